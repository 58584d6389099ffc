"""Makes tiny random models of any family of transformers, with sizes derived from the defaults of its config class.

The sizes in a config have hundreds of names, which `SIZES` maps to small values; what a family needs beyond that is in
`OVERRIDES`. Weights are drawn wide, so that greedy answers depend on every token of the context.
"""

import copy
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    CONFIG_MAPPING,
    CLIPImageProcessorPil,
    GenerationConfig,
    Glm4vImageProcessorPil,
    Glm46VImageProcessorPil,
    LlavaNextImageProcessorPil,
    Qwen2VLImageProcessorPil,
)

from tests.families import FAMILIES
from tests.tiny_models import write_tokenizer

Values = dict[str, Any]

VOCAB_SIZE = 320
PROMPT_TOKENS = (3, 250)
"""Range of the tokens of prompts: special tokens lie beyond it."""
NUM_LAYERS = 4
WINDOW = 24
"""Length of sliding windows, which the prompts of a sweep exceed."""
FIRST_SPECIAL_TOKEN = 290

_HEADS, _KV_HEADS, _HEAD_DIM = 4, 2, 16
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "n_vocab": VOCAB_SIZE,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "num_hidden_layers": NUM_LAYERS,
    "num_layers": NUM_LAYERS,
    "n_layer": NUM_LAYERS,
    "n_layers": NUM_LAYERS,
    "decoder_layers": NUM_LAYERS,
    "encoder_layers": 2,
    "depth": 2,
    "hidden_size": 64,
    "n_embd": 64,
    "d_model": 64,
    "embed_dim": 64,
    "emb_dim": 64,
    "word_embed_proj_dim": 64,
    "embedding_size": 64,
    "input_embedding_size": 64,
    "output_embedding_size": 64,
    "dim_model": 64,
    "hidden_size_per_layer_input": 16,
    "intermediate_size": 96,
    "ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "encoder_ffn_dim": 96,
    "ffn_hidden_size": 96,
    "mlp_hidden_size": 96,
    "dff": 96,
    "n_inner": 96,
    "intermediate_size_mlp": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "num_attention_heads": _HEADS,
    "n_head": _HEADS,
    "n_heads": _HEADS,
    "num_heads": _HEADS,
    "decoder_attention_heads": _HEADS,
    "encoder_attention_heads": _HEADS,
    "num_key_value_heads": _KV_HEADS,
    "num_kv_heads": _KV_HEADS,
    "head_dim": _HEAD_DIM,
    "attention_head_dim": _HEAD_DIM,
    "kv_channels": _HEAD_DIM,
    "d_kv": _HEAD_DIM,
    "rotary_dim": 8,
    "query_pre_attn_scalar": _HEAD_DIM,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "qk_head_dim": 40,
    "v_head_dim": 20,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "moe_num_primary_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "moe_top_k": 2,
    "top_k_experts": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "sliding_window": WINDOW,
    "sliding_window_size": WINDOW,
    "window_size": WINDOW,
    "attention_chunk_size": 32,  # whole blocks
    "chunk_size": WINDOW,
    "local_attention": WINDOW,
    "initializer_range": 0.15,
    "init_std": 0.15,
    "image_size": 32,
    "patch_size": 8,
    "max_window_layers": 2,
    "attention_dropout": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "dropout": 0.0,
    "tie_word_embeddings": False,
}
"""Values of a tiny model by field of a config, in all nested configs too; only fields that a config has are changed."""

_MAMBA: Values = {"mamba_d_head": 32, "mamba_n_heads": 4, "mamba_d_state": 16, "mamba_expand": 2}
_VISION: Values = {"vision_config": {"out_hidden_size": 64}}
_ROUTED: Values = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
_TYPES_OF_LAYERS: Values = {"layer_types": ["sliding_attention", "full_attention"] * 2}
_LFM: Values = {"layer_types": ["conv", "full_attention"] * 2}
_ASSISTANT: Values = {"hidden_size_per_layer_input": 0, "enable_moe_block": False, "num_kv_shared_layers": NUM_LAYERS}
_INDEXER: Values = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 64,
    "indexer_compress_ratio": 4,
    "ngram_vocab_size_base": 100,
    "split_ngram_parts": 1,
}
_ROPE: Values = {"rope_type": "default", "rope_theta": 10000.0}
_MROPE: Values = {"rope_parameters": {**_ROPE, "mrope_section": [4, 2, 2]}}
_WINDOWS: Values = {"out_hidden_size": 64, "window_size": 32, "fullatt_block_indexes": [1]}
_DEEP: Values = {"out_hidden_size": 64, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16}
_OMNI: Values = {"audio_config": {"output_dim": 64}, "vision_start_token_id": FIRST_SPECIAL_TOKEN}
_LINEAR: Values = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_COMPASS: Values = {
    **_TYPES_OF_LAYERS,
    "rope_parameters": {kind: _ROPE for kind in ("sliding_attention", "full_attention")},
}
OVERRIDES: dict[str, Values] = {
    # transformers' classes with the tower leave the factor of the logits out, which changes no greedy answer.
    "aya_vision": {"text_config": {"logit_scale": 1.0}},
    "cohere2_vision": {"text_config": {"logit_scale": 1.0}},
    **{
        kind: {"num_key_value_heads": 4}
        for kind in ("axk1", "axk2", "deepseek_v32", "glm_moe_dsa", "longcat_flash", "sarvam_mla", "youtu")
    },
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "chameleon": {"vocabulary_map": {"<image>": FIRST_SPECIAL_TOKEN, "IMGIMGBSA": FIRST_SPECIAL_TOKEN + 1}},
    "cohere_compass": {"text_config": _COMPASS},
    "cohere_compass_text": _COMPASS,
    "cosmos3_edge": {"text_config": {"rope_parameters": {"mrope_section": [4, 2, 2]}}, **_VISION},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 64},
    },
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", "sparse"] * 2}},
    "dots1": {**_ROUTED, "first_k_dense_replace": 1, "n_shared_experts": 1},
    "emu3": {"vocabulary_map": {"<image>": FIRST_SPECIAL_TOKEN}},
    "dory": {"n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},
    "dots3_note": {"text_config": {"num_key_value_heads": 4}},
    "dots3_note_text": {"num_key_value_heads": 4},
    "ernie4_5_vl_moe": {
        "text_config": {"moe_intermediate_size": [32, 32], "rope_parameters": {"mrope_section": [2, 2, 4]}}
    },
    "florence2": {"vision_config": {"patch_size": [7, 3, 3, 3]}},
    "gemma3n_text": {"num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.0] * NUM_LAYERS},
    "gemma4_assistant": {"text_config": _ASSISTANT},
    "gemma4_unified_assistant": {"text_config": _ASSISTANT},
    **{kind: {"text_config": _MROPE, **_VISION} for kind in ("glm4v", "glm46v", "glmga", "glm_ocr")},
    "glm4v_moe": {
        "text_config": {"rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}},
        **_VISION,
    },
    "blt": {"encoder_hash_byte_group_vocab": 100, "encoder_hash_byte_group_nb_functions": 1},
    "glm5_next": {"text_config": {"num_key_value_heads": 4, "qk_rope_head_dim": 0}},
    "granite4_vision": {"deepstack_layer_map": [[0, 0]], "downsample_rate": "1/2"},
    "granite_docling": _VISION,
    "granitemoehybrid": {**_MAMBA, "layer_types": ["mamba", "attention"] * 2},
    "hunyuan_vl": {"text_config": {"head_dim": 16, "rope_parameters": {**_ROPE, "mrope_section": [2, 2, 2, 2]}}},
    **{
        kind: {"vision_config": {"text_hidden_size": 64}, "audio_config": {"text_hidden_size": 64}}
        for kind in ("inkling2", "inkling2_loop")
    },
    "kimi_k25": {"text_config": {"num_key_value_heads": 4}},
    # All experts: with two of four, a token of a sweep's prompts has two whose weights are equal but for rounding.
    "lara_mini": {"num_experts_per_tok": 4},
    "lfm2": _LFM,
    "lfm2_moe": _LFM,
    "llava_next": {"image_grid_pinpoints": [[32, 64], [64, 32], [64, 64]]},
    "mamba2": {"num_heads": 4, "head_dim": 32, "expand": 2},
    "molmo2": {"vision_config": {"image_size": [32, 32]}, "vit_config": {"image_size": [32, 32]}},
    "mpt": {"attn_config": {"attn_pdrop": 0}, "d_model": 64, "n_heads": 4, "expansion_ratio": 2},
    "muse_spark": {"audio_config": {"out_hidden_size": 64}},
    "qwen2_vl": {"text_config": _MROPE},
    "qwen2_5_omni_thinker": {"text_config": _MROPE, "vision_config": _WINDOWS, **_OMNI},
    "qwen2_5_vl": {"text_config": _MROPE, "vision_config": _WINDOWS},
    "qwen3_omni_moe_thinker": {"text_config": _MROPE, "vision_config": _DEEP, **_OMNI},
    "qwen3_vl": {"vision_config": _DEEP},
    "qwen3_vl_moe": {"vision_config": _DEEP},
    **{kind: {**_VISION, "text_config": _LINEAR} for kind in ("qwen3_5", "qwen3_5_moe")},
    "qwen4_exp": {"text_config": _INDEXER},
    "qwen4_exp_text": _INDEXER,
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "xlnet": {"d_head": 16},
    "zaya": {"num_experts_per_tok": 1},
}
"""Values that families need beyond `SIZES`, by model type. A nested dict changes a nested config."""


_SCALERS: dict[str, Any] = {
    **{kind: Glm4vImageProcessorPil for kind in ("glm4v", "glm4v_moe")},
    **{kind: Glm46VImageProcessorPil for kind in ("glm46v", "glm_ocr")},
    **{kind: Qwen2VLImageProcessorPil for kind in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")},
    **{kind: Qwen2VLImageProcessorPil for kind in ("qwen3_5", "qwen3_5_moe")},
}
"""Image processors of models whose images become grids of their own shape, by model type."""
TOKEN_SIDE = 2 * SIZES["patch_size"]
"""How many pixels a token of these models shows in each direction."""


def tiny_config(model_type: str, *, has_window: bool = False) -> Any:
    """Return the config of a tiny model. `has_window` switches the window of the text model on.

    Raises whatever the config class raises.
    """
    config_class = CONFIG_MAPPING[model_type]
    known = next((family.config for family in FAMILIES.values() if family.config["model_type"] == model_type), None)
    if known is None:
        values = _shrunk(config_class().to_dict())
        _merge(values, OVERRIDES.get(model_type, {}))
    else:
        values = dict(known)
    if has_window:
        values |= {"sliding_window": WINDOW} | ({"use_sliding_window": True} if "qwen" in model_type else {})
    values.pop("model_type", None)
    return config_class(**values)


def has_idle_window(model_type: str) -> bool:
    """Return whether the default config of a family has a window that is switched off."""
    config = tiny_config(model_type)
    is_off = getattr(config, "sliding_window", 0) is None or getattr(config, "use_sliding_window", True) is False
    return is_off and hasattr(config, "sliding_window")


def write_family(model_type: str, model_class: str, folder: Path, *, has_window: bool = False) -> Any:
    """Write a tiny random model to `folder`, and return it with eager attention.

    Return None if `has_window` is asked for and the family has none that is switched off. Raises whatever
    transformers raises for this family.
    """
    if has_window and not has_idle_window(model_type):
        return None
    config = tiny_config(model_type, has_window=has_window)
    torch.manual_seed(3)
    model: Any = getattr(transformers, model_class)._from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    model.eval()
    _widen(model)
    # Answers of equal length are compared, so no token may end them.
    model.generation_config = GenerationConfig(eos_token_id=None, bos_token_id=None, pad_token_id=0)
    # transformers writes the text part of Kimi K2.5 under names that it does not read.
    model.save_pretrained(folder, save_original_format=model_type != "kimi_k25")
    write_tokenizer(folder)
    if model_type in _SCALERS:
        pixels = {"shortest_edge": 4 * TOKEN_SIDE**2, "longest_edge": 64 * TOKEN_SIDE**2}
        _SCALERS[model_type](size=pixels, patch_size=SIZES["patch_size"]).save_pretrained(folder)
    if model_type in ("llava", "llava_next"):
        processor = {"llava": CLIPImageProcessorPil, "llava_next": LlavaNextImageProcessorPil}[model_type]
        size = SIZES["image_size"]
        grid = {} if model_type == "llava" else {"image_grid_pinpoints": config.image_grid_pinpoints}
        crop = {"height": size, "width": size}
        processor(size={"shortest_edge": size}, crop_size=crop, **grid).save_pretrained(folder)
    # These models generate from images alone; their text models are whole decoders.
    return model.language_model if model_type in ("blip-2", "instructblip", "instructblipvideo") else model


def _shrunk(values: Values) -> Values:
    """Return the values of a config with small sizes; lists with an entry for each layer are cut."""
    lengths = {values[name] for name in ("num_hidden_layers", "num_layers", "n_layer") if values.get(name)}
    found: Values = {}
    special = FIRST_SPECIAL_TOKEN
    for name, value in values.items():
        if name.endswith(("_token_id", "_token_index")) and isinstance(value, (int, list)):
            found[name], special = special if isinstance(value, int) else [special], special + 1
        elif isinstance(value, list) and len(value) in lengths:
            found[name] = _some(value)
        elif isinstance(value, dict):
            found[name] = _shrunk_dict(name, value)
        elif name == "attn_pdrop" and isinstance(value, int):
            found[name] = 0
        else:
            has_size = name in SIZES and value is not None and not isinstance(value, (list, tuple))
            found[name] = copy.copy(SIZES[name]) if has_size else value
    return found


def _shrunk_dict(name: str, value: Values) -> Any:
    """Return a field that is a dict: a nested config, what differs in some layers, or rules of positions."""
    if name == "per_layer_config" and value:
        # In the tiny model these are the layers whose type is the rarer one in `_some`.
        different = next(iter(value.values()))
        small = {key: 2 * SIZES[key] if key == "head_dim" else SIZES.get(key, different[key]) for key in different}
        return {layer: small for layer in range(1, NUM_LAYERS, 2)}
    if "mrope_section" in value:
        return {**value, "mrope_section": [4, 2, 2]}
    return _shrunk(value) if "model_type" in value or name.endswith("_config") else value


def _some(entries: list[Any]) -> list[Any]:
    """Return as many entries as the tiny model has layers, with each kind of entry among them."""
    kinds = list(dict.fromkeys(map(repr, entries)))
    chosen = [next(entry for entry in entries if repr(entry) == kind) for kind in kinds[:NUM_LAYERS]]
    return [chosen[at % len(chosen)] for at in range(NUM_LAYERS)]


def _merge(values: Values, more: Values) -> None:
    for name, value in more.items():
        if isinstance(value, dict) and isinstance(values.get(name), dict):
            _merge(values[name], value)
        else:
            values[name] = value


def _widen(model: torch.nn.Module) -> None:
    """Draw norms, biases and narrow matrices again: many families start them at constants."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.1)
            elif parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif float(parameter.std()) < 0.1:
                parameter.normal_(0.0, 0.15)
