"""Registers paged attention in transformers (AttentionInterface), and decides a layer's rules: window, sinks, softcap,
scale.

The layers of a model call `attend` through transformers' AttentionInterface. The data of a step is passed as a keyword
argument of the model's forward. Some models do not pass it on to their layers; their modules read it from the model's
`StepHolder` instead. It is never global state. No mask function is registered for this name, so transformers builds no
mask (masking_utils returns None for implementations without one).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from baton_serve.contracts.block_layout import KVShape
from baton_serve.engine.errors import UnsupportedModelError
from baton_serve.engine.kernels import AttentionBackend, AttentionMetadata, AttentionSpec

NAME = "baton"
"""Name of the implementation in transformers' AttentionInterface."""


class MixerContext(Protocol):
    """Runs a layer with recurrent states (a mixer, such as Mamba) for the tokens of a step, which lie one after another
    without padding. `arguments` are those of the module's own forward, by name.
    """

    def run(self, mixer: "Mixer", arguments: dict[str, object]) -> Any: ...


@dataclass(slots=True)
class Mixer:
    """How to call a transformers module with recurrent states, such as Mamba: its own forward and the names of its
    arguments.
    """

    kind: str
    """The name of the module's class."""
    forward: Callable[..., Any]
    names: tuple[str, ...]
    """The forward's arguments in order."""
    cache_name: str
    """The argument for the cache."""
    step: Callable[..., Any] | None = None
    """The forward for one token of each sequence whose cache returns states in slots (`recurrent_steps.py`)."""
    packed: Callable[..., Any] | None = None
    """The forward for all tokens of a step at once (`batched_mixers.PackedForward`); None: the step is divided."""


class AttentionContext(Protocol):
    """The interface by which an attention layer of a transformers model attends in the current step. `query` is
    [num_tokens, num_heads, head_dim]; `key` and `value` have num_kv_heads. `mixers` runs layers with recurrent states.
    """

    @property
    def mixers(self) -> MixerContext | None: ...

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec | None) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class CachePlace:
    """Which layer of the KV cache an attention layer of the model reads, and its attention rules."""

    number: int
    """The number of the layer's KV in a block."""
    spec: AttentionSpec
    is_shared: bool = False
    """True if another layer, which is computed before, stores this KV."""
    is_causal: bool = False
    """True if tokens of an image do not see later ones in this layer, even if they do in others (Gemma 4)."""


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """Implements `AttentionContext` for one step, over the paged KV cache. `layers` are the cache's views, one for each
    layer that has KV of its own.
    """

    backend: AttentionBackend
    layers: list[Tensor]
    places: Mapping[int, CachePlace]
    """The place of each layer with attention, by the model's number of the layer."""
    meta: AttentionMetadata
    chunked: AttentionMetadata
    """The same batch for layers whose spec has a `chunk`."""
    positions: Tensor
    """The position of each token, int64 [num_tokens]."""
    after_layer: Callable[[int], None] | None = None
    """Called after a layer's KV was stored; see `StepInputs.after_layer`."""
    mixers: MixerContext | None = None
    layer_metas: Sequence[AttentionMetadata] | None = None
    """With cache groups: the batch of each layer with KV, instead of `meta`."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec | None) -> Tensor:
        """Store the new keys and values of the model's layer `layer` in the KV cache, and return attention over the
        cache. `spec` is ignored: the rules were recorded when the model was loaded.
        """
        place = self.places[layer]
        cache = self.layers[place.number]
        own = self.meta if self.layer_metas is None else self.layer_metas[place.number]
        if not place.is_shared:
            self.backend.store(key, value, cache, own)
            if self.after_layer is not None:
                self.after_layer(place.number)
        # The rules that the module passes are ignored: the probe has recorded them when the model was loaded.
        meta = own if place.spec.chunk is None else self.chunked
        if place.is_causal and meta.seen_ends is not None:
            meta = replace(meta, seen_ends=None)
        return self.backend.attend(query, cache, meta, place.spec)


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The KV shape and the attention rules of one layer, as `AttentionProbe` has recorded them."""

    kv: KVShape
    spec: AttentionSpec
    source: int | None = None
    """The earlier layer whose keys and values this layer reads; None: it has its own."""


@dataclass(frozen=True, slots=True)
class AttentionProbe:
    """Implements `AttentionContext` for one run of the model without a KV cache, at load: it records which layers
    attend, and with which shapes and rules. Attention returns zeros.
    """

    mixers: MixerContext
    shapes: dict[int, list[LayerShape]] = field(default_factory=dict)
    own: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Keys and values of the layers that have their own. They stay in memory, so that no later ones get their
    address."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec | None) -> Tensor:
        assert spec is not None
        # Latent attention passes one tensor as both key and value.
        kv = KVShape(key.shape[1], key.shape[2], 1 if key is value else 2)
        # Layers that share KV pass the very tensors of the first one.
        source = next((first for first, known in self.own.items() if _are_same(known, (key, value))), None)
        if source is None:
            self.own[layer] = (key, value)
        self.shapes.setdefault(layer, []).append(LayerShape(kv, spec, source))
        return query.new_zeros(*query.shape[:2], spec.value_dim or value.shape[2])


def _are_same(known: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> bool:
    """Return whether two pairs (key, value) lie in the same memory."""
    return all(one.data_ptr() == two.data_ptr() for one, two in zip(known, other, strict=True))


class StepHolder:
    """Gives the attention layers of a transformers model access to the current step while the model's forward runs.
    There is one for each model.
    """

    def __init__(self, module: nn.Module) -> None:
        self.context: AttentionContext | None = None
        for part in module.modules():
            if _layer_of(part) is not None:
                part.baton_step = self  # type: ignore[assignment]  # a plain object, not a parameter

    def run(self, module: nn.Module, context: AttentionContext, **inputs: object) -> Any:
        """Call the forward of a transformers model, whose attention layers use `context` meanwhile, and return its
        output.
        """
        self.context = context
        try:
            return module(use_cache=False, baton=context, **inputs)
        finally:
            self.context = None


PositionScales = Callable[[Tensor], Tensor]
"""Returns the factors of queries, float32 [num_tokens], for the positions of their tokens."""


class LatentProjection(Protocol):
    """The up-projections of a layer of latent attention (MLA), whose KV cache holds latents instead of the keys and
    values of every head.
    """

    @property
    def rank(self) -> int: ...
    def absorb(self, query: Tensor) -> Tensor: ...
    def restore(self, output: Tensor) -> Tensor: ...


def register() -> None:
    """Register paged attention as an attention implementation of transformers. It may be called several times."""
    from transformers import AttentionInterface  # takes seconds: only models that need transformers should pay them

    AttentionInterface.register(NAME, attend)


def attend(
    module: nn.Module,
    query: Tensor,  # [1, num_heads, num_tokens, head_dim]
    key: Tensor,  # [1, num_kv_heads, num_tokens, head_dim]
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    baton: AttentionContext | None = None,
    **rules: object,
) -> tuple[Tensor, None]:
    """Compute paged attention for an attention module of transformers, with the signature of its attention interface.
    Return ([1, num_tokens, num_heads, head_dim], None).

    `baton` is the current step; None: that of the module's `StepHolder`. `rules` are `scaling`, `sliding_window`,
    `softcap`, `s_aux` (sinks) and `alibi` (slopes). Raises `UnsupportedModelError` for modules without a layer number.
    """
    layer, holder = _layer_of(module), getattr(module, "baton_step", None)
    if baton is None and isinstance(holder, StepHolder):
        baton = holder.context
    if baton is None or layer is None:
        raise UnsupportedModelError(f"{type(module).__name__} has no layer number (layer_idx)")
    latent: LatentProjection | None = getattr(module, "baton_latent", None)
    if latent is not None:
        query = latent.absorb(query)
    scales: PositionScales | None = getattr(module, "baton_scales", None)
    if scales is not None and isinstance(baton, PagedAttention):
        query = (query * scales(baton.positions)[:, None]).to(query.dtype)
    spec = None if isinstance(baton, PagedAttention) else _spec(module, query.shape[-1], rules)
    value_dim = value.shape[-1]
    if key.shape[-1] != value_dim:
        # The planes of a layer have equal rows. Zeros change neither scores nor sums.
        width = max(key.shape[-1], value_dim)
        query, key, value = (F.pad(part, (0, width - part.shape[-1])) for part in (query, key, value))
    # If key and value are one tensor (MLA) they must stay one, which the probe looks for.
    keys = key[0].transpose(0, 1)
    values = keys if value is key else value[0].transpose(0, 1)
    output = baton.attend(layer, query[0].transpose(0, 1), keys, values, spec)[..., :value_dim]
    return (output if latent is None else latent.restore(output)).unsqueeze(0), None


def _layer_of(module: nn.Module) -> int | None:
    """Return the layer number of an attention module of transformers (`layer_idx`); None if it has none."""
    layer = getattr(module, "layer_idx", getattr(module, "layer_id", None))
    return layer if isinstance(layer, int) else None


def _spec(module: nn.Module, head_dim: int, rules: dict[str, object]) -> AttentionSpec:
    """Return the attention rules of a module from the arguments that it has passed. Raises `UnsupportedModelError` if
    its attention is not causal.
    """
    if getattr(module, "is_causal", True) is False or rules.get("is_causal") is False:
        raise UnsupportedModelError(f"{type(module).__name__} is not causal")
    scaling, window = rules.get("scaling"), rules.get("sliding_window", getattr(module, "baton_window", None))
    latent: LatentProjection | None = getattr(module, "baton_latent", None)
    softcap, sinks, alibi = rules.get("softcap"), rules.get("s_aux"), rules.get("alibi")
    return AttentionSpec(
        scale=float(scaling) if isinstance(scaling, (int, float)) else head_dim**-0.5,
        sliding_window=window if isinstance(window, int) and window > 0 else None,
        softcap=float(softcap) if isinstance(softcap, (int, float)) and softcap else None,
        sinks=sinks.detach() if isinstance(sinks, torch.Tensor) else None,
        alibi=alibi.float() if isinstance(alibi, torch.Tensor) else None,
        value_dim=None if latent is None else latent.rank,
        chunk=getattr(module, "baton_chunk", None),
    )
