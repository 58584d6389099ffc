// Operations on one row of a tensor that several steps share: roundings, activations, norms.
#pragma once

#include "vector.h"

namespace baton {

// Returns x rounded as if it had been stored in a tensor of T.
template <class T> inline vf rounded(vf x) {
  T elements[W];
  store_elements(elements, x);
  return load_elements(elements);
}
template <> inline vf rounded<float>(vf x) { return x; }
#ifdef __AVX512BF16__
template <> inline vf rounded<bf16>(vf x) {
  return (vf)(__builtin_convertvector((vh)_mm512_cvtneps_pbh((__m512)x), vu) << 16);
}
#endif

enum NormKind : int32_t {
  RMS = 0,       // root mean square; rounded before it is multiplied by the weight
  OFFSET = 1,    // the same with 1 + weight, rounded once (Gemma)
  CENTERED = 2,  // LayerNorm: mean and variance, rounded once
};

enum Activation : int32_t { SILU = 0, GELU_TANH = 1, SIGMOID = 2 };

// What a gate's sigmoid is of: x * sigmoid(argument) is the activation. GELU's tanh(y) is 2 * sigmoid(2 y) - 1.
inline vf gate_argument(vf x, int32_t activation) {
  return activation == GELU_TANH ? x * 1.5957691216057308f * fma(x * x, splat(0.044715f), splat(1.f)) : x;
}

// LayerNorm of one row; `output` may be `input`, `bias` may be null.
template <class T>
inline void center_row(const T* input, const T* weight, const T* bias, T* output, int n, float epsilon) {
  vf sums{}, squares{};
  for (int i = 0; i < n; i += W) sums += load_elements(input + i, n - i);
  const float mean = sum(sums) / n;
  for (int i = 0; i < n; i += W) {
    const vf inside = n - i >= W ? splat(1.f) : (vf)((lane_numbers() < n - i) & (vi)splat(1.f));
    const vf x = (load_elements(input + i, n - i) - mean) * inside;
    squares = fma(x, x, squares);
  }
  const float factor = 1.f / std::sqrt(sum(squares) / n + epsilon);
  for (int i = 0; i < n; i += W) {
    vf x = (load_elements(input + i, n - i) - mean) * factor * load_elements(weight + i, n - i);
    if (bias) x += load_elements(bias + i, n - i);
    store_elements(output + i, x, n - i);
  }
}

// Norm of one row; `output` may be `input`.
template <class T>
inline void norm_row(const T* input, const T* weight, const T* bias, T* output, int n, float epsilon, int32_t kind) {
  if (kind == CENTERED) return center_row(input, weight, bias, output, n, epsilon);
  vf squares{};
  for (int i = 0; i < n; i += W) {
    const vf x = load_elements(input + i, n - i);
    squares = fma(x, x, squares);
  }
  const float factor = 1.f / std::sqrt(sum(squares) / n + epsilon);
  for (int i = 0; i < n; i += W) {
    const vf x = load_elements(input + i, n - i) * factor, w = load_elements(weight + i, n - i);
    store_elements(output + i, kind == OFFSET ? x * (1.f + w) : rounded<T>(x) * w, n - i);
  }
}

}  // namespace baton
