"""Shapes of known decoders, which `baton-bench engine` builds with random weights, and the bytes and operations of a
step.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import cast

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

_LLAMA_3_1_8B: dict[str, object] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "rope_parameters": _LLAMA3_ROPE,
    "tie_word_embeddings": False,
}

SHAPES: dict[str, dict[str, object]] = {
    "llama-3.1-8b": _LLAMA_3_1_8B,
    "llama-3.1-70b": {
        **_LLAMA_3_1_8B,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
    "qwen3-4b": {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 151936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40960,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "tie_word_embeddings": True,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40960,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "tie_word_embeddings": False,
    },
    "mixtral-8x7b": {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 32768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "tie_word_embeddings": False,
    },
    "qwen3-next-12l": {  # Qwen3-Next-80B-A3B with 12 of its 48 layers: one card's memory holds no more in bf16
        "model_type": "qwen3_next",
        "architectures": ["Qwen3NextForCausalLM"],
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 3,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 262144,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25},
        "tie_word_embeddings": False,
    },
    "deepseek-v2-lite": {
        "model_type": "deepseek_v2",
        "architectures": ["DeepseekV2ForCausalLM"],
        "vocab_size": 102400,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 163840,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
    },
    "bench-0.5b": {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": 32000,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "tie_word_embeddings": True,
    },
    "bench-0.5b-hybrid": {  # three layers of the gated delta rule to one of full attention, as Qwen3.5 has
        "model_type": "qwen3_5_text",
        "architectures": ["Qwen3_5ForCausalLM"],
        "vocab_size": 32000,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_key_heads": 7,
        "linear_num_value_heads": 14,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 6,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "partial_rotary_factor": 0.25},
        "tie_word_embeddings": True,
    },
    "bench-0.5b-latent": {  # latent attention as DeepSeek-V3 has it, without experts
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "vocab_size": 32000,
        "hidden_size": 1024,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "first_k_dense_replace": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": 512,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 64,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
    },
}

COUNTED_BY_CONFIG = frozenset({"bench-0.5b-latent", "deepseek-v2-lite", "qwen3-next-12l"})
"""Shapes whose parameters `engine_model_costs` counts, since their layers differ from each other."""

DTYPE_BYTES = 2
WEIGHT_BITS = {
    "fp8": 8.0,
    "fp8_e4m3": 8.0,
    "fp8_e5m2": 8.0,
    "int8": 8.0,
    "fp6": 6.125,
    "asym_int4": 4.25,
    "sym_int4": 4.125,
    "mxfp4": 4.5,
}
"""Bits per weight including the scales, for groups of 128 (mxfp4: 32)."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Parameters and bytes of one forward pass. In a mixture of experts, `expert_parameters` counts one expert in each
    layer, and `dense_parameters` everything outside of the experts. `layer_bytes` and `head_bytes` are per parameter.
    `num_layers` counts those with KV; `state_bytes` is the size of a sequence's recurrent states in all other layers.
    `tail_parameters` are the active ones behind the last attention, which only tokens pass whose logits are needed.
    """

    dense_parameters: int
    expert_parameters: int
    num_experts: int
    top_k: int
    head_parameters: int
    layer_bytes: float
    head_bytes: float
    num_layers: int
    num_heads: int
    head_dim: int
    kv_bytes_per_token: int
    state_bytes: int = 0
    tail_parameters: int = 0

    @property
    def active_parameters(self) -> int:
        """Return the parameters that one token is multiplied with, without the head."""
        return self.dense_parameters + self.top_k * self.expert_parameters

    def decode_bytes(self, batch: int, context: int) -> int:
        """Return the bytes that a decode step reads, each weight that some token needs once and the whole KV of each
        sequence, and the recurrent states, which it reads and writes. Tokens are assumed to choose experts evenly and
        independently.
        """
        missed = (1 - self.top_k / self.num_experts) ** max(batch, 1) if self.num_experts else 1.0
        experts = round(self.num_experts * (1 - missed) * self.expert_parameters)
        layers = (self.dense_parameters + experts) * self.layer_bytes
        weights = round(layers + self.head_parameters * self.head_bytes)
        return weights + batch * (context * self.kv_bytes_per_token + 2 * self.state_bytes)

    def decode_flops(self, batch: int) -> int:
        """Return the floating-point operations of a decode step, without attention."""
        return 2 * batch * (self.active_parameters + self.head_parameters)

    def prefill_flops(self, prompts: int, length: int) -> int:
        """Return the floating-point operations of a prefill: products of all tokens, causal attention, and for the last
        token of each prompt what stands behind the last attention, and its logits."""
        attention = 2 * length * (length + 1) * self.num_heads * self.head_dim * self.num_layers
        products = length * (self.active_parameters - self.tail_parameters) + self.tail_parameters
        return prompts * (2 * products + attention + 2 * self.head_parameters)


def costs(name: str, quantization: str | None = None, kv_cache_dtype: str = "auto") -> Costs:
    """Return the costs of a shape, quantized or in bfloat16."""
    shape = SHAPES[name]

    def number(*keys: str) -> int:
        value = next((shape[key] for key in keys if key in shape), 0)
        assert isinstance(value, int)
        return value

    hidden, head_dim, heads, kv_heads = map(
        number, ("hidden_size", "head_dim", "num_attention_heads", "num_key_value_heads")
    )
    layers, num_experts = number("num_hidden_layers"), number("num_experts", "num_local_experts")
    mlp = 3 * hidden * number("moe_intermediate_size", "intermediate_size")
    num_linear = cast(list[str], shape.get("layer_types", [])).count("linear_attention")
    value_heads, value_dim = number("linear_num_value_heads"), number("linear_value_head_dim")
    keys, values = number("linear_num_key_heads") * number("linear_key_head_dim"), value_heads * value_dim
    taps = number("linear_conv_kernel_dim")
    # The linear layers project to keys and queries, values and their gates, and two numbers for each head.
    linear = hidden * (2 * keys + 3 * values + 2 * value_heads)
    # The query of layers beside linear ones is twice as wide: half of it is the gate of their output.
    attention = hidden * head_dim * ((3 if num_linear else 2) * heads + 2 * kv_heads)
    mixers = num_linear * linear + (layers - num_linear) * attention
    top_k = number("num_experts_per_tok")
    return Costs(
        dense_parameters=mixers + layers * (hidden * num_experts if num_experts else mlp),
        expert_parameters=layers * mlp if num_experts else 0,
        num_experts=num_experts,
        top_k=top_k,
        head_parameters=hidden * number("vocab_size"),
        layer_bytes=DTYPE_BYTES if quantization is None else WEIGHT_BITS[quantization] / 8,
        head_bytes=DTYPE_BYTES if quantization is None else 1,
        num_layers=layers - num_linear,
        num_heads=heads,
        head_dim=head_dim,
        kv_bytes_per_token=2
        * (layers - num_linear)
        * kv_heads
        * head_dim
        * (DTYPE_BYTES if kv_cache_dtype == "auto" else 1),
        # The state of a head, [key size, value size], is float32; the convolution keeps its last inputs.
        state_bytes=num_linear
        * (4 * values * number("linear_key_head_dim") + DTYPE_BYTES * taps * (2 * keys + values)),
        tail_parameters=hidden * heads * head_dim + (hidden * num_experts + top_k * mlp if num_experts else mlp),
    )


def write_shape(name: str, folder: Path) -> Path:
    """Write the config of a shape. An engine with `load_format="dummy"` can start from this folder."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {**SHAPES[name], "hidden_act": "silu", "dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(values, indent=1))
    return folder
