// A matrix product with weights that were packed once, for as many rows as a step has tokens.
#pragma once

#include "vector.h"

namespace baton {

// Weights of `outputs` x `inputs` in panels of 32 outputs, the last one padded. They are read once, from start to end, for
// any number of rows. A weight is bf16, or a code of `bits` bits: (table[code] - zero) * scale, where a scale and a zero
// belong to one output and `group` inputs.
//   16 bits: [panel][pair of inputs][output][input of the pair]
//    8 bits: [panel][pair of inputs] 64 codes: sign, and a place in the table of 128 bf16; their order is
//            [4][half of the panel][4 outputs][input of the pair], what interleaving bytes within lanes puts right
//    4 bits: [panel][two pairs of inputs] 32 words; nibble i of word j is input j % 2 of pair i / 2, output
//            16 * (i % 2) + j / 2
struct PackedMatrix {
  const void* words;
  const bf16* bias;       // [outputs] or null
  const float* scales;    // [groups][outputs, padded] or null: 16 bits
  const float* zeros;     // the same, or null
  const uint16_t* table;  // 128 magnitudes of 8 bits, 16 values of 4 bits twice
  int32_t inputs, outputs, bits, group;
};

enum Epilogue : int32_t {
  PLAIN = 0,
  GATED = 1,  // a panel holds 16 columns of the gate, then the same 16 of up: silu(gate) * up, half as many columns
  GELU_GATED = 2,  // the same with GELU (its tanh form)
  GELU = 3,        // GELU of every output, no gate
};

// y[rows][outputs] = x[rows][inputs] x weights + bias, both bf16; strides count elements and are even.
// A row's bits do not depend on the other rows nor on the threads. False: out of memory.
bool linear(const PackedMatrix& weights, const bf16* x, int64_t x_stride, bf16* y, int64_t y_stride, int64_t rows,
            Epilogue epilogue, int num_threads);

}  // namespace baton

// The product of each head with its own weights: outputs [head * n, (head + 1) * n) of `weights` are of one head, where n is a
// multiple of a panel's outputs. Strides count elements. 0: done; 2: out of memory.
extern "C" int baton_linear_heads(const baton::PackedMatrix* weights, int32_t num_heads, const void* x, int64_t x_stride,
                                  int64_t x_head_stride, void* y, int64_t y_stride, int64_t y_head_stride, int64_t rows,
                                  int32_t num_threads);
