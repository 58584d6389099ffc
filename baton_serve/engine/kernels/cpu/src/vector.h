// One SIMD word of the CPU, as wide as the machine has it. It uses GCC's vector extensions, so that AVX-512, AVX2, NEON and
// plain C++ share one source; intrinsics only where the compiler cannot find the instruction by itself.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#ifdef __AVX512F__
#include <immintrin.h>
#define BATON_LANES 16
#define BATON_COLUMNS 4  // words per row of a register tile: 6 x 4 accumulators of 32 registers
#else
#define BATON_LANES 8
#define BATON_COLUMNS 2  // 6 x 2 of 16 registers
#endif

namespace baton {

constexpr int W = BATON_LANES;

typedef float vf __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));
typedef uint32_t vu __attribute__((vector_size(W * 4)));
typedef uint16_t vh __attribute__((vector_size(W * 2)));
typedef int8_t vb __attribute__((vector_size(W)));

struct bf16 {
  uint16_t bits;
};

constexpr float NEG_INF = -std::numeric_limits<float>::infinity();

template <class V, class T> inline V load_as(const T* p) {
  V v;
  std::memcpy(&v, p, sizeof(V));
  return v;
}
inline vf load(const float* p) { return load_as<vf>(p); }
inline void store(void* p, vf v) { std::memcpy(p, &v, sizeof v); }
inline vf splat(float x) { return x - vf{}; }

inline vf fma(vf a, vf b, vf c) {
#ifdef __AVX512F__
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
  return a * b + c;  // contracted: -ffp-contract=fast
#endif
}
inline vf max(vf a, vf b) {
#ifdef __AVX512F__
  return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return a > b ? a : b;
#endif
}
inline vf round(vf x) {  // to nearest, |x| < 2^22
#ifdef __AVX512F__
  return (vf)_mm512_roundscale_ps((__m512)x, 0);
#else
  return (x + 12582912.f) - 12582912.f;
#endif
}
inline vf times_power_of_two(vf x, vf n) {  // n integral, the result normal
#ifdef __AVX512F__
  return (vf)_mm512_scalef_ps((__m512)x, (__m512)n);
#else
  return x * (vf)((__builtin_convertvector(n, vi) + 127) << 23);
#endif
}
inline vi lane_numbers() {
#if BATON_LANES == 16
  return vi{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#else
  return vi{0, 1, 2, 3, 4, 5, 6, 7};
#endif
}

// W x W words of 32 bits.
inline void transpose(vf (&rows)[W]) {
#ifdef __AVX512F__  // shuffles within 128-bit lanes, then of lanes: fewer registers than perfect shuffles
  __m512 pairs[16], fours[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    pairs[i] = _mm512_unpacklo_ps((__m512)rows[i], (__m512)rows[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_ps((__m512)rows[i], (__m512)rows[i + 1]);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 4)
#pragma GCC unroll 2
    for (int j = 0; j < 2; j++) {
      const __m512d a = (__m512d)pairs[i + j], b = (__m512d)pairs[i + j + 2];
      fours[i + 2 * j] = (__m512)_mm512_unpacklo_pd(a, b);
      fours[i + 2 * j + 1] = (__m512)_mm512_unpackhi_pd(a, b);
    }
#pragma GCC unroll 4
  for (int c = 0; c < 4; c++) {
    const __m512 even = _mm512_shuffle_f32x4(fours[c], fours[c + 4], 0x88);
    const __m512 odd = _mm512_shuffle_f32x4(fours[c], fours[c + 4], 0xdd);
    const __m512 even2 = _mm512_shuffle_f32x4(fours[c + 8], fours[c + 12], 0x88);
    const __m512 odd2 = _mm512_shuffle_f32x4(fours[c + 8], fours[c + 12], 0xdd);
    rows[c] = (vf)_mm512_shuffle_f32x4(even, even2, 0x88);
    rows[c + 4] = (vf)_mm512_shuffle_f32x4(odd, odd2, 0x88);
    rows[c + 8] = (vf)_mm512_shuffle_f32x4(even, even2, 0xdd);
    rows[c + 12] = (vf)_mm512_shuffle_f32x4(odd, odd2, 0xdd);
  }
#else  // log2(W) perfect shuffles of the rows
#pragma GCC unroll 3
  for (int stage = 1; stage < W; stage *= 2) {
    vf next[W];
#pragma GCC unroll 4
    for (int i = 0; i < W / 2; i++) {
      next[2 * i] = __builtin_shuffle(rows[i], rows[i + W / 2], vi{0, 8, 1, 9, 2, 10, 3, 11});
      next[2 * i + 1] = __builtin_shuffle(rows[i], rows[i + W / 2], vi{4, 12, 5, 13, 6, 14, 7, 15});
    }
#pragma GCC unroll 8
    for (int i = 0; i < W; i++) rows[i] = next[i];
  }
#endif
}

inline float sum(vf v) {  // one order of additions everywhere, so that results do not depend on the caller
  for (int half = W / 2; half > 0; half /= 2)
    for (int i = 0; i < half; i++) v[i] += v[i + half];
  return v[0];
}
inline float maximum(vf v) {
#ifdef __AVX512F__
  return _mm512_reduce_max_ps((__m512)v);
#else
  for (int half = W / 2; half > 0; half /= 2)
    for (int i = 0; i < half; i++) v[i] = std::max(v[i], v[i + half]);
  return v[0];
#endif
}

// e^x to about one unit in the last place (Cephes' expf); below -87.3 the smallest normal number.
inline vf exp_accurate(vf x) {
  x = max(x, splat(-87.3f));
  vf n = round(x * 1.44269504088896341f);
  vf r = fma(n, splat(-0.693359375f), x);
  r = fma(n, splat(2.12194440e-4f), r);
  vf p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  return times_power_of_two(fma(p, r * r, r) + 1.f, n);
}

// 2^x to about 3e-6 of its value, exactly 1 at 0: the result is rounded to bf16 (2e-3) anyway.
inline vf exp2_fast(vf x) {
  x = max(x, splat(-126.f));
  vf n = round(x), f = x - n;
  vf p = splat(9.5828532e-3f);
  p = fma(p, f, splat(5.5906426e-2f));
  p = fma(p, f, splat(2.4024099e-1f));
  p = fma(p, f, splat(6.9312419e-1f));
  return times_power_of_two(fma(p, f, splat(1.f)), n);
}

inline vf tanh(vf x) {  // a series where 1 - 2 / (e^2x + 1) would cancel
  vf e = exp_accurate(max(splat(-40.f), x + x > splat(80.f) ? splat(80.f) : x + x));
  vf far = 1.f - 2.f / (e + 1.f);
  vf s = x * x, p = splat(21844.f / 6081075.f);
  p = fma(p, s, splat(-1382.f / 155925.f));
  p = fma(p, s, splat(62.f / 2835.f));
  p = fma(p, s, splat(-17.f / 315.f));
  p = fma(p, s, splat(2.f / 15.f));
  p = fma(p, s, splat(-1.f / 3.f));
  vf near = fma(p * s, x, x);
  return s < splat(0.16f) ? near : far;
}

inline uint16_t round_to_bf16(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  if ((u & 0x7fffffff) > 0x7f800000) return 0x7fc0;
  return (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

// W elements of memory as float32 and back, rounded to nearest.
inline vf load_elements(const float* p) { return load(p); }
inline vf load_elements(const bf16* p) {
#ifdef __AVX512F__  // GCC 12 would convert the halves of a word one after the other
  return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#else
  return (vf)(__builtin_convertvector(load_as<vh>(p), vu) << 16);
#endif
}
inline vf load_elements(const int8_t* p) {
#ifdef __AVX512F__
  return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#else
  return __builtin_convertvector(load_as<vb>(p), vf);
#endif
}
inline void store_elements(float* p, vf v) { store(p, v); }
inline void store_elements(bf16* p, vf v) {
#ifdef __AVX512BF16__
  const __m256bh bits = _mm512_cvtneps_pbh((__m512)v);
  std::memcpy((void*)p, &bits, sizeof bits);
#else
  for (int i = 0; i < W; i++) p[i].bits = round_to_bf16(v[i]);
#endif
}
#ifdef __FLT16_MAX__
typedef _Float16 halves __attribute__((vector_size(W * 2)));
inline vf load_elements(const _Float16* p) { return __builtin_convertvector(load_as<halves>(p), vf); }
inline void store_elements(_Float16* p, vf v) {
  const halves h = __builtin_convertvector(v, halves);
  std::memcpy(p, &h, sizeof h);
}
#endif

// The same for the last `remaining` elements of a row; lanes past its end are 0 and are not written.
template <class T> inline vf load_elements(const T* p, int remaining) {
  if (remaining >= W) return load_elements(p);
  T padded[W] = {};
  std::memcpy((void*)padded, p, remaining * sizeof(T));
  return load_elements(padded);
}
template <class T> inline void store_elements(T* p, vf v, int remaining) {
  if (remaining >= W) return store_elements(p, v);
  T padded[W];
  store_elements(padded, v);
  std::memcpy((void*)p, padded, remaining * sizeof(T));
}

}  // namespace baton
