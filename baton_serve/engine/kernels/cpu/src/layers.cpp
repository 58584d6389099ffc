// The small steps between the matrix products of a layer, each one pass over memory: norms with the residual sum,
// gated activation, rotary embedding, and the KV store. Arithmetic is float32; roundings to the tensor's dtype happen
// where the plain-torch twin (baton_serve/engine/kernels/reference/attention.py) has them.
#include "arguments.h"
#include "codes.h"
#include "rows.h"

#include <type_traits>
#include <vector>

using namespace baton;

namespace {

constexpr int64_t PARALLEL_ELEMENTS = 1 << 15;  // below this, a second thread costs more time than it saves

// e^x, with the precision that the resulting element needs.
template <class T> inline vf exponential(vf x) { return exp_accurate(x); }
template <> inline vf exponential<bf16>(vf x) { return exp2_fast(x * 1.44269504088896341f); }

// f(row) for all rows.
template <class F> void for_rows(int64_t num_rows, int64_t row_elements, int num_threads, F f) {
  const int threads = num_rows * row_elements < PARALLEL_ELEMENTS ? 1 : num_threads;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t row = 0; row < num_rows; row++) f(row);
}

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

}  // namespace

extern "C" {

int baton_norm(const NormArguments* a) {
  return with_dtype(a->dtype, [a](auto* element) {
    using T = std::remove_pointer_t<decltype(element)>;
    const int n = a->size;
    for_rows(a->num_rows, n, a->num_threads, [=](int64_t row) {
      const T* input = (const T*)a->input + row * a->input_stride;
      T* output = (T*)a->output + row * n;
      if (a->input_weight) {
        norm_row(input, (const T*)a->input_weight, (const T*)a->input_bias, output, n, a->epsilon, a->kind);
        input = output;
      }
      if (a->residual) {
        T* residual = (T*)a->residual + row * a->residual_stride;
        for (int i = 0; i < n; i += W) {
          vf x = load_elements(input + i, n - i);
          if (a->scale != 1.f) x = rounded<T>(x * a->scale);
          store_elements(residual + i, x + load_elements(residual + i, n - i), n - i);
        }
        input = residual;
      }
      if (a->weight) norm_row(input, (const T*)a->weight, (const T*)a->bias, output, n, a->epsilon, a->kind);
    });
  });
}

int baton_gate(const GateArguments* a) {
  return with_dtype(a->dtype, [a](auto* element) {
    using T = std::remove_pointer_t<decltype(element)>;
    const int n = a->size;
    for_rows(a->num_rows, n, a->num_threads, [=](int64_t row) {
      const T* gate = (const T*)a->gate + row * a->gate_stride;
      const T* up = (const T*)a->up + row * a->up_stride;
      T* output = (T*)a->output + row * n;
      for (int i = 0; i < n; i += W) {
        const vf x = load_elements(gate + i, n - i);
        vf e = vf{} - gate_argument(x, a->activation);
        e = exponential<T>(e > splat(80.f) ? splat(80.f) : e);
        const vf top = a->activation == SIGMOID ? splat(1.f) : x;
        store_elements(output + i, rounded<T>(top / (1.f + e)) * load_elements(up + i, n - i), n - i);
      }
    });
  });
}

// The norm's result is rounded before it is multiplied by silu(gate), as the twin does.
int baton_gated_norm(const GatedNormArguments* a) {
  return with_dtype(a->dtype, [a](auto* element) {
    using T = std::remove_pointer_t<decltype(element)>;
    const int n = a->size;
    for_rows(a->num_rows, (int64_t)a->num_heads * n, a->num_threads, [=](int64_t row) {
      const T* input = (const T*)a->input + row * a->input_stride;
      const T* gate = (const T*)a->gate + row * a->gate_stride;
      T* output = (T*)a->output + row * a->num_heads * n;
      for (int h = 0; h < a->num_heads; h++, input += n, gate += n, output += n) {
        norm_row(input, (const T*)a->weight, (const T*)nullptr, output, n, a->epsilon, RMS);
        for (int i = 0; i < n; i += W) {
          const vf x = load_elements(gate + i, n - i), minus = vf{} - x;
          const vf e = exp_accurate(minus > splat(80.f) ? splat(80.f) : minus);
          store_elements(output + i, load_elements(output + i, n - i) * (x / (1.f + e)), n - i);
        }
      }
    });
  });
}

}  // extern "C"

namespace {

// Pairs are (i, i + half), or neighbours; `reads_pairs` and `writes_pairs` say whether they are neighbours in `from` and `to`,
// which may be the same row if both agree.
template <class T>
void rotate_pairs(const T* from, T* to, int half, const float* cos, const float* sin, bool reads_pairs, bool writes_pairs) {
  for (int i = 0; i < half; i += W) {
    const int left = std::min(W, half - i);
    T pairs[2][W] = {};
    if (reads_pairs)
      for (int j = 0; j < 2 * left; j++) pairs[j % 2][j / 2] = from[2 * i + j];
    const vf low = reads_pairs ? load_elements(pairs[0]) : load_elements(from + i, left);
    const vf high = reads_pairs ? load_elements(pairs[1]) : load_elements(from + half + i, left);
    const vf c = load_elements(cos + i, left), s = load_elements(sin + i, left);
    const vf first = low * c - high * s, second = fma(high, c, low * s);
    if (writes_pairs) {
      store_elements(pairs[0], first);
      store_elements(pairs[1], second);
      for (int j = 0; j < 2 * left; j++) to[2 * i + j] = pairs[j % 2][j / 2];
    } else {
      store_elements(to + i, first, left);
      store_elements(to + half + i, second, left);
    }
  }
}

// `from` and `to` may be the same row. Pairs are (i, i + rotary_dim / 2), or neighbours where interleaved.
template <class T> void rotate(const T* from, T* to, const StoreArguments& a, int64_t token) {
  const float *cos = a.cos + token * a.rotary_stride, *sin = a.sin + token * a.rotary_stride;
  rotate_pairs(from, to, a.rotary_dim / 2, cos, sin, a.interleaved, a.interleaved);
  if (from != to && a.rotary_dim < a.head_dim)
    std::memcpy((void*)(to + a.rotary_dim), from + a.rotary_dim, (a.head_dim - a.rotary_dim) * sizeof(T));
}

// Store one token of all KV heads as codes.
template <class T> void store_codes(const StoreArguments& a, int64_t token, const T* key, const T* value, T* rotated) {
  const int64_t block = a.slots[token] / a.block_tokens, offset = a.slots[token] % a.block_tokens;
  uint8_t* head = (uint8_t*)a.cache + block * a.cache_block_stride;
  for (int h = 0; h < a.num_kv_heads; h++, head += a.cache_head_stride) {
    const T* row = key + h * a.key_head_stride;
    if (a.cos) rotate(row, rotated, a, token), row = rotated;
    uint8_t* to = head + offset * a.cache_token_stride;
    bf16* scale = (bf16*)(head + (int64_t)a.block_tokens * a.head_dim) + offset;
    *scale = encode_row(row, a.head_dim, a.codes, to);
    scale[a.cache_value_offset / 2] =
        encode_row(value + h * a.value_head_stride, a.head_dim, a.codes, to + a.cache_value_offset);
  }
}

}  // namespace

extern "C" int baton_store(const StoreArguments* a) {
  return with_dtype(a->dtype, [a](auto* element) {
    using T = std::remove_pointer_t<decltype(element)>;
    const int64_t row_elements = (int64_t)(a->num_heads + 2 * a->num_kv_heads) * a->head_dim;
    for_rows(a->num_tokens, row_elements, a->num_threads, [=](int64_t token) {
      for (int h = 0; a->query && h < a->num_heads; h++) {
        T* row = (T*)a->query + token * a->query_token_stride + h * a->query_head_stride;
        rotate(row, row, *a, token);
      }
      const int64_t slot = a->slots[token];
      if (slot < 0) return;
      if (a->codes) {
        thread_local std::vector<T> rotated;
        rotated.resize(a->head_dim);
        store_codes(*a, token, (const T*)a->key + token * a->key_token_stride,
                    (const T*)a->value + token * a->value_token_stride, rotated.data());
        return;
      }
      T* to = (T*)a->cache + slot / a->block_tokens * a->cache_block_stride +
              slot % a->block_tokens * a->cache_token_stride;
      for (int h = 0; h < a->num_kv_heads; h++, to += a->cache_head_stride) {
        const T* key = (const T*)a->key + token * a->key_token_stride + h * a->key_head_stride;
        const T* value = (const T*)a->value + token * a->value_token_stride + h * a->value_head_stride;
        if (a->cos)
          rotate(key, to, *a, token);
        else
          std::memcpy((void*)to, key, a->head_dim * sizeof(T));
        std::memcpy((void*)(to + a->cache_value_offset), value, a->head_dim * sizeof(T));
      }
    });
  });
}

extern "C" int baton_latent_rows(const LatentRowsArguments* a) {
  return with_dtype(a->dtype, [a](auto* element) {
    using T = std::remove_pointer_t<decltype(element)>;
    const int width = a->rank + a->rotary_dim, half = a->rotary_dim / 2;
    for_rows(a->num_tokens, width + (int64_t)a->num_heads * a->rotary_dim, a->num_threads, [=](int64_t token) {
      const float *cos = a->cos + token * a->rotary_stride, *sin = a->sin + token * a->rotary_stride;
      const T* latent = (const T*)a->latents + token * a->latent_stride;
      T* output = (T*)a->output + token * width;
      norm_row(latent, (const T*)a->weight, (const T*)nullptr, output, a->rank, a->epsilon, RMS);
      rotate_pairs(latent + a->rank, output + a->rank, half, cos, sin, a->is_interleaved, a->keeps_order);
      const T* query = (const T*)a->query + token * a->query_token_stride;
      T* attending = (T*)a->attending + token * a->attending_token_stride;
      for (int h = 0; h < a->num_heads; h++, query += a->query_head_stride, attending += a->attending_head_stride)
        rotate_pairs(query, attending, half, cos, sin, a->is_interleaved, a->keeps_order);
    });
  });
}
