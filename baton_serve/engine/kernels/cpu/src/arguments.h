// The arguments that Python passes to the library, field by field as in baton_serve/engine/kernels/cpu/*.py, and the
// functions that it calls.
#pragma once

#include <cstdint>

extern "C" {

struct NormArguments {
  const void *input, *weight, *bias;  // bias: null where there is none; weight: null for the residual sum alone
  const void *input_weight, *input_bias;  // of a norm of the input, before it is added; null: none
  void* residual;  // null: none; otherwise it is set to scale * input + residual, and this sum is normed
  void* output;    // contiguous; it may be the input
  int64_t input_stride, residual_stride, num_rows;
  int32_t size, dtype, num_threads, kind;  // kind: of both norms, see rows.h
  float epsilon, scale;
};

struct GateArguments {
  const void *gate, *up;
  void* output;  // contiguous
  int64_t gate_stride, up_stride, num_rows;
  int32_t size, dtype, num_threads, activation;  // activation: see rows.h
};

struct GatedNormArguments {
  const void *input, *gate, *weight;  // rows [num_heads, size]; weight [size], as of norm kind 0
  void* output;                       // contiguous
  int64_t input_stride, gate_stride, num_rows;
  int32_t num_heads, size, dtype, num_threads;
  float epsilon;
};

struct StoreArguments {
  void* query;            // rotated in place; null: only K and V are stored
  const void *key, *value;
  const float *cos, *sin;  // [num_tokens, rotary_dim] float32, the first half of the columns counts; null: no rotation
  void* cache;
  const int64_t* slots;  // negative: the token is not stored
  int64_t query_token_stride, query_head_stride, key_token_stride, key_head_stride, value_token_stride,
      value_head_stride;
  int64_t cache_block_stride, cache_value_offset, cache_head_stride, cache_token_stride;
  int64_t num_tokens, rotary_stride;
  int32_t num_heads, num_kv_heads, head_dim, rotary_dim, block_tokens, dtype, num_threads, interleaved;
  int32_t codes;  // of the cache (codes.h); its strides count bytes then, and a head's tokens lie close together
};

// What the cache of latent attention stores of each token: the norm of its latent, and the rotated part of its key. The
// parts of its query heads that rotate go to `attending`.
struct LatentRowsArguments {
  const void *latents, *weight, *query;  // [num_tokens, rank + rotary_dim]; [rank]; [num_tokens, num_heads, rotary_dim]
  const float *cos, *sin;                // as in StoreArguments
  void *output, *attending;              // [num_tokens, rank + rotary_dim], contiguous; as query
  int64_t latent_stride, query_token_stride, query_head_stride, attending_token_stride, attending_head_stride;
  int64_t num_tokens, rotary_stride;
  int32_t num_heads, rank, rotary_dim, dtype, num_threads;
  int32_t is_interleaved, keeps_order;  // whether pairs are neighbours, and whether they stay so
  float epsilon;
};

struct AttendArguments {
  const void* query;  // [num_tokens, num_heads, head_dim]
  const void* cache;  // [num_blocks, 2, num_kv_heads, block_tokens, head_dim]
  void* output;       // [num_tokens, num_heads, value_dim], contiguous
  const int32_t* query_starts;
  const int32_t* context_lens;
  const int32_t* block_tables;
  const float* alibi;  // [num_heads] or null: slopes, which are added before a score is scaled
  const float* sinks;  // [num_heads] or null
  int64_t query_token_stride, query_head_stride;  // strides count elements
  int64_t cache_block_stride, cache_value_offset, cache_head_stride, cache_token_stride;
  int64_t table_stride;
  int32_t num_seqs, num_heads, num_kv_heads, head_dim, value_dim, block_tokens;  // the first elements of V are the value
  int32_t sliding_window;  // 0: none
  int32_t dtype;           // 0 float32, 1 bfloat16, 2 float16
  int32_t num_threads;
  int32_t codes;  // as above
  float scale, softcap;
};

// States lie in batch slots: that of a sequence begins at states + slots[sequence] * state_stride. Strides count
// elements from one sequence to the next; heads and channels are contiguous. Outputs are contiguous.
struct DeltaArguments {
  const void *query, *key, *value;  // [num_seqs, num_key_heads, key_size] twice, [num_seqs, num_heads, value_size]
  const float *decay, *beta;        // logarithm of the decay, [num_seqs, num_heads(, key_size)]; [num_seqs, num_heads]
  float* states;                    // [num_heads, key_size, value_size]
  const int64_t* slots;
  void* output;
  int64_t query_stride, key_stride, value_stride, state_stride, num_seqs;
  int32_t num_heads, num_key_heads, key_size, value_size, dtype, num_threads;
  int32_t has_channel_decay, normalizes;  // normalizes: query and key are divided by their lengths
  float scale;                            // of the query
};

// The delta rule for any number of tokens of each sequence, from what a layer's projections give. Rows lie one after
// another: those of sequence i are [starts[i], starts[i + 1]). A negative slot has no state, and its rows are set to 0.
struct DeltaPromptArguments {
  const void* qkv;          // [num_tokens, 2 * num_key_heads * key_size + num_heads * value_size]
  const void *beta, *step;  // [num_tokens, num_heads]: before the sigmoid; before bias and softplus
  const float *log_rate, *step_bias;  // [num_heads]
  float* states;                      // [num_heads, key_size, value_size] of each slot
  const int32_t* starts;
  const int64_t* slots;
  const int64_t* inner_slots;   // [num_seqs] or null: where states before a sequence's last token go too, negative: nowhere
  const int32_t* inner_tokens;  // after how many of its tokens
  void* output;                 // [num_tokens, num_heads, value_size], contiguous
  int64_t qkv_stride, beta_stride, step_stride, state_stride, num_seqs;
  int32_t num_heads, num_key_heads, key_size, value_size, dtype, num_threads;
};

struct StateSpaceArguments {
  const void *input, *input_map, *output_map;  // x [num_seqs, num_heads, head_dim]; B and C [num_seqs, num_groups, state_size]
  const float *step, *decay;     // dt and exp(dt * A), [num_seqs, num_heads]
  const float* skip;             // D [num_heads]
  float* states;                 // [num_heads, head_dim, state_size]
  const int64_t* slots;
  void* output;
  int64_t input_stride, input_map_stride, output_map_stride, state_stride, num_seqs;
  int32_t num_heads, num_groups, head_dim, state_size, dtype, num_threads;
};

struct ConvolutionArguments {
  const void *input, *weight, *bias;  // [num_tokens, num_channels], [num_channels, taps], [num_channels] or null
  void* states;                       // [num_channels, taps], of the input's dtype
  const int32_t* starts;              // rows as in DeltaPromptArguments; null: one of each sequence
  const int64_t *slots, *inner_slots;  // as there
  const int32_t* inner_tokens;
  void* output;
  int64_t input_stride, state_stride, num_seqs;
  int32_t num_channels, taps, dtype, num_threads, has_silu;
};

// 0: done; 1: this build has no code for the dtype; 2: out of memory (attention alone).
int baton_norm(const NormArguments*);
int baton_gate(const GateArguments*);
int baton_gated_norm(const GatedNormArguments*);
int baton_store(const StoreArguments*);
int baton_latent_rows(const LatentRowsArguments*);
int baton_attend(const AttendArguments*);
int baton_delta_step(const DeltaArguments*);
int baton_delta_prompt(const DeltaPromptArguments*);
int baton_state_space_step(const StateSpaceArguments*);
int baton_convolution(const ConvolutionArguments*);

}  // extern "C"
