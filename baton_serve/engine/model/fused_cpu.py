"""Computes all layers by one C++ call on CPUs with bf16 instructions, and decides which decoders with ordinary MLPs
fit.

Weights may be bf16 or quantized. Layers may have the gated delta rule, attention with a gate (Qwen3.5), or latent
attention (Youtu-LLM).
"""

import ctypes
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from baton_serve.engine.kernels import AttentionSpec, Linear, Norm
from baton_serve.engine.kernels.cpu.decoder import (
    MAX_TAPS,
    CpuDecoder,
    DecoderLayer,
    DecoderRules,
    DeltaRule,
    DeltaStates,
    LatentProjections,
)
from baton_serve.engine.kernels.cpu.layers import CpuLayers
from baton_serve.engine.kernels.cpu.linear import PANEL, Matrix, can_pack, gated, has_packed_linear, pack, pack_codes
from baton_serve.engine.kernels.quantized_weights import QuantizedWeight
from baton_serve.engine.kv.state_memory import StateViews
from baton_serve.engine.model import fused_layers
from baton_serve.engine.model.batch_inputs import StepInputs, StepStates, added_rows, embedded
from baton_serve.engine.model.families import (
    GELU_TANH,
    FamilyDescription,
    describe,
    rotations_of,
    scales_of,
)
from baton_serve.engine.model.fused_mixers import (
    GatedAttention,
    GatedDelta,
    LatentAttention,
    MixerTools,
    is_gated_attention,
    is_gated_delta,
    is_latent_attention,
    is_mixer,
    pack_mixer,
)
from baton_serve.engine.model.loaded_model import LoadedModel
from baton_serve.engine.model.mrope_axes import row_angles
from baton_serve.engine.model.quantized.modules import QuantizedLinear, install


def fits(model: LoadedModel, library: ctypes.CDLL) -> bool:
    """Return whether `CpuForward`, which computes all layers by one C++ call, supports this model. Otherwise its layers
    are computed one by one.
    """
    if model.dtype != torch.bfloat16 or not has_packed_linear(library) or not fused_layers.fits(model.module):
        return False
    module = cast(Any, model.module)
    family = describe(module)
    assert family is not None  # `fused_layers.fits` is True
    if not _fits_mixers(model, family):
        return False
    # The C++ decoder takes one epsilon for all norms and reads pairs of bf16.
    norms = {
        norm.eps for layer in module.model.layers for norm in _norms(layer, family).values() if norm is not None
    } | {family.norm_of(module.model.norm).eps}
    sizes = (module.config.hidden_size, model.head_dim)
    is_dense = all(_is_dense(layer, family) for layer in module.model.layers) and _can_pack_all(module.lm_head)
    return not any(size % 2 for size in sizes) and len(norms) == 1 and is_dense


def _fits_mixers(model: LoadedModel, family: FamilyDescription) -> bool:
    """Return whether the C++ decoder supports attention and linear attention of all layers: attention, with a gate or
    without, or the gated delta rule with states of known types, with at least one layer of attention; or latent
    attention in all layers.
    """
    mixers = [family.attention_of(layer) for layer in cast(Any, model.module).model.layers]
    if all(map(is_latent_attention, mixers)):
        return all(map(_can_pack_latents, mixers))
    recurrent = [number for number, mixer in enumerate(mixers) if is_gated_delta(mixer)]
    attending = [number for number in range(len(mixers)) if number not in recurrent]
    if any(is_mixer(mixers[number]) and not is_gated_attention(mixers[number]) for number in attending):
        return False
    if not recurrent:
        return True
    states = {(part.layer, part.kind, part.index): part for part in model.states}
    has_known_states = all(
        part.dtype == (torch.bfloat16 if part.kind == "conv" else torch.float32) for part in states.values()
    )
    taps = [part.shape[-1] for part in states.values() if part.kind == "conv"]
    wanted = {(number, kind, 0) for number in recurrent for kind in ("conv", "recurrent")}
    has_its_kv = bool(attending) and list(model.attending_layers) == attending
    return has_its_kv and set(states) == wanted and has_known_states and max(taps) <= MAX_TAPS


def _can_pack_latents(attention: Any) -> bool:
    """Return whether the C++ library can multiply the heads of a module of latent attention by packed weights, whose
    rows and columns are pairs of numbers and whole panels.
    """
    sizes = (attention.qk_nope_head_dim, attention.qk_rope_head_dim, getattr(attention, "q_lora_rank", None) or 0)
    return not any(size % 2 for size in sizes) and attention.kv_lora_rank % PANEL == attention.v_head_dim % PANEL == 0


def _is_dense(layer: Any, family: FamilyDescription) -> bool:
    """Return whether a decoder layer has an ordinary MLP and only weights that the C++ library can pack. The MLP's
    width must be a multiple of 16, as gate and up are interleaved by 16 rows.
    """
    down = getattr(getattr(layer, family.mlp), family.down, None)
    if not isinstance(down, nn.Linear | QuantizedLinear) or down.in_features % 16:
        return False
    attention = family.attention_of(layer)
    if is_gated_delta(attention) and attention.num_v_heads * attention.head_v_dim % 2:
        return False  # products read and write pairs of columns
    return _can_pack_all(layer)


def _norms(layer: Any, family: FamilyDescription) -> dict[str, Norm | None]:
    """Return the norms of a transformers decoder layer by their field names in `DecoderLayer`; None for those it does
    not have.
    """
    return {
        "input_norm": family.norm_at(layer, family.input_norm),
        "attention_norm": family.norm_at(layer, family.attention_norm),
        "query_norm": family.norm_at(family.attention_of(layer), "q_norm"),
        "key_norm": family.norm_at(family.attention_of(layer), "k_norm"),
        "mlp_norm": family.norm_at(layer, family.mlp_norm),
        "mlp_output_norm": family.norm_at(layer, family.mlp_output_norm),
    }


def _can_pack_all(module: nn.Module) -> bool:
    """Return whether the C++ library can pack all quantized weights in a module; weights in bf16 it always can."""
    quantized = (part.weight for part in module.modules() if isinstance(part, QuantizedLinear))
    return all(isinstance(weight, QuantizedWeight) and can_pack(weight) for weight in quantized)


class CpuForward:
    """Implements `Forward` by one call of the C++ library for all layers. It takes the weights out of the transformers
    module layer by layer, so that each is in memory only once.
    """

    is_capturable = False
    parts = None
    adapter_slots = None

    def __init__(self, model: LoadedModel, kernels: CpuLayers, tools: MixerTools) -> None:
        module = cast(Any, model.module)
        self._embed: Callable[[Tensor], Tensor] = module.model.embed_tokens
        family = describe(module)
        assert family is not None  # `fits` is True
        self._scales = scales_of(family, module.config)
        rotations = rotations_of(family, module)
        self._frequencies = rotations.frequencies[:, None]  # [num_rotations, 1, rotary_dim / 2]
        self._axes = rotations.axes
        self._rotation_scaling = torch.tensor(rotations.scaling)[:, None, None]
        self._has_rotation_scaling = set(rotations.scaling) != {1.0}
        specs = dict(zip(model.attending_layers, model.specs, strict=True))
        layers = [
            _take(kernels.library, family, layer, tools, specs.get(number), rotation)
            for number, (layer, rotation) in enumerate(zip(module.model.layers, rotations.of_layer, strict=True))
        ]
        self._recurrent = [number for number, layer in enumerate(layers) if layer.delta is not None]
        self._views: StateViews | None = None
        self._states: list[tuple[Tensor, Tensor]] = []
        rules = DecoderRules(
            model.num_kv_heads,
            family.norm_of(module.model.norm),
            self._scales.residual,
            is_gelu=getattr(module.config, family.activation) == GELU_TANH,
            has_no_gate=family.up is not None,
            is_parallel=family.is_parallel,
            is_interleaved=family.is_interleaved,
            has_wide_norms=family.has_wide_norms,
        )
        self._decoder = CpuDecoder(kernels.library, layers, _take_head(module, kernels), rules)

    def __call__(self, inputs: StepInputs, layers: list[Tensor]) -> Tensor:
        if inputs.position_ids.dim() == 2 and self._axes is not None:
            angles = row_angles(inputs.position_ids, self._axes, self._frequencies)
        else:
            angles = inputs.position_ids[:, None].float() * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        if self._has_rotation_scaling:
            cos, sin = cos * self._rotation_scaling, sin * self._rotation_scaling
        hidden = embedded(self._embed, inputs)
        if self._scales.embedding != 1.0:
            hidden = hidden * self._scales.embedding
        rows, after_layer = inputs.logit_rows, inputs.after_layer
        added = added_rows(inputs, hidden)
        self._decoder.use_groups(inputs.layer_metas)
        if inputs.states is not None:
            self._decoder.use_states(self._states_of(inputs.states))
        logits = self._decoder(hidden, (cos, sin), layers, inputs.meta, rows, after_layer, added)
        return self._scales.finish(logits)

    def _states_of(self, states: StepStates) -> DeltaStates:
        """Return the recurrent states of a step, of the layers that have them."""
        if states.views is not self._views:
            self._views = views = states.views
            self._states = [(views[number]["conv", 0], views[number]["recurrent", 0]) for number in self._recurrent]
        return DeltaStates(states.slots, self._states, states.checkpoints)


def _take(
    library: ctypes.CDLL,
    family: FamilyDescription,
    layer: Any,
    tools: MixerTools,
    spec: AttentionSpec | None,
    rotation: int,
) -> DecoderLayer:
    """Pack the weights of one transformers decoder layer, and free them in the module. `rotation` is the number of the
    layer's rotary embedding.
    """
    attention, mlp = family.attention_of(layer), getattr(layer, family.mlp)
    mixed = pack_mixer(attention, tools)
    if mixed is None:
        is_merged = hasattr(attention, "qkv_proj")
        qkv = [attention.qkv_proj] if is_merged else [attention.q_proj, attention.k_proj, attention.v_proj]
        first, output = _packed(library, qkv), _packed(library, [attention.o_proj])
    else:
        first, output = _matrix(mixed.first), _packed(library, [mixed.output])
    mixer = None if mixed is None else mixed.mixer
    gate_up = [getattr(mlp, name) for name in family.first_products(mlp)]
    taken = DecoderLayer(
        **_norms(layer, family),
        qkv=first,
        output=output,
        gate_up=_packed(library, gate_up, takes_turns=family.up is None),
        down=_packed(library, [getattr(mlp, family.down)]),
        spec=spec,
        rotation=rotation,
        has_output_gate=isinstance(mixer, GatedAttention),
        delta=_delta_rule(mixer) if isinstance(mixer, GatedDelta) else None,
        latent=_latent_projections(mixer) if isinstance(mixer, LatentAttention) else None,
    )
    _empty(layer)
    return taken


def _matrix(product: Linear) -> Matrix:
    """Return the packed weight and the bias of a mixer's first product as the C++ decoder reads them."""
    assert isinstance(product.weight, Matrix)  # `fits` has checked it
    return replace(product.weight, bias=product.bias)


def _delta_rule(mixer: GatedDelta) -> DeltaRule:
    return DeltaRule(
        convolution=mixer.weight.contiguous(),
        log_rate=mixer.log_rate.contiguous(),
        step_bias=mixer.step_bias.contiguous(),
        norm=mixer.norm,
        num_heads=mixer.num_heads,
        num_key_heads=mixer.num_key_heads,
        key_size=mixer.key_size,
        value_size=mixer.value_size,
    )


def _latent_projections(mixer: LatentAttention) -> LatentProjections:
    keys, values = mixer.keys, mixer.values
    assert isinstance(keys, Matrix) and isinstance(values, Matrix)  # `fits` has checked it
    return LatentProjections(
        keys=keys,
        values=values,
        query=None if mixer.query is None else _matrix(mixer.query),
        norm=mixer.norm,
        query_norm=mixer.query_norm,
        num_heads=mixer.num_heads,
        key_size=mixer.key_size,
        value_size=mixer.value_size,
        is_interleaved=mixer.is_interleaved,
        keeps_order=mixer.keeps_order,
    )


def _take_head(module: Any, kernels: CpuLayers) -> Matrix:
    """Pack the weight of the output head, and free it in the module.

    A quantized head that is tied to the embedding stays in the module, packed.
    """
    head = module.lm_head
    if isinstance(head, QuantizedLinear):
        install(head, kernels)
        assert isinstance(head.weight, Matrix)  # `fits` has checked it
        return replace(head.weight, bias=head.bias)
    matrix = pack(kernels.library, [head.weight.data], head.bias)
    # A tied weight is also the embedding's table, which is still needed.
    if head.weight is not getattr(module.model.embed_tokens, "weight", None):
        _empty(head)
    return matrix


def _packed(library: ctypes.CDLL, parts: list[Any], *, takes_turns: bool = False) -> Matrix:
    """Join the weights of some linear layers along their outputs, and pack them for the C++ library.

    `takes_turns` interleaves gate and up in runs of 16 rows; the two may be one linear layer already.
    """
    quantized = [part.weight for part in parts if isinstance(part.weight, QuantizedWeight)]
    biases = [part.bias.data for part in parts if part.bias is not None]
    bias = torch.cat(biases) if biases else None
    # A panel of the kernel must hold gate and up of the same outputs to compute SiLU(gate) * up immediately.
    if quantized:
        return pack_codes(library, quantized, bias, takes_turns=takes_turns)
    weights = [part.weight.data for part in parts]
    if takes_turns and len(weights) == 1:
        weights = list(weights[0].chunk(2))
    return pack(library, weights, gated(bias) if takes_turns and bias is not None else bias, takes_turns=takes_turns)


def _empty(module: nn.Module) -> None:
    """Free the weights of all linear layers in a module."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            part.weight.data = torch.empty(0)
        elif isinstance(part, QuantizedLinear):
            part.weight = torch.empty(0)
