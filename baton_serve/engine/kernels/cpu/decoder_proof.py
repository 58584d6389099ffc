"""Proves the call of C++ that computes all layers of a decoder, on a decoder of two small random layers.

One layer has biases and norms of heads and the other has none, so that both kinds of models are covered. Heads have the
model's size and weights its format; the twin computes the layers step by step in plain torch.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from baton_serve.engine.kernels.cpu.decoder import CpuDecoder, DecoderLayer, DecoderRules
from baton_serve.engine.kernels.cpu.linear import Matrix, can_pack, gated, pack, pack_codes
from baton_serve.engine.kernels.metadata import AttentionMetadata, AttentionSpec, Norm
from baton_serve.engine.kernels.operations import (
    EPS,
    MIXED,
    CacheBatch,
    Draw,
    ProofShapes,
    WeightFormat,
    described,
    random_weight,
)
from baton_serve.engine.kernels.proof import Operation
from baton_serve.engine.kernels.quantized import QuantizedWeight
from baton_serve.engine.kernels.reference import layers as twin
from baton_serve.engine.kernels.reference.attention import ReferenceAttention

HIDDEN, INNER, VOCAB_SIZE = 128, 128, 96
MAX_KV_HEADS = 2

Rotation = tuple[Tensor, Tensor]
Step = Callable[[Tensor, Rotation, list[Tensor], AttentionMetadata, Tensor | None], Tensor]
"""Computes the logits of a step from embeddings, cos and sin, the layers' caches, the batch, and rows with logits."""


@dataclass(frozen=True, slots=True)
class SmallLayer:
    """The weights of one layer, not packed. `norms` are those of its input and of its MLP."""

    norms: tuple[Tensor, Tensor]
    head_norms: tuple[Tensor, Tensor] | None
    qkv: Tensor | QuantizedWeight
    qkv_bias: Tensor | None
    output: Tensor | QuantizedWeight
    gate_up: Tensor | QuantizedWeight
    down: Tensor | QuantizedWeight
    spec: AttentionSpec


@dataclass(frozen=True, slots=True)
class SmallDecoder:
    """The weights of a small decoder."""

    layers: Sequence[SmallLayer]
    final_norm: Tensor
    head: Tensor
    num_kv_heads: int
    head_dim: int


class DecoderKernel(Protocol):
    """Makes a function that computes all layers of a decoder."""

    def __call__(self, decoder: SmallDecoder) -> Step: ...


class PackedDecoder:
    """Implements `DecoderKernel` in C++."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def __call__(self, decoder: SmallDecoder) -> Step:
        layers = [self._packed_layer(layer) for layer in decoder.layers]
        head = pack(self._library, [decoder.head], None)
        rules = DecoderRules(decoder.num_kv_heads, Norm(decoder.final_norm, EPS))
        return CpuDecoder(self._library, layers, head, rules)

    def _packed_layer(self, layer: SmallLayer) -> DecoderLayer:
        heads = layer.head_norms
        return DecoderLayer(
            input_norm=Norm(layer.norms[0], EPS),
            attention_norm=None,
            query_norm=None if heads is None else Norm(heads[0], EPS),
            key_norm=None if heads is None else Norm(heads[1], EPS),
            mlp_norm=Norm(layer.norms[1], EPS),
            mlp_output_norm=None,
            qkv=self._packed(layer.qkv, layer.qkv_bias),
            output=self._packed(layer.output, None),
            gate_up=self._packed(layer.gate_up, None, takes_turns=True),
            down=self._packed(layer.down, None),
            spec=layer.spec,
        )

    def _packed(self, weight: Tensor | QuantizedWeight, bias: Tensor | None, *, takes_turns: bool = False) -> Matrix:
        if isinstance(weight, QuantizedWeight):
            return pack_codes(self._library, [weight], bias, takes_turns=takes_turns)
        parts = list(weight.chunk(2)) if takes_turns else [weight]
        ordered = gated(bias) if takes_turns and bias is not None else bias
        return pack(self._library, parts, ordered, takes_turns=takes_turns)


class TwinDecoder:
    """Computes a decoder step by step in plain torch. The class itself implements `DecoderKernel`."""

    def __init__(self, decoder: SmallDecoder) -> None:
        self._decoder = decoder
        self._attention = ReferenceAttention()

    def __call__(
        self,
        residual: Tensor,
        rotation: Rotation,
        caches: list[Tensor],
        meta: AttentionMetadata,
        logit_rows: Tensor | None,
    ) -> Tensor:
        hidden: Tensor | None = None
        # Both halves of the columns are equal, and `rotation` has one of them.
        rotation = (rotation[0][0].repeat(1, 2), rotation[1][0].repeat(1, 2))
        for layer, cache in zip(self._decoder.layers, caches, strict=True):
            normed = _norm(hidden, residual, layer.norms[0])
            attended = self._attend(layer, normed, rotation, cache, meta)
            normed = _norm(twin.linear(attended, layer.output, None), residual, layer.norms[1])
            gates = twin.silu_mul(twin.linear(normed, layer.gate_up, None))
            hidden = twin.linear(gates, layer.down, None)
        last = _norm(hidden, residual, self._decoder.final_norm)
        return twin.linear(last if logit_rows is None else last[logit_rows], self._decoder.head, None)

    def _attend(
        self, layer: SmallLayer, normed: Tensor, rotation: Rotation, cache: Tensor, meta: AttentionMetadata
    ) -> Tensor:
        count, dim = self._decoder.num_kv_heads, self._decoder.head_dim
        heads = twin.linear(normed, layer.qkv, layer.qkv_bias).view(len(normed), -1, dim)
        query, key, value = torch.split(heads, [heads.shape[1] - 2 * count, count, count], dim=1)
        if layer.head_norms is not None:
            query = twin.rms_norm(query, layer.head_norms[0], EPS)
            key = twin.rms_norm(key, layer.head_norms[1], EPS)
        query = query.contiguous()
        twin.rotary_store(query, key, value, rotation, cache, meta.slots)
        return self._attention.attend(query, cache, meta, layer.spec).flatten(1)


def decoder_operations(shapes: ProofShapes) -> list[Operation[DecoderKernel]]:
    """Return the operation `decoder` for plain weights and for each of the model's formats that can be packed."""
    host = torch.device("cpu")
    # Few heads: the call is the same for more, and packing them would take most of the time.
    draw = Draw(host, shapes.dtype)
    ratio, num_kv_heads = shapes.num_heads // shapes.num_kv_heads, min(MAX_KV_HEADS, shapes.num_kv_heads)
    small = replace(shapes, num_kv_heads=num_kv_heads, num_heads=ratio * num_kv_heads)
    found = []
    for form in (None, *shapes.formats):
        decoder = _draw_decoder(small, form, draw)
        weights = [weight for layer in decoder.layers for weight in (layer.qkv, layer.gate_up, layer.down)]
        if all(can_pack(weight) for weight in weights if isinstance(weight, QuantizedWeight)):
            label = str(shapes.dtype).removeprefix("torch.") if form is None else form.codebook
            rules = "".join(dict.fromkeys(described(layer.spec) for layer in decoder.layers))
            shape = f"{small.num_heads} heads, {num_kv_heads} KV heads of {small.head_dim}, {label}{rules}"
            found.append(Operation("decoder", shape, _run(decoder, small, draw), 2 * shapes.tolerance))
    return found


def _draw_decoder(shapes: ProofShapes, form: WeightFormat | None, draw: Draw) -> SmallDecoder:
    dim, heads = shapes.head_dim, shapes.num_heads
    queries, rows = heads * dim, (heads + 2 * shapes.num_kv_heads) * dim

    def weight(outputs: int, inputs: int) -> Tensor | QuantizedWeight:
        if form is None:
            return draw.values(outputs, inputs).div(inputs**0.5)
        return random_weight(form, outputs, inputs, draw)

    layers = [
        SmallLayer(
            norms=(draw.values(HIDDEN), draw.values(HIDDEN)),
            head_norms=(draw.values(dim), draw.values(dim)) if has_extras else None,
            qkv=weight(rows, HIDDEN),
            qkv_bias=draw.values(rows) if has_extras else None,
            output=weight(HIDDEN, queries),
            gate_up=weight(2 * INNER, HIDDEN),
            down=weight(HIDDEN, INNER),
            spec=_cut_heads(shapes.specs[number % len(shapes.specs)], heads),
        )
        for number, has_extras in enumerate((False, True))
    ]
    head = draw.values(VOCAB_SIZE, HIDDEN).div(HIDDEN**0.5)
    return SmallDecoder(layers, draw.values(HIDDEN), head, shapes.num_kv_heads, dim)


def _cut_heads(spec: AttentionSpec, num_heads: int) -> AttentionSpec:
    return spec if spec.sinks is None else replace(spec, sinks=spec.sinks[:num_heads])


def _run(decoder: SmallDecoder, shapes: ProofShapes, draw: Draw) -> Callable[[DecoderKernel], tuple[Tensor, ...]]:
    batch = CacheBatch(shapes, MIXED, draw)
    embeddings = draw.values(batch.num_tokens, HIDDEN)
    angles = draw.normal(1, batch.num_tokens, shapes.head_dim // 2)
    rows = (batch.meta.query_starts[1:] - 1).long()

    def run(kernel: DecoderKernel) -> tuple[Tensor, ...]:
        stored = batch.tensor.clone()
        caches = [batch.layer(stored, number) for number in range(2)]
        step = kernel(decoder)
        logits = step(embeddings.clone(), (angles.cos(), angles.sin()), caches, batch.meta, rows)
        return (logits, *batch.read(stored))

    return run


def _norm(hidden: Tensor | None, residual: Tensor, weight: Tensor) -> Tensor:
    """Return the norm of the residual after `hidden` was added to it."""
    return (
        twin.rms_norm(residual, weight, EPS)
        if hidden is None
        else twin.rms_norm(hidden, weight, EPS, residual=residual)
    )
