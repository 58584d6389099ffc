"""Decides the longest context of a model (`--max-model-len`), and whether it may exceed the model's config."""

import logging

from baton_serve.engine.config import EngineConfig
from baton_serve.engine.errors import ConfigError
from baton_serve.engine.model_folder import HfConfig

logger = logging.getLogger(__name__)

_STRETCHING = ("linear", "dynamic", "yarn")
"""Types of rotary embeddings that multiply the length for which a model was trained by a factor."""


def max_model_len_of(config: EngineConfig, text_config: HfConfig) -> int:
    """Return the largest number of tokens of prompt and answer together: `config.max_model_len`, or what the model's
    config allows.

    Raises `ConfigError` if neither states it, or if the setting exceeds the model's own limit without
    `config.allow_long_max_model_len`.
    """
    longest = _longest(text_config)
    if longest is None:
        if config.max_model_len is None:
            raise ConfigError("the model's config does not say how long its context is; set max_model_len")
        return config.max_model_len
    # A layer with a window sees all tokens of a shorter text, so up to this length its answers are those without one.
    window = _smallest_window(text_config) if config.disable_sliding_window else None
    if window is not None and window < longest:
        if config.max_model_len is not None and config.max_model_len > window:
            raise ConfigError(
                f"max_model_len ({config.max_model_len}) is more than the window of the model (sliding_window ="
                f" {window}), which disable_sliding_window keeps to: lower it, or leave that flag out"
            )
        return config.max_model_len or window
    if config.max_model_len is None or config.max_model_len <= longest:
        return config.max_model_len or longest
    reason = (
        f"max_model_len ({config.max_model_len}) is more than the model was made for"
        f" (max_position_embeddings = {longest})"
    )
    if not any(getattr(text_config, name, None) for name in ("rope_parameters", "rope_scaling", "rope_theta")):
        raise ConfigError(f"{reason}, and its positions are learned: lower it, or leave it out")
    if not config.allow_long_max_model_len:
        raise ConfigError(
            f"{reason}: lower it, stretch the positions with --rope-scaling, or set VLLM_ALLOW_LONG_MAX_MODEL_LEN=1"
        )
    logger.warning("%s; answers to longer prompts may be wrong", reason)
    return config.max_model_len


def _smallest_window(text_config: HfConfig) -> int | None:
    """Return the shortest sliding window of the model's layers in tokens, or None if no layer has one."""
    layers = getattr(text_config, "layer_types", None)
    if getattr(text_config, "use_sliding_window", True) is False or (layers and "sliding_attention" not in layers):
        return None
    window = getattr(text_config, "sliding_window", None)
    return window if isinstance(window, int) and window > 0 else None


def _longest(text_config: HfConfig) -> int | None:
    """Return the longest context in tokens that a model's config states, or None if it states none."""
    # Older architectures use the next two names, and decoders with cross-attention the last one.
    names = ("max_position_embeddings", "seq_length", "max_seq_len", "max_target_positions")
    known = (getattr(text_config, name, None) for name in names)
    longest = next((length for length in known if length is not None), None)
    rope = getattr(text_config, "rope_parameters", None)
    # With other rules, and with rules for each type of layer, the limit is stated after the stretch.
    if longest is None or not isinstance(rope, dict) or rope.get("rope_type") not in _STRETCHING:
        return None if longest is None else int(longest)
    native = rope.get("original_max_position_embeddings") if rope["rope_type"] == "yarn" else None
    return int((native or longest) * (rope.get("factor") or 1.0))
