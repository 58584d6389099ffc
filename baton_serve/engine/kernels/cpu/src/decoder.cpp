// All layers of a decoder with ordinary MLPs in one call, on packed weights, with as few passes over memory as possible. The
// families of models differ in where the norms stand, their kind, scales, activation and rotation. Layers may have the gated
// delta rule in place of attention, or latent attention.
#include "arguments.h"
#include "linear.h"
#include "rows.h"

using namespace baton;

extern "C" {

struct NormWeights {
  const void *weight, *bias;  // null: none
};

// The gated delta rule behind a short convolution and before a gated norm. The columns of the product `qkv` are query, key and
// value, then the gate, then the step sizes and the time steps of the heads.
struct DeltaLayer {
  const void* convolution;             // [channels, taps]
  const float *log_rate, *step_bias;   // [num_heads]
  const void* norm;                    // [value_size]
  void* inputs;                        // of the convolution: [channels, taps] of each batch slot
  float* states;                       // [num_heads, key_size, value_size] of each batch slot
  int64_t input_stride, state_stride;  // from one batch slot to the next, in elements
  int32_t num_heads, num_key_heads, key_size, value_size, taps;  // num_heads 0: the layer has attention
  float epsilon;
};

// Latent attention (MLA). The columns of the product `qkv` are the query, or the input of the query's second product, then the
// latent and the part of the key that rotates.
struct LatentLayer {
  PackedMatrix keys, values;  // as baton_linear_heads reads them: from parts of queries to latents, from latents to values
  PackedMatrix query;         // the query's second product; words null: it has one only
  const void *norm, *query_norm;                  // [rank]; [inputs of `query`] or null
  int32_t num_heads, rank, key_size, value_size;  // num_heads 0: the layer has none; key_size: without what rotates
  int32_t is_interleaved, keeps_order;            // as in LatentRowsArguments
  float epsilon, query_epsilon;
};

struct DecoderLayer {
  PackedMatrix qkv, output, gate_up, down;
  NormWeights input_norm, attention_norm, mlp_norm, mlp_output_norm;  // before and behind attention and the MLP
  NormWeights query_norm, key_norm;
  void* cache;                        // [num_blocks, 2, num_kv_heads, block_tokens, head_dim]
  const float* sinks;                 // [num_heads] or null
  const int32_t* block_tables;        // of the layer's cache group; null: those of the step
  const int64_t* slots;
  float scale, softcap;
  int32_t sliding_window, rotation;  // rotation: its number in the step's cos and sin
  int32_t has_output_gate;  // attention's output is multiplied by the sigmoid of a gate, the last columns of `qkv`
  DeltaLayer delta;
  LatentLayer latent;
};

struct StepArguments {
  const DecoderLayer* layers;
  PackedMatrix head;
  NormWeights final_norm;
  void* residual;                         // [num_tokens, hidden]: embeddings, destroyed
  void *normed, *heads, *attended, *gated, *parallel, *convolved;  // scratch, rows as wide as their matrices
  void* latents;                          // scratch of latent attention, see `attend_latents`
  void* logits;                           // [num_logits, vocabulary]
  const float *cos, *sin;                 // [num_rotations, num_tokens, rotary_dim / 2]
  const int32_t *query_starts, *context_lens, *block_tables;
  const int64_t *slots, *logit_rows;      // logit_rows ascend; null: every token
  const int64_t *state_slots, *inner_slots;  // [num_seqs]: batch slots of recurrent states, and DeltaPromptArguments'
  const int32_t* inner_tokens;
  const void* added;                      // [num_added_layers, num_added, hidden]: joins the outputs of the first layers
  const int64_t* added_rows;              // [num_added]: to which tokens
  int64_t cache_block_stride, cache_value_offset, cache_head_stride, cache_token_stride;
  int64_t table_stride, rotary_stride, rotation_stride, num_tokens, num_logits, num_added;
  int32_t num_layers, num_seqs, num_heads, num_kv_heads, head_dim, rotary_dim, block_tokens, num_threads, codes;
  int32_t norm_kind, activation, has_no_gate, is_parallel, is_interleaved;
  int32_t num_added_layers;  // fewer than num_layers
  int32_t has_wide_norms;    // queries and keys have one norm over all heads, not one for each
  int32_t head_norm_stride;  // from the norm weights of a head to those of the next; 0: all have the same
  float epsilon, residual_scale;
  // Called with the number of a layer with attention among these after its K and V were stored and read; the step ends unless
  // it returns 0. May be null.
  int32_t (*after_layer)(int32_t number);
};

}  // extern "C"

namespace {

constexpr int BF16 = 1;
constexpr int64_t PARALLEL_ROWS = 64;
constexpr int64_t PARALLEL_STATES = 1 << 16;  // elements of states and tokens worth a second thread

struct Step {
  const StepArguments& a;
  const int hidden, query_width;
  int64_t rows;

  explicit Step(const StepArguments& arguments)
      : a(arguments), hidden(a.layers[0].qkv.inputs), query_width(a.num_heads * a.head_dim), rows(a.num_tokens) {}

  bool run() {
    int num_attended = 0;
    const void* x = normed(a.layers[0].input_norm);
    const Epilogue gate = a.has_no_gate ? GELU : a.activation == GELU_TANH ? GELU_GATED : GATED;
    for (int number = 0; number < a.num_layers; number++) {
      const DecoderLayer& layer = a.layers[number];
      const bool is_last = number + 1 == a.num_layers;
      if (!product(layer.qkv, x, a.heads, layer.qkv.outputs)) return false;
      if (layer.delta.num_heads) {
        apply_delta_rule(layer);
      } else {
        if (!(layer.latent.num_heads ? attend_latents(layer) : attend_heads(layer))) return false;
        if (a.after_layer && a.after_layer(num_attended++)) return true;
      }
      if (is_last && a.logit_rows) keep_logit_rows(layer);
      // With parallel layers, the MLP reads what attention has read.
      void* output = a.is_parallel ? a.parallel : a.normed;
      if (!product(layer.output, a.attended, output, hidden)) return false;
      const void* next = join(output, layer.attention_norm, layer.mlp_norm);
      if (!a.is_parallel) x = next;
      if (!product(layer.gate_up, x, a.gated, layer.down.inputs, gate)) return false;
      if (!product(layer.down, a.gated, a.normed, hidden)) return false;
      x = join(a.normed, layer.mlp_output_norm, is_last ? a.final_norm : a.layers[number + 1].input_norm);
      if (number < a.num_added_layers) {
        add_features(number);
        x = normed(a.layers[number + 1].input_norm);
      }
    }
    return product(a.head, x, a.logits, a.head.outputs);
  }

  // False, here and below: out of memory.
  bool product(const PackedMatrix& weights, const void* x, void* y, int64_t columns, Epilogue epilogue = PLAIN) const {
    return linear(weights, (const bf16*)x, weights.inputs, (bf16*)y, columns, rows, epilogue, a.num_threads);
  }

  NormArguments norm_arguments() const {
    NormArguments norm{};
    norm.input_stride = norm.residual_stride = norm.size = hidden;
    norm.num_rows = rows, norm.dtype = BF16, norm.num_threads = a.num_threads;
    norm.kind = a.norm_kind, norm.epsilon = a.epsilon, norm.scale = 1.f;
    return norm;
  }

  // The input of a product: the norm of the residual, or the residual itself if there is no norm.
  const void* normed(const NormWeights& weights) const {
    if (!weights.weight) return a.residual;
    NormArguments norm = norm_arguments();
    norm.input = a.residual, norm.output = a.normed, norm.weight = weights.weight, norm.bias = weights.bias;
    baton_norm(&norm);
    return a.normed;
  }

  // Add the output of a sublayer, after its norm if it has one, to the residual. Return the input of the next product.
  const void* join(void* output, const NormWeights& own, const NormWeights& next) const {
    NormArguments norm = norm_arguments();
    norm.input = output, norm.output = output, norm.residual = a.residual, norm.scale = a.residual_scale;
    norm.input_weight = own.weight, norm.input_bias = own.bias, norm.weight = next.weight, norm.bias = next.bias;
    baton_norm(&norm);
    return next.weight ? output : a.residual;
  }

  // Add the features of images to the residual of their tokens.
  void add_features(int64_t layer) const {
    for (int64_t i = 0; i < a.num_added; i++) {
      bf16* row = (bf16*)a.residual + a.added_rows[i] * hidden;
      const bf16* features = (const bf16*)a.added + (layer * a.num_added + i) * hidden;
      for (int column = 0; column < hidden; column += W) {
        const int remaining = hidden - column;
        store_elements(row + column, load_elements(row + column, remaining) + load_elements(features + column, remaining), remaining);
      }
    }
  }

  void apply_delta_rule(const DecoderLayer& layer) const {
    const DeltaLayer& delta = layer.delta;
    const int values = delta.num_heads * delta.value_size, channels = 2 * delta.num_key_heads * delta.key_size + values;
    const int64_t stride = layer.qkv.outputs;
    const bf16 *gate = (const bf16*)a.heads + channels, *beta = gate + values;
    ConvolutionArguments convolution{};
    convolution.input = a.heads, convolution.weight = delta.convolution, convolution.states = delta.inputs;
    convolution.starts = a.query_starts, convolution.slots = a.state_slots, convolution.output = a.convolved;
    convolution.inner_slots = a.inner_slots, convolution.inner_tokens = a.inner_tokens;
    convolution.input_stride = stride, convolution.state_stride = delta.input_stride, convolution.num_seqs = a.num_seqs;
    convolution.num_channels = channels, convolution.taps = delta.taps, convolution.dtype = BF16, convolution.has_silu = 1;
    convolution.num_threads = threads_for(channels * delta.taps);
    baton_convolution(&convolution);
    DeltaPromptArguments rule{};
    rule.qkv = a.convolved, rule.beta = beta, rule.step = beta + delta.num_heads;
    rule.log_rate = delta.log_rate, rule.step_bias = delta.step_bias, rule.states = delta.states;
    rule.starts = a.query_starts, rule.slots = a.state_slots, rule.output = a.attended;
    rule.inner_slots = a.inner_slots, rule.inner_tokens = a.inner_tokens;
    rule.qkv_stride = channels, rule.beta_stride = rule.step_stride = stride, rule.state_stride = delta.state_stride;
    rule.num_seqs = a.num_seqs, rule.num_heads = delta.num_heads, rule.num_key_heads = delta.num_key_heads;
    rule.key_size = delta.key_size, rule.value_size = delta.value_size, rule.dtype = BF16;
    rule.num_threads = threads_for(values * delta.key_size);
    baton_delta_prompt(&rule);
    GatedNormArguments norm{};
    norm.input = norm.output = a.attended, norm.gate = gate, norm.weight = delta.norm;
    norm.input_stride = values, norm.gate_stride = stride, norm.num_rows = rows;
    norm.num_heads = delta.num_heads, norm.size = delta.value_size, norm.dtype = BF16;
    norm.num_threads = a.num_threads, norm.epsilon = delta.epsilon;
    baton_gated_norm(&norm);
  }

  int threads_for(int64_t elements) const { return rows * elements < PARALLEL_STATES ? 1 : a.num_threads; }

  void apply_output_gate(const DecoderLayer& layer) const {
    GateArguments gate{};
    gate.gate = (const bf16*)a.heads + layer.qkv.outputs - query_width, gate.up = gate.output = a.attended;
    gate.gate_stride = layer.qkv.outputs, gate.up_stride = query_width, gate.num_rows = rows;
    gate.size = query_width, gate.dtype = BF16, gate.num_threads = a.num_threads, gate.activation = SIGMOID;
    baton_gate(&gate);
  }

  bool attend_heads(const DecoderLayer& layer) const {
    if (layer.query_norm.weight) norm_heads(layer);
    store(layer);
    if (!attend(layer)) return false;
    if (layer.has_output_gate) apply_output_gate(layer);
    return true;
  }

  // The keys' products are applied to the queries, and the values' products to the sums of latents. The scratch memory has, of all
  // tokens, the query if it has a second product, then what attention multiplies, the rows of the cache, and sums of latents.
  bool attend_latents(const DecoderLayer& layer) const {
    const LatentLayer& latent = layer.latent;
    const int heads = latent.num_heads, rank = latent.rank, width = rank + a.rotary_dim, size = latent.key_size + a.rotary_dim;
    bf16 *asked = (bf16*)a.heads, *made = (bf16*)a.latents;
    bf16 *query = made + rows * heads * size, *stored = query + rows * heads * width, *sums = stored + rows * width;
    int64_t asked_stride = layer.qkv.outputs;
    if (latent.query.words) {
      for_rows([&](int64_t token) {
        bf16* row = asked + token * asked_stride;
        norm_row(row, (const bf16*)latent.query_norm, (const bf16*)nullptr, row, latent.query.inputs, latent.query_epsilon, RMS);
      });
      const int64_t columns = heads * size;
      if (!linear(latent.query, asked, asked_stride, made, columns, rows, PLAIN, a.num_threads)) return false;
      asked = made, asked_stride = columns;
    }
    prepare_latents(layer, asked, asked_stride, query, stored);
    AttendArguments attend = attend_arguments(layer);
    attend.query = query, attend.output = sums;
    attend.query_token_stride = heads * width, attend.query_head_stride = attend.head_dim = width, attend.value_dim = rank;
    attend.num_heads = heads, attend.num_kv_heads = 1;
    if (baton_linear_heads(&latent.keys, heads, asked, asked_stride, size, query, heads * width, width, rows, a.num_threads) ||
        baton_attend(&attend))
      return false;
    return !baton_linear_heads(&latent.values, heads, sums, heads * rank, rank, a.attended, heads * latent.value_size,
                               latent.value_size, rows, a.num_threads);
  }

  // Store the rows of the cache, and the rotated parts of queries where attention reads them.
  void prepare_latents(const DecoderLayer& layer, const bf16* asked, int64_t asked_stride, bf16* query, bf16* stored) const {
    const LatentLayer& latent = layer.latent;
    const int width = latent.rank + a.rotary_dim;
    LatentRowsArguments made{};
    made.latents = (const bf16*)a.heads + layer.qkv.outputs - width, made.weight = latent.norm;
    made.query = asked + latent.key_size, made.output = stored, made.attending = query + latent.rank;
    made.cos = a.cos + layer.rotation * a.rotation_stride, made.sin = a.sin + layer.rotation * a.rotation_stride;
    made.latent_stride = layer.qkv.outputs;
    made.query_token_stride = asked_stride, made.query_head_stride = latent.key_size + a.rotary_dim;
    made.attending_token_stride = latent.num_heads * width, made.attending_head_stride = width;
    made.num_tokens = rows, made.rotary_stride = a.rotary_stride, made.num_heads = latent.num_heads;
    made.rank = latent.rank, made.rotary_dim = a.rotary_dim, made.dtype = BF16, made.num_threads = a.num_threads;
    made.is_interleaved = latent.is_interleaved, made.keeps_order = latent.keeps_order, made.epsilon = latent.epsilon;
    baton_latent_rows(&made);
    StoreArguments store = store_arguments(layer);
    store.key = store.value = stored, store.num_kv_heads = 1, store.head_dim = width;
    store.key_token_stride = store.value_token_stride = store.key_head_stride = store.value_head_stride = width;
    baton_store(&store);
  }

  // f(row) for all rows.
  template <class F> void for_rows(F f) const {
#pragma omp parallel for schedule(static) num_threads(a.num_threads) if (rows >= PARALLEL_ROWS)
    for (int64_t row = 0; row < rows; row++) f(row);
  }

  void norm_heads(const DecoderLayer& layer) const {
    const int key_heads = a.has_wide_norms ? 1 : a.num_kv_heads, query_heads = a.has_wide_norms ? 1 : a.num_heads;
    const int query_size = query_width / query_heads, key_size = a.num_kv_heads * a.head_dim / key_heads;
    for_rows([&](int64_t token) {
      bf16* heads = (bf16*)a.heads + token * layer.qkv.outputs;
      norm_each(heads, layer.query_norm, query_heads, query_size);
      norm_each(heads + query_width, layer.key_norm, key_heads, key_size);
    });
  }

  void norm_each(bf16* heads, const NormWeights& weights, int count, int size) const {
    const bf16 *weight = (const bf16*)weights.weight, *bias = (const bf16*)weights.bias;
    for (int h = 0; h < count; h++, heads += size, weight += a.head_norm_stride)
      norm_row(heads, weight, bias, heads, size, a.epsilon, a.norm_kind);
  }

  void store(const DecoderLayer& layer) const {
    bf16 *query = (bf16*)a.heads, *key = query + query_width, *value = key + a.num_kv_heads * a.head_dim;
    StoreArguments store = store_arguments(layer);
    store.query = query, store.key = key, store.value = value;
    store.cos = a.cos + layer.rotation * a.rotation_stride, store.sin = a.sin + layer.rotation * a.rotation_stride;
    store.query_token_stride = store.key_token_stride = store.value_token_stride = layer.qkv.outputs;
    store.query_head_stride = store.key_head_stride = store.value_head_stride = a.head_dim;
    store.num_heads = a.num_heads, store.num_kv_heads = a.num_kv_heads, store.head_dim = a.head_dim;
    store.rotary_dim = a.rotary_dim, store.interleaved = a.is_interleaved;
    baton_store(&store);
  }

  // What does not depend on the kind of attention, here and below.
  StoreArguments store_arguments(const DecoderLayer& layer) const {
    StoreArguments store{};
    store.cache = layer.cache, store.slots = layer.slots ? layer.slots : a.slots;
    store.cache_block_stride = a.cache_block_stride, store.cache_value_offset = a.cache_value_offset;
    store.cache_head_stride = a.cache_head_stride, store.cache_token_stride = a.cache_token_stride;
    store.num_tokens = rows, store.rotary_stride = a.rotary_stride, store.block_tokens = a.block_tokens;
    store.dtype = BF16, store.num_threads = a.num_threads, store.codes = a.codes;
    return store;
  }

  bool attend(const DecoderLayer& layer) const {
    AttendArguments attend = attend_arguments(layer);
    attend.query = a.heads, attend.output = a.attended;
    attend.query_token_stride = layer.qkv.outputs, attend.query_head_stride = a.head_dim;
    attend.num_heads = a.num_heads, attend.num_kv_heads = a.num_kv_heads;
    attend.head_dim = attend.value_dim = a.head_dim;
    return baton_attend(&attend) == 0;
  }

  AttendArguments attend_arguments(const DecoderLayer& layer) const {
    AttendArguments attend{};
    attend.cache = layer.cache, attend.query_starts = a.query_starts, attend.context_lens = a.context_lens;
    attend.block_tables = layer.block_tables ? layer.block_tables : a.block_tables;
    attend.sinks = layer.sinks, attend.table_stride = a.table_stride, attend.num_seqs = a.num_seqs;
    attend.cache_block_stride = a.cache_block_stride, attend.cache_value_offset = a.cache_value_offset;
    attend.cache_head_stride = a.cache_head_stride, attend.cache_token_stride = a.cache_token_stride;
    attend.block_tokens = a.block_tokens, attend.sliding_window = layer.sliding_window, attend.dtype = BF16;
    attend.num_threads = a.num_threads, attend.codes = a.codes, attend.scale = layer.scale, attend.softcap = layer.softcap;
    return attend;
  }

  // Keep only the tokens whose logits are wanted. Rows move towards the start, so none is overwritten before it has moved.
  void keep_logit_rows(const DecoderLayer& layer) {
    for (int64_t i = 0; i < a.num_logits; i++) {
      move_row(a.attended, layer.output.inputs, a.logit_rows[i], i);
      move_row(a.residual, hidden, a.logit_rows[i], i);
      if (a.is_parallel) move_row(a.normed, hidden, a.logit_rows[i], i);
    }
    rows = a.num_logits;
  }

  static void move_row(void* rows, int64_t columns, int64_t from, int64_t to) {
    std::memmove((bf16*)rows + to * columns, (bf16*)rows + from * columns, columns * sizeof(bf16));
  }
};

}  // namespace

// 0: done, or ended by after_layer; 2: out of memory.
extern "C" int baton_decoder_step(const StepArguments* arguments) { return Step(*arguments).run() ? 0 : 2; }
