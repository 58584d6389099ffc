"""Llama-shaped decoders on CPUs with bf16 matrix instructions: the layers' weights, packed for a single call of C++.

Weights may be bf16 or quantized.
"""

import ctypes
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from baton_serve.engine.kernels import AttentionSpec
from baton_serve.engine.kernels.cpu.decoder import CpuDecoder, DecoderLayer
from baton_serve.engine.kernels.cpu.layers import CpuLayers
from baton_serve.engine.kernels.cpu.linear import Matrix, can_pack, gated, has_packed_linear, pack, pack_codes
from baton_serve.engine.kernels.quantized import QuantizedWeight
from baton_serve.engine.model import fused
from baton_serve.engine.model.batch_inputs import StepInputs, embedded
from baton_serve.engine.model.loaded_model import LoadedModel
from baton_serve.engine.model.quantized.modules import QuantizedLinear, install


def fits(model: LoadedModel, library: ctypes.CDLL) -> bool:
    """Return whether `CpuForward` supports this model. Otherwise its layers run one by one."""
    if model.dtype != torch.bfloat16 or not has_packed_linear(library) or not fused.fits(model.module):
        return False
    module = cast(Any, model.module)
    # The C++ decoder takes one epsilon for all norms. It interleaves gate and up by 16 rows and reads pairs of bf16.
    norms = {part.variance_epsilon for part in module.modules() if hasattr(part, "variance_epsilon")}
    sizes = (module.config.hidden_size, model.head_dim)
    are_sizes_right = module.config.intermediate_size % 16 == 0 and not any(size % 2 for size in sizes)
    is_dense = all(_is_dense(layer) for layer in module.model.layers) and _can_pack_all(module.lm_head)
    return are_sizes_right and len(norms) == 1 and is_dense


def _is_dense(layer: Any) -> bool:
    """Return whether the layer has only products that can be packed."""
    if not isinstance(getattr(layer.mlp, "down_proj", None), nn.Linear | QuantizedLinear):
        return False
    return _can_pack_all(layer)


def _can_pack_all(module: nn.Module) -> bool:
    """Return whether all quantized weights in a module can be packed; bf16 always can."""
    quantized = (part.weight for part in module.modules() if isinstance(part, QuantizedLinear))
    return all(isinstance(weight, QuantizedWeight) and can_pack(weight) for weight in quantized)


class CpuForward:
    """Runs all layers of a decoder by one call of the C++ library. Implements `Forward`. It takes the weights out of
    the module layer by layer, so that each is in memory only once.
    """

    is_capturable = False
    parts = None
    adapter_slots = None

    def __init__(self, model: LoadedModel, kernels: CpuLayers) -> None:
        module = cast(Any, model.module)
        self._embed: Callable[[Tensor], Tensor] = module.model.embed_tokens
        self._rotary: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = module.model.rotary_emb
        self._like = torch.empty(0)
        norm = fused.norm_of(module.model.norm)
        layers = [
            _take(kernels.library, layer, spec) for layer, spec in zip(module.model.layers, model.specs, strict=True)
        ]
        head = _take_head(module, kernels)
        library, kv_heads = kernels.library, model.num_kv_heads
        self._decoder = CpuDecoder(library, layers, norm.weight, head, norm.eps, kv_heads)

    def __call__(self, inputs: StepInputs, layers: list[Tensor]) -> Tensor:
        cos, sin = self._rotary(self._like, inputs.position_ids[None])
        hidden, rotation = embedded(self._embed, inputs), (cos[0], sin[0])
        return self._decoder(hidden, rotation, layers, inputs.meta, inputs.logit_rows, inputs.after_layer)


def _take(library: ctypes.CDLL, layer: Any, spec: AttentionSpec) -> DecoderLayer:
    """Pack the weights of one layer, and remove them from the module."""
    attention, mlp = layer.self_attn, layer.mlp
    has_head_norms = hasattr(attention, "q_norm")
    is_merged = hasattr(attention, "qkv_proj")
    qkv = [attention.qkv_proj] if is_merged else [attention.q_proj, attention.k_proj, attention.v_proj]
    gate_up = [mlp.gate_up_proj] if hasattr(mlp, "gate_up_proj") else [mlp.gate_proj, mlp.up_proj]
    taken = DecoderLayer(
        input_norm=fused.norm_of(layer.input_layernorm).weight,
        query_norm=fused.norm_of(attention.q_norm).weight if has_head_norms else None,
        key_norm=fused.norm_of(attention.k_norm).weight if has_head_norms else None,
        mlp_norm=fused.norm_of(layer.post_attention_layernorm).weight,
        qkv=_packed(library, qkv),
        output=_packed(library, [attention.o_proj]),
        gate_up=_packed(library, gate_up, takes_turns=True),
        down=_packed(library, [mlp.down_proj]),
        spec=spec,
    )
    _empty(layer)
    return taken


def _take_head(module: Any, kernels: CpuLayers) -> Matrix:
    """Pack the head.

    A quantized head that also is the embedding's table stays in the module, in the order of products.
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
    """Join and pack matrices.

    `takes_turns` interleaves the rows of gate and up, 16 of each; they may be one matrix already.
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
