"""Connects transformers' models to paged attention: the one attention function, and what it is told per step.

A model's layers call `attend` below through transformers' AttentionInterface. What a step needs travels as
a keyword argument of the model's forward; some models do not hand it down to their layers, whose modules look it up in
the model's own `StepHolder` instead. It is never global state. No mask function is registered for the name,
so transformers builds no mask at all (masking_utils: implementations without one are told None).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from baton_serve.engine.errors import UnsupportedModelError
from baton_serve.engine.kernels import AttentionBackend, AttentionMetadata, AttentionSpec

NAME = "baton"


class AttentionContext(Protocol):
    """Answers for one layer. query [num_tokens, num_heads, head_dim]; key, value with num_kv_heads."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec | None) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """One step of the engine. `specs` and `layers` are indexed by layer."""

    backend: AttentionBackend
    layers: list[Tensor]
    specs: list[AttentionSpec]
    meta: AttentionMetadata
    after_layer: Callable[[int], None] | None = None
    """As in `StepInputs`."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec | None) -> Tensor:
        cache = self.layers[layer]
        self.backend.store(key, value, cache, self.meta)
        if self.after_layer is not None:
            self.after_layer(layer)
        return self.backend.attend(query, cache, self.meta, self.specs[layer])


@dataclass(frozen=True, slots=True)
class LayerShape:
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    is_latent: bool
    spec: AttentionSpec


@dataclass(frozen=True, slots=True)
class AttentionProbe:
    """Runs a model once to see which layers ask for attention, and with what."""

    shapes: dict[int, list[LayerShape]] = field(default_factory=dict)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec | None) -> Tensor:
        assert spec is not None
        shape = LayerShape(query.shape[1], key.shape[1], key.shape[2], value.shape[2], key is value, spec)
        self.shapes.setdefault(layer, []).append(shape)
        return query.new_zeros(*query.shape[:2], value.shape[2])


class StepHolder:
    """One per model: holds the step's context while the model's forward runs."""

    def __init__(self, module: nn.Module) -> None:
        self.context: AttentionContext | None = None
        for part in module.modules():
            if _layer_of(part) is not None:
                part.baton_step = self  # type: ignore[assignment]  # a plain object, no parameter

    def run(self, module: nn.Module, context: AttentionContext, **inputs: object) -> Any:
        """The model's forward with `context` for all its layers."""
        self.context = context
        try:
            return module(use_cache=False, baton=context, **inputs)
        finally:
            self.context = None


class LatentProjection(Protocol):
    """Latent attention (MLA): what is cached is what keys and values of all heads are computed from."""

    def absorb(self, query: Tensor) -> Tensor: ...
    def restore(self, output: Tensor) -> Tensor: ...


def register() -> None:
    """Makes the name known to transformers; again is harmless."""
    from transformers import AttentionInterface  # seconds that only a real model should cost

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
    """transformers' signature. `rules`: `scaling`, `sliding_window`, `softcap`, `s_aux` (sinks), `alibi` (slopes).

    Returns [1, num_tokens, num_heads, head_dim].
    """
    layer, holder = _layer_of(module), getattr(module, "baton_step", None)
    if baton is None and isinstance(holder, StepHolder):
        baton = holder.context
    if baton is None or layer is None:
        raise UnsupportedModelError(f"{type(module).__name__} does not say which layer it is")
    latent: LatentProjection | None = getattr(module, "baton_latent", None)
    if latent is not None:
        query = latent.absorb(query)
    spec = None if isinstance(baton, PagedAttention) else _spec(module, query.shape[-1], rules)
    keys = key[0].transpose(0, 1)
    values = keys if value is key else value[0].transpose(0, 1)
    output = baton.attend(layer, query[0].transpose(0, 1), keys, values, spec)
    return (output if latent is None else latent.restore(output)).unsqueeze(0), None


def _layer_of(module: nn.Module) -> int | None:
    layer = getattr(module, "layer_idx", getattr(module, "layer_id", None))
    return layer if isinstance(layer, int) else None


def _spec(module: nn.Module, head_dim: int, rules: dict[str, object]) -> AttentionSpec:
    if getattr(module, "is_causal", True) is False or rules.get("is_causal") is False:
        raise UnsupportedModelError(f"{type(module).__name__} is not causal")
    scaling, window = rules.get("scaling"), rules.get("sliding_window")
    softcap, sinks, alibi = rules.get("softcap"), rules.get("s_aux"), rules.get("alibi")
    return AttentionSpec(
        scale=float(scaling) if isinstance(scaling, (int, float)) else head_dim**-0.5,
        sliding_window=window if isinstance(window, int) and window > 0 else None,
        softcap=float(softcap) if isinstance(softcap, (int, float)) and softcap else None,
        sinks=sinks.detach() if isinstance(sinks, torch.Tensor) else None,
        alibi=alibi.float() if isinstance(alibi, torch.Tensor) else None,
    )
