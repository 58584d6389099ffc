"""Joins kernels of several implementations, operation by operation, after they were proved right.

If one implementation is right in everything, it is used itself, and nothing here runs.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from baton_serve.engine.kernels.interfaces import (
    Activations,
    AttentionBackend,
    AttentionMetadata,
    AttentionSpec,
    Experts,
    LayerKernels,
    Linear,
    NewHeads,
    Norm,
    Weight,
    no_work,
)
from baton_serve.engine.kernels.quantized_weights import QuantizedWeight


@dataclass(frozen=True, slots=True)
class ComposedAttention:
    """Implements `AttentionBackend` by several other backends, one for each kind of work. A step in which any sequence
    has more than one new token goes to `prefill` as a whole.
    """

    storing: AttentionBackend
    decode: AttentionBackend
    prefill: AttentionBackend
    fused_decode: AttentionBackend | None
    """None: decode steps apply norms and rotation, store and attend one after another."""

    def store(self, key: Tensor, value: Tensor, cache: Tensor, meta: AttentionMetadata) -> None:
        self.storing.store(key, value, cache, meta)

    def attend(self, query: Tensor, cache: Tensor, meta: AttentionMetadata, spec: AttentionSpec) -> Tensor:
        chosen = self.decode if meta.max_query_len <= 1 else self.prefill
        return chosen.attend(query, cache, meta, spec)

    def attend_new(self, new: NewHeads, cache: Tensor, meta: AttentionMetadata, spec: AttentionSpec) -> Tensor | None:
        return None if self.fused_decode is None else self.fused_decode.attend_new(new, cache, meta, spec)


@dataclass(frozen=True, slots=True)
class ComposedLayers:
    """Implements `LayerKernels` by several other implementations, one for each operation. A packed weight can be read
    only by the implementation that packed it, so all matrix products come from one.
    """

    products: LayerKernels
    fused_products: LayerKernels | None
    """`products`, or None: what combines a product with other operations is computed in separate steps."""
    norms: LayerKernels
    gates: LayerKernels
    rotations: LayerKernels
    rotary_stores: LayerKernels
    experts: LayerKernels
    other_norms: LayerKernels
    gelu_gates: LayerKernels

    def pack(self, weight: Tensor | QuantizedWeight) -> Weight:
        return self.products.pack(weight)

    def linear(self, x: Activations, weight: Weight, bias: Tensor | None) -> Tensor:
        return self.products.linear(x, weight, bias)

    def embed(self, token_ids: Tensor, weight: Weight, dtype: torch.dtype) -> Tensor:
        return self.products.embed(token_ids, weight, dtype)

    def rms_norm(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        *,
        residual: Tensor | None = None,
        unit_offset: bool = False,
    ) -> Tensor:
        return self.norms.rms_norm(x, weight, eps, residual=residual, unit_offset=unit_offset)

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        return self.other_norms.norm(x, norm)

    def norm_for(self, x: Tensor, norm: Norm, then: Weight, *, residual: Tensor | None = None) -> Activations:
        if self.fused_products is None:
            return self.norms.rms_norm(x, norm.weight, norm.eps, residual=residual)
        return self.fused_products.norm_for(x, norm, then, residual=residual)

    def linear_norm(
        self,
        x: Activations,
        product: Linear,
        residual: Tensor,
        norm: Norm,
        then: Weight | None = None,
        *,
        before_norm: Callable[[], None] = no_work,
    ) -> Activations:
        if self.fused_products is not None:
            return self.fused_products.linear_norm(x, product, residual, norm, then, before_norm=before_norm)
        output = self.products.linear(x, product.weight, product.bias)
        before_norm()
        return self.norms.rms_norm(output, norm.weight, norm.eps, residual=residual)

    def gated_linear(self, x: Activations, gate_up: Linear, then: Weight) -> Activations:
        if self.fused_products is not None:
            return self.fused_products.gated_linear(x, gate_up, then)
        return self.gates.silu_mul(self.products.linear(x, gate_up.weight, gate_up.bias))

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return self.gates.silu_mul(gate_up)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        return self.gelu_gates.gelu_mul(gate_up)

    def rotation(self, positions: Tensor, frequencies: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
        return self.rotations.rotation(positions, frequencies, scaling)

    def rotary_store(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rotation: tuple[Tensor, Tensor],
        cache: Tensor,
        slots: Tensor,
        *,
        interleaved: bool = False,
    ) -> None:
        self.rotary_stores.rotary_store(query, key, value, rotation, cache, slots, interleaved=interleaved)

    def route(
        self, logits: Tensor, top_k: int, *, renormalize: bool, num_shared: int = 0, has_gate: bool = False
    ) -> tuple[Tensor, Tensor]:
        return self.experts.route(logits, top_k, renormalize=renormalize, num_shared=num_shared, has_gate=has_gate)

    def mix(self, x: Tensor, weights: Tensor, chosen: Tensor, experts: Experts) -> Tensor:
        return self.experts.mix(x, weights, chosen, experts)
