// Measures the time of a dot product of bf16 pairs when the kernels are built. Some CPUs do two multiplications in one
// cycle; others split the instruction into steps and are faster with float32.
#include <algorithm>
#include <chrono>

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
#include <immintrin.h>

namespace {

constexpr int CHAINS = 12, STEPS = 4000, ROUNDS = 40;  // more chains than either instruction has cycles of latency

struct Pairs {
  static __m512 add(__m512 sum, __m512 x) { return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)x); }
};
struct Floats {
  static __m512 add(__m512 sum, __m512 x) { return _mm512_fmadd_ps(x, x, sum); }
};

// Seconds of CHAINS x STEPS instructions.
template <class M> double seconds() {
  __m512 sums[CHAINS], x = _mm512_set1_ps(1.f);
#pragma GCC unroll 12
  for (int i = 0; i < CHAINS; i++) __asm__ volatile("" : "=v"(sums[i]) : "0"(x));  // all alike, but the compiler cannot know
  const auto start = std::chrono::steady_clock::now();
  for (int step = 0; step < STEPS; step++) {
    __asm__ volatile("" : "+v"(x));
#pragma GCC unroll 12
    for (int i = 0; i < CHAINS; i++) sums[i] = M::add(sums[i], x);
  }
#pragma GCC unroll 12
  for (int i = 0; i < CHAINS; i++) __asm__ volatile("" : "+v"(sums[i]));
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

// Returns the time of a dot product relative to a float32 multiply-add: the smallest of many, so that load does not matter.
extern "C" double baton_pair_cost() {
  double pairs = 1, floats = 1;
  for (int round = 0; round < ROUNDS; round++) pairs = std::min(pairs, seconds<Pairs>()), floats = std::min(floats, seconds<Floats>());
  return pairs / floats;
}

#else

extern "C" double baton_pair_cost() { return 1; }

#endif
