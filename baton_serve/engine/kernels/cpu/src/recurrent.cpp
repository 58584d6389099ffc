// One token of layers with recurrent states, for many sequences: each state is read and written once, in its batch
// slot. The results are those of transformers' functions (tests/contract/kernels/test_recurrent_steps.py), with float32
// arithmetic and one rounding of the output.
#include "arguments.h"
#include "rows.h"

#include <type_traits>
#include <vector>

using namespace baton;

namespace {

// Calls f with a null pointer of the element type that `dtype` names.
template <class F> int with_dtype(int dtype, F f) {
  switch (dtype) {
    case 0: f((float*)nullptr); return 0;
    case 1: f((bf16*)nullptr); return 0;
#ifdef __FLT16_MAX__
    case 2: f((_Float16*)nullptr); return 0;
#endif
    default: return 1;
  }
}

inline float number(float x) { return x; }
inline float number(bf16 x) {
  const uint32_t bits = (uint32_t)x.bits << 16;
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}
#ifdef __FLT16_MAX__
inline float number(_Float16 x) { return (float)x; }
#endif

// A row as float32, divided by its length if it is to be normalized.
template <class T> void read_row(const T* from, float* to, int n, float scale, bool normalizes) {
  vf squares{};
  for (int i = 0; i < n; i += W) {
    const vf x = load_elements(from + i, n - i);
    squares = fma(x, x, squares);
    store_elements(to + i, x, n - i);
  }
  const float factor = normalizes ? scale / std::sqrt(sum(squares) + 1e-6f) : scale;
  for (int i = 0; i < n; i++) to[i] *= factor;
}

// N words of the value's columns. `state` is [key_size, value_size].
template <int N, class T>
void delta_columns(float* state, const float* query, const float* key, const float* decay, const T* value, T* output,
                   int key_size, int stride, int columns, float beta, float key_query) {
  vf remembered[N] = {}, read[N] = {};
  const int last = columns - (N - 1) * W;
  for (int i = 0; i < key_size; i++) {
    const float* row = state + (int64_t)i * stride;
    const vf k = splat(key[i] * decay[i]), q = splat(query[i] * decay[i]);
#pragma GCC unroll 4
    for (int w = 0; w < N; w++) {
      const vf s = load_elements(row + w * W, w == N - 1 ? last : W);
      remembered[w] = fma(s, k, remembered[w]);
      read[w] = fma(s, q, read[w]);
    }
  }
  vf delta[N];
#pragma GCC unroll 4
  for (int w = 0; w < N; w++) {
    const int left = w == N - 1 ? last : W;
    delta[w] = (load_elements(value + w * W, left) - remembered[w]) * beta;
    store_elements(output + w * W, fma(delta[w], splat(key_query), read[w]), left);
  }
  for (int i = 0; i < key_size; i++) {
    float* row = state + (int64_t)i * stride;
    const vf k = splat(key[i]), d = splat(decay[i]);
#pragma GCC unroll 4
    for (int w = 0; w < N; w++) {
      const int left = w == N - 1 ? last : W;
      store_elements(row + w * W, fma(load_elements(row + w * W, left), d, k * delta[w]), left);
    }
  }
}

template <class T> void delta_head(const DeltaArguments& a, int64_t sequence, int head) {
  const int key_head = head / (a.num_heads / a.num_key_heads);
  thread_local std::vector<float> rows;
  rows.resize(3 * a.key_size);
  float *query = rows.data(), *key = query + a.key_size, *decay = key + a.key_size;
  read_row((const T*)a.query + sequence * a.query_stride + key_head * a.key_size, query, a.key_size, a.scale,
           a.normalizes);
  read_row((const T*)a.key + sequence * a.key_stride + key_head * a.key_size, key, a.key_size, 1.f, a.normalizes);
  const int64_t index = sequence * a.num_heads + head;
  float key_query = 0.f;
  for (int i = 0; i < a.key_size; i++) {
    decay[i] = std::exp(a.decay[a.has_channel_decay ? index * a.key_size + i : index]);
    key_query += key[i] * query[i];
  }
  float* state = a.states + a.slots[sequence] * a.state_stride + (int64_t)head * a.key_size * a.value_size;
  const T* value = (const T*)a.value + sequence * a.value_stride + head * a.value_size;
  T* output = (T*)a.output + index * a.value_size;
  const float beta = a.beta[index];
  for (int at = 0; at < a.value_size; at += 4 * W) {
    const int columns = std::min(4 * W, a.value_size - at);
    const auto run = [&](auto words) {
      delta_columns<decltype(words)::value>(state + at, query, key, decay, value + at, output + at, a.key_size,
                                            a.value_size, columns, beta, key_query);
    };
    switch ((columns + W - 1) / W) {
      case 1: run(std::integral_constant<int, 1>()); break;
      case 2: run(std::integral_constant<int, 2>()); break;
      case 3: run(std::integral_constant<int, 3>()); break;
      default: run(std::integral_constant<int, 4>());
    }
  }
}

template <class T> void state_space_head(const StateSpaceArguments& a, int64_t sequence, int head) {
  const int group = head / (a.num_heads / a.num_groups), n = a.state_size;
  const int64_t index = sequence * a.num_heads + head;
  const T* x = (const T*)a.input + sequence * a.input_stride + head * a.head_dim;
  const T* in = (const T*)a.input_map + sequence * a.input_map_stride + group * n;
  const T* out = (const T*)a.output_map + sequence * a.output_map_stride + group * n;
  float* state = a.states + a.slots[sequence] * a.state_stride + (int64_t)head * a.head_dim * n;
  T* output = (T*)a.output + index * a.head_dim;
  const vf decay = splat(a.decay[index]);
  thread_local std::vector<float> products;
  products.resize(a.head_dim + W);
  for (int p = 0; p < a.head_dim; p++, state += n) {
    const float value = number(x[p]);
    const vf added = splat(value * a.step[index]);
    vf y{};
    for (int i = 0; i < n; i += W) {
      const vf s = fma(load_elements(state + i, n - i), decay, added * load_elements(in + i, n - i));
      store_elements(state + i, s, n - i);
      y = fma(s, load_elements(out + i, n - i), y);
    }
    products[p] = sum(y) + a.skip[head] * value;
  }
  for (int p = 0; p < a.head_dim; p += W)
    store_elements(output + p, load_elements(products.data() + p, a.head_dim - p), a.head_dim - p);
}

// The state of a channel is its last `taps` inputs.
template <class T> void convolve_row(const ConvolutionArguments& a, int64_t sequence) {
  const T* x = (const T*)a.input + sequence * a.input_stride;
  T* state = (T*)a.states + a.slots[sequence] * a.state_stride;
  const T *weight = (const T*)a.weight, *bias = (const T*)a.bias;
  T* output = (T*)a.output + sequence * a.num_channels;
  for (int c = 0; c < a.num_channels; c += W) {
    const int count = std::min(W, a.num_channels - c);
    float sums[W] = {};
    for (int j = 0; j < count; j++) {
      T* past = state + (int64_t)(c + j) * a.taps;
      std::memmove((void*)past, past + 1, (a.taps - 1) * sizeof(T));
      past[a.taps - 1] = x[c + j];
      for (int i = 0; i < a.taps; i++)
        sums[j] += number(past[i]) * number(weight[(int64_t)(c + j) * a.taps + i]);
    }
    vf y = load(sums);
    if (bias) y = y + load_elements(bias + c, count);
    if (a.has_silu) {
      vf e = vf{} - y;
      y = y / (1.f + exp_accurate(e > splat(80.f) ? splat(80.f) : e));
    }
    store_elements(output + c, y, count);
  }
}

}  // namespace

extern "C" {

int baton_delta_step(const DeltaArguments* a) {
  return with_dtype(a->dtype, [a](auto* element) {
    using T = std::remove_pointer_t<decltype(element)>;
    const int64_t heads = a->num_seqs * a->num_heads;
#pragma omp parallel for schedule(static) num_threads(a->num_threads) if (a->num_threads > 1)
    for (int64_t i = 0; i < heads; i++) delta_head<T>(*a, i / a->num_heads, (int)(i % a->num_heads));
  });
}

int baton_state_space_step(const StateSpaceArguments* a) {
  return with_dtype(a->dtype, [a](auto* element) {
    using T = std::remove_pointer_t<decltype(element)>;
    const int64_t heads = a->num_seqs * a->num_heads;
#pragma omp parallel for schedule(static) num_threads(a->num_threads) if (a->num_threads > 1)
    for (int64_t i = 0; i < heads; i++) state_space_head<T>(*a, i / a->num_heads, (int)(i % a->num_heads));
  });
}

int baton_convolution_step(const ConvolutionArguments* a) {
  return with_dtype(a->dtype, [a](auto* element) {
    using T = std::remove_pointer_t<decltype(element)>;
    const bool is_parallel = a->num_threads > 1 && a->num_seqs > 1;
#pragma omp parallel for schedule(static) num_threads(a->num_threads) if (is_parallel)
    for (int64_t i = 0; i < a->num_seqs; i++) convolve_row<T>(*a, i);
  });
}

}  // extern "C"
