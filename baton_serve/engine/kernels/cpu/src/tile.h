// The arithmetic of one tile of attention, in three variants with one interface. It has the layout of K, V, Q and the
// probabilities for a register-tiled product, and the conversion of a row of scores to probabilities.
//
// The operations on a row and their order do not depend on the other rows of its tile, its task or its batch.
#pragma once

#include "vector.h"

namespace baton {

// Keys packed at a time; tiles start at multiples of it. With AMX the products are short, and the steps of softmax between
// them cost less for more keys at once.
#ifdef __AMX_BF16__
constexpr int TILE_KEYS = 128;
#else
constexpr int TILE_KEYS = 64;
#endif
static_assert(TILE_KEYS % (W * BATON_COLUMNS) == 0);

// Reads `W` packed words of a row of `remaining` elements; words past the row's end are 0.
template <class M> inline vf load_row(const typename M::Element* row, int remaining) {
  if (remaining >= W * M::PAIR) return M::load_words(row);
  alignas(64) typename M::Element padded[W * M::PAIR] = {};
  if (remaining > 0) std::memcpy(padded, row, remaining * sizeof(*row));
  return M::load_words(padded);
}

template <class M> inline vf load_row_lanes(const typename M::Element* row, int remaining) {
  alignas(64) typename M::Element padded[W * M::LANE] = {};
  if (remaining > 0) std::memcpy(padded, row, remaining * sizeof(*row));
  return M::load_lanes(padded);
}

// float32 products of any element that widens to float32.
template <class T> struct Widening {
  using Element = T;
  using Word = float;
  static constexpr int MAX_ROWS = 6;  // at once
  static constexpr bool READS_ROWS = false;  // true: V is read without packing if a tile has at most MAX_ROWS rows
  static constexpr int PAIR = 1;  // elements per packed word
  static constexpr float UNIT = 1.f;  // scores are natural exponents

  static constexpr int LANE = 1;  // elements of a row in 32 bits of what pack_keys transposes

  static vf load_lanes(const T* p) { return load_elements(p); }
  static void store_lanes(Word* to, int, vf v) { store(to, v); }
  static vf load_words(const T* p) { return load_elements(p); }
  static vf multiply_add(vf sum, Word a, vf b) { return fma(splat(a), b, sum); }
  static vf exponential(vf x) { return exp_accurate(x); }
  static void store_probabilities(Word* to, const vf* p) {
    for (int j = 0; j < TILE_KEYS / W; j++) store(to + j * W, p[j]);
  }
  // V as [key][head_dim]
  static void pack_values(const T* const* rows, int head_dim, int columns, Word* packed) {
    for (int key = 0; key < TILE_KEYS; key++)
      for (int d = 0; d < columns; d += W)
        store(packed + key * columns + d, load_row<Widening>(rows[key] + d, head_dim - d));
  }
};

#ifdef BATON_WIDENS
// bf16 where products of pairs are slow (pairs.cpp): float32 products, at the precision that bf16 results keep.
struct WidenedBf16 : Widening<bf16> {
  static constexpr float UNIT = 1.44269504088896341f;  // scores are exponents of two
  static constexpr int LANE = 2;
  static constexpr int MAX_ROWS = 7;  // a common number of query heads per KV head
  static constexpr bool READS_ROWS = true;

  static vf load_lanes(const bf16* p) { return load_as<vf>(p); }
  static void store_lanes(float* to, int stride, vf v) {
    store(to, (vf)((vu)v << 16));
    store(to + stride, (vf)((vu)v & 0xffff0000));
  }
  static vf exponential(vf x) { return exp2_fast(x); }
};
using Bf16 = WidenedBf16;

// int8 codes for the same products, without their scales.
struct WidenedInt8 : Widening<int8_t> {
  static constexpr int LANE = 4;

  static vf load_lanes(const int8_t* p) { return load_as<vf>(p); }
  static void store_lanes(float* to, int stride, vf v) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) store(to + i * stride, __builtin_convertvector((vi)v << (24 - 8 * i) >> 24, vf));
  }
};
#elif defined(__AVX512BF16__)
// Two bf16 per word: the CPU's dot product multiplies pairs and adds in float32.
struct PairsOfBf16 {
  using Element = bf16;
  using Word = uint32_t;
  static constexpr int MAX_ROWS = 6;
  static constexpr bool READS_ROWS = false;
  static constexpr int PAIR = 2, LANE = 2;
  static constexpr float UNIT = 1.44269504088896341f;  // scores are exponents of two

  static vf load_lanes(const bf16* p) { return load_as<vf>(p); }
  static void store_lanes(Word* to, int, vf v) { store(to, v); }
  static vf load_words(const bf16* p) { return load_as<vf>(p); }
  static vf multiply_add(vf sum, Word a, vf b) {
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)b, (__m512bh)_mm512_set1_epi32((int)a));
  }
  static vf exponential(vf x) { return exp2_fast(x); }
  static void store_probabilities(Word* to, const vf* p) {
    for (int j = 0; j < TILE_KEYS / W; j += 2) {
      __m512bh pair = _mm512_cvtne2ps_pbh((__m512)p[j + 1], (__m512)p[j]);
      std::memcpy(to + j * W / 2, &pair, sizeof pair);
    }
  }
  // V as [pair of keys][head_dim]
  static void pack_values(const bf16* const* rows, int head_dim, int columns, Word* packed) {
    alignas(64) static constexpr uint16_t LOW[32] = {0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                     8,  40, 9,  41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const __m512i low = _mm512_load_si512(LOW), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (int key = 0; key < TILE_KEYS; key += 2)
      for (int d = 0; d < columns; d += 32) {
        __m512i a = (__m512i)load_row<PairsOfBf16>(rows[key] + d, head_dim - d);
        __m512i b = (__m512i)load_row<PairsOfBf16>(rows[key + 1] + d, head_dim - d);
        Word* to = packed + key / 2 * columns + d;
        _mm512_storeu_si512(to, _mm512_permutex2var_epi16(a, low, b));
        if (d + 16 < columns) _mm512_storeu_si512(to + 16, _mm512_permutex2var_epi16(a, high, b));
      }
  }
};
using Bf16 = PairsOfBf16;
#else
using Bf16 = Widening<bf16>;
#endif

// K as [word of head_dim][key], so that a row of scores is a sum of broadcast query words times key vectors.
template <class M>
void pack_keys(const typename M::Element* const* rows, int head_dim, int words, typename M::Word* packed) {
  constexpr int WORDS = M::LANE / M::PAIR;  // of a lane
  for (int key = 0; key < TILE_KEYS; key += W)
    for (int d = 0; d < words * M::PAIR; d += W * M::LANE) {
      vf square[W];
      const int remaining = head_dim - d;
      typename M::Word* to = packed + d / M::PAIR * TILE_KEYS + key;
      if (remaining >= W * M::LANE) {
#pragma GCC unroll 16
        for (int i = 0; i < W; i++) square[i] = M::load_lanes(rows[key + i] + d);
        transpose(square);
#pragma GCC unroll 16
        for (int i = 0; i < W; i++) M::store_lanes(to + i * WORDS * TILE_KEYS, TILE_KEYS, square[i]);
      } else {
        for (int i = 0; i < W; i++) square[i] = load_row_lanes<M>(rows[key + i] + d, remaining);
        transpose(square);
        for (int i = 0; i < words / WORDS - d / M::LANE; i++) M::store_lanes(to + i * WORDS * TILE_KEYS, TILE_KEYS, square[i]);
      }
    }
}

// Rows of the next tile, which are prefetched one cache line at a time while this tile is multiplied. More requests at once
// than the processor can hold would make it wait. `end` is the number of bytes of a row.
struct Ahead {
  const void* const* rows;
  int end;
  void ask(int row, int offset) const {
    if (offset < end) __builtin_prefetch((const char*)rows[row] + offset, 0, 2);
  }
};

// c[ROWS][WORDS * W] = c * factors + a[ROWS][depth] x b[depth][...]; without factors c starts at 0. `line`: the first of `ahead`.
template <class M, int ROWS, int WORDS>
inline void multiply_columns(const typename M::Word* a, int lda, const typename M::Word* b, int ldb, float* c, int ldc,
                             int depth, const float* factors, Ahead ahead, int line) {
  vf sums[ROWS][WORDS];
  for (int i = 0; i < ROWS; i++)
    for (int j = 0; j < WORDS; j++) sums[i][j] = factors ? load(c + i * ldc + j * W) * factors[i] : vf{};
  for (int k = 0; k < depth; k++) {
    if (M::READS_ROWS) ahead.ask(k % TILE_KEYS, line + k / TILE_KEYS * 128);
    vf column[WORDS];
    for (int j = 0; j < WORDS; j++) column[j] = load_as<vf>(b + (int64_t)k * ldb + j * W);
    for (int i = 0; i < ROWS; i++)
      for (int j = 0; j < WORDS; j++) sums[i][j] = M::multiply_add(sums[i][j], a[i * lda + k], column[j]);
  }
  for (int i = 0; i < ROWS; i++)
    for (int j = 0; j < WORDS; j++) store(c + i * ldc + j * W, sums[i][j]);
}

template <class M, int ROWS>
void multiply(const typename M::Word* a, int lda, const typename M::Word* b, int ldb, float* c, int ldc, int columns,
              int depth, const float* factors, Ahead ahead = {}) {
  constexpr int COLUMNS = ROWS > 6 ? 2 : BATON_COLUMNS;  // the registers there are
  int j = 0;
  for (; j + W * COLUMNS <= columns; j += W * COLUMNS)
    multiply_columns<M, ROWS, COLUMNS>(a, lda, b + j, ldb, c + j, ldc, depth, factors, ahead, j * 2);
  for (; j < columns; j += W) multiply_columns<M, ROWS, 1>(a, lda, b + j, ldb, c + j, ldc, depth, factors, {}, 0);
}

// c[ROWS][columns] = c * factors + a[ROWS][TILE_KEYS] x rows, with the sums in the same order as for packed rows. It is for
// so few rows of `a` that packing would cost more. `columns` is a multiple of 2 * W.
template <int ROWS, class Element>
void multiply_rows(const float* a, const Element* const* rows, float* c, int columns, const float* factors, Ahead ahead) {
  for (int d = 0; d < columns; d += 2 * W) {
    vf sums[ROWS][2];
    for (int i = 0; i < ROWS; i++)
      for (int j = 0; j < 2; j++) sums[i][j] = load(c + i * columns + d + j * W) * factors[i];
    for (int key = 0; key < TILE_KEYS; key++) {
      ahead.ask(key, d * 2);
      const vf low = load_elements(rows[key] + d), high = load_elements(rows[key] + d + W);
      for (int i = 0; i < ROWS; i++) {
        const vf p = splat(a[i * TILE_KEYS + key]);
        sums[i][0] = fma(p, low, sums[i][0]), sums[i][1] = fma(p, high, sums[i][1]);
      }
    }
    for (int i = 0; i < ROWS; i++)
      for (int j = 0; j < 2; j++) store(c + i * columns + d + j * W, sums[i][j]);
  }
}

struct ScoreRule {
  float scale, softcap;  // softcap 0: none
};

// Converts one row of raw scores to probabilities relative to the row's maximum so far; keys outside [first, end) get 0.
// `value_scales`, if not null, multiply the probabilities but not their sum. Returns the factor by which all earlier sums of
// the row must be multiplied.
template <class M>
__attribute__((noinline)) float soften(const float* scores, typename M::Word* probabilities, ScoreRule rule, int first,
                                       int end, float* row_maximum, float* row_sums, const float* value_scales) {
  constexpr int N = TILE_KEYS / W;
  vf x[N];
  for (int j = 0; j < N; j++) x[j] = load(scores + j * W) * rule.scale;
  if (rule.softcap > 0)
    for (int j = 0; j < N; j++) x[j] = tanh(x[j] / rule.softcap) * (rule.softcap * M::UNIT);
  const bool masked = first > 0 || end < TILE_KEYS;
  if (masked)
    for (int j = 0; j < N; j++) {
      const vi key = lane_numbers() + j * W;
      x[j] = (key >= first) & (key < end) ? x[j] : splat(NEG_INF);
    }
  vf top = x[0];
  for (int j = 1; j < N; j++) top = max(top, x[j]);
  const float before = *row_maximum, now = std::max(before, maximum(top));
  const float base = now == NEG_INF ? 0.f : now;
  vf p[N];
  for (int j = 0; j < N; j++) p[j] = M::exponential(x[j] - base);
  if (masked)
    for (int j = 0; j < N; j++) {
      const vi key = lane_numbers() + j * W;
      p[j] = (key >= first) & (key < end) ? p[j] : vf{};
    }
  if (value_scales) {
    vf scaled[N];
    for (int j = 0; j < N; j++) scaled[j] = p[j] * load(value_scales + j * W);
    M::store_probabilities(probabilities, scaled);
  } else {  // apart: GCC would copy `p` in halves of a word, and reading whole words of that waits for the stores
    M::store_probabilities(probabilities, p);
  }
  const float factor = before == now ? 1.f : M::exponential(splat(before - base))[0];
  vf total = load(row_sums) * factor;
  for (int j = 0; j < N; j++) total = total + p[j];
  store(row_sums, total);
  *row_maximum = now;
  return factor;
}

}  // namespace baton
