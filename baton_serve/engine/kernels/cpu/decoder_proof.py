"""Proves the call of C++ that computes all layers of a decoder, on a decoder of two small random layers.

One layer has biases and norms of heads and the other has none, so that both kinds of models are covered. Decoders
of several kinds cover the places and kinds of norms, activations and rotations of all families. For a model with the
gated delta rule, one decoder has it in its first layer, and attention with a gate in the second. A model with latent
attention is proved by layers of latent attention alone. Heads have the model's size and weights its format; the twin
computes the layers step by step in plain torch.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from baton_serve.engine.kernels.cpu.decoder import (
    CpuDecoder,
    DecoderLayer,
    DecoderRules,
    DeltaRule,
    DeltaStates,
    LatentProjections,
)
from baton_serve.engine.kernels.cpu.linear import PANEL, Matrix, PackedHeads, can_pack, gated, pack, pack_codes
from baton_serve.engine.kernels.interfaces import AttentionMetadata, AttentionSpec, Norm
from baton_serve.engine.kernels.mixer_operations import LOG_RATE, NUM_SLOTS
from baton_serve.engine.kernels.mixers import DeltaHeads, LatentRows, MixerShapes, PackedSequences
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
from baton_serve.engine.kernels.prover import Operation
from baton_serve.engine.kernels.quantized_weights import QuantizedWeight
from baton_serve.engine.kernels.reference import layers as twin
from baton_serve.engine.kernels.reference import mixers as twin_mixers
from baton_serve.engine.kernels.reference.attention import ReferenceAttention

HIDDEN, INNER, VOCAB_SIZE = 128, 128, 96
MAX_KV_HEADS = 2
CODE_STEPS = {torch.float8_e4m3fn: 1 / 8, torch.float8_e5m2: 1 / 4}
"""By dtype of the KV cache: the largest relative distance of two neighbouring codes. The twin rounds to bf16 at other
places, so a key may get the next code. Codes of int8 are closer than the tolerance."""
LATENT_HEADS, LATENT_KEY_SIZE, LATENT_VALUE_SIZE, QUERY_RANK = 4, 24, 32, 40
"""Sizes of latent attention that a model's KV cache does not state."""

Rotation = tuple[Tensor, Tensor]
Step = Callable[
    [Tensor, Rotation, list[Tensor], Sequence[AttentionMetadata], Tensor | None, DeltaStates | None], Tensor
]
"""Computes the logits of a step from embeddings, cos and sin, the caches and batches of layers with attention, the rows
with logits, and the states of layers with the delta rule."""


@dataclass(frozen=True, slots=True)
class SmallLatent:
    """The weights of latent attention in a layer of a small random decoder, not packed, named as in
    `LatentProjections`.
    """

    keys: Tensor  # [num_heads, key_size, rank]
    values: Tensor  # [num_heads, rank, value_size]
    query: Tensor | None
    norm: Norm
    query_norm: Norm | None
    is_interleaved: bool
    keeps_order: bool


@dataclass(frozen=True, slots=True)
class SmallLayer:
    """The weights of one layer of a small random decoder, not packed, for comparing the C++ decoder with plain torch.
    The norms are named as in `DecoderLayer`.
    """

    input_norm: Norm | None
    attention_norm: Norm | None
    mlp_norm: Norm | None
    mlp_output_norm: Norm | None
    head_norms: tuple[Norm, Norm] | None
    qkv: Tensor | QuantizedWeight
    qkv_bias: Tensor | None
    output: Tensor | QuantizedWeight
    gate_up: Tensor | QuantizedWeight
    down: Tensor | QuantizedWeight
    spec: AttentionSpec
    has_output_gate: bool = False
    delta: DeltaRule | None = None
    latent: SmallLatent | None = None


@dataclass(frozen=True, slots=True)
class SmallDecoder:
    """A small random decoder, by which the C++ decoder is compared with plain torch."""

    layers: Sequence[SmallLayer]
    rules: DecoderRules
    head: Tensor
    head_dim: int


@dataclass(frozen=True, slots=True)
class DecoderKind:
    """In which points a kind of decoders, such as Gemma's, differs from Llama's. The norms are before or behind
    attention and the MLP, or both.
    """

    label: str
    has_norms_before: bool = True
    has_norms_behind: bool = False
    is_centered: bool = False
    has_offset: bool = False
    has_wide_norms: bool = False
    is_parallel: bool = False
    is_interleaved: bool = False
    is_gelu: bool = False
    residual_scale: float = 1.0
    is_hybrid: bool = False
    """True if the first layer has the gated delta rule, and the second one attention with a gate."""
    is_latent: bool = False
    """True if both layers have latent attention: the first with one product of the query, the second with two."""


LLAMA = DecoderKind("")
OTHER_KINDS = (
    DecoderKind(", as Gemma", has_norms_behind=True, has_offset=True, is_gelu=True, residual_scale=0.5),
    DecoderKind(", as OLMo", has_norms_before=False, has_norms_behind=True, has_wide_norms=True),
    DecoderKind(", as Cohere", is_centered=True, is_parallel=True, is_interleaved=True),
)
HYBRID = DecoderKind(", as Qwen 3.5", has_offset=True, is_hybrid=True)
LATENT = DecoderKind(", as Youtu", residual_scale=0.5, is_latent=True)


class DecoderKernel(Protocol):
    """Makes, from a small decoder's weights, a function that computes a step of all its layers."""

    def __call__(self, decoder: SmallDecoder) -> Step: ...


class PackedDecoder:
    """Implements `DecoderKernel` by the C++ library, which computes all layers in one call."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def __call__(self, decoder: SmallDecoder) -> Step:
        layers = [self._packed_layer(layer) for layer in decoder.layers]
        head = pack(self._library, [decoder.head], None)
        packed = CpuDecoder(self._library, layers, head, decoder.rules)

        def step(
            residual: Tensor,
            rotation: Rotation,
            caches: list[Tensor],
            metas: Sequence[AttentionMetadata],
            logit_rows: Tensor | None,
            states: DeltaStates | None,
        ) -> Tensor:
            packed.use_groups(None if metas[0] is metas[-1] else metas)
            if states is not None:
                packed.use_states(states)
            return packed(residual, rotation, caches, metas[0], logit_rows)

        return step

    def _packed_layer(self, layer: SmallLayer) -> DecoderLayer:
        query_norm, key_norm = layer.head_norms or (None, None)
        return DecoderLayer(
            input_norm=layer.input_norm,
            attention_norm=layer.attention_norm,
            query_norm=query_norm,
            key_norm=key_norm,
            mlp_norm=layer.mlp_norm,
            mlp_output_norm=layer.mlp_output_norm,
            qkv=self._packed(layer.qkv, layer.qkv_bias),
            output=self._packed(layer.output, None),
            gate_up=self._packed(layer.gate_up, None, takes_turns=True),
            down=self._packed(layer.down, None),
            spec=layer.spec,
            has_output_gate=layer.has_output_gate,
            delta=layer.delta,
            latent=None if layer.latent is None else self._packed_latent(layer.latent),
        )

    def _packed_latent(self, own: SmallLatent) -> LatentProjections:
        heads = PackedHeads(self._library)
        keys, values = heads.pack(own.keys), heads.pack(own.values)
        assert keys is not None and values is not None  # `decoder_operations` has checked the sizes
        return LatentProjections(
            keys=keys,
            values=values,
            query=None if own.query is None else pack(self._library, [own.query], None),
            norm=own.norm,
            query_norm=own.query_norm,
            num_heads=len(own.keys),
            key_size=own.keys.shape[1],
            value_size=own.values.shape[2],
            is_interleaved=own.is_interleaved,
            keeps_order=own.keeps_order,
        )

    def _packed(self, weight: Tensor | QuantizedWeight, bias: Tensor | None, *, takes_turns: bool = False) -> Matrix:
        if isinstance(weight, QuantizedWeight):
            return pack_codes(self._library, [weight], bias, takes_turns=takes_turns)
        parts = list(weight.chunk(2)) if takes_turns else [weight]
        ordered = gated(bias) if takes_turns and bias is not None else bias
        return pack(self._library, parts, ordered, takes_turns=takes_turns)


class TwinDecoder:
    """Computes all layers of a small decoder in plain torch, as the reference for the C++ decoder. The class itself
    implements `DecoderKernel`.
    """

    def __init__(self, decoder: SmallDecoder) -> None:
        self._decoder = decoder
        self._attention = ReferenceAttention()

    def __call__(
        self,
        residual: Tensor,
        rotation: Rotation,
        caches: list[Tensor],
        metas: Sequence[AttentionMetadata],
        logit_rows: Tensor | None,
        states: DeltaStates | None,
    ) -> Tensor:
        layers, rules = self._decoder.layers, self._decoder.rules
        gate = twin.gelu_mul if rules.is_gelu else twin.silu_mul
        # Both halves of the columns are equal, and `rotation` has one of them.
        rotation = (rotation[0][0].repeat(1, 2), rotation[1][0].repeat(1, 2))
        x = _normed(residual, layers[0].input_norm)
        following = [*(layer.input_norm for layer in layers[1:]), rules.final_norm]
        places = iter(zip(caches, metas, strict=True))
        for layer, after in zip(layers, following, strict=True):
            if layer.latent is not None:
                mixed = self._attend_latents(layer, layer.latent, x, rotation, *next(places))
            elif layer.delta is None:
                mixed = self._attend(layer, x, rotation, *next(places))
            else:
                assert states is not None
                mixed = self._apply_delta_rule(layer, layer.delta, x, metas[0], states)
            attended = twin.linear(mixed, layer.output, None)
            residual += _normed(attended, layer.attention_norm) * rules.residual_scale
            if not rules.is_parallel:
                x = _normed(residual, layer.mlp_norm)
            output = twin.linear(gate(twin.linear(x, layer.gate_up, None)), layer.down, None)
            residual += _normed(output, layer.mlp_output_norm) * rules.residual_scale
            x = _normed(residual, after)
        return twin.linear(x if logit_rows is None else x[logit_rows], self._decoder.head, None)

    def _attend(
        self, layer: SmallLayer, normed: Tensor, rotation: Rotation, cache: Tensor, meta: AttentionMetadata
    ) -> Tensor:
        rules, dim = self._decoder.rules, self._decoder.head_dim
        count = rules.num_kv_heads
        heads = twin.linear(normed, layer.qkv, layer.qkv_bias).view(len(normed), -1, dim)
        gates = heads.shape[1] // 2 - count if layer.has_output_gate else 0
        heads, gate = torch.split(heads, [heads.shape[1] - gates, gates], dim=1)
        query, key, value = torch.split(heads, [heads.shape[1] - 2 * count, count, count], dim=1)
        if layer.head_norms is not None:
            rows = [part.flatten(1) if rules.has_wide_norms else part for part in (query, key)]
            pairs = zip(rows, layer.head_norms, (query, key), strict=True)
            query, key = (_normed(row, norm).reshape(part.shape) for row, norm, part in pairs)
        query = query.contiguous()
        twin.rotary_store(query, key, value, rotation, cache, meta.slots, interleaved=rules.is_interleaved)
        attended = self._attention.attend(query, cache, meta, layer.spec).flatten(1)
        return twin_mixers.sigmoid_gate(attended, gate.flatten(1)) if layer.has_output_gate else attended

    def _attend_latents(
        self,
        layer: SmallLayer,
        own: SmallLatent,
        normed: Tensor,
        rotation: Rotation,
        cache: Tensor,
        meta: AttentionMetadata,
    ) -> Tensor:
        width, count = cache.shape[4], len(own.keys)
        product = twin.linear(normed, layer.qkv, layer.qkv_bias)
        asked, latents = product[:, :-width], product[:, -width:]
        if own.query is not None:
            asked = twin.linear(_normed(asked, own.query_norm), own.query, None)
        asked = asked.reshape(len(asked), count, -1)
        query = asked.new_empty(len(asked), count, width)
        rows = LatentRows(latents, asked, own.norm, rotation, own.is_interleaved, own.keeps_order)
        new = twin_mixers.latent_rows(rows, query)
        self._attention.store(new, new, cache, meta)
        twin_mixers.multiply_heads(asked[..., : own.keys.shape[1]], own.keys, query[..., : own.keys.shape[2]])
        attended = self._attention.attend(query, cache, meta, layer.spec)
        output = attended.new_empty(len(attended), count, own.values.shape[2])
        twin_mixers.multiply_heads(attended, own.values, output)
        return output.flatten(1)

    @staticmethod
    def _apply_delta_rule(
        layer: SmallLayer, rule: DeltaRule, normed: Tensor, meta: AttentionMetadata, states: DeltaStates
    ) -> Tensor:
        sequences, (inputs, matrices) = (
            PackedSequences(meta.query_starts, states.slots, meta.max_query_len),
            states.layers[0],
        )
        sizes = [len(rule.convolution), rule.num_heads * rule.value_size, rule.num_heads, rule.num_heads]
        product = twin.linear(normed, layer.qkv, layer.qkv_bias)
        qkv, gate, beta, steps = torch.split(product, sizes, dim=1)
        qkv = twin_mixers.convolve(qkv, rule.convolution, None, inputs, sequences, has_silu=True)
        heads = DeltaHeads(qkv, beta, steps, rule.log_rate, rule.step_bias, rule.num_key_heads, rule.key_size)
        output = twin_mixers.delta_rule(heads, matrices, sequences)
        return twin_mixers.gated_norm(output, gate.view(output.shape), rule.norm).flatten(1)


def decoder_operations(shapes: ProofShapes) -> list[Operation[DecoderKernel]]:
    """Return the comparisons for the C++ decoder: with unquantized weights for all kinds of decoders, and with Llama's
    kind for each of the model's weight formats that can be packed. Return [] for a model with ALiBi, which it does not
    compute.
    """
    if any(spec.alibi is not None for spec in shapes.specs):
        return []
    host = torch.device("cpu")
    # Few heads: the call is the same for more, and packing them would take most of the time.
    draw = Draw(host, shapes.dtype)
    ratio, num_kv_heads = shapes.num_heads // shapes.num_kv_heads, min(MAX_KV_HEADS, shapes.num_kv_heads)
    small = replace(shapes, num_kv_heads=num_kv_heads, num_heads=ratio * num_kv_heads)
    tolerance = 2 * shapes.tolerance + CODE_STEPS.get(shapes.cache_dtype, 0.0)
    found = []
    for kind, form in _kinds(shapes):
        decoder = _draw_decoder(small, kind, form, draw)
        weights = [weight for layer in decoder.layers for weight in (layer.qkv, layer.gate_up, layer.down)]
        if all(can_pack(weight) for weight in weights if isinstance(weight, QuantizedWeight)):
            label = str(shapes.dtype).removeprefix("torch.") if form is None else form.codebook
            rules = "".join(dict.fromkeys(described(layer.spec) for layer in decoder.layers))
            shape = f"{small.num_heads} heads, {num_kv_heads} KV heads of {small.head_dim}, {label}{rules}{kind.label}"
            found.append(Operation("decoder", shape, _run(decoder, small, draw, kind), tolerance))
    return found


def _kinds(shapes: ProofShapes) -> list[tuple[DecoderKind, WeightFormat | None]]:
    """Return the kinds of decoders that are compared, and the weight format of each; None: unquantized."""
    if shapes.num_planes == 1:
        return [(LATENT, None)] if shapes.mixers.rank and shapes.mixers.rank % PANEL == 0 else []
    others = (*OTHER_KINDS, HYBRID) if _has_delta_rule(shapes.mixers) else OTHER_KINDS
    return [(LLAMA, None), *((LLAMA, form) for form in shapes.formats), *((kind, None) for kind in others)]


def _has_delta_rule(mixers: MixerShapes) -> bool:
    return bool(mixers.num_heads) and not mixers.has_channel_decay


def _draw_decoder(shapes: ProofShapes, kind: DecoderKind, form: WeightFormat | None, draw: Draw) -> SmallDecoder:
    dim, heads = shapes.head_dim, shapes.num_heads
    queries, rows = heads * dim, (heads + 2 * shapes.num_kv_heads) * dim

    def weight(outputs: int, inputs: int) -> Tensor | QuantizedWeight:
        if form is None:
            return draw.values(outputs, inputs).div(inputs**0.5)
        return random_weight(form, outputs, inputs, draw)

    def norm(size: int = HIDDEN) -> Norm:
        return Norm(draw.values(size), EPS, is_centered=kind.is_centered, has_offset=kind.has_offset)

    def head_norms() -> tuple[Norm, Norm]:
        return (norm(queries), norm(shapes.num_kv_heads * dim)) if kind.has_wide_norms else (norm(dim), norm(dim))

    gates = queries if kind.is_hybrid else 0
    layers = [
        SmallLayer(
            input_norm=norm() if kind.has_norms_before else None,
            attention_norm=norm() if kind.has_norms_behind else None,
            mlp_norm=norm() if kind.has_norms_before and not kind.is_parallel else None,
            mlp_output_norm=norm() if kind.has_norms_behind else None,
            head_norms=head_norms() if has_extras else None,
            qkv=weight(rows + gates, HIDDEN),
            qkv_bias=draw.values(rows + gates) if has_extras else None,
            output=weight(HIDDEN, queries),
            gate_up=weight(2 * INNER, HIDDEN),
            down=weight(HIDDEN, INNER),
            spec=_cut_heads(shapes.specs[number % len(shapes.specs)], heads),
            has_output_gate=kind.is_hybrid,
        )
        for number, has_extras in enumerate((False, True))
    ]
    if kind.is_hybrid:
        rule = _draw_delta_rule(shapes.mixers, draw)
        values = rule.num_heads * rule.value_size
        qkv, output = weight(len(rule.convolution) + values + 2 * rule.num_heads, HIDDEN), weight(HIDDEN, values)
        layers[0] = replace(layers[0], qkv=qkv, output=output, has_output_gate=False, delta=rule)
    if kind.is_latent:
        layers = [_with_latents(layer, shapes.mixers, draw, number) for number, layer in enumerate(layers)]
    head = draw.values(VOCAB_SIZE, HIDDEN).div(HIDDEN**0.5)
    rules = DecoderRules(
        shapes.num_kv_heads,
        norm(),
        kind.residual_scale,
        is_gelu=kind.is_gelu,
        is_parallel=kind.is_parallel,
        is_interleaved=kind.is_interleaved,
        has_wide_norms=kind.has_wide_norms,
    )
    return SmallDecoder(layers, rules, head, dim)


def _with_latents(layer: SmallLayer, mixers: MixerShapes, draw: Draw, number: int) -> SmallLayer:
    """Return a layer with latent attention in place of other attention. Layers with an odd `number` have two products
    of the query, and other orders of what rotates.
    """

    def weight(*sizes: int) -> Tensor:
        return draw.values(*sizes).div(sizes[-1] ** 0.5)

    has_two, queries = number % 2 == 1, LATENT_HEADS * (LATENT_KEY_SIZE + mixers.rotary_size)
    first = QUERY_RANK if has_two else queries
    own = SmallLatent(
        keys=weight(LATENT_HEADS, LATENT_KEY_SIZE, mixers.rank),
        values=weight(LATENT_HEADS, mixers.rank, LATENT_VALUE_SIZE),
        query=weight(queries, QUERY_RANK) if has_two else None,
        norm=Norm(draw.values(mixers.rank), EPS),
        query_norm=Norm(draw.values(QUERY_RANK), EPS) if has_two else None,
        is_interleaved=True,
        keeps_order=not has_two,
    )
    rows = first + mixers.rank + mixers.rotary_size
    return replace(
        layer,
        head_norms=None,
        qkv=weight(rows, HIDDEN),
        qkv_bias=None if layer.qkv_bias is None else draw.values(rows),
        output=weight(HIDDEN, LATENT_HEADS * LATENT_VALUE_SIZE),
        latent=own,
    )


def _draw_delta_rule(mixers: MixerShapes, draw: Draw) -> DeltaRule:
    # Two key heads, as of attention: more would only take longer.
    key_heads = min(MAX_KV_HEADS, mixers.num_key_heads)
    heads = key_heads * (mixers.num_heads // mixers.num_key_heads)
    channels = 2 * key_heads * mixers.key_size + heads * mixers.value_size
    return DeltaRule(
        convolution=draw.values(channels, mixers.taps),
        log_rate=draw.normal(heads) + LOG_RATE,
        step_bias=draw.normal(heads),
        norm=Norm(draw.values(mixers.value_size), EPS),
        num_heads=heads,
        num_key_heads=key_heads,
        key_size=mixers.key_size,
        value_size=mixers.value_size,
    )


def _cut_heads(spec: AttentionSpec, num_heads: int) -> AttentionSpec:
    return spec if spec.sinks is None else replace(spec, sinks=spec.sinks[:num_heads])


def _run(
    decoder: SmallDecoder, shapes: ProofShapes, draw: Draw, kind: DecoderKind
) -> Callable[[DecoderKernel], tuple[Tensor, ...]]:
    batch = CacheBatch(shapes, MIXED, draw)
    # Layers of cache groups find their KV in other blocks.
    metas = [batch.meta, batch.meta if kind is LLAMA else _in_other_blocks(batch.meta, len(batch.tensor), shapes)]
    attending = [number for number, layer in enumerate(decoder.layers) if layer.delta is None]
    embeddings = draw.values(batch.num_tokens, HIDDEN)
    rotated = shapes.mixers.rotary_size if kind.is_latent else shapes.head_dim
    angles = draw.normal(1, batch.num_tokens, rotated // 2)
    rows = (batch.meta.query_starts[1:] - 1).long()
    rule = decoder.layers[0].delta
    states = None if rule is None else _draw_states(rule, draw)

    def run(kernel: DecoderKernel) -> tuple[Tensor, ...]:
        stored = batch.tensor.clone()
        caches = [batch.layer(stored, number) for number in attending]
        own = None if states is None else replace(states, layers=[(x.clone(), m.clone()) for x, m in states.layers])
        step = kernel(decoder)
        rotation = (angles.cos(), angles.sin())
        logits = step(embeddings.clone(), rotation, caches, [metas[number] for number in attending], rows, own)
        changed = () if own is None else tuple(part for layer in own.layers for part in layer)
        return (logits, *batch.read(stored), *changed)

    return run


def _draw_states(rule: DeltaRule, draw: Draw) -> DeltaStates:
    """Return random states of batch slots, of which the sequences of a batch use some."""
    inputs = draw.values(NUM_SLOTS, *rule.convolution.shape)
    matrices = draw.normal(NUM_SLOTS, rule.num_heads, rule.key_size, rule.value_size)
    return DeltaStates(torch.tensor([4, 1, 0, 3]), [(inputs, matrices)])


def _in_other_blocks(meta: AttentionMetadata, num_blocks: int, shapes: ProofShapes) -> AttentionMetadata:
    """Return the same batch with the blocks in the opposite order. Block 0 stays padding."""
    tables, size = meta.block_tables, shapes.block_tokens
    slots = (num_blocks - meta.slots // size) * size + meta.slots % size
    return replace(meta, block_tables=torch.where(tables > 0, num_blocks - tables, 0).int(), slots=slots)


def _normed(x: Tensor, norm: Norm | None) -> Tensor:
    return x if norm is None else twin.norm(x, norm)
