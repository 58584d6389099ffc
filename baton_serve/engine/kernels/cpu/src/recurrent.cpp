// Layers with recurrent states, for many sequences: each state is read and written once, or once for a chunk of a prompt,
// in its batch slot. The results are those of transformers' functions (tests/contract/kernels/test_recurrent_steps.py), with float32
// arithmetic and one rounding of the output.
#include "arguments.h"
#include "delta_chunks.h"
#include "rows.h"
#include "turns.h"

#include <memory>
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

constexpr int DELTA_WORDS = BATON_LANES == 16 ? 8 : 4;  // of a row of the state, whose sums are in registers

// N words of the value's columns. `state` is [key_size, value_size]. Whole rows are read as one stream, which the hardware's
// prefetchers follow; asking for more in advance makes it slower.
// IS_WHOLE: the last word is a whole one. Where it may not be, the sums do not stay in registers.
template <int N, bool IS_WHOLE, class T>
void delta_columns(float* state, const float* query, const float* key, const float* decay, const T* value, T* output,
                   int key_size, int stride, int columns, float beta, float key_query) {
  vf remembered[N] = {}, read[N] = {};
  const int last = IS_WHOLE ? W : columns - (N - 1) * W;
  for (int i = 0; i < key_size; i++) {
    const float* row = state + (int64_t)i * stride;
    const vf k = splat(key[i] * decay[i]), q = splat(query[i] * decay[i]);
#pragma GCC unroll 8
    for (int w = 0; w < N; w++) {
      const vf s = load_elements(row + w * W, w == N - 1 ? last : W);
      remembered[w] = fma(s, k, remembered[w]);
      read[w] = fma(s, q, read[w]);
    }
  }
  vf delta[N];
#pragma GCC unroll 8
  for (int w = 0; w < N; w++) {
    const int left = w == N - 1 ? last : W;
    delta[w] = (load_elements(value + w * W, left) - remembered[w]) * beta;
    store_elements(output + w * W, fma(delta[w], splat(key_query), read[w]), left);
  }
  for (int i = 0; i < key_size; i++) {
    float* row = state + (int64_t)i * stride;
    const vf k = splat(key[i]), d = splat(decay[i]);
#pragma GCC unroll 8
    for (int w = 0; w < N; w++) {
      const int left = w == N - 1 ? last : W;
      store_elements(row + w * W, fma(load_elements(row + w * W, left), d, k * delta[w]), left);
    }
  }
}

// One token of one head. `decay` is exp of the decay's logarithm, for each channel of the key.
template <class T>
void delta_token(float* state, const float* query, const float* key, const float* decay, const T* value, T* output,
                 int key_size, int value_size, float beta) {
  float key_query = 0.f;
  for (int i = 0; i < key_size; i++) key_query += key[i] * query[i];
  for (int at = 0, columns; at < value_size; at += columns) {
    const bool is_wide = value_size - at >= DELTA_WORDS * W;
    columns = is_wide ? DELTA_WORDS * W : std::min(4 * W, value_size - at);
    const auto run = [&](auto words) {
      constexpr int N = decltype(words)::value;
      const auto update = columns == N * W ? delta_columns<N, true, T> : delta_columns<N, false, T>;
      update(state + at, query, key, decay, value + at, output + at, key_size, value_size, columns, beta, key_query);
    };
    switch (is_wide ? DELTA_WORDS : (columns + W - 1) / W) {
      case 1: run(std::integral_constant<int, 1>()); break;
      case 2: run(std::integral_constant<int, 2>()); break;
      case 3: run(std::integral_constant<int, 3>()); break;
      case 4: run(std::integral_constant<int, 4>()); break;
      default: run(std::integral_constant<int, DELTA_WORDS>());
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
  for (int i = 0; i < a.key_size; i++) decay[i] = std::exp(a.decay[a.has_channel_decay ? index * a.key_size + i : index]);
  float* state = a.states + a.slots[sequence] * a.state_stride + (int64_t)head * a.key_size * a.value_size;
  const T* value = (const T*)a.value + sequence * a.value_stride + head * a.value_size;
  delta_token(state, query, key, decay, value, (T*)a.output + index * a.value_size, a.key_size, a.value_size, a.beta[index]);
}

// One head of one sequence in chunks; the tokens of DeltaPromptArguments.
template <class T> class DeltaHead {
 public:
  DeltaHead(const DeltaPromptArguments& arguments, int64_t sequence, int head)
      : a(arguments),
        head(head),
        first(a.starts[sequence]),
        end(a.starts[sequence + 1]),
        key_at(head / (a.num_heads / a.num_key_heads) * a.key_size),
        all_keys(a.num_key_heads * a.key_size),
        state(state_of(a.slots[sequence])),
        inner(a.inner_slots ? state_of(a.inner_slots[sequence]) : nullptr),
        middle(inner ? first + a.inner_tokens[sequence] : first) {}

  void run() const {
    if (!state)
      for (int64_t row = first; row < end; row++) std::memset((void*)output(row), 0, a.value_size * sizeof(T));
    else if (end - first == 1)
      step();
    else if (end > first)
      run_chunks();
  }

 private:
  const T* qkv(int64_t row) const { return (const T*)a.qkv + row * a.qkv_stride; }
  const T* value(int64_t row) const { return qkv(row) + 2 * all_keys + head * a.value_size; }
  T* output(int64_t row) const { return (T*)a.output + (row * a.num_heads + head) * a.value_size; }

  // The logarithm: -rate * softplus(step + bias).
  float decay(int64_t row) const {
    const float x = number(((const T*)a.step)[row * a.step_stride + head]) + a.step_bias[head];
    return -std::exp(a.log_rate[head]) * (x > 20.f ? x : std::log1p(std::exp(x)));
  }
  float beta(int64_t row) const {
    return number(rounded_scalar(1.f / (1.f + std::exp(-number(((const T*)a.beta)[row * a.beta_stride + head])))));
  }
  static T rounded_scalar(float x) {
    T row[W];
    store_elements(row, splat(x));
    return row[0];
  }
  void read(int64_t row, float* query, float* key) const {
    read_row(qkv(row) + key_at, query, a.key_size, 1.f / std::sqrt((float)a.key_size), true);
    read_row(qkv(row) + all_keys + key_at, key, a.key_size, 1.f, true);
  }

  void step() const {
    thread_local std::vector<float> rows;
    rows.resize(3 * a.key_size);
    float *query = rows.data(), *key = query + a.key_size, *decays = key + a.key_size;
    read(first, query, key);
    std::fill(decays, decays + a.key_size, std::exp(decay(first)));
    delta_token(state, query, key, decays, value(first), output(first), a.key_size, a.value_size, beta(first));
  }

  void run_chunks() const {
    thread_local std::unique_ptr<DeltaChunk> kept;
    if (!kept || kept->key_size != a.key_size || kept->value_size != a.value_size)
      kept = std::make_unique<DeltaChunk>(a.key_size, a.value_size);
    DeltaChunk& chunk = *kept;
    for (int i = 0; i < a.key_size; i++)
      std::memcpy(chunk.state + i * chunk.values, state + (int64_t)i * a.value_size, a.value_size * sizeof(float));
    int rows;
    for (int64_t start = first; start < end; start += rows) {
      yield_to_others();
      rows = (int)std::min<int64_t>(CHUNK_ROWS, (start < middle ? middle : end) - start);
      float total = 0.f;
      for (int i = 0; i < rows; i++) {
        read(start + i, chunk.query(i), chunk.key(i));
        chunk.totals[i] = total += decay(start + i);
        chunk.betas[i] = beta(start + i);
        for (int d = 0; d < a.value_size; d += W)
          store(chunk.value(i) + d, load_elements(value(start + i) + d, a.value_size - d));
      }
      chunk.compute(rows);
      for (int i = 0; i < rows; i++)
        for (int d = 0; d < a.value_size; d += W)
          store_elements(output(start + i) + d, load(chunk.output(i) + d), a.value_size - d);
      if (start + rows == middle) keep(chunk, inner);
    }
    keep(chunk, state);
  }
  void keep(const DeltaChunk& chunk, float* to) const {
    for (int i = 0; i < a.key_size; i++)
      std::memcpy(to + (int64_t)i * a.value_size, chunk.state + i * chunk.values, a.value_size * sizeof(float));
  }
  float* state_of(int64_t slot) const {
    return slot < 0 ? nullptr : a.states + slot * a.state_stride + (int64_t)head * a.key_size * a.value_size;
  }

  const DeltaPromptArguments& a;
  const int head;
  const int64_t first, end;
  const int key_at, all_keys;  // elements of a row of qkv
  float *const state, *const inner;  // inner: of the tokens before `middle`, or null
  const int64_t middle;
};

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

// Elements of W channels with 4 taps each, as a word for each tap, and back.
inline void split_taps(const vf (&channels)[4], vf (&taps)[4]) {
#if BATON_LANES == 16
  for (int i = 0; i < 2; i++) {
    const vi order = vi{0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29} + 2 * i;
    const vf low = __builtin_shuffle(channels[0], channels[1], order);
    const vf high = __builtin_shuffle(channels[2], channels[3], order);
    taps[2 * i] = __builtin_shuffle(low, high, vi{0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23});
    taps[2 * i + 1] = __builtin_shuffle(low, high, vi{8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31});
  }
#else
  for (int c = 0; c < W; c++)
    for (int i = 0; i < 4; i++) taps[i][c] = channels[(4 * c + i) / W][(4 * c + i) % W];
#endif
}
inline void join_taps(const vf (&taps)[4], vf (&channels)[4]) {
#if BATON_LANES == 16
  for (int i = 0; i < 2; i++) {  // the lower and upper half of the channels
    const vi order = vi{0, 16, 0, 16, 1, 17, 1, 17, 2, 18, 2, 18, 3, 19, 3, 19} + 8 * i;
    const vi next = order + 4;
    const vi pairs = vi{0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29};
    channels[2 * i] = __builtin_shuffle(__builtin_shuffle(taps[0], taps[1], order),
                                        __builtin_shuffle(taps[2], taps[3], order), pairs);
    channels[2 * i + 1] = __builtin_shuffle(__builtin_shuffle(taps[0], taps[1], next),
                                            __builtin_shuffle(taps[2], taps[3], next), pairs);
  }
#else
  for (int c = 0; c < W; c++)
    for (int i = 0; i < 4; i++) channels[(4 * c + i) / W][(4 * c + i) % W] = taps[i][c];
#endif
}

// The taps of W channels, each a word; channels past `count` are 0. `from` is [channels, taps].
template <class T> void load_taps(const T* from, int taps, int count, vf* to) {
  if (taps == 4 && count == W) {
    vf channels[4], words[4];
    for (int i = 0; i < 4; i++) channels[i] = load_elements(from + i * W);
    split_taps(channels, words);
    for (int i = 0; i < 4; i++) to[i] = words[i];
    return;
  }
  for (int i = 0; i < taps; i++) {
    float row[W] = {};
    for (int c = 0; c < count; c++) row[c] = number(from[c * taps + i]);
    to[i] = load(row);
  }
}

template <class T> void store_taps(T* to, int taps, int count, const vf* from) {
  if (taps == 4 && count == W) {
    const vf words[4] = {from[0], from[1], from[2], from[3]};
    vf channels[4];
    join_taps(words, channels);
    for (int i = 0; i < 4; i++) store_elements(to + i * W, channels[i]);
    return;
  }
  for (int i = 0; i < taps; i++) {
    T row[W];
    store_elements(row, from[i]);
    for (int c = 0; c < count; c++) to[c * taps + i] = row[c];
  }
}

// TAPS 0: known only at run time, and at most MAX_TAPS.
constexpr int MAX_TAPS = 16;

// The W channels from `c` on for rows [first, end) of one sequence. The state of a channel is its last `taps` inputs.
// IS_WHOLE: there are W. Where there may be fewer, the taps do not stay in registers.
template <int TAPS, bool IS_WHOLE, class T>
void convolve_channels(const ConvolutionArguments& a, T* state, int64_t first, int64_t end, int c) {
  const int taps = TAPS ? TAPS : a.taps, count = IS_WHOLE ? W : std::min(W, a.num_channels - c);
  vf weight[TAPS ? TAPS : MAX_TAPS], past[TAPS ? TAPS : MAX_TAPS];
  load_taps((const T*)a.weight + (int64_t)c * taps, taps, count, weight);
  load_taps(state + (int64_t)c * taps, taps, count, past);
  const vf bias = a.bias ? load_elements((const T*)a.bias + c, count) : vf{};
  for (int64_t row = first; row < end; row++) {
    for (int i = 1; i < taps; i++) past[i - 1] = past[i];
    past[taps - 1] = load_elements((const T*)a.input + row * a.input_stride + c, count);
    vf y = past[0] * weight[0];
    for (int i = 1; i < taps; i++) y = fma(past[i], weight[i], y);
    y += bias;
    if (a.has_silu) {
      const vf minus = vf{} - y;
      y = y / (1.f + exp_accurate(minus > splat(80.f) ? splat(80.f) : minus));
    }
    store_elements((T*)a.output + row * a.num_channels + c, y, count);
  }
  store_taps(state + (int64_t)c * taps, taps, count, past);
}

// Channels [begin, stop) of one sequence.
template <class T> void convolve_sequence(const ConvolutionArguments& a, int64_t sequence, int begin, int stop) {
  const int64_t first = a.starts ? a.starts[sequence] : sequence, end = a.starts ? a.starts[sequence + 1] : sequence + 1;
  if (a.slots[sequence] < 0) {
    for (int64_t row = first; row < end; row++)
      std::memset((void*)((T*)a.output + row * a.num_channels + begin), 0, (stop - begin) * sizeof(T));
    return;
  }
  if (first == end) return;
  T* state = (T*)a.states + a.slots[sequence] * a.state_stride;
  const int64_t inner_slot = a.inner_slots ? a.inner_slots[sequence] : -1;
  const int64_t middle = inner_slot < 0 ? first : first + a.inner_tokens[sequence];
  for (int c = begin; c < stop; c += W) {
    const auto convolve = a.taps != 4               ? convolve_channels<0, false, T>
                          : c + W <= a.num_channels ? convolve_channels<4, true, T>
                                                    : convolve_channels<4, false, T>;
    if (inner_slot >= 0) {
      convolve(a, state, first, middle, c);
      const int64_t at = (int64_t)c * a.taps, count = std::min(W, a.num_channels - c) * a.taps;
      std::memcpy((void*)((T*)a.states + inner_slot * a.state_stride + at), state + at, count * sizeof(T));
    }
    convolve(a, state, middle, end, c);
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

int baton_delta_prompt(const DeltaPromptArguments* a) {
  return with_dtype(a->dtype, [a](auto* element) {
    using T = std::remove_pointer_t<decltype(element)>;
    const int64_t heads = a->num_seqs * a->num_heads;
    // Heads of one token lie one after another for a thread; those of prompts take long enough to be shared out one by one.
    const bool has_prompts = a->starts[a->num_seqs] > a->num_seqs;
    const int64_t share = std::min<int64_t>((heads + a->num_threads - 1) / a->num_threads, a->num_heads);
    const int64_t stretch = has_prompts || share < 1 ? 1 : share;
#pragma omp parallel for schedule(dynamic, stretch) num_threads(a->num_threads) if (a->num_threads > 1)
    for (int64_t i = 0; i < heads; i++) DeltaHead<T>(*a, i / a->num_heads, (int)(i % a->num_heads)).run();
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

int baton_convolution(const ConvolutionArguments* a) {
  if (a->taps > MAX_TAPS) return 1;
  return with_dtype(a->dtype, [a](auto* element) {
    using T = std::remove_pointer_t<decltype(element)>;
    // A task's rows of a prompt stay in a near cache, in stretches of whole cache lines.
    constexpr int STRETCH = 16 * W;
    const int64_t stretches = (a->num_channels + STRETCH - 1) / STRETCH;
#pragma omp parallel for schedule(static) num_threads(a->num_threads) if (a->num_threads > 1)
    for (int64_t i = 0; i < a->num_seqs * stretches; i++) {
      yield_to_others();
      const int begin = (int)(i % stretches) * STRETCH;
      convolve_sequence<T>(*a, i / stretches, begin, std::min(begin + STRETCH, a->num_channels));
    }
  });
}

}  // extern "C"
