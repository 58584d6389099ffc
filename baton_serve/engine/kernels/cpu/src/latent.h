// A tile of attention whose keys and values are the same rows of memory (latent attention, MLA), for a few query rows.
//
// The lanes of a SIMD word are query rows, and elements of a key are broadcast from its row as it lies in memory: nothing is
// transposed, and far memory is read once for scores and values. The sums of a query row are formed in the same order as in
// tile.h, so that both give the same bits.
#pragma once

#include "tile.h"

namespace baton {

constexpr int MAX_LATENT_ROWS = 128;  // query rows of a tile; the other form is as fast for more
constexpr int LATENT_KEYS = 8;        // keys whose scores are in registers together
constexpr int EVEN_KEYS = 16;         // the same of evenly spaced rows, so many that dot products do not wait for each other
constexpr int LATENT_VALUE_ROWS = BATON_LANES == 16 ? 8 : 4;  // query rows whose sums are

// Whether rows of this type are words already, or have to be widened to float32 first.
template <class M> constexpr bool READS_WORDS = M::PAIR == 2;
template <> inline constexpr bool READS_WORDS<Widening<float>> = true;

// The values of M::PAIR keys in columns [d, d + 2 W) as words.
template <class M> inline void load_values(const typename M::Word* const* rows, int d, vf& low, vf& high) {
  low = load(rows[0] + d), high = load(rows[0] + d + W);
}
#if defined(__AVX512BF16__) && !defined(BATON_WIDENS)
template <> inline void load_values<PairsOfBf16>(const uint32_t* const* rows, int d, vf& low, vf& high) {
  alignas(64) static constexpr uint16_t LOW[32] = {0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                   8,  40, 9,  41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i order = _mm512_load_si512(LOW), next = _mm512_add_epi16(order, _mm512_set1_epi16(16));
  const __m512i a = _mm512_loadu_si512(rows[0] + d / 2), b = _mm512_loadu_si512(rows[1] + d / 2);
  low = (vf)_mm512_permutex2var_epi16(a, order, b), high = (vf)_mm512_permutex2var_epi16(a, next, b);
}
#endif

// scores[LATENT_KEYS][stride], LANES words of query rows; `queries` is [words][stride], `words` a multiple of 16. The rows
// `ahead` of `ahead_bytes` bytes are prefetched.
template <class M, int LANES>
__attribute__((noinline)) void score_latents(const typename M::Word* const* keys, const typename M::Word* queries, int words,
                                             int stride, float* scores, const void* const* ahead, int ahead_bytes) {
  vf sums[LATENT_KEYS][LANES];
  const typename M::Word* rows[LATENT_KEYS];
  for (int i = 0; i < LATENT_KEYS; i++) {
    rows[i] = keys[i];
    for (int j = 0; j < LANES; j++) sums[i][j] = vf{};
  }
  for (int w = 0; w < words; w += 16) {
    if (w * 4 < ahead_bytes)
      for (int i = 0; i < LATENT_KEYS; i++) __builtin_prefetch((const char*)ahead[i] + w * 4, 0, 2);
    for (int k = w; k < w + 16; k++, queries += stride) {
      vf query[LANES];
      for (int j = 0; j < LANES; j++) query[j] = load_as<vf>(queries + j * W);
      for (int i = 0; i < LATENT_KEYS; i++)
        for (int j = 0; j < LANES; j++) sums[i][j] = M::multiply_add(sums[i][j], rows[i][k], query[j]);
    }
  }
  for (int i = 0; i < LATENT_KEYS; i++)
    for (int j = 0; j < LANES; j++) store(scores + i * stride + j * W, sums[i][j]);
}

// scores[EVEN_KEYS][W] for one word of query rows, `queries` [words][W], and keys that lie `spacing` bytes from each other: four
// addresses and the spacing fit in registers, sixteen addresses do not. The rest is as in `score_latents`.
template <class M>
__attribute__((noinline)) void score_even_latents(const void* keys, int64_t spacing, const typename M::Word* queries,
                                                  int words, float* scores, const void* const* ahead, int ahead_bytes) {
  vf sums[EVEN_KEYS];
  for (int i = 0; i < EVEN_KEYS; i++) sums[i] = vf{};
  const char* rows[4];
  for (int i = 0; i < 4; i++) rows[i] = (const char*)keys + 4 * i * spacing;
  const int64_t thrice = 3 * spacing;
  for (int w = 0; w < words; w += 16) {
    if (w * 4 < ahead_bytes)
      for (int i = 0; i < EVEN_KEYS; i++) __builtin_prefetch((const char*)ahead[i] + w * 4, 0, 2);
#pragma GCC unroll 16
    for (int k = 0; k < 16; k++, queries += W) {
      const vf query = load_as<vf>(queries);
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) {
        const char* row = rows[i] + k * sizeof(typename M::Word);
        asm("" : "+r"(row));
        const auto word = [&](int64_t at) { return *(const typename M::Word*)(row + at); };
        sums[4 * i] = M::multiply_add(sums[4 * i], word(0), query);
        sums[4 * i + 1] = M::multiply_add(sums[4 * i + 1], word(spacing), query);
        sums[4 * i + 2] = M::multiply_add(sums[4 * i + 2], word(2 * spacing), query);
        sums[4 * i + 3] = M::multiply_add(sums[4 * i + 3], word(thrice), query);
      }
    }
    for (int i = 0; i < 4; i++) rows[i] += 16 * sizeof(typename M::Word);
  }
  for (int i = 0; i < EVEN_KEYS; i++) store(scores + i * W, sums[i]);
}

// c[ROWS][ldc], columns [d, d + 2 W) = c * factors + probabilities x rows; `probabilities` is [TILE_KEYS / PAIR][stride].
template <class M, int ROWS>
__attribute__((noinline)) void add_latents(const typename M::Word* probabilities, int stride,
                                           const typename M::Word* const* rows, float* c, int ldc, int d,
                                           const float* factors) {
  vf sums[ROWS][2];
  for (int i = 0; i < ROWS; i++)
    for (int j = 0; j < 2; j++) sums[i][j] = load(c + (int64_t)i * ldc + d + j * W) * factors[i];
  for (int key = 0; key < TILE_KEYS; key += M::PAIR, probabilities += stride) {
    vf low, high;
    load_values<M>(rows + key, d, low, high);
    for (int i = 0; i < ROWS; i++) {
      sums[i][0] = M::multiply_add(sums[i][0], probabilities[i], low);
      sums[i][1] = M::multiply_add(sums[i][1], probabilities[i], high);
    }
  }
  for (int i = 0; i < ROWS; i++)
    for (int j = 0; j < 2; j++) store(c + (int64_t)i * ldc + d + j * W, sums[i][j]);
}

// The sums over keys of some query rows, in lanes.
struct LatentSums {
  float *maxima, *totals;  // [rows], [W][rows]: a total for each key of a word, as `soften` has
  float* factors;          // [rows], what the tile multiplies earlier sums by
  int stride;              // rows, in whole words
};

// `soften` for one word of query rows from row `at` on. `ends`: of each row, the first key of the tile that it does not see.
// `key_scales`, if not null, multiply scores, and probabilities but not their sums.
template <class M>
__attribute__((noinline)) void soften_latents(const float* scores, typename M::Word* probabilities, ScoreRule rule, vi ends,
                                              LatentSums sums, int at, const float* key_scales) {
  vf x[TILE_KEYS], top = splat(NEG_INF);
  const int stride = sums.stride;
  for (int j = 0; j < TILE_KEYS; j++) {
    vf score = load(scores + j * stride + at);
    if (key_scales) score = score * key_scales[j];
    x[j] = score * rule.scale;
    if (rule.softcap > 0) x[j] = tanh(x[j] / rule.softcap) * (rule.softcap * M::UNIT);
    x[j] = vi{} + j < ends ? x[j] : splat(NEG_INF);
    top = max(top, x[j]);
  }
  const vf before = load(sums.maxima + at), now = max(before, top);
  const vf base = now == splat(NEG_INF) ? vf{} : now;
  for (int j = 0; j < TILE_KEYS; j++) {
    const vf p = M::exponential(x[j] - base);
    x[j] = vi{} + j < ends ? p : vf{};
  }
  const vf factor = before == now ? splat(1.f) : M::exponential(before - base);
  store(sums.maxima + at, now), store(sums.factors + at, factor);
  for (int i = 0; i < W; i++) {
    vf total = load(sums.totals + i * stride + at) * factor;
    for (int j = i; j < TILE_KEYS; j += W) total = total + x[j];
    store(sums.totals + i * stride + at, total);
  }
  for (int j = 0; j < TILE_KEYS; j++)
    if (key_scales) x[j] = x[j] * key_scales[j];
#if defined(__AVX512BF16__) && !defined(BATON_WIDENS)
  if constexpr (M::PAIR == 2) {
    for (int j = 0; j < TILE_KEYS; j += 2) {
      const __m512i even = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)x[j]));
      const __m512i odd = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)x[j + 1]));
      _mm512_storeu_si512(probabilities + j / 2 * stride + at, _mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
    }
    return;
  }
#endif
  for (int j = 0; j < TILE_KEYS; j++) store((float*)probabilities + j * stride + at, x[j]);
}

}  // namespace baton
