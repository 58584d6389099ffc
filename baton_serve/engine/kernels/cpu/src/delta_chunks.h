// The gated delta rule for several tokens of a sequence, in chunks whose steps are small matrix products in float32
// (https://arxiv.org/abs/2412.06464, section 3.3). Within a chunk the updates of the state depend on each other through a
// triangular system of equations.
#pragma once

#include "vector.h"

#include <vector>

namespace baton {

constexpr int CHUNK_ROWS = 64;

// c[ROWS][WORDS * W] = c * factor + a[ROWS][depth] x b[depth][WORDS * W]; with factor 0, c is not read.
template <int ROWS, int WORDS>
inline void add_products(const float* a, int lda, const float* b, int ldb, float* c, int ldc, int depth, float factor) {
  vf sums[ROWS][WORDS];
  for (int i = 0; i < ROWS; i++)
    for (int j = 0; j < WORDS; j++) sums[i][j] = factor == 0.f ? vf{} : load(c + i * ldc + j * W) * factor;
  for (int k = 0; k < depth; k++) {
    vf row[WORDS];
    for (int j = 0; j < WORDS; j++) row[j] = load(b + (int64_t)k * ldb + j * W);
    for (int i = 0; i < ROWS; i++)
      for (int j = 0; j < WORDS; j++) sums[i][j] = fma(splat(a[i * lda + k]), row[j], sums[i][j]);
  }
  for (int i = 0; i < ROWS; i++)
    for (int j = 0; j < WORDS; j++) store(c + i * ldc + j * W, sums[i][j]);
}

template <int ROWS>
void add_rows(const float* a, int lda, const float* b, int ldb, float* c, int ldc, int columns, int depth, float factor) {
  int j = 0;
  for (; j + BATON_COLUMNS * W <= columns; j += BATON_COLUMNS * W)
    add_products<ROWS, BATON_COLUMNS>(a, lda, b + j, ldb, c + j, ldc, depth, factor);
  for (; j < columns; j += W) add_products<ROWS, 1>(a, lda, b + j, ldb, c + j, ldc, depth, factor);
}

// The same for any number of rows; `columns` is a multiple of W.
inline void multiply_add(const float* a, int lda, const float* b, int ldb, float* c, int ldc, int rows, int columns,
                         int depth, float factor) {
  int i = 0;
  for (; i + 6 <= rows; i += 6) add_rows<6>(a + i * lda, lda, b, ldb, c + i * ldc, ldc, columns, depth, factor);
  for (; i < rows; i++) add_rows<1>(a + i * lda, lda, b, ldb, c + i * ldc, ldc, columns, depth, factor);
}

// The scratch memory of one head, which a thread keeps. Rows have whole words; what fills them up is 0.
struct DeltaChunk {
  const int key_size, value_size, keys, values;  // keys, values: the sizes in whole words
  std::vector<float> memory;
  float *both, *turned, *products, *state_parts, *update, *scaled, *state;
  float totals[CHUNK_ROWS], betas[CHUNK_ROWS], grown[CHUNK_ROWS];

  DeltaChunk(int key_size, int value_size)
      : key_size(key_size),
        value_size(value_size),
        keys((key_size + W - 1) / W * W),
        values((value_size + W - 1) / W * W),
        memory((int64_t)CHUNK_ROWS * (3 * keys + 4 * values + 2 * CHUNK_ROWS) + (int64_t)keys * values) {
    both = memory.data();                              // [2 * CHUNK_ROWS][keys]: keys, then queries
    turned = both + 2 * CHUNK_ROWS * keys;             // [keys][CHUNK_ROWS]: keys
    products = turned + keys * CHUNK_ROWS;             // [2 * CHUNK_ROWS][CHUNK_ROWS]: of both with keys
    state_parts = products + 2 * CHUNK_ROWS * CHUNK_ROWS;  // [2 * CHUNK_ROWS][values]: of both with the state
    update = state_parts + 2 * CHUNK_ROWS * values;    // [CHUNK_ROWS][values]
    scaled = update + CHUNK_ROWS * values;             // the same, decayed to the end of the chunk
    state = scaled + CHUNK_ROWS * values;              // [keys][values]
  }

  float* key(int row) { return both + row * keys; }
  float* query(int row) { return both + (CHUNK_ROWS + row) * keys; }
  float* value(int row) { return update + row * values; }
  const float* output(int row) const { return state_parts + (CHUNK_ROWS + row) * values; }

  // The caller has set the rows of key, query and value, `betas`, and `totals`: the sums of the logarithms of decays from the
  // chunk's start on. Sets the rows of output, and moves `state` to the end of the chunk.
  void compute(int rows) {
    for (int row = 0; row < rows; row++) grown[row] = std::exp(totals[row]);
    for (int k = 0; k < keys; k += W)
      for (int row = 0; row < CHUNK_ROWS; row += W) {
        vf square[W];
        for (int i = 0; i < W; i++) square[i] = row + i < rows ? load(key(row + i) + k) : vf{};
        transpose(square);
        for (int i = 0; i < W; i++) store(turned + (k + i) * CHUNK_ROWS + row, square[i]);
      }
    const int columns = (rows + W - 1) / W * W;
    for (int half = 0; half < 2; half++) {
      const float* a = both + half * CHUNK_ROWS * keys;
      multiply_add(a, keys, turned, CHUNK_ROWS, products + half * CHUNK_ROWS * CHUNK_ROWS, CHUNK_ROWS, rows, columns, keys, 0.f);
      multiply_add(a, keys, state, values, state_parts + half * CHUNK_ROWS * values, values, rows, values, key_size, 0.f);
    }
    weigh(rows, columns);
    solve(rows);
    for (int row = 0; row < rows; row++) {
      float* out = state_parts + (CHUNK_ROWS + row) * values;
      for (int d = 0; d < values; d += W) store(out + d, load(out + d) * grown[row]);
    }
    multiply_add(products + CHUNK_ROWS * CHUNK_ROWS, CHUNK_ROWS, update, values, state_parts + CHUNK_ROWS * values, values, rows,
                 values, rows, 1.f);
    for (int row = 0; row < rows; row++) {
      const float left = std::exp(totals[rows - 1] - totals[row]);
      for (int d = 0; d < values; d += W) store(scaled + row * values + d, load(update + row * values + d) * left);
    }
    multiply_add(turned, CHUNK_ROWS, scaled, values, state, values, key_size, values, rows, grown[rows - 1]);
  }

 private:
  // Products of keys become the triangular system, negated, and those of queries the scores. Above the diagonal both are 0.
  void weigh(int rows, int columns) {
    for (int row = 0; row < rows; row++) {
      float *mixing = products + row * CHUNK_ROWS, *scores = mixing + CHUNK_ROWS * CHUNK_ROWS;
      for (int j = 0; j < columns; j += W) {
        const vi column = lane_numbers() + j;
        const vf between = exp_accurate(splat(totals[row]) - load(totals + j));
        const vf none{}, seen = column <= row ? between : none;
        store(scores + j, column <= row ? load(scores + j) * seen : none);
        store(mixing + j, column < row ? load(mixing + j) * seen * -betas[row] : none);
      }
      // The right-hand side: what the state does not know of the value yet.
      const float* known = state_parts + row * values;
      for (int d = 0; d < values; d += W)
        store(value(row) + d, (load(value(row) + d) - load(known + d) * grown[row]) * betas[row]);
    }
  }

  void solve(int rows) {
    constexpr int BLOCK = 6;
    for (int first = 0; first < rows; first += BLOCK) {
      const int count = std::min(BLOCK, rows - first);
      if (first)
        multiply_add(products + first * CHUNK_ROWS, CHUNK_ROWS, update, values, value(first), values, count, values, first, 1.f);
      for (int row = first + 1; row < first + count; row++)
        for (int d = 0; d < values; d += W) {
          vf sum = load(value(row) + d);
          for (int j = first; j < row; j++) sum = fma(splat(products[row * CHUNK_ROWS + j]), load(value(j) + d), sum);
          store(value(row) + d, sum);
        }
    }
  }
};

}  // namespace baton
