"""Llama-shaped decoders as a list of matrix products and fused kernels, on the weights that transformers loaded.

A layer is: norm, QKV as one product, rotary and KV store, attention, output, residual and norm, gate and up as one
product, activation, down. With small batches, calling transformers' modules would take longer than the products
themselves. A mixture of experts runs as grouped products; any other MLP stays transformers' module.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from baton_serve.engine.collectives.backends import Collectives
from baton_serve.engine.kernels import (
    Activations,
    AttentionBackend,
    LayerKernels,
    Linear,
    NewHeads,
    Norm,
    Weight,
    row_kernel,
)
from baton_serve.engine.model.batch_inputs import StepInputs, embedded
from baton_serve.engine.model.loaded_model import LoadedModel
from baton_serve.engine.model.lora.slots import AdapterSlots
from baton_serve.engine.model.mixture_of_experts import Mixture, pack_mixture
from baton_serve.engine.model.quantized.modules import QuantizedLinear, ReorderedLinear, can_merge, install, merge

LAYERS = {
    "DenseLayer",  # our own
    "GptOssDecoderLayer",
    "LlamaDecoderLayer",
    "MistralDecoderLayer",
    "MixtralDecoderLayer",
    "Phi3DecoderLayer",
    "Qwen2DecoderLayer",
    "Qwen3DecoderLayer",
    "Qwen3MoeDecoderLayer",
}
"""Layer classes that were compared with transformers.

They are found by name, since a layer that looks alike may differ.
"""


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one layer in the form that the fused kernels read."""

    input_norm: Norm
    qkv: Linear
    query_norm: Norm | None
    key_norm: Norm | None
    output: Linear
    mlp_norm: Norm
    gate_up: Linear | None
    down: Linear | None
    mixture: Mixture | None
    mlp: Callable[[Tensor], Tensor | tuple[Tensor, ...]]
    """The module of transformers, used if `gate_up` and `mixture` are None."""


def fits(module: nn.Module) -> bool:
    """Return whether fused layers support these weights."""
    decoder, config = getattr(module, "model", None), cast(Any, module).config
    layers = getattr(decoder, "layers", ())
    if not layers or {type(layer).__name__ for layer in layers} - LAYERS:
        return False
    is_whole = all(hasattr(layer, "mlp") for layer in layers) and hasattr(decoder, "rotary_emb")
    if not all(can_merge(parts) for layer in layers for parts in _packed_parts(layer)):
        return False
    are_in_order = not any(isinstance(part, ReorderedLinear) for part in module.modules())
    return is_whole and are_in_order and config.hidden_act == "silu"


class FusedForward:
    """Runs the layers of a decoder with fused kernels instead of transformers' modules. Implements `Forward` and
    `LogitParts`.
    """

    def __init__(
        self, model: LoadedModel, backend: AttentionBackend, kernels: LayerKernels, collectives: Collectives
    ) -> None:
        """Pack the weights; transformers' parameters become views of the packed ones.

        With several ranks, all call it together.
        """
        module = cast(Any, model.module)
        self.vocab_size = model.vocab_size
        self._embed: Callable[[Tensor], Tensor] = module.model.embed_tokens
        # Frequencies that would change with the length of a step have been fixed (engine/model/rotary.py).
        self._frequencies: Tensor = module.model.rotary_emb.inv_freq.float()
        self._rotation_scaling = float(getattr(module.model.rotary_emb, "attention_scaling", 1.0))
        self._head = _linear(module.lm_head, kernels)
        self._layers = [pack_layer(layer, kernels) for layer in module.model.layers]
        self._final_norm = norm_of(module.model.norm)
        self._specs = model.specs
        self._head_dim, self._num_kv_heads = model.head_dim, model.num_kv_heads
        self._backend, self._kernels, self._collectives = backend, kernels, collectives
        self._is_alone = model.is_whole
        self._is_head_whole = model.is_whole or module.lm_head.weight.shape[0] == model.vocab_size
        self._like = torch.empty(0, device=self._final_norm.weight.device)
        collectives.prepare(self._final_norm.weight)
        self._row = None
        if model.is_whole:
            self._row = row_kernel(self._like.device, self._layers, self._specs, self._head_dim, self._num_kv_heads)
        self.adapter_slots: AdapterSlots | None = None
        # A module of transformers may read values back from the device, as its mixtures of experts do.
        self.is_capturable = all(layer.gate_up is not None or layer.mixture is not None for layer in self._layers)

    def __call__(self, inputs: StepInputs, layers: list[Tensor]) -> Tensor:
        return self.whole(self.compute(inputs, layers))

    @property
    def parts(self) -> "FusedForward | None":
        return None if self._is_head_whole or not self.max_rows else self

    @property
    def max_rows(self) -> int:
        return self._collectives.argmax_rows

    def largest(self, part: Tensor, out: Tensor) -> None:
        self._collectives.argmax(part, out)

    def whole(self, part: Tensor) -> Tensor:
        return part if self._is_head_whole else self._collectives.gather_columns(part)

    def compute(self, inputs: StepInputs, layers: list[Tensor]) -> Tensor:
        """Compute this rank's columns of the logits."""
        residual = embedded(self._embed, inputs)  # [num_tokens, hidden]
        rotation = self._kernels.rotation(inputs.position_ids, self._frequencies, self._rotation_scaling)
        # On some devices a whole step of one token runs as a single kernel.
        if self._compute_row(residual, rotation, layers, inputs):
            hidden = self._kernels.norm_for(residual, self._final_norm, self._head.weight)
            return self._kernels.linear(hidden, self._head.weight, self._head.bias)
        first = self._layers[0]
        hidden = self._kernels.norm_for(residual, first.input_norm, first.qkv.weight)
        for number, layer in enumerate(self._layers):
            heads = self._kernels.linear(hidden, layer.qkv.weight, layer.qkv.bias)
            attended = self._attend(layer, number, heads, rotation, layers[number], inputs)
            if inputs.after_layer is not None:
                inputs.after_layer(number)
            then = None if layer.gate_up is None else layer.gate_up.weight
            hidden = self._linear_norm(attended, layer.output, residual, layer.mlp_norm, then)
            is_last = number + 1 == len(self._layers)
            norm = self._final_norm if is_last else self._layers[number + 1].input_norm
            then = (self._head if is_last else self._layers[number + 1].qkv).weight
            if is_last and inputs.logit_rows is not None:  # only the rows whose logits are needed go on
                output = self._collectives.all_reduce(self._mlp(layer, hidden))[inputs.logit_rows]
                residual = residual[inputs.logit_rows]
                hidden = self._kernels.norm_for(output, norm, then, residual=residual)
            elif layer.gate_up is not None and layer.down is not None:
                gated = self._gated(layer.gate_up, hidden, layer.down)
                hidden = self._linear_norm(gated, layer.down, residual, norm, then)
            else:
                hidden = self._norm_of_sum(self._mlp(layer, hidden), residual, norm)
        return self._kernels.linear(hidden, self._head.weight, self._head.bias)

    def _compute_row(
        self, residual: Tensor, rotation: tuple[Tensor, Tensor], layers: list[Tensor], inputs: StepInputs
    ) -> bool:
        """Return True if `residual` has gone through all layers in one kernel."""
        if self._row is None or inputs.logit_rows is not None or inputs.after_layer is not None:
            return False
        return self._row(residual, rotation, layers, inputs.meta)

    def _linear_norm(
        self, x: Activations, product: Linear, residual: Tensor, norm: Norm, then: Weight | None
    ) -> Activations:
        """Return the norm of the ranks' products of `x` plus `residual`, which becomes that sum.

        `then` is the weight of the next product: some kernels prepare their output for it.
        """
        if self._is_alone:
            return self._kernels.linear_norm(x, product, residual, norm, then)
        return self._norm_of_sum(self._kernels.linear(x, product.weight, product.bias), residual, norm)

    def _norm_of_sum(self, output: Tensor, residual: Tensor, norm: Norm) -> Tensor:
        """Return the norm of the ranks' outputs plus `residual`, which becomes that sum."""
        hidden = self._collectives.sum_norm(output, residual, norm.weight, norm.eps)
        if hidden is not None:
            return hidden
        output = self._collectives.all_reduce(output)
        return self._kernels.rms_norm(output, norm.weight, norm.eps, residual=residual)

    def _attend(
        self,
        layer: Layer,
        number: int,
        heads: Tensor,
        rotation: tuple[Tensor, Tensor],
        cache: Tensor,
        inputs: StepInputs,
    ) -> Tensor:
        """Store the KV of new tokens and compute attention, [num_tokens, num_heads * head_dim].

        `heads` are Q, K and V side by side.
        """
        heads = heads.view(len(heads), -1, self._head_dim)
        new = NewHeads(heads, rotation, layer.query_norm, layer.key_norm)
        # One fused kernel rotates, stores and attends; it returns None for steps that it does not support.
        attended = self._backend.attend_new(new, cache, inputs.meta, self._specs[number])
        if attended is not None:
            return attended.flatten(1)
        kv = self._num_kv_heads
        query, key, value = heads[:, : -2 * kv], heads[:, -2 * kv : -kv], heads[:, -kv:]
        if layer.query_norm is not None and layer.key_norm is not None:
            query = self._kernels.rms_norm(query, layer.query_norm.weight, layer.query_norm.eps)
            key = self._kernels.rms_norm(key, layer.key_norm.weight, layer.key_norm.eps)
        self._kernels.rotary_store(query, key, value, rotation, cache, inputs.meta.slots)
        return self._backend.attend(query, cache, inputs.meta, self._specs[number]).flatten(1)

    def _mlp(self, layer: Layer, hidden: Activations) -> Tensor:
        """Compute the MLP of a layer without the sum over ranks."""
        if layer.gate_up is not None and layer.down is not None:
            gated = self._gated(layer.gate_up, hidden, layer.down)
            return self._kernels.linear(gated, layer.down.weight, layer.down.bias)
        assert isinstance(hidden, Tensor)  # only fused products ask for prepared activations
        if layer.mixture is not None:
            return layer.mixture(hidden, self._kernels)
        mixed = layer.mlp(hidden[None])  # older versions of transformers also return the router's logits
        return (mixed[0] if isinstance(mixed, tuple) else mixed)[0]

    def _gated(self, gate_up: Linear, hidden: Activations, down: Linear) -> Activations:
        return self._kernels.gated_linear(hidden, gate_up, down.weight)


def pack_layer(layer: Any, kernels: LayerKernels) -> Layer:
    """Join and pack the weights of a transformers layer into few matrices, such as one for query, key and value."""
    attention, mlp = layer.self_attn, layer.mlp
    if hasattr(attention, "qkv_proj"):
        qkv = _linear(attention.qkv_proj, kernels)
    else:
        qkv = _packed([attention.q_proj, attention.k_proj, attention.v_proj], kernels)
    gate_up: Linear | None = None
    if hasattr(mlp, "gate_up_proj") and hasattr(mlp, "down_proj"):
        gate_up = _linear(mlp.gate_up_proj, kernels)
    elif hasattr(mlp, "gate_proj") and hasattr(mlp, "up_proj"):
        gate_up = _packed([mlp.gate_proj, mlp.up_proj], kernels)
    has_head_norms = hasattr(attention, "q_norm")
    return Layer(
        input_norm=norm_of(layer.input_layernorm),
        qkv=qkv,
        query_norm=norm_of(attention.q_norm) if has_head_norms else None,
        key_norm=norm_of(attention.k_norm) if has_head_norms else None,
        output=_linear(attention.o_proj, kernels),
        mlp_norm=norm_of(layer.post_attention_layernorm),
        gate_up=gate_up,
        down=_linear(mlp.down_proj, kernels) if gate_up is not None else None,
        mixture=pack_mixture(mlp) if gate_up is None else None,
        mlp=mlp,
    )


def _packed_parts(layer: Any) -> Iterator[list[nn.Linear]]:
    """Return the linear layers of a layer that are joined into one product."""
    if not hasattr(layer.self_attn, "qkv_proj"):
        yield [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj]
    if hasattr(layer.mlp, "gate_proj") and hasattr(layer.mlp, "up_proj"):
        yield [layer.mlp.gate_proj, layer.mlp.up_proj]


def _packed(parts: list[nn.Linear], kernels: LayerKernels) -> Linear:
    """Join several matrices. The originals become views of the result, so that nothing is stored twice."""
    quantized = [part for part in cast(list[nn.Module], parts) if isinstance(part, QuantizedLinear)]
    if quantized:
        return _linear(merge(quantized), kernels)
    weight = torch.cat([part.weight.data for part in parts])
    biases = [part.bias.data for part in parts if part.bias is not None]
    bias = torch.cat(biases) if biases else None
    sizes = [part.weight.shape[0] for part in parts]
    for part, rows in zip(parts, torch.split(weight, sizes), strict=True):
        part.weight.data = rows
    return Linear(weight, bias)


def _linear(module: nn.Linear | QuantizedLinear, kernels: LayerKernels) -> Linear:
    if isinstance(module, QuantizedLinear):
        install(module, kernels)
    return Linear(module.weight, module.bias)


def norm_of(module: Any) -> Norm:
    """Return the weight and epsilon of a norm."""
    return Norm(module.weight, float(module.variance_epsilon))
