"""Llama-shaped decoders on a CPU that multiplies bf16: the fused layers' weights, packed for one call of C++."""

import ctypes
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from engine import fused
from engine.inputs import StepInputs
from engine.kernels import AttentionSpec, reference_layers
from engine.kernels.cpu_decoder import CpuDecoder, DecoderLayer, Matrix, has_packed_linear, pack, pack_gated
from engine.model import LoadedModel
from engine.quantization import QuantizedLinear


def fits(model: LoadedModel, library: ctypes.CDLL) -> bool:
    """Whether `CpuForward` computes this model: otherwise its layers run one by one."""
    if model.dtype != torch.bfloat16 or not has_packed_linear(library) or not fused.fits(model.module):
        return False
    module = cast(Any, model.module)
    if any(isinstance(part, QuantizedLinear) for part in module.modules()):
        return False
    is_dense = all(isinstance(getattr(layer.mlp, "down_proj", None), nn.Linear) for layer in module.model.layers)
    has_one_epsilon = (
        len({part.variance_epsilon for part in module.modules() if hasattr(part, "variance_epsilon")}) == 1
    )
    sizes = (module.config.hidden_size, model.head_dim)
    return is_dense and has_one_epsilon and module.config.intermediate_size % 16 == 0 and not any(n % 2 for n in sizes)


class CpuForward:
    """Fits `Forward`. Takes the weights out of the module, layer by layer: they are in memory once."""

    is_capturable = False

    def __init__(self, model: LoadedModel, library: ctypes.CDLL) -> None:
        module = cast(Any, model.module)
        self._embed: Callable[[Tensor], Tensor] = module.model.embed_tokens
        self._rotary: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = module.model.rotary_emb
        self._like = torch.empty(0)
        norm = fused.norm_of(module.model.norm)
        layers = [_take(layer, spec) for layer, spec in zip(module.model.layers, model.specs, strict=True)]
        head = pack(module.lm_head.weight.data, module.lm_head.bias)
        if module.lm_head.weight is not module.model.embed_tokens.weight:
            _empty(module.lm_head)
        self._decoder = CpuDecoder(library, layers, norm.weight, head, norm.eps, model.num_kv_heads)

    def __call__(self, inputs: StepInputs, layers: list[Tensor]) -> Tensor:
        cos, sin = self._rotary(self._like, inputs.position_ids[None])
        return self._decoder(self._embed(inputs.input_ids), (cos[0], sin[0]), layers, inputs.meta, inputs.logit_rows)


def _take(layer: Any, spec: AttentionSpec) -> DecoderLayer:
    parts = fused.pack_layer(layer, reference_layers)
    assert parts.gate_up is not None and parts.down is not None  # `fits` saw to it
    assert isinstance(parts.gate_up.weight, Tensor)
    taken = DecoderLayer(
        input_norm=parts.input_norm.weight,
        query_norm=None if parts.query_norm is None else parts.query_norm.weight,
        key_norm=None if parts.key_norm is None else parts.key_norm.weight,
        mlp_norm=parts.mlp_norm.weight,
        qkv=_packed(parts.qkv),
        output=_packed(parts.output),
        gate_up=pack_gated(parts.gate_up.weight.data, parts.gate_up.bias),
        down=_packed(parts.down),
        spec=spec,
    )
    _empty(layer)
    return taken


def _packed(linear: fused.Linear) -> Matrix:
    assert isinstance(linear.weight, Tensor)
    return pack(linear.weight.data, linear.bias)


def _empty(module: nn.Module) -> None:
    for part in module.modules():
        if isinstance(part, nn.Linear):
            part.weight.data = torch.empty(0)
