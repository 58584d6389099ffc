"""Decides which attention of fused layers differs from Llama's, packs and computes it: gated delta rule, gated
attention, MLA.

All products of a mixer that read its input are one, whose rows are put into the order in which the kernels read the
outputs. A mixer takes the outputs of that product, and returns the input of the layer's output product.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from baton_serve.engine.kernels import (
    AttentionBackend,
    AttentionSpec,
    DeltaHeads,
    LatentRows,
    LayerKernels,
    Linear,
    MixerKernels,
    NewHeads,
    Norm,
    PackedWeight,
)
from baton_serve.engine.model.batch_inputs import StepInputs
from baton_serve.engine.model.families import FamilyDescription
from baton_serve.engine.model.mixture_of_experts import shared_expert

Module: TypeAlias = Any  # transformers' modules are untyped bags of attributes


@dataclass(frozen=True, slots=True)
class MixerTools:
    """The kernels by which a decoder layer's mixer (attention or linear attention) computes."""

    layers: LayerKernels
    mixers: MixerKernels
    attention: AttentionBackend


@dataclass(frozen=True, slots=True)
class MixerStep:
    """A step as the mixer of one layer reads it: the step's inputs, and the layer's cos, sin, view of the KV cache and
    rules.
    """

    inputs: StepInputs
    rotation: tuple[Tensor, Tensor]
    cache: Tensor | None
    """The view of the layer's KV; None for layers with recurrent states."""
    spec: AttentionSpec | None


class TokenMixer(Protocol):
    """Attention, linear attention or what else combines each token with earlier ones of its sequence, in packed
    form.
    """

    def __call__(self, product: Tensor, step: MixerStep) -> Tensor:
        """Return the input of the layer's output projection, [num_tokens, width]. `product` is the output of the
        mixer's joined input projections, [num_tokens, outputs].
        """
        ...


@dataclass(frozen=True, slots=True)
class PackedMixer:
    """A layer's attention or linear attention in packed form: the joined input projections `first`, the computation
    `mixer`, and the output projection.
    """

    first: Linear
    mixer: TokenMixer
    output: nn.Linear


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """Implements `TokenMixer` for linear attention by the gated delta rule, behind a short convolution and before a
    gated norm (Qwen3-Next, Qwen3.5).
    """

    tools: MixerTools
    layer: int
    weight: Tensor  # of the convolution, [channels, taps]
    log_rate: Tensor
    step_bias: Tensor
    norm: Norm
    num_heads: int
    num_key_heads: int
    key_size: int
    value_size: int

    def __call__(self, product: Tensor, step: MixerStep) -> Tensor:
        kernels, states = self.tools.mixers, step.inputs.states
        assert states is not None
        sequences = states.sequences(step.inputs.meta)
        # The order in which `_gated_delta` has put the rows of the product.
        values = self.num_heads * self.value_size
        sizes = [len(self.weight), values, self.num_heads, self.num_heads]
        qkv, gate, beta, steps = torch.split(product, sizes, dim=1)
        views = states.views[self.layer]
        qkv = kernels.convolve(qkv, self.weight, None, views["conv", 0], sequences, has_silu=True)
        heads = DeltaHeads(qkv, beta, steps, self.log_rate, self.step_bias, self.num_key_heads, self.key_size)
        output = kernels.delta_rule(heads, views["recurrent", 0], sequences)
        return kernels.gated_norm(output, gate.view(output.shape), self.norm).flatten(1)


@dataclass(frozen=True, slots=True)
class GatedAttention:
    """Implements `TokenMixer` for attention whose output is multiplied by the sigmoid of a gate; the query projection
    computes the gate too (Qwen3-Next, Qwen3.5).
    """

    tools: MixerTools
    num_heads: int
    num_kv_heads: int
    head_dim: int
    query_norm: Norm
    key_norm: Norm
    fused_norms: tuple[Norm, Norm] | None
    """The same norms as the kernel for new heads reads them; None: no such kernel is asked."""

    def __call__(self, product: Tensor, step: MixerStep) -> Tensor:
        assert step.cache is not None and step.spec is not None
        count = self.num_heads + 2 * self.num_kv_heads
        heads, gate = torch.split(product, [count * self.head_dim, self.num_heads * self.head_dim], dim=1)
        attended = self._attend(heads.view(len(heads), count, self.head_dim), step, step.cache, step.spec)
        return self.tools.mixers.sigmoid_gate(attended.flatten(1), gate)

    def _attend(self, heads: Tensor, step: MixerStep, cache: Tensor, spec: AttentionSpec) -> Tensor:
        attention, layers, meta = self.tools.attention, self.tools.layers, step.inputs.meta
        if self.fused_norms is not None:
            new = NewHeads(heads, step.rotation, *self.fused_norms)
            # It returns None for prompts, and where separate steps are as fast.
            attended = attention.attend_new(new, cache, meta, spec)
            if attended is not None:
                return attended
        query, key, value = torch.split(heads, [self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        query, key = layers.norm(query, self.query_norm), layers.norm(key, self.key_norm)
        layers.rotary_store(query, key, value, step.rotation, cache, meta.slots)
        return attention.attend(query, cache, meta, spec)


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Implements `TokenMixer` for latent attention (MLA) over cached latents; see
    `attention_adapters.MLAProjection`.
    """

    tools: MixerTools
    num_heads: int
    keys: Tensor | PackedWeight  # [num_heads, key size without rotation, rank], as `pack_heads` returns it
    values: Tensor | PackedWeight  # [num_heads, rank, value size]
    key_size: int
    value_size: int
    norm: Norm
    query_norm: Norm | None
    query: Linear | None
    """The second product of the query; None: it has one only."""
    is_interleaved: bool
    keeps_order: bool

    def __call__(self, product: Tensor, step: MixerStep) -> Tensor:
        assert step.cache is not None and step.spec is not None
        attention, layers, meta = self.tools.attention, self.tools.layers, step.inputs.meta
        # `width` is the rank and the rotary size together: the columns of a row of the cache.
        width, rank = step.cache.shape[4], len(self.norm.weight)
        asked, latents = product[:, :-width], product[:, -width:]
        if self.query is not None and self.query_norm is not None:
            asked = layers.linear(layers.norm(asked, self.query_norm), self.query.weight, self.query.bias)
        asked = asked.view(len(asked), self.num_heads, -1)
        query = asked.new_empty(len(asked), self.num_heads, width)
        rows = LatentRows(latents, asked, self.norm, step.rotation, self.is_interleaved, self.keeps_order)
        # The rotated parts of the query are stored directly where attention reads them.
        new = self.tools.mixers.latent_rows(rows, query)
        # Keys and values are the same rows: the values are the first `rank` columns of the keys.
        attention.store(new, new, step.cache, meta)
        # The up-projection of the keys is applied to the query, and that of the values to the result.
        self.tools.mixers.multiply_heads(asked[..., : self.key_size], self.keys, query[..., :rank])
        attended = attention.attend(query, step.cache, meta, step.spec)
        output = attended.new_empty(len(attended), self.num_heads, self.value_size)
        self.tools.mixers.multiply_heads(attended, self.values, output)
        return output.flatten(1)


def pack_mixer(module: Module, tools: MixerTools) -> PackedMixer | None:
    """Join the input projections of an attention module; None if its class is not one of linear, gated or latent
    attention that this file supports.

    If the rows of the joined weight are in another order than the module's, the module loses its weights and cannot
    compute any more. Otherwise its weights become views of the joined one.
    """
    make = _MIXERS.get(type(module).__name__)
    return None if make is None else make(module, tools)


def is_mixer(module: Module) -> bool:
    """Return whether `pack_mixer` supports the class of this module: linear, gated or latent attention."""
    return type(module).__name__ in _MIXERS


def has_mixers(module: Module, family: FamilyDescription) -> bool:
    """Return whether any layer of a transformers model of this family has a module that `pack_mixer` supports."""
    return any(is_mixer(family.attention_of(layer)) for layer in module.model.layers)


def is_gated_delta(module: Module) -> bool:
    """Return whether `pack_mixer` returns `GatedDelta` for this module."""
    return _MIXERS.get(type(module).__name__) is _gated_delta


def is_gated_attention(module: Module) -> bool:
    """Return whether `pack_mixer` returns `GatedAttention` for this module."""
    return _MIXERS.get(type(module).__name__) is _gated_attention


def is_latent_attention(module: Module) -> bool:
    """Return whether `pack_mixer` returns `LatentAttention` for this module."""
    return _MIXERS.get(type(module).__name__) is _latent_attention


def can_pack_mixer(module: Module) -> bool:
    """Return whether all linear layers of an attention module are plain, not quantized ones, as `pack_mixer` needs."""
    products = [part for name, part in module.named_modules() if name.endswith("proj") or "_proj_" in name]
    # The type must be exact: subclasses of nn.Linear may compute something else.
    return all(type(part) is nn.Linear for part in products)


def _gated_delta(module: Module, tools: MixerTools) -> PackedMixer:
    key_heads, heads = module.num_k_heads, module.num_v_heads
    mixer = GatedDelta(
        tools,
        layer=module.layer_idx,
        # torch has the weight of a convolution of single channels as [channels, 1, taps].
        weight=module.conv1d.weight.data[:, 0],
        # transformers computes the decay in float32 too.
        log_rate=module.A_log.data.float(),
        step_bias=module.dt_bias.data.float(),
        norm=Norm(module.norm.weight.data, module.norm.variance_epsilon),
        num_heads=heads,
        num_key_heads=key_heads,
        key_size=module.head_k_dim,
        value_size=module.head_v_dim,
    )
    if hasattr(module, "in_proj_qkv"):
        parts = [module.in_proj_qkv, module.in_proj_z, module.in_proj_b, module.in_proj_a]
        return PackedMixer(_joined(parts, None, tools.layers), mixer, module.out_proj)
    # Qwen3-Next has the rows of query, key, values and gates of one key head side by side.
    group, keys = heads // key_heads, module.head_k_dim
    values = group * module.head_v_dim
    rows = torch.split(
        torch.arange(key_heads * 2 * (keys + values)).view(key_heads, -1), [keys, keys, values, values], dim=1
    )
    gates = torch.split(torch.arange(2 * heads).view(key_heads, -1), [group, group], dim=1)
    # In the joined weight, the rows of `in_proj_ba` come after all rows of `in_proj_qkvz`.
    order = torch.cat(
        [*(part.flatten() for part in rows), *(part.flatten() + 2 * len(rows[0]) * (keys + values) for part in gates)]
    )
    return PackedMixer(_joined([module.in_proj_qkvz, module.in_proj_ba], order, tools.layers), mixer, module.out_proj)


def _gated_attention(module: Module, tools: MixerTools) -> PackedMixer:
    size = module.head_dim
    # The numbers of heads follow from the weights, of which a rank has a part.
    heads, kv_heads = module.o_proj.in_features // size, module.k_proj.out_features // size
    query, key = (Norm(part.weight.data, part.eps, has_offset=True) for part in (module.q_norm, module.k_norm))
    fused: tuple[Norm, Norm] | None = None
    if query.weight.device.type != "cpu":
        # The kernel for new heads multiplies by the weight alone.
        fused = (Norm(query.weight.float() + 1.0, query.eps), Norm(key.weight.float() + 1.0, key.eps))
    mixer = GatedAttention(tools, heads, kv_heads, size, query, key, fused)
    # Each head of the query's product is followed by its gate.
    both = torch.arange(2 * heads * size).view(heads, 2, size)
    rest = torch.arange(2 * kv_heads * size) + 2 * heads * size
    order = torch.cat([both[:, 0].flatten(), rest, both[:, 1].flatten()])
    return PackedMixer(
        _joined([module.q_proj, module.k_proj, module.v_proj], order, tools.layers), mixer, module.o_proj
    )


def _latent_attention(module: Module, tools: MixerTools) -> PackedMixer:
    up = module.kv_b_proj.weight.data
    heads = up.shape[0] // (module.qk_nope_head_dim + module.v_head_dim)
    keys, values = torch.split(up.view(heads, -1, up.shape[1]), [module.qk_nope_head_dim, module.v_head_dim], dim=1)
    # DeepSeek V2 rotates pairs of neighbours as complex numbers, and leaves them in their places.
    is_complex = type(module).__name__ == "DeepseekV2Attention"
    has_two = module.q_proj is None if hasattr(module, "q_proj") else True
    mixer = LatentAttention(
        tools,
        heads,
        tools.mixers.pack_heads(keys),
        tools.mixers.pack_heads(values.transpose(1, 2)),
        key_size=module.qk_nope_head_dim,
        value_size=module.v_head_dim,
        norm=_plain_norm(module.kv_a_layernorm),
        query_norm=_plain_norm(module.q_a_layernorm) if has_two else None,
        query=in_kernel_order(
            Linear(module.q_b_proj.weight.data, _bias(module.q_b_proj)), [module.q_b_proj], tools.layers
        )
        if has_two
        else None,
        is_interleaved=is_complex or bool(module.config.rope_interleave),
        keeps_order=is_complex,
    )
    if not isinstance(mixer.keys, Tensor) and not isinstance(mixer.values, Tensor):
        _free([module.kv_b_proj])
    asking = module.q_a_proj if has_two else module.q_proj
    return PackedMixer(_joined([asking, module.kv_a_proj_with_mqa], None, tools.layers), mixer, module.o_proj)


def _plain_norm(module: Module) -> Norm:
    return Norm(module.weight.data, float(module.variance_epsilon))


def _bias(module: nn.Linear) -> Tensor | None:
    return None if module.bias is None else module.bias.data


def _joined(parts: list[nn.Linear], order: Tensor | None, kernels: LayerKernels) -> Linear:
    """Join the weights of some linear layers along their outputs, with the rows in `order`. The layers' weights become
    views of the result if `order` is None and `kernels` read the rows in this order; otherwise they are freed.
    """
    weight = torch.cat([part.weight.data for part in parts])
    bias: Tensor | None = None
    if any(part.bias is not None for part in parts):
        biases = (
            part.bias.data if part.bias is not None else part.weight.new_zeros(part.out_features) for part in parts
        )
        bias = torch.cat(list(biases))
    if order is None:
        # With views, the modules can still compute, and each weight is in memory once.
        for part, rows in zip(parts, torch.split(weight, [part.out_features for part in parts]), strict=True):
            part.weight.data = rows
        return in_kernel_order(Linear(weight, bias), parts, kernels)
    _free(parts)
    order = order.to(weight.device)
    return in_kernel_order(Linear(weight[order], None if bias is None else bias[order]), [], kernels)


def in_kernel_order(product: Linear, parts: Iterable[nn.Linear], kernels: LayerKernels) -> Linear:
    """Return a linear layer with its weight, a plain tensor, in the form that `kernels` read fastest. If that is
    another one, the weights of `parts`, modules that have the same memory, are freed.
    """
    assert isinstance(product.weight, Tensor)
    packed = kernels.pack(product.weight)
    if packed is not product.weight:
        _free(parts)
    return Linear(packed, product.bias)


def _free(parts: Iterable[nn.Linear]) -> None:
    for part in parts:
        part.weight.data = part.weight.data.new_empty(0)


_MIXERS: dict[str, Callable[[Module, MixerTools], PackedMixer]] = {
    "DeepseekV2Attention": _latent_attention,
    "DeepseekV3Attention": _latent_attention,
    "Glm4MoeLiteAttention": _latent_attention,
    "Qwen3NextAttention": _gated_attention,
    "Qwen3NextGatedDeltaNet": _gated_delta,
    "Qwen3_5Attention": _gated_attention,
    "Qwen3_5GatedDeltaNet": _gated_delta,
    "Qwen3_5MoeAttention": _gated_attention,
    "Qwen3_5MoeGatedDeltaNet": _gated_delta,
    "YoutuAttention": _latent_attention,
}
"""Packs the modules of these classes, which were compared with transformers."""


def packed_parts(layer: Any, family: FamilyDescription) -> Iterator[list[nn.Linear]]:
    """Iterate over the groups of linear layers in a decoder layer that are joined into one product, such as query, key
    and value.
    """
    attention = family.attention_of(layer)
    if not is_mixer(attention) and not hasattr(attention, "qkv_proj"):
        yield [attention.q_proj, attention.k_proj, attention.v_proj]
    mlp = getattr(layer, family.mlp)
    for part in (mlp, shared_expert(mlp)):
        if hasattr(part, "gate_proj") and hasattr(part, "up_proj"):
            yield [part.gate_proj, part.up_proj]
