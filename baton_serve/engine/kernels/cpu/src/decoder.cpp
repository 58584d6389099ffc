// All layers of a Llama-shaped decoder in one call, on packed bf16 weights, with as few passes over memory as possible.
#include "arguments.h"
#include "linear.h"
#include "rows.h"

using namespace baton;

extern "C" {

struct DecoderLayer {
  PackedMatrix qkv, output, gate_up, down;
  const void *input_norm, *mlp_norm;
  const void *query_norm, *key_norm;  // of each head; null: none
  void* cache;                        // [num_blocks, 2, num_kv_heads, block_tokens, head_dim]
  const float* sinks;                 // [num_heads] or null
  float scale, softcap;
  int32_t sliding_window;
};

struct StepArguments {
  const DecoderLayer* layers;
  PackedMatrix head;
  const void* final_norm;
  void* residual;                         // [num_tokens, hidden]: embeddings, destroyed
  void *normed, *heads, *attended, *gated;  // scratch, rows as wide as their matrices
  void* logits;                           // [num_logits, vocabulary]
  const float *cos, *sin;                 // [num_tokens, rotary_dim]
  const int32_t *query_starts, *context_lens, *block_tables;
  const int64_t *slots, *logit_rows;      // logit_rows ascend; null: every token
  int64_t cache_block_stride, cache_value_offset, cache_head_stride, cache_token_stride;
  int64_t table_stride, rotary_stride, num_tokens, num_logits;
  int32_t num_layers, num_seqs, num_heads, num_kv_heads, head_dim, rotary_dim, block_tokens, num_threads, codes;
  float epsilon;
  int32_t (*after_layer)(int32_t layer);  // called after its K and V were stored and read; the step ends unless it returns 0. May be null
};

}  // extern "C"

namespace {

constexpr int BF16 = 1;
constexpr int64_t PARALLEL_ROWS = 64;

struct Step {
  const StepArguments& a;
  const int hidden, width, query_width;  // width: of query, key and value heads together
  int64_t rows;

  explicit Step(const StepArguments& arguments)
      : a(arguments),
        hidden(a.layers[0].qkv.inputs),
        width((a.num_heads + 2 * a.num_kv_heads) * a.head_dim),
        query_width(a.num_heads * a.head_dim),
        rows(a.num_tokens) {}

  bool run() {
    norm(a.residual, nullptr, a.layers[0].input_norm);
    for (int number = 0; number < a.num_layers; number++) {
      const DecoderLayer& layer = a.layers[number];
      const bool is_last = number + 1 == a.num_layers;
      if (!product(layer.qkv, a.normed, a.heads, width)) return false;
      if (layer.query_norm) norm_heads(layer);
      store(layer);
      if (!attend(layer)) return false;
      if (a.after_layer && a.after_layer(number)) return true;
      if (is_last && a.logit_rows) keep_logit_rows();
      if (!product(layer.output, a.attended, a.normed, hidden)) return false;
      norm(a.normed, a.residual, layer.mlp_norm);
      if (!product(layer.gate_up, a.normed, a.gated, layer.down.inputs, GATED)) return false;
      if (!product(layer.down, a.gated, a.normed, hidden)) return false;
      norm(a.normed, a.residual, is_last ? a.final_norm : a.layers[number + 1].input_norm);
    }
    return product(a.head, a.normed, a.logits, a.head.outputs);
  }

  // False, here and below: out of memory.
  bool product(const PackedMatrix& weights, const void* x, void* y, int64_t columns, Epilogue epilogue = PLAIN) const {
    return linear(weights, (const bf16*)x, weights.inputs, (bf16*)y, columns, rows, epilogue, a.num_threads);
  }

  void norm(const void* input, void* residual, const void* weight) const {
    NormArguments norm{input, weight, residual, a.normed, hidden, hidden, rows, hidden, BF16, a.num_threads, 0, a.epsilon};
    baton_rms_norm(&norm);
  }

  void norm_heads(const DecoderLayer& layer) const {
#pragma omp parallel for schedule(static) num_threads(a.num_threads) if (rows >= PARALLEL_ROWS)
    for (int64_t token = 0; token < rows; token++)
      for (int h = 0; h < a.num_heads + a.num_kv_heads; h++) {
        bf16* head = (bf16*)a.heads + token * width + h * a.head_dim;
        const void* weight = h < a.num_heads ? layer.query_norm : layer.key_norm;
        norm_row(head, (const bf16*)weight, head, a.head_dim, a.epsilon, false);
      }
  }

  void store(const DecoderLayer& layer) const {
    bf16 *query = (bf16*)a.heads, *key = query + query_width, *value = key + a.num_kv_heads * a.head_dim;
    StoreArguments store{};
    store.query = query, store.key = key, store.value = value;
    store.cos = a.cos, store.sin = a.sin, store.cache = layer.cache, store.slots = a.slots;
    store.query_token_stride = store.key_token_stride = store.value_token_stride = width;
    store.query_head_stride = store.key_head_stride = store.value_head_stride = a.head_dim;
    store.cache_block_stride = a.cache_block_stride, store.cache_value_offset = a.cache_value_offset;
    store.cache_head_stride = a.cache_head_stride, store.cache_token_stride = a.cache_token_stride;
    store.num_tokens = rows, store.rotary_stride = a.rotary_stride;
    store.num_heads = a.num_heads, store.num_kv_heads = a.num_kv_heads, store.head_dim = a.head_dim;
    store.rotary_dim = a.rotary_dim, store.block_tokens = a.block_tokens, store.dtype = BF16;
    store.num_threads = a.num_threads, store.codes = a.codes;
    baton_store(&store);
  }

  bool attend(const DecoderLayer& layer) const {
    AttendArguments attend{};
    attend.query = a.heads, attend.cache = layer.cache, attend.output = a.attended;
    attend.query_starts = a.query_starts, attend.context_lens = a.context_lens, attend.block_tables = a.block_tables;
    attend.sinks = layer.sinks;
    attend.query_token_stride = width, attend.query_head_stride = a.head_dim;
    attend.cache_block_stride = a.cache_block_stride, attend.cache_value_offset = a.cache_value_offset;
    attend.cache_head_stride = a.cache_head_stride, attend.cache_token_stride = a.cache_token_stride;
    attend.table_stride = a.table_stride, attend.num_seqs = a.num_seqs;
    attend.num_heads = a.num_heads, attend.num_kv_heads = a.num_kv_heads, attend.head_dim = a.head_dim;
    attend.block_tokens = a.block_tokens, attend.sliding_window = layer.sliding_window, attend.dtype = BF16;
    attend.num_threads = a.num_threads, attend.codes = a.codes, attend.scale = layer.scale, attend.softcap = layer.softcap;
    return baton_attend(&attend) == 0;
  }

  // Keep only the tokens whose logits are wanted. Rows move towards the start, so none is overwritten before it has moved.
  void keep_logit_rows() {
    for (int64_t i = 0; i < a.num_logits; i++) {
      move_row(a.attended, query_width, a.logit_rows[i], i);
      move_row(a.residual, hidden, a.logit_rows[i], i);
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
