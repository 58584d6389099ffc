"""Model families that tests compare with transformers, as tiny random-weight models.

docs/reference/models.md is generated from them.

Every one is compared inside one process, engine by engine and through router, prefill, transfer and decode; those in
`IN_PROCESSES` also as real processes.
"""

from dataclasses import dataclass
from typing import Any

VOCAB_SIZE = 320
EOS_ID = 256
SLIDING_WINDOW = 24
MAX_POSITIONS = 512


@dataclass(frozen=True)
class Family:
    """A model family. `models` are its well-known names; `config` is that of a tiny model of the family."""

    models: str
    config: dict[str, Any]


_IDS = {"bos_token_id": EOS_ID, "eos_token_id": EOS_ID, "pad_token_id": EOS_ID}
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "initializer_range": 0.15,
    **_IDS,
}
_MOE: dict[str, Any] = {**_COMMON, "num_experts_per_tok": 2}
_ROUTED: dict[str, Any] = {
    **_MOE,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 20,
}
_INDEXED: dict[str, Any] = {"index_n_heads": 2, "index_head_dim": 32, "index_topk": MAX_POSITIONS}
_GPT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": MAX_POSITIONS,
    "tie_word_embeddings": False,
    "initializer_range": 0.15,
    **_IDS,
}
_FALCON: dict[str, Any] = {
    "model_type": "falcon",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_POSITIONS,
    "initializer_range": 0.15,
    **_IDS,
}


def _stretched(theta: float, factor: float, **more: float) -> dict[str, Any]:
    """YaRN from a short context to `MAX_POSITIONS`; the default of these families is made for their real length."""
    native = int(MAX_POSITIONS / factor)
    rope = {"rope_type": "yarn", "rope_theta": theta, "factor": factor, "original_max_position_embeddings": native}
    return {"rope_parameters": {**rope, "beta_fast": 32.0, "beta_slow": 1.0, **more}}


_UNTIED = {"tie_word_embeddings": False}  # tied ones repeat their last token for ever
_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
_MIXED = {"sliding_window": SLIDING_WINDOW, "layer_types": _TYPES}
_GEMMA4: dict[str, Any] = {
    **_COMMON,
    **_UNTIED,
    "model_type": "gemma4_text",
    "head_dim": 16,
    "global_head_dim": 32,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "sliding_window": SLIDING_WINDOW,
}
_MULTIPLIED = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.3,
    "logits_scaling": 1.5,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

FAMILIES: dict[str, Family] = {
    "llama": Family("Llama 2, Yi, DeepSeek-Coder, Llama-shaped others", {**_COMMON, "model_type": "llama"}),
    "llama3": Family(
        "Llama 3, 3.1, 3.2, 3.3; DeepSeek-R1-Distill-Llama",
        {**_COMMON, "model_type": "llama", "rope_parameters": _LLAMA3_ROPE},
    ),
    "mistral": Family(
        "Mistral 7B, Mistral Nemo, Mistral Small",
        {**_COMMON, "model_type": "mistral", "sliding_window": SLIDING_WINDOW},
    ),
    "ministral": Family("Ministral 8B", {**_COMMON, "model_type": "ministral", "head_dim": 16, **_MIXED}),
    "ministral3": Family(
        "Ministral 3", {**_COMMON, "model_type": "ministral3", **_stretched(1000000.0, 16.0, llama_4_scaling_beta=0.1)}
    ),
    "mixtral": Family("Mixtral 8x7B", {**_MOE, "model_type": "mixtral", "num_local_experts": 4}),
    "qwen2": Family(
        "Qwen 1.5, 2, 2.5; QwQ; DeepSeek-R1-Distill-Qwen; Qwen2.5-Coder", {**_COMMON, "model_type": "qwen2"}
    ),
    "qwen2_moe": Family(
        "Qwen1.5-MoE, Qwen2-57B-A14B",
        {
            **_MOE,
            "model_type": "qwen2_moe",
            "num_experts": 4,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 64,
        },
    ),
    "qwen3": Family("Qwen 3; DeepSeek-R1-0528-Qwen3", {**_COMMON, "model_type": "qwen3", "head_dim": 32}),
    "qwen3_moe": Family(
        "Qwen3-30B-A3B, Qwen3-Coder-30B-A3B, Qwen3-235B-A22B",
        {
            **_MOE,
            "model_type": "qwen3_moe",
            "head_dim": 32,
            "num_experts": 4,
            "moe_intermediate_size": 48,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
        },
    ),
    "gemma": Family("Gemma", {**_COMMON, "model_type": "gemma", "head_dim": 32, **_UNTIED}),
    "gemma2": Family(
        "Gemma 2",
        {
            **_COMMON,
            "model_type": "gemma2",
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": SLIDING_WINDOW,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 10.0,
            **_UNTIED,
        },
    ),
    "gemma3": Family(
        "Gemma 3 (text)",
        {
            **_COMMON,
            "model_type": "gemma3_text",
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            **_UNTIED,
            **_MIXED,
        },
    ),
    "gemma3n": Family(
        "Gemma 3n (text)",
        {
            **_COMMON,
            "model_type": "gemma3n_text",
            "num_hidden_layers": 5,
            "intermediate_size": [96] * 5,
            "head_dim": 16,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "hidden_size_per_layer_input": 16,
            "num_kv_shared_layers": 2,
            "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0, 0.0],
            "sliding_window": SLIDING_WINDOW,
            "layer_types": [*_TYPES, "full_attention", "sliding_attention"],
        },
    ),
    "gemma4": Family(
        "Gemma 4 E2B, E4B (text)",
        {
            **_GEMMA4,
            "num_hidden_layers": 5,
            "hidden_size_per_layer_input": 16,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "layer_types": [*_TYPES, "sliding_attention", "full_attention"],
        },
    ),
    "gemma4_moe": Family(
        "Gemma 4 31B, 26B-A4B (text)",
        {
            **_GEMMA4,
            "num_hidden_layers": 4,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "use_bidirectional_attention": "vision",
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 48,
            "layer_types": [*_TYPES, "full_attention"],
        },
    ),
    "mimo_v2_flash": Family(
        "MiMo-V2-Flash",
        {
            **_ROUTED,
            "model_type": "mimo_v2_flash",
            "head_dim": 24,
            "v_head_dim": 16,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            **_MIXED,
        },
    ),
    "youtu": Family("Youtu-LLM", {**_COMMON, **_LATENT, "model_type": "youtu"}),
    "glm": Family("GLM-4-9B-chat in transformers' format", {**_COMMON, "model_type": "glm", "head_dim": 32}),
    "glm4": Family("GLM-4-9B-0414, GLM-4-32B-0414, GLM-Z1", {**_COMMON, "model_type": "glm4", "head_dim": 32}),
    "glm4_moe": Family(
        "GLM-4.5, GLM-4.5-Air",
        {**_ROUTED, "model_type": "glm4_moe", "head_dim": 32, "n_group": 2, "use_qk_norm": True},
    ),
    "glm4_moe_lite": Family("GLM-4.7-Flash", {**_ROUTED, **_LATENT, "model_type": "glm4_moe_lite"}),
    "phi": Family("Phi 1, 1.5, 2", {**_COMMON, "model_type": "phi"}),
    "phi3": Family("Phi 3, Phi 3.5 mini, Phi 4, Phi 4 mini", {**_COMMON, "model_type": "phi3"}),
    "phimoe": Family("Phi 3.5 MoE", {**_MOE, "model_type": "phimoe", "num_local_experts": 4}),
    "internlm3": Family("InternLM 3", {**_COMMON, "model_type": "internlm3"}),
    "deepseek_v2": Family(
        "DeepSeek-V2, DeepSeek-V2-Lite, DeepSeek-Coder-V2-Lite",
        {**_ROUTED, **_LATENT, "q_lora_rank": None, "model_type": "deepseek_v2"},
    ),
    "deepseek_v3": Family(
        "DeepSeek-V3, DeepSeek-R1", {**_ROUTED, **_LATENT, "n_group": 2, "model_type": "deepseek_v3"}
    ),
    "deepseek_v32": Family(
        "DeepSeek-V3.2 (contexts up to 2,048 tokens)",
        {**_ROUTED, **_LATENT, **_INDEXED, "n_group": 2, "model_type": "deepseek_v32"},
    ),
    "glm_moe_dsa": Family(
        "GLM-5 (contexts up to 2,048 tokens)",
        {
            **_ROUTED,
            **_LATENT,
            **_INDEXED,
            "model_type": "glm_moe_dsa",
            "indexer_types": ["full", "shared", "full"],
        },
    ),
    "llama4_text": Family(
        "Llama 4 Scout, Maverick (text)",
        {
            **_COMMON,
            "model_type": "llama4_text",
            "num_hidden_layers": 4,
            "head_dim": 16,
            "intermediate_size_mlp": 96,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "no_rope_layers": [1, 0, 1, 1],
            "attention_chunk_size": 64,
            # Small, so that the scales of the layer without rotation change within a test's prompt.
            "floor_scale": 16,
        },
    ),
    "gpt_oss": Family(
        "gpt-oss-20b, gpt-oss-120b",
        {
            **_MOE,
            "model_type": "gpt_oss",
            "head_dim": 32,
            "num_local_experts": 4,
            **_MIXED,
            **_stretched(150000.0, 32.0),
        },
    ),
    "seed_oss": Family("Seed-OSS-36B", {**_COMMON, "model_type": "seed_oss", "head_dim": 32}),
    "hunyuan_v1_dense": Family(
        "Hunyuan 0.5B, 1.8B, 4B, 7B", {**_COMMON, "model_type": "hunyuan_v1_dense", "head_dim": 32}
    ),
    "hunyuan_v1_moe": Family(
        "Hunyuan-A13B",
        {**_MOE, "model_type": "hunyuan_v1_moe", "head_dim": 32, "num_experts": 4, "moe_topk": 2},
    ),
    "minicpm3": Family(
        "MiniCPM3-4B",
        {**_COMMON, **_LATENT, "model_type": "minicpm3", "scale_emb": 1, "dim_model_base": 64},
    ),
    "ernie4_5": Family("ERNIE 4.5 0.3B", {**_COMMON, "model_type": "ernie4_5"}),
    "ernie4_5_moe": Family(
        "ERNIE 4.5 21B-A3B, 300B-A47B",
        {
            **_COMMON,
            "model_type": "ernie4_5_moe",
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 48,
            "moe_layer_start_index": 1,
            "moe_num_shared_experts": 1,
        },
    ),
    "exaone4": Family("EXAONE 4", {**_COMMON, "model_type": "exaone4", **_MIXED}),
    "cwm": Family(
        "Code World Model 32B",
        {**_COMMON, "model_type": "cwm", "head_dim": 16, "rope_parameters": _LLAMA3_ROPE, **_MIXED},
    ),
    "helium": Family("Helium 1 2B", {**_COMMON, "model_type": "helium", "head_dim": 16}),
    "vaultgemma": Family(
        "VaultGemma 1B",
        {
            **_COMMON,
            "model_type": "vaultgemma",
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 10.0,
            **_UNTIED,
            **_MIXED,
        },
    ),
    "smollm3": Family("SmolLM3", {**_COMMON, "model_type": "smollm3", "no_rope_layers": [1, 0, 1]}),
    "granite": Family("Granite 3", {**_COMMON, **_MULTIPLIED, "model_type": "granite"}),
    "granitemoe": Family("Granite 3 MoE", {**_MOE, **_MULTIPLIED, "model_type": "granitemoe", "num_local_experts": 4}),
    "cohere": Family("Command R", {**_COMMON, "model_type": "cohere", **_UNTIED}),
    "cohere_norms": Family("Command R+", {**_COMMON, "model_type": "cohere", "use_qk_norm": True, **_UNTIED}),
    "cohere2": Family("Command R7B, Command A", {**_COMMON, "model_type": "cohere2", **_UNTIED, **_MIXED}),
    "olmo2": Family("OLMo 2", {**_COMMON, "model_type": "olmo2"}),
    "olmo3": Family("OLMo 3", {**_COMMON, "model_type": "olmo3", **_MIXED}),
    "olmoe": Family("OLMoE", {**_MOE, "model_type": "olmoe", "num_experts": 4}),
    "stablelm": Family("StableLM 2", {**_COMMON, "model_type": "stablelm"}),
    "falcon": Family("Falcon 7B", {**_FALCON, "multi_query": True, "parallel_attn": True, "bias": False}),
    "falcon_gqa": Family(
        "Falcon 40B, Falcon 2 11B", {**_FALCON, "num_kv_heads": 2, "new_decoder_architecture": True, "bias": False}
    ),
    "falcon_alibi": Family(
        "Falcon-RW", {**_FALCON, "multi_query": False, "parallel_attn": False, "bias": True, "alibi": True}
    ),
    "gpt2": Family("GPT-2", {**_GPT, "model_type": "gpt2"}),
    "gptj": Family("GPT-J", {**_GPT, "model_type": "gptj", "rotary_dim": 8}),
    "gpt_neo": Family(
        "GPT-Neo",
        {
            "model_type": "gpt_neo",
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 64,
            "num_layers": 3,
            "num_heads": 4,
            "attention_types": [[["global", "local", "global"], 1]],
            "window_size": SLIDING_WINDOW,
            "max_position_embeddings": MAX_POSITIONS,
            "initializer_range": 0.15,
            **_UNTIED,
            **_IDS,
        },
    ),
    "gpt_neox": Family("GPT-NeoX, Pythia", {**_COMMON, "model_type": "gpt_neox"}),
    "codegen": Family("CodeGen", {**_GPT, "model_type": "codegen", "rotary_dim": 8}),
    "bloom": Family(
        "BLOOM, BLOOMZ",
        {
            "model_type": "bloom",
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 64,
            "n_layer": 3,
            "n_head": 4,
            "seq_length": MAX_POSITIONS,
            "initializer_range": 0.15,
            **_UNTIED,
            **_IDS,
        },
    ),
    "opt": Family(
        "OPT",
        {
            "model_type": "opt",
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "ffn_dim": 96,
            "word_embed_proj_dim": 64,
            "max_position_embeddings": MAX_POSITIONS,
            "init_std": 0.15,
            **_UNTIED,
            **_IDS,
            "pad_token_id": 1,
        },
    ),
    "gpt_bigcode": Family("StarCoder, SantaCoder", {**_GPT, "model_type": "gpt_bigcode"}),
    "starcoder2": Family("StarCoder2", {**_COMMON, "model_type": "starcoder2", "sliding_window": SLIDING_WINDOW}),
    "nemotron": Family("Nemotron 4, Minitron", {**_COMMON, "model_type": "nemotron"}),
}

_MIXED_LAYERS = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
_DELTA_RULE: dict[str, Any] = {
    **_COMMON,
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": _MIXED_LAYERS,
}
_SPARSE: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
}
_MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
}
_CONVOLUTIONS: dict[str, Any] = {
    **_COMMON,
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
    **_UNTIED,
}
_KIMI: dict[str, Any] = {
    **_COMMON,
    **_LATENT,
    "num_hidden_layers": 4,
    "q_lora_rank": None,
    "layer_types": _MIXED_LAYERS,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "moe_intermediate_size": 48,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}

_STATES: dict[str, Any] = {
    **_COMMON,
    "state_size": 8,
    "expand": 2,
    "tie_word_embeddings": False,
}
HYBRIDS: dict[str, Family] = {
    "qwen3_next": Family("Qwen3-Next-80B-A3B", {**_DELTA_RULE, **_SPARSE, "model_type": "qwen3_next"}),
    "qwen3_5": Family("Qwen 3.5, 3.6 (text)", {**_DELTA_RULE, "model_type": "qwen3_5_text"}),
    "qwen3_5_moe": Family(
        "Qwen3.5-35B-A3B, Qwen3.5-122B-A10B (text)", {**_DELTA_RULE, **_SPARSE, "model_type": "qwen3_5_moe_text"}
    ),
    "nemotron_h": Family(
        "Nemotron-H, Nemotron Nano 2 and 3",
        {
            **_COMMON,
            "model_type": "nemotron_h",
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
            "head_dim": 32,
            "ssm_state_size": 16,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "chunk_size": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "moe_shared_expert_intermediate_size": 48,
        },
    ),
    "granitemoehybrid": Family(
        "Granite 4 H",
        {
            **_COMMON,
            **_MAMBA2,
            "model_type": "granitemoehybrid",
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 48,
        },
    ),
    "jamba": Family(
        "Jamba 1.5, 1.6, 1.7",
        {
            **_COMMON,
            "model_type": "jamba",
            "num_hidden_layers": 4,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "num_experts": 4,
            "mamba_d_state": 8,
            "mamba_dt_rank": 8,
        },
    ),
    "mamba": Family("Mamba 130M to 2.8B", {**_STATES, "model_type": "mamba"}),
    "falcon_mamba": Family("FalconMamba 7B", {**_STATES, "model_type": "falcon_mamba"}),
    "mamba2": Family(
        "Mamba 2, Mamba-Codestral 7B",
        {**_STATES, "model_type": "mamba2", "num_heads": 8, "head_dim": 16, "n_groups": 2, "chunk_size": 16},
    ),
    "falcon_h1": Family(
        "Falcon-H1", {**_COMMON, **_MAMBA2, "model_type": "falcon_h1", "mamba_d_ssm": 128, "mamba_rms_norm": True}
    ),
    "bamba": Family("Bamba 9B", {**_COMMON, **_MAMBA2, "model_type": "bamba", "attn_layer_indices": [1]}),
    "lfm2": Family("LFM2", {**_CONVOLUTIONS, "model_type": "lfm2", "block_multiple_of": 32}),
    "lfm2_moe": Family(
        "LFM2-8B-A1B, LFM2-24B-A2B",
        {
            **_CONVOLUTIONS,
            "model_type": "lfm2_moe",
            "num_dense_layers": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
        },
    ),
    "lfm3": Family(
        "LFM3",
        {
            **_CONVOLUTIONS,
            "model_type": "lfm3",
            "layer_types": ["conv", "full_attention", "sliding_attention", "conv"],
            "head_dim": 32,
            "sliding_window": SLIDING_WINDOW,
        },
    ),
    "olmo_hybrid": Family(
        "OLMo Hybrid",
        {
            **_DELTA_RULE,
            "model_type": "olmo_hybrid",
            "linear_num_key_heads": 4,
            "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        },
    ),
    "kimi_linear": Family(
        "Kimi-Linear-48B-A3B",
        {**_KIMI, "model_type": "kimi_linear", "linear_head_dim": 16, "linear_num_heads": 4},
    ),
    "bailing_hybrid": Family(
        "Ling and Ring 2.5, hybrid", {**_KIMI, "model_type": "bailing_hybrid", "head_dim": 16, "num_mtp_layers": 0}
    ),
    "zamba2": Family(
        "Zamba 2",
        {
            **_COMMON,
            "model_type": "zamba2",
            "num_hidden_layers": 4,
            "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
            "num_key_value_heads": 4,
            "mamba_d_state": 16,
            "mamba_ngroups": 2,
            "n_mamba_heads": 8,
            "chunk_size": 16,
            "adapter_rank": 8,
            "num_mem_blocks": 1,
        },
    ),
    "minimax": Family(
        "MiniMax-Text-01, MiniMax-M1",
        {
            **_MOE,
            "model_type": "minimax",
            "num_hidden_layers": 4,
            "head_dim": 32,
            "num_local_experts": 4,
            "block_size": 16,
            "layer_types": _MIXED_LAYERS,
        },
    ),
    "recurrent_gemma": Family(
        "RecurrentGemma 2B, 9B",
        {
            **_COMMON,
            "model_type": "recurrent_gemma",
            "num_hidden_layers": 4,
            "attention_window_size": SLIDING_WINDOW,
            "block_types": ["recurrent", "attention", "recurrent"],
            **_UNTIED,
        },
    ),
}
"""Families whose layers have recurrent states; in most of them others have attention."""

IN_PROCESSES = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma3",
    "gemma4",
    "phi3",
    "gpt2",
    "mixtral",
    "gpt_oss",
    "qwen3_moe",
    "deepseek_v2",
    "bloom",
    "qwen3_next",
    "nemotron_h",
)
"""Families that differ most in the content of a block and in how attention reads it."""

FAMILIES |= HYBRIDS

REFUSED: dict[str, str] = {
    "aquila": "Aquila, AquilaChat",
    "arctic": "Snowflake Arctic",
    "baichuan": "Baichuan, Baichuan 2",
    "chatglm": "ChatGLM 2 and 3, GLM-4-9B and CodeGeeX4 in their first format",
    "deci": "DeciLM",
    "internlm": "InternLM 1",
    "internlm2": "InternLM 2, 2.5",
    "jais": "Jais",
    "minicpm": "MiniCPM 1, 2",
    "orion": "Orion 14B",
    "phi3small": "Phi 3 small",
    "qwen": "Qwen 1",
    "telechat": "TeleChat, TeleChat 2",
    "xverse": "XVERSE",
}
"""Model types that transformers does not have: their folders bring Python code."""
