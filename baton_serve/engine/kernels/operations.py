"""Defines the operations by which kernels are compared with their twins: random inputs of a model's shapes, and
tolerances.

The sizes that kernels specialize on (heads, head size, block size, hidden size, formats of weights) are those of the
model; the numbers of tokens and of outputs are small, so that a proof on a CPU takes milliseconds.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from baton_serve.engine.kernels import quantized_kv
from baton_serve.engine.kernels.interfaces import (
    AttentionBackend,
    AttentionMetadata,
    AttentionSpec,
    Experts,
    LayerKernels,
    Linear,
    NewHeads,
    Norm,
    Weight,
)
from baton_serve.engine.kernels.mixers import NO_MIXERS, MixerShapes
from baton_serve.engine.kernels.prover import Operation
from baton_serve.engine.kernels.quantized_weights import Codebook, QuantizedWeight, code_bits, dequantize, pack_codes
from baton_serve.engine.kernels.reference import layers as twin_layers
from baton_serve.engine.kernels.reference.attention import ReferenceAttention

Argmax = Callable[[Tensor, Tensor], Tensor]
"""A function as `selection.argmax_kernel` returns it."""

CONTEXTS = (70, 9, 200, 33)
"""KV tokens of the sequences: one is shorter than a block, and some last blocks are not full."""
DECODE, PREFILL, MIXED = (1, 1, 1, 1), (5, 9, 130, 2), (1, 9, 130, 1)
"""New tokens of the sequences."""
WINDOW = 48
"""Windows are cut to this length, which most of the contexts exceed."""
ROWS = 7
"""Tokens of a layer's operations: no multiple of a tile, so that the last tile is not full."""
EXPERT_ROWS = 200
"""Tokens of experts that have many."""
OUTPUTS, WIDTH = 160, 128
"""Outputs of a product, and width of an MLP."""
FLOAT32_TOLERANCE, TOLERANCE = 5e-3, 0.02
"""Largest differences that rounding explains: in float32 (matrix units may round its products), and in 16 bits. A
kernel that reads a wrong block differs by about 1."""
EPS = 1e-6
WHOLE_ROW = 1 << 30
"""The group of a weight with one scale for a whole row, whatever its length."""


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """The format of quantized weights: codes, group size, dtype of scales, and whether there are zero points."""

    codebook: Codebook
    group: int
    scales: torch.dtype
    has_zeros: bool

    @property
    def label(self) -> str:
        return f"{self.codebook} in rows" if self.group >= WHOLE_ROW else f"{self.codebook} in groups of {self.group}"


@dataclass(frozen=True, slots=True)
class ProofShapes:
    """The shapes of a model's part on one device with which its kernels are compared with plain torch."""

    dtype: torch.dtype
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_planes: int
    block_tokens: int
    scale_rows: int
    """Rows behind the tokens of a head that hold scales; see `KVLayout`."""
    cache_dtype: torch.dtype
    vocab_size: int
    specs: tuple[AttentionSpec, ...]
    """The different rules of its layers."""
    formats: tuple[WeightFormat, ...] = ()
    has_experts: bool = False
    mixers: MixerShapes = NO_MIXERS
    others: tuple["ProofShapes", ...] = ()
    """The shapes of attention in further layers, if those of the model's layers differ."""

    @property
    def tolerance(self) -> float:
        return FLOAT32_TOLERANCE if self.dtype == torch.float32 else TOLERANCE

    @property
    def heads(self) -> str:
        return f"{self.num_heads} heads, {self.num_kv_heads} KV heads of {self.head_dim}"

    @property
    def key(self) -> str:
        """Return a text that is different for different shapes and attention rules, to find the results of earlier
        comparisons.
        """
        every = (self, *self.others)
        return repr([(replace(one, specs=(), others=()), [_kind_of(spec) for spec in one.specs]) for one in every])


def different_specs(specs: Sequence[AttentionSpec]) -> tuple[AttentionSpec, ...]:
    """Return one of each kind of attention rules among those of a model's layers. Sliding windows are cut to `WINDOW`
    tokens.
    """
    kinds: dict[object, AttentionSpec] = {}
    for spec in specs:
        window = None if spec.sliding_window is None else min(spec.sliding_window, WINDOW)
        cut = replace(spec, sliding_window=window, chunk=None)
        kinds.setdefault(_kind_of(cut), cut)
    return tuple(kinds.values())


def _kind_of(spec: AttentionSpec) -> tuple[object, ...]:
    """Return a key that is equal for attention rules that kernels treat alike. Of sinks and ALiBi slopes it contains
    only whether the layer has them.
    """
    return tuple(
        isinstance(value, Tensor) or value for value in (getattr(spec, field.name) for field in fields(AttentionSpec))
    )


def random_weight(form: WeightFormat, outputs: int, inputs: int, draw: "Draw") -> QuantizedWeight:
    """Return a random quantized weight [outputs, inputs] of the given format, in which all codes that kernels must read
    can occur.
    """
    bits = code_bits(form.codebook)
    codes = draw.codes((outputs, inputs), bits)
    if form.codebook == "int8":
        stored = codes.view(torch.int8).clamp(min=-127)  # quantizers do not use -128, which not all kernels read
    elif bits == 8:
        kind = torch.float8_e4m3fn if form.codebook == "fp8_e4m3" else torch.float8_e5m2
        stored = draw.normal(outputs, inputs).to(kind)
    else:
        stored = pack_codes(codes, bits)
    groups = max(1, -(-inputs // form.group))
    zeros = draw.codes((outputs, groups), 3).to(form.scales) if form.has_zeros else None
    scales = draw.normal(outputs, groups).abs().add(0.5)
    weight = QuantizedWeight(form.codebook, inputs, min(form.group, inputs), stored, scales, zeros)
    # Outputs of about 1, as in a model: with larger ones, the softmax of attention would magnify the rounding.
    factor = float(dequantize(weight).std()) * inputs**0.5
    return replace(weight, scales=(scales / factor).to(form.scales))


class Draw:
    """Draws random inputs for comparisons on the host, so that they are equal for all devices, and moves them to
    `device`.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self._generator = torch.Generator().manual_seed(7)

    def normal(self, *shape: int) -> Tensor:
        """Return normally distributed random numbers of this shape, float32 on the device."""
        return torch.randn(shape, generator=self._generator).to(self.device)

    def values(self, *shape: int) -> Tensor:
        """Return normally distributed random numbers of this shape in the model's dtype, on the device."""
        return self.normal(*shape).to(self.dtype)

    def codes(self, shape: tuple[int, ...], bits: int) -> Tensor:
        """Return random codes of this shape from 0 to 2 ** bits - 1, uint8 on the device."""
        return torch.randint(0, 1 << bits, shape, generator=self._generator, dtype=torch.uint8).to(self.device)

    def order(self, count: int) -> list[int]:
        """Return the numbers from 1 to `count` in random order."""
        numbers: list[int] = (torch.randperm(count, generator=self._generator) + 1).tolist()
        return numbers


class CacheBatch:
    """A KV cache of two layers with random content, `tensor`, and sequences in it, by which attention kernels are
    compared with plain torch. `new_tokens` are the sequences' numbers of new tokens. Block 0 belongs to no sequence.
    """

    def __init__(self, shapes: ProofShapes, new_tokens: Sequence[int], draw: Draw) -> None:
        block = shapes.block_tokens
        counts = [-(-context // block) for context in CONTEXTS]
        # In random order, so that a kernel that ignores the block table reads wrong blocks.
        order, starts = draw.order(sum(counts)), list(itertools.accumulate(counts, initial=0))
        rows = [order[start:end] for start, end in itertools.pairwise(starts)]
        slots = [
            row[at // block] * block + at % block
            for row, context, new in zip(rows, CONTEXTS, new_tokens, strict=True)
            for at in range(context - new, context)
        ]
        tables = [row + [0] * (max(counts) - len(row)) for row in rows]
        starts = list(itertools.accumulate(new_tokens, initial=0))
        self.meta = AttentionMetadata(
            query_starts=torch.tensor(starts, dtype=torch.int32, device=draw.device),
            context_lens=torch.tensor(CONTEXTS, dtype=torch.int32, device=draw.device),
            block_tables=torch.tensor(tables, dtype=torch.int32, device=draw.device),
            slots=torch.tensor(slots, dtype=torch.int64, device=draw.device),
            max_query_len=max(new_tokens),
            max_context_len=max(CONTEXTS),
        )
        self.num_tokens, self._block, self._shapes = sum(new_tokens), block, shapes
        sizes = (sum(counts) + 1, 2, shapes.num_planes, shapes.num_kv_heads, block + shapes.scale_rows, shapes.head_dim)
        self.tensor = torch.zeros(sizes, dtype=shapes.cache_dtype, device=draw.device)
        self._fill(draw)

    def layer(self, tensor: Tensor, number: int) -> Tensor:
        """Return the view of layer `number` (0 or 1) of a cache like `self.tensor`, in the shape that attention kernels
        get.
        """
        return tensor[:, number, :, :, : self._block].expand(-1, 2, -1, -1, -1)

    def new_rows(self, draw: Draw) -> tuple[Tensor, Tensor]:
        """Return random K and V for the new tokens, both [num_tokens, num_kv_heads, head_dim]; for latent attention
        both are the same tensor.
        """
        key = draw.values(self.num_tokens, self._shapes.num_kv_heads, self._shapes.head_dim)
        return key, key if self._shapes.num_planes == 1 else draw.values(*key.shape)

    def read(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """Return the content of both layers of a cache like `self.tensor` as numbers. Both are compared, because a
        kernel must leave the other layer as it was.
        """
        blocks = torch.arange(len(tensor), device=tensor.device)
        return quantized_kv.read(self.layer(tensor, 0), blocks), quantized_kv.read(self.layer(tensor, 1), blocks)

    def _fill(self, draw: Draw) -> None:
        every = torch.arange(len(self.tensor) * self._block, device=draw.device)
        meta = replace(self.meta, slots=every)
        for number in range(2):
            key = draw.values(len(every), self._shapes.num_kv_heads, self._shapes.head_dim)
            value = key if self._shapes.num_planes == 1 else draw.values(*key.shape)
            ReferenceAttention().store(key, value, self.layer(self.tensor, number), meta)


def attention_operations(shapes: ProofShapes, device: torch.device) -> list[Operation[AttentionBackend]]:
    """Return the comparisons with plain torch for attention kernels: one for the KV store, and for each kind of
    attention rules one each for decode, prefill, mixed steps and fused decode.
    """
    draw = Draw(device, shapes.dtype)
    batches = {kind: CacheBatch(shapes, kind, draw) for kind in (DECODE, PREFILL, MIXED)}
    heads = f"{shapes.heads}, {_kind(shapes.cache_dtype)}"
    found = [Operation("KV store", heads, _store(batches[PREFILL], draw), shapes.tolerance)]
    for spec in shapes.specs:
        shape = heads + described(spec)
        for name, kind in (("decode", DECODE), ("prefill", PREFILL), ("mixed", MIXED)):
            run = _attend(batches[kind], draw.values(sum(kind), shapes.num_heads, shapes.head_dim), spec)
            found.append(Operation(f"{name} attention", shape, run, shapes.tolerance))
        if shapes.num_planes == 2 and shapes.head_dim % 2 == 0:
            fused = _fused_decode(batches[DECODE], shapes, spec, draw)
            found.append(Operation("fused decode attention", shape, fused, 2 * shapes.tolerance))
    return found


def described(spec: AttentionSpec) -> str:
    """Return the attention rules in words, to be put at the end of a list, such as ", window 48, sinks"."""
    parts = [
        f"window {spec.sliding_window}" if spec.sliding_window else "",
        "soft cap" if spec.softcap else "",
        "sinks" if spec.sinks is not None else "",
        "ALiBi" if spec.alibi is not None else "",
    ]
    return "".join(f", {part}" for part in parts if part)


def layer_operations(shapes: ProofShapes, device: torch.device) -> list[Operation[LayerKernels]]:
    """Return the comparisons with plain torch for all operations of `LayerKernels` that a model with these shapes
    needs.
    """
    draw, hidden, tolerance = Draw(device, shapes.dtype), shapes.hidden, shapes.tolerance
    kind = _kind(shapes.dtype)
    found = [
        Operation("norm", f"hidden size {hidden}, {kind}", _norm(hidden, draw), tolerance),
        Operation("gate", f"width {WIDTH}, {kind}", _gate(draw), tolerance),
        Operation("other norms", f"hidden size {hidden}, {kind}", _other_norms(hidden, draw), tolerance),
        Operation("GELU gate", f"width {WIDTH}, {kind}", _gelu_gate(draw), tolerance),
    ]
    if shapes.head_dim % 2 == 0:
        heads = f"{shapes.heads}, {kind}"
        found.append(Operation("rotation", f"head size {shapes.head_dim}", _rotation(shapes.head_dim, draw), 1e-3))
        if shapes.num_planes == 2:
            found.append(Operation("rotary store", heads, _rotary_store(shapes, draw), tolerance))
    plain = (None, *shapes.formats)
    for form in plain:
        label = kind if form is None else form.label
        shape = f"hidden size {hidden}, {label}"
        found.append(Operation("product", shape, _product(hidden, form, draw), tolerance))
        found.append(Operation("fused products", shape, _fused_products(hidden, form, draw), 2 * tolerance))
    if shapes.has_experts:
        found.append(Operation("experts", f"hidden size {hidden}, {kind}", _experts(hidden, draw), tolerance))
    return found


def argmax_operations(shapes: ProofShapes, device: torch.device) -> list[Operation[Argmax]]:
    """Return the comparison with plain torch for the function that finds the largest logit of each row."""
    # Float32, because equal values are frequent in bfloat16, and the columns of equal values differ by implementation.
    logits = Draw(device, shapes.dtype).normal(3, min(shapes.vocab_size, 20000))

    def run(argmax: Argmax) -> tuple[Tensor, ...]:
        return (argmax(logits, torch.empty(len(logits), dtype=torch.int64, device=device)),)

    return [Operation("argmax", f"{logits.shape[1]} logits", run, 0.0)]


def _store(batch: CacheBatch, draw: Draw) -> Callable[[AttentionBackend], tuple[Tensor, ...]]:
    key, value = batch.new_rows(draw)

    def run(attention: AttentionBackend) -> tuple[Tensor, ...]:
        # The whole cache is compared: a kernel must leave all other blocks, and the other layer, as they were.
        stored = batch.tensor.clone()
        attention.store(key, value, batch.layer(stored, 1), batch.meta)
        return batch.read(stored)

    return run


def _attend(batch: CacheBatch, query: Tensor, spec: AttentionSpec) -> Callable[[AttentionBackend], tuple[Tensor, ...]]:
    def run(attention: AttentionBackend) -> tuple[Tensor, ...]:
        return (attention.attend(query, batch.layer(batch.tensor, 1), batch.meta, spec),)

    return run


def _fused_decode(
    batch: CacheBatch, shapes: ProofShapes, spec: AttentionSpec, draw: Draw
) -> Callable[[AttentionBackend], tuple[Tensor, ...] | None]:
    heads = draw.values(batch.num_tokens, shapes.num_heads + 2 * shapes.num_kv_heads, shapes.head_dim)
    angles = draw.normal(batch.num_tokens, shapes.head_dim // 2).repeat(1, 2)
    norm = Norm(draw.values(shapes.head_dim), EPS)
    new = NewHeads(heads, (angles.cos(), angles.sin()), norm, norm)

    def run(attention: AttentionBackend) -> tuple[Tensor, ...] | None:
        stored = batch.tensor.clone()
        cache = batch.layer(stored, 1)
        # The twin has no fused form; its separate steps specify the result.
        if type(attention) is ReferenceAttention:
            output = _separate_decode(attention, new, cache, batch.meta, spec)
            return (output, *batch.read(stored))
        found = attention.attend_new(new, cache, batch.meta, spec)
        return None if found is None else (found, *batch.read(stored))

    return run


def _separate_decode(
    attention: ReferenceAttention, new: NewHeads, cache: Tensor, meta: AttentionMetadata, spec: AttentionSpec
) -> Tensor:
    """Compute what `AttentionBackend.attend_new` specifies in separate steps of plain torch: norms, rotation and store,
    attention.
    """
    assert new.query_norm is not None and new.key_norm is not None
    num_kv_heads = cache.shape[2]
    num_heads = new.heads.shape[1] - 2 * num_kv_heads
    query, key, value = torch.split(new.heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    query = twin_layers.rms_norm(query, new.query_norm.weight, new.query_norm.eps)
    key = twin_layers.rms_norm(key, new.key_norm.weight, new.key_norm.eps)
    twin_layers.rotary_store(query, key, value, new.rotation, cache, meta.slots)
    return attention.attend(query, cache, meta, spec)


def _norm(hidden: int, draw: Draw) -> Callable[[LayerKernels], tuple[Tensor, ...]]:
    x, residual, weight = draw.values(ROWS, hidden), draw.values(ROWS, hidden), draw.values(hidden)

    def run(kernels: LayerKernels) -> tuple[Tensor, ...]:
        added = residual.clone()
        return (
            kernels.rms_norm(x, weight, EPS),
            kernels.rms_norm(x[:1], weight, EPS, unit_offset=True),
            kernels.rms_norm(x.clone(), weight, EPS, residual=added),
            added,
        )

    return run


def _other_norms(hidden: int, draw: Draw) -> Callable[[LayerKernels], tuple[Tensor, ...]]:
    x, weight, bias = draw.values(ROWS, hidden), draw.values(hidden), draw.values(hidden)
    kinds = (
        Norm(weight, EPS, bias, is_centered=True),
        Norm(weight, EPS, is_centered=True),
        Norm(weight, EPS, has_offset=True),
    )
    return lambda kernels: tuple(kernels.norm(x, kind) for kind in kinds)


def _gelu_gate(draw: Draw) -> Callable[[LayerKernels], tuple[Tensor, ...]]:
    x = draw.values(ROWS, 2 * WIDTH)
    return lambda kernels: (kernels.gelu_mul(x),)


def _gate(draw: Draw) -> Callable[[LayerKernels], tuple[Tensor, ...]]:
    x = draw.values(ROWS, 2 * WIDTH)
    return lambda kernels: (kernels.silu_mul(x),)


def _rotation(head_dim: int, draw: Draw) -> Callable[[LayerKernels], tuple[Tensor, ...]]:
    half = head_dim // 2
    frequencies = 10000.0 ** (-torch.arange(half, dtype=torch.float32, device=draw.device) / half)
    positions = torch.tensor([0, 1, 7, 100, 999, 3, 2], device=draw.device)
    return lambda kernels: kernels.rotation(positions, frequencies, 1.25)


def _rotary_store(shapes: ProofShapes, draw: Draw) -> Callable[[LayerKernels], tuple[Tensor, ...]]:
    batch = CacheBatch(shapes, PREFILL, draw)
    query = draw.values(batch.num_tokens, shapes.num_heads, shapes.head_dim)
    key, value = batch.new_rows(draw)
    angles = draw.normal(batch.num_tokens, shapes.head_dim // 2).repeat(1, 2)
    rotation = (angles.cos(), angles.sin())

    def run(kernels: LayerKernels) -> tuple[Tensor, ...]:
        stored, rotated = batch.tensor.clone(), query.clone()
        kernels.rotary_store(rotated, key.clone(), value, rotation, batch.layer(stored, 1), batch.meta.slots)
        return (rotated, *batch.read(stored))

    return run


class _Weights:
    """A random weight of one format for comparisons. It is packed once for each implementation, as a model's weights
    are.
    """

    def __init__(self, outputs: int, inputs: int, form: WeightFormat | None, draw: Draw) -> None:
        self._plain: Tensor | QuantizedWeight = (
            draw.values(outputs, inputs).div(inputs**0.5)
            if form is None
            else random_weight(form, outputs, inputs, draw)
        )
        self._packed: dict[int, Weight] = {}

    def of(self, kernels: LayerKernels) -> Weight:
        """Return the weight in the form that the implementation `kernels` has packed."""
        if id(kernels) not in self._packed:
            # `pack` takes over the memory of a quantized weight.
            plain = self._plain
            copy = (
                plain
                if isinstance(plain, Tensor)
                else replace(plain, codes=plain.codes.clone(), scales=plain.scales.clone())
            )
            self._packed[id(kernels)] = kernels.pack(copy)
        return self._packed[id(kernels)]


def _product(hidden: int, form: WeightFormat | None, draw: Draw) -> Callable[[LayerKernels], tuple[Tensor, ...]]:
    x, weights = draw.values(2 * ROWS + 3, hidden), _Weights(OUTPUTS, hidden, form, draw)
    bias = draw.values(OUTPUTS)

    def run(kernels: LayerKernels) -> tuple[Tensor, ...]:
        weight = weights.of(kernels)
        return (
            kernels.linear(x[:1], weight, None),
            kernels.linear(x[:ROWS], weight, bias),
            kernels.linear(x, weight, None),
        )

    return run


def _fused_products(hidden: int, form: WeightFormat | None, draw: Draw) -> Callable[[LayerKernels], tuple[Tensor, ...]]:
    """Return the comparison for products that are combined with other operations: an MLP between two norms, in which
    each product reads the form that the step before it has prepared.
    """
    rows, residual = draw.values(ROWS, hidden), draw.values(ROWS, hidden)
    up, down = _Weights(2 * WIDTH, hidden, form, draw), _Weights(hidden, WIDTH, form, draw)
    norm = Norm(draw.values(hidden).abs(), EPS)

    def run(kernels: LayerKernels) -> tuple[Tensor, ...]:
        first, second = up.of(kernels), down.of(kernels)
        results: list[Tensor] = []
        # Products of a single row have kernels of their own.
        for count in (1, ROWS):
            added = residual[:count].clone()
            x = kernels.norm_for(rows[:count].clone(), norm, first)
            gated = kernels.gated_linear(x, Linear(first, None), second)
            normed = kernels.linear_norm(gated, Linear(second, None), added, norm, first)
            results += [added, kernels.linear(normed, first, None)]
        return tuple(results)

    return run


def _experts(hidden: int, draw: Draw) -> Callable[[LayerKernels], tuple[Tensor, ...]]:
    count, top_k = 8, 2
    experts = Experts(
        draw.values(count, 2 * WIDTH, hidden).div(hidden**0.5), draw.values(count, hidden, WIDTH).div(WIDTH**0.5)
    )
    x, logits, gated = draw.values(ROWS, hidden), draw.values(ROWS, count), draw.values(ROWS, count + 1)
    # Given to `mix` instead of what a kernel has chosen: equal logits may be chosen in any order.
    weights, chosen = twin_layers.route(logits, top_k, renormalize=True)
    assert isinstance(experts.gate_up, Tensor) and isinstance(experts.down, Tensor)
    pair, rows = Experts(experts.gate_up[:top_k], experts.down[:top_k]), draw.values(EXPERT_ROWS, hidden)
    factors = draw.normal(EXPERT_ROWS, top_k).sigmoid()
    both = torch.arange(top_k, dtype=torch.int32, device=draw.device).repeat(EXPERT_ROWS, 1)

    def run(kernels: LayerKernels) -> tuple[Tensor, ...]:
        found = kernels.route(logits, top_k, renormalize=True)[0]
        shared = kernels.route(gated, top_k, renormalize=False, num_shared=1, has_gate=True)[0]
        # One token alone is mixed in another way.
        one = kernels.mix(x[:1], weights[:1], chosen[:1], experts)
        mixed = kernels.mix(x, weights, chosen, experts)
        # So are experts with many rows.
        many = kernels.mix(rows, factors, both, pair)
        return mixed, one, many, found.sort(dim=-1).values, shared.sort(dim=-1).values

    return run


def _kind(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
