// A matrix product with weights that were packed once, for as many rows as a step has tokens.
#pragma once

#include "vector.h"

namespace baton {

// Weights of `outputs` x `inputs` bf16 as [panel of 32 outputs][pair of inputs][output within the panel]: whatever the
// number of rows, they are read once, forwards. The last panel is padded with zeros.
struct PackedMatrix {
  const uint32_t* words;
  const bf16* bias;  // [outputs] or null
  int32_t inputs, outputs;
};

enum Epilogue : int32_t {
  PLAIN = 0,
  GATED = 1,  // a panel holds 16 columns of the gate, then the same 16 of up: silu(gate) * up, half as many columns
};

// y[rows][outputs] = x[rows][inputs] x weights + bias, both bf16; strides count elements and are even.
// A row's bits do not depend on the other rows nor on the threads.
void linear(const PackedMatrix& weights, const bf16* x, int64_t x_stride, bf16* y, int64_t y_stride, int64_t rows,
            Epilogue epilogue, int num_threads);

}  // namespace baton
