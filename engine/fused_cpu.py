"""Llama-shaped decoders on a CPU that multiplies bf16: the fused layers' weights, packed for one call of C++.

Weights may be bf16 or quantized, each in its own way.
"""

import ctypes
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from engine import fused
from engine.inputs import StepInputs
from engine.kernels import AttentionSpec, Linear, reference_layers
from engine.kernels.cpu_decoder import CpuDecoder, DecoderLayer
from engine.kernels.cpu_layers import CpuLayers
from engine.kernels.cpu_linear import Matrix, can_pack, gated, has_packed_linear, pack, pack_codes
from engine.kernels.quantized import QuantizedWeight
from engine.model import LoadedModel
from engine.quantization import QuantizedLinear, install


def fits(model: LoadedModel, library: ctypes.CDLL) -> bool:
    """Whether `CpuForward` computes this model: otherwise its layers run one by one."""
    if model.dtype != torch.bfloat16 or not has_packed_linear(library) or not fused.fits(model.module):
        return False
    module = cast(Any, model.module)
    norms = {part.variance_epsilon for part in module.modules() if hasattr(part, "variance_epsilon")}
    sizes = (module.config.hidden_size, model.head_dim)
    are_sizes_right = module.config.intermediate_size % 16 == 0 and not any(size % 2 for size in sizes)
    is_dense = all(_is_dense(layer) for layer in module.model.layers) and _can_pack_all(module.lm_head)
    return are_sizes_right and len(norms) == 1 and is_dense


def _is_dense(layer: Any) -> bool:
    """All its products, and nothing else, can be packed."""
    if not isinstance(getattr(layer.mlp, "down_proj", None), nn.Linear | QuantizedLinear):
        return False
    return _can_pack_all(layer)


def _can_pack_all(module: nn.Module) -> bool:
    quantized = (part.weight for part in module.modules() if isinstance(part, QuantizedLinear))
    return all(isinstance(weight, QuantizedWeight) and can_pack(weight) for weight in quantized)


class CpuForward:
    """Fits `Forward`. Takes the weights out of the module, layer by layer: they are in memory once."""

    is_capturable = False

    def __init__(self, model: LoadedModel, kernels: CpuLayers) -> None:
        module = cast(Any, model.module)
        self._embed: Callable[[Tensor], Tensor] = module.model.embed_tokens
        self._rotary: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = module.model.rotary_emb
        self._like = torch.empty(0)
        norm = fused.norm_of(module.model.norm)
        layers = [_take(layer, spec) for layer, spec in zip(module.model.layers, model.specs, strict=True)]
        head = _take_head(module, kernels)
        library, kv_heads = kernels.library, model.num_kv_heads
        self._decoder = CpuDecoder(library, layers, norm.weight, head, norm.eps, kv_heads)

    def __call__(self, inputs: StepInputs, layers: list[Tensor]) -> Tensor:
        cos, sin = self._rotary(self._like, inputs.position_ids[None])
        return self._decoder(self._embed(inputs.input_ids), (cos[0], sin[0]), layers, inputs.meta, inputs.logit_rows)


def _take(layer: Any, spec: AttentionSpec) -> DecoderLayer:
    parts = fused.pack_layer(layer, reference_layers)
    assert parts.gate_up is not None and parts.down is not None  # `fits` saw to it
    taken = DecoderLayer(
        input_norm=parts.input_norm.weight,
        query_norm=None if parts.query_norm is None else parts.query_norm.weight,
        key_norm=None if parts.key_norm is None else parts.key_norm.weight,
        mlp_norm=parts.mlp_norm.weight,
        qkv=_packed(parts.qkv),
        output=_packed(parts.output),
        gate_up=_packed(_with_turns(parts.gate_up)),
        down=_packed(parts.down),
        spec=spec,
    )
    _empty(layer)
    return taken


def _take_head(module: Any, kernels: CpuLayers) -> Matrix:
    """A quantized head may be the embedding's table too: then it stays, in the order of the products."""
    head = module.lm_head
    if isinstance(head, QuantizedLinear):
        install(head, kernels)
        assert isinstance(head.weight, Matrix)  # `fits` saw to it
        return replace(head.weight, bias=head.bias)
    matrix = pack(head.weight.data, head.bias)
    if head.weight is not getattr(module.model.embed_tokens, "weight", None):
        _empty(head)
    return matrix


def _with_turns(linear: Linear) -> Linear:
    bias = None if linear.bias is None else gated(linear.bias)
    if isinstance(linear.weight, QuantizedWeight):
        order = gated(torch.arange(linear.weight.outputs))
        codes, zeros = linear.weight.codes, linear.weight.zeros
        turned = replace(
            linear.weight,
            codes=codes.view(torch.uint8)[order].view(codes.dtype),  # no index kernel knows float8
            scales=linear.weight.scales[order],
            zeros=None if zeros is None else zeros[order],
        )
        return Linear(turned, bias)
    assert isinstance(linear.weight, Tensor)
    return Linear(gated(linear.weight.data), bias)


def _packed(linear: Linear) -> Matrix:
    if isinstance(linear.weight, QuantizedWeight):
        return pack_codes(linear.weight, linear.bias)
    assert isinstance(linear.weight, Tensor)
    return pack(linear.weight.data, linear.bias)


def _empty(module: nn.Module) -> None:
    for part in module.modules():
        if isinstance(part, nn.Linear):
            part.weight.data = torch.empty(0)
        elif isinstance(part, QuantizedLinear):
            part.weight = torch.empty(0)
