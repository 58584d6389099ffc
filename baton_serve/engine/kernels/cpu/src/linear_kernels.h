// The innermost loops of a product with a panel of packed weights, in registers.
#pragma once

#include "weight_codes.h"

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)

namespace baton {

constexpr int PANEL = 32;        // columns, two words
constexpr int KERNEL_ROWS = 12;  // 24 accumulators of 32 registers
constexpr int DEPTH = 512;       // pairs of inputs at a time: 64 KiB of bf16

// One pair of inputs of 16 outputs, and a row's part in them.
#ifdef BATON_WIDENS  // pairs of bf16 are slow here (pairs.cpp): two float32 products in the order of the inputs
using Input = float;
constexpr int INPUTS_OF_PAIR = 2;
struct Weights {
  __m512 even, odd;
  explicit Weights(__m512i pairs)
      : even((__m512)_mm512_slli_epi32(pairs, 16)), odd((__m512)_mm512_and_si512(pairs, _mm512_set1_epi32((int)0xffff0000))) {}
};
inline __m512 multiply_add(__m512 sum, const Input* x, const Weights& w) {
  return _mm512_fmadd_ps(_mm512_set1_ps(x[1]), w.odd, _mm512_fmadd_ps(_mm512_set1_ps(x[0]), w.even, sum));
}
#else
using Input = uint32_t;  // two bf16
constexpr int INPUTS_OF_PAIR = 1;
struct Weights {
  __m512bh pairs;
  explicit Weights(__m512i pairs) : pairs((__m512bh)pairs) {}
};
inline __m512 multiply_add(__m512 sum, const Input* x, const Weights& w) {
  return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32((int)*x), w.pairs);
}
#endif

// The scales and zeros that are applied to the sums of one group of inputs. With null scales the sums stay as they are.
struct Scaling {
  const float *scales, *zeros;  // [32]
  const float* totals;          // of each row, its inputs' sum; read where there are zeros
  int64_t totals_stride;
};

// before + (sum - zero * total) * scale, of row i and word j.
inline vf rescaled(vf sum, const Scaling& scaling, int i, int j, vf before) {
  if (scaling.zeros) sum -= load(scaling.zeros + j * W) * scaling.totals[i * scaling.totals_stride];
  return fma(sum, load(scaling.scales + j * W), before);
}

// sums[ROWS][32] (+)= x[ROWS][depth] x b[depth][32]. `ahead` is prefetched, `stride` bytes for each step.
template <int ROWS, bool ASKS>
void kernel(const Input* x, int64_t ldx, const uint32_t* b, float* sums, int depth, bool is_first, Scaling scaling,
            const char* ahead, int stride) {
  __m512 c[ROWS][2];
  const bool starts_at_zero = is_first || scaling.scales;
  for (int i = 0; i < ROWS; i++)
    for (int j = 0; j < 2; j++)
      c[i][j] = starts_at_zero ? _mm512_setzero_ps() : _mm512_loadu_ps(sums + i * PANEL + j * W);
  for (int k = 0; k < depth; k++, b += PANEL) {
    const Weights low(_mm512_loadu_si512(b)), high(_mm512_loadu_si512(b + W));
    if (ASKS) {
      __builtin_prefetch(ahead, 0, 2);
      __builtin_prefetch(ahead + 64, 0, 2);
      ahead += stride;
    }
    for (int i = 0; i < ROWS; i++) {
      const Input* a = x + i * ldx + k * INPUTS_OF_PAIR;
      c[i][0] = multiply_add(c[i][0], a, low);
      c[i][1] = multiply_add(c[i][1], a, high);
    }
  }
  for (int i = 0; i < ROWS; i++)
    for (int j = 0; j < 2; j++) {
      float* to = sums + i * PANEL + j * W;
      vf sum = (vf)c[i][j];
      store(to, scaling.scales ? rescaled(sum, scaling, i, j, is_first ? vf{} : load(to)) : sum);
    }
}

using Kernel = void (*)(const Input*, int64_t, const uint32_t*, float*, int, bool, Scaling, const char*, int);
template <bool ASKS>
constexpr Kernel KERNELS[] = {nullptr,         kernel<1, ASKS>, kernel<2, ASKS>,  kernel<3, ASKS>,  kernel<4, ASKS>,
                              kernel<5, ASKS>, kernel<6, ASKS>, kernel<7, ASKS>,  kernel<8, ASKS>,  kernel<9, ASKS>,
                              kernel<10, ASKS>, kernel<11, ASKS>, kernel<12, ASKS>};

// sums[ROWS][2 panels][32] += x[ROWS][depth] x codes of two panels. With so few rows, decoding to bf16 in memory would cost
// more than the products. The sums are formed in the same order as in `kernel`.
template <class Codes, int ROWS>
void kernel_coded(const Input* x, int64_t ldx, const uint8_t* const* codes, const Codes& source, float* sums, int at,
                  int depth) {
  __m512 c[ROWS][4];
  for (int i = 0; i < ROWS; i++)
    for (int j = 0; j < 4; j++) c[i][j] = _mm512_loadu_ps(sums + (i * 4 + j) * W);
  for (int k = 0; k < depth; k += Codes::PAIRS) {
    const int64_t offset = (int64_t)(at + k) / Codes::PAIRS * 64;
    for (int p = 0; p < 2; p++) {
      __builtin_prefetch(codes[p] + offset + CODES_AHEAD, 0, 2);
      __m512i words[2 * Codes::PAIRS];
      source.expand(codes[p] + offset, words);
      for (int j = 0; j < Codes::PAIRS; j++) {
        const Weights low(words[2 * j]), high(words[2 * j + 1]);
        for (int i = 0; i < ROWS; i++) {
          const Input* a = x + i * ldx + (at + k + j) * INPUTS_OF_PAIR;
          c[i][2 * p] = multiply_add(c[i][2 * p], a, low);
          c[i][2 * p + 1] = multiply_add(c[i][2 * p + 1], a, high);
        }
      }
    }
  }
  for (int i = 0; i < ROWS; i++)
    for (int j = 0; j < 4; j++) _mm512_storeu_ps(sums + (i * 4 + j) * W, c[i][j]);
}

}  // namespace baton

#endif
