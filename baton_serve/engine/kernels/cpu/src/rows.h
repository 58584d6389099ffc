// Operations on one row of a tensor that several steps share.
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

// Root mean square norm of one row; `output` may be `input`. With unit_offset the weight is 1 + weight, one rounding.
template <class T>
inline void norm_row(const T* input, const T* weight, T* output, int n, float epsilon, bool unit_offset) {
  vf squares{};
  for (int i = 0; i < n; i += W) {
    const vf x = load_elements(input + i, n - i);
    squares = fma(x, x, squares);
  }
  const float factor = 1.f / std::sqrt(sum(squares) / n + epsilon);
  for (int i = 0; i < n; i += W) {
    const vf x = load_elements(input + i, n - i) * factor, w = load_elements(weight + i, n - i);
    store_elements(output + i, unit_offset ? x * (1.f + w) : rounded<T>(x) * w, n - i);
  }
}

}  // namespace baton
