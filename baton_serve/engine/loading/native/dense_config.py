"""Decides from config.json whether a model is a dense decoder (Llama, Mistral, Qwen) that loads without transformers.
Only `read_folder` does I/O; torch is not imported.

A field that a config leaves out would get transformers' default, and an unknown field may change what is computed. In
both cases, and for values that transformers would reject, the folder is left to transformers.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

_Family = Literal["llama", "mistral", "qwen2", "qwen3"]
_Dtype = Literal["float32", "float16", "bfloat16"]
_Ids = int | list[int] | None
_Size = Annotated[int, Meta(gt=0, le=2**31 - 1)]

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""Class name of each family in transformers."""


@dataclass(frozen=True, slots=True)
class StretchedRope:
    """Parameters of rotary embeddings for longer contexts than the model was first trained for, as in Llama 3.1."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int


@dataclass(frozen=True, slots=True)
class DenseConfig:
    """The config of a decoder of the usual structure (such as Llama, Mistral or Qwen) that Baton loads without
    transformers. `dtype` is that of the weights if config.json states it."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    rope_stretch: StretchedRope | None
    is_tied: bool
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    has_head_norms: bool
    dtype: str | None
    eos_token_ids: frozenset[int]
    hidden_act: str = "silu"

    @property
    def tie_word_embeddings(self) -> bool:
        """Return `is_tied`, under the name that configs of transformers have for it: the head is the embedding."""
        return self.is_tied


class _Rope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rotary settings in config.json. Older and newer versions of transformers use different fields."""

    rope_theta: float | None = None
    rope_type: str | None = None
    type: str | None = None
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None

    def kind(self) -> str:
        """Return the type of rotary embedding that is stated, such as "default" or "llama3"."""
        return self.rope_type or self.type or "default"


class _Stated(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The fields of config.json that this loader knows. A file with any other field or value cannot be converted to it,
    and transformers loads the model."""

    model_type: _Family
    architectures: list[str]
    hidden_size: _Size
    intermediate_size: _Size
    num_hidden_layers: _Size
    num_attention_heads: _Size
    num_key_value_heads: _Size
    vocab_size: _Size
    rms_norm_eps: float
    max_position_embeddings: _Size
    hidden_act: Literal["silu"]
    tie_word_embeddings: bool
    head_dim: _Size | None = None
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    rope_theta: float | None = None
    rope_parameters: _Rope | None = None
    rope_scaling: _Rope | None = None
    use_sliding_window: Literal[False] = False
    sliding_window: int | msgspec.UnsetType | None = msgspec.UNSET
    layer_types: list[Literal["full_attention"]] | None = None
    dtype: _Dtype | None = None
    torch_dtype: _Dtype | None = None
    eos_token_id: _Ids | msgspec.UnsetType = msgspec.UNSET
    # The following fields do not change what is computed.
    bos_token_id: _Ids = None
    pad_token_id: int | None = None
    attention_dropout: float | None = None
    initializer_range: float | None = None
    max_window_layers: int | None = None
    pretraining_tp: int | None = None
    transformers_version: str | None = None
    use_cache: bool | None = None
    name_or_path: str | None = msgspec.field(default=None, name="_name_or_path")


class _Generation(msgspec.Struct, frozen=True):
    """The fields of generation_config.json that are read: the tokens that end an answer."""

    eos_token_id: _Ids = None


def read_folder(folder: Path) -> DenseConfig | None:
    """Return the config of the decoder in a folder. None if this loader does not know all of it: then transformers must
    load the model, or report what is wrong with it."""
    generation = folder / "generation_config.json"
    try:
        stated = json.loads((folder / "config.json").read_text())
        ends = msgspec.json.decode(generation.read_bytes(), type=_Generation) if generation.is_file() else None
    except (OSError, RecursionError, ValueError, msgspec.MsgspecError):
        return None
    return dense_config(stated, also_ends=_ids(ends.eos_token_id) if ends is not None else frozenset())


def dense_config(stated: object, *, also_ends: frozenset[int] = frozenset()) -> DenseConfig | None:
    """Return the decoder that `stated`, the content of config.json, describes; None if this loader does not know all of
    it. `also_ends` are further tokens that end an answer."""
    try:
        known = msgspec.convert(stated, _Stated)
    except msgspec.ValidationError:
        return None
    theta, stretch = _theta(known), _stretch(known)
    if not _is_plain(known) or theta is None or isinstance(stretch, str):
        return None
    family, bias = known.model_type, bool(known.attention_bias)
    ends = known.eos_token_id
    assert not isinstance(ends, msgspec.UnsetType)  # `_is_plain` has checked it
    return DenseConfig(
        name=_CLASSES[family],
        hidden_size=known.hidden_size,
        intermediate_size=known.intermediate_size,
        num_layers=known.num_hidden_layers,
        num_heads=known.num_attention_heads,
        num_kv_heads=known.num_key_value_heads,
        head_dim=known.head_dim or known.hidden_size // known.num_attention_heads,
        vocab_size=known.vocab_size,
        norm_eps=known.rms_norm_eps,
        max_position_embeddings=known.max_position_embeddings,
        rope_theta=theta,
        rope_stretch=stretch,
        is_tied=known.tie_word_embeddings,
        has_qkv_bias=family == "qwen2" or bias,
        has_output_bias=bias,
        has_mlp_bias=bool(known.mlp_bias),
        has_head_norms=family == "qwen3",
        dtype=known.dtype or known.torch_dtype,
        eos_token_ids=_ids(ends) | also_ends,
    )


def _is_plain(known: _Stated) -> bool:
    """Return whether a config states nothing that changes the usual structure of its model family, and everything that
    matters. Only such a decoder is loaded without transformers."""
    family = known.model_type
    is_consistent = (
        known.architectures == [_CLASSES[family]]
        and known.num_attention_heads % known.num_key_value_heads == 0
        and known.hidden_size % known.num_attention_heads == 0
        and (known.dtype is None or known.torch_dtype in (None, known.dtype))
        and (known.layer_types is None or len(known.layer_types) == known.num_hidden_layers)
        and known.eos_token_id is not msgspec.UNSET
    )
    has_biases = {"llama": True, "qwen3": known.mlp_bias is None}.get(family, False)
    are_biases_its_own = has_biases or (known.attention_bias is None and known.mlp_bias is None)
    # Mistral and Qwen have windows that a missing field would switch on by default.
    windows = {"llama": (None, msgspec.UNSET), "mistral": (None,)}.get(family, (known.sliding_window,))
    has_head_dim = known.head_dim is not None or family != "qwen3"
    return is_consistent and are_biases_its_own and known.sliding_window in windows and has_head_dim


def _theta(known: _Stated) -> float | None:
    """Return the base of the rotary frequencies (rope_theta); None if it is missing, or stated twice with different
    values."""
    rope = known.rope_parameters or known.rope_scaling
    thetas = {theta for theta in (known.rope_theta, rope.rope_theta if rope else None) if theta is not None}
    return thetas.pop() if len(thetas) == 1 else None


def _stretch(known: _Stated) -> StretchedRope | str | None:
    """Return the parameters by which rotary frequencies are stretched as in Llama 3.1, or None if they are not changed.
    Return a string, the kind of change, for any other one: then transformers must load the model."""
    # Newer and older field together: it is not defined which one counts.
    if known.rope_parameters is not None and known.rope_scaling is not None:
        return "two statements"
    rope = known.rope_parameters or known.rope_scaling
    if rope is None:
        return None
    numbers = (rope.factor, rope.low_freq_factor, rope.high_freq_factor, rope.original_max_position_embeddings)
    if rope.kind() == "default" and numbers == (None,) * 4:
        return None
    if rope.kind() != "llama3":
        return rope.kind()
    if rope.factor is None or rope.low_freq_factor is None or rope.high_freq_factor is None:
        return "incomplete"
    if rope.original_max_position_embeddings is None:
        return "incomplete"
    return StretchedRope(
        rope.factor, rope.low_freq_factor, rope.high_freq_factor, rope.original_max_position_embeddings
    )


def _ids(stated: _Ids) -> frozenset[int]:
    """Return token ids, which config.json states as a number or a list, as a set; it is empty for None."""
    if stated is None:
        return frozenset()
    return frozenset(stated) if isinstance(stated, list) else frozenset([stated])
