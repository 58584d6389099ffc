"""Computes decoder layers as a list of matrix products and fused kernels; which product or kernel does it, is decided
in `kernels`.

A layer of Llama is: norm, QKV as one product, rotary and KV store, attention, output, residual and norm, gate and up as
one product, activation, down. `families.py` describes how other families differ. With small batches, calling
transformers' modules would take longer than the products themselves. A mixture of experts runs as grouped products; any
other MLP stays transformers' module.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from baton_serve.engine.collectives.backends import Collectives
from baton_serve.engine.kernels import (
    Activations,
    AttentionBackend,
    LayerKernels,
    Linear,
    MixerKernels,
    NewHeads,
    Norm,
    Weight,
    row_kernel,
)
from baton_serve.engine.kernels.interfaces import RowLayer
from baton_serve.engine.kernels.reference import mixers as twin_mixers
from baton_serve.engine.model.batch_inputs import StepInputs, add_image_features, embedded
from baton_serve.engine.model.families import GELU_TANH, FamilyDescription, describe, rotations_of, scales_of
from baton_serve.engine.model.fused_layers import Layer, ResidualSum, pack_layers, packed_head
from baton_serve.engine.model.fused_mixers import (
    MixerStep,
    MixerTools,
)
from baton_serve.engine.model.loaded_model import LoadedModel
from baton_serve.engine.model.lora.slots import AdapterSlots


class FusedForward:
    """Computes the layers of a decoder with fused kernels instead of transformers' modules. Implements `Forward`, and
    `LogitParts` for several ranks.
    """

    def __init__(
        self,
        model: LoadedModel,
        backend: AttentionBackend,
        kernels: LayerKernels,
        collectives: Collectives,
        mixers: MixerKernels = twin_mixers,
    ) -> None:
        """Join and pack the weights of the model; the parameters of its transformers modules become views of the packed
        ones. Call it only if `fits` is True.

        With several ranks, all must call it together.
        """
        module = cast(Any, model.module)
        family = describe(module)
        assert family is not None  # `fits` is True
        self._has_gate = family.up is None
        self._is_gelu = getattr(module.config, family.activation) == GELU_TANH
        self._scales = scales_of(family, module.config)
        self._rotations = rotations_of(family, module)
        self._is_parallel, self._is_interleaved = family.is_parallel, family.is_interleaved
        self._has_wide_norms = family.has_wide_norms
        self.vocab_size = model.vocab_size
        self._embed: Callable[[Tensor], Tensor] = module.model.embed_tokens
        self._is_last = model.stage.is_last
        # Without a head this is a later stage of a pipeline, which never computes logits.
        self._head = packed_head(module, kernels) if model.stage.is_first else None
        self._final_norm = family.norm_of(module.model.norm)
        last_norm = self._final_norm if self._is_last else None
        self._offload = model.offload
        tools = MixerTools(kernels, mixers, backend)
        self._layers = pack_layers(module, family, tools, last_norm, self._offload)
        first = 0 if model.stage.is_whole else model.stage.layers.start
        self._kv_number = {layer - first: number for number, layer in enumerate(model.attending_layers)}
        self._specs = model.specs
        # A stage of a pipeline may have no attention.
        self._head_dim, self._num_kv_heads = (model.head_dim, model.num_kv_heads) if model.kv_shapes else (0, 0)
        self._backend, self._kernels, self._collectives = backend, kernels, collectives
        self._is_alone, self._num_ranks = model.is_whole, model.parts.shard.size
        has_part = not model.is_whole and self._head is not None
        self._is_head_whole = not has_part or module.lm_head.out_features == model.vocab_size
        self._like = torch.empty(0, device=self._final_norm.weight.device)
        collectives.prepare(self._final_norm.weight)
        self._row = None
        is_resident = model.offload is None  # the kernel of all layers reads them in any order
        if model.is_whole and model.stage.is_whole and is_resident and self._is_plain(family):
            layers = cast(list[RowLayer], self._layers)  # plain layers have all norms
            self._row = row_kernel(self._like.device, layers, self._specs, self._head_dim, self._num_kv_heads)
        self.adapter_slots: AdapterSlots | None = None
        # A module of transformers may read values back from the device, as its mixtures of experts do.
        self.is_capturable = all(layer.gate_up is not None or layer.mixture is not None for layer in self._layers)

    def _is_plain(self, family: FamilyDescription) -> bool:
        """Return whether all layers are like Llama's, so that a single kernel may compute all of them for one token."""
        has_one_rotation = len(self._rotations.scaling) == 1 and not family.is_interleaved
        has_plain_mlp = not self._is_gelu and not family.is_parallel
        return has_one_rotation and has_plain_mlp and all(layer.is_plain for layer in self._layers)

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
        """Compute a step and return this rank's columns of its logits, [num_logits, columns]. `layers` are the layers'
        views of the KV cache.
        """
        assert self._head is not None  # stages of a pipeline call `run_stage`
        residual, rotations = self._begin(inputs)
        # On some devices a whole step of one token runs as a single kernel.
        if self._compute_row(residual, rotations[0], layers, inputs):
            return self._logits(self._kernels.norm_for(residual, self._final_norm, self._head.weight))
        return self._logits(self._run_layers(residual, rotations, layers, inputs, self._head.weight))

    def run_stage(self, inputs: StepInputs, layers: list[Tensor], received: Tensor | None) -> Tensor:
        """Compute the layers of this pipeline stage. Return the residual for the next stage, or from the last stage the
        input of the head; see `StagePart.run_stage`.
        """
        hidden = self._run_layers(*self._begin(inputs, received), layers, inputs, None)
        assert isinstance(hidden, Tensor)  # it is prepared only for a weight that is named
        return hidden

    def finish(self, hidden: Tensor) -> Tensor:
        """Return the logits for `hidden`, the rows that the last pipeline stage has sent. It is for ranks of the first
        stage, which have the head.
        """
        return self.whole(self._logits(hidden))

    def _run_layers(
        self,
        residual: Tensor,
        rotations: list[tuple[Tensor, Tensor]],
        layers: list[Tensor],
        inputs: StepInputs,
        head: Weight | None,
    ) -> Activations:
        """Compute the layers of this pipeline stage, which update `residual` in place. Return the input of the product
        with `head`, or with `head` None what `run_stage` returns.
        """
        first = self._layers[0]
        rows = inputs.logit_rows if self._is_last else None
        hidden = self._input_of(residual, first.input_norm, first.qkv.weight)
        for number, layer in enumerate(self._layers):
            if self._offload is not None:
                self._offload.enter(number)
            heads = self._kernels.linear(hidden, layer.qkv.weight, layer.qkv.bias)
            attended = self._mix(number, heads, rotations, layers, inputs)
            is_end = number + 1 == len(self._layers)
            if is_end and rows is not None and not self._is_parallel:
                # Behind the last attention, only the tokens whose logits are needed go on.
                attended, residual, rows = attended[rows], residual[rows], None
            then = None if layer.gate_up is None else layer.gate_up.weight
            summed = self._linear_join(attended, layer.output, residual, layer.after_attention, then)
            # Parallel layers: the MLP reads what attention has read, and both outputs are added.
            if not self._is_parallel:
                hidden = summed
            then = head if is_end else self._layers[number + 1].qkv.weight
            if is_end and rows is not None:
                # The input of attention may be prepared for a product: then it has no rows to choose from.
                output = self._collectives.all_reduce(self._mlp(layer, hidden))[rows]
                hidden = self._joined(output, residual[rows], layer.after_mlp, then)
            elif layer.gate_up is not None and layer.down is not None:
                gated = self._gated(layer.gate_up, hidden, layer.down)
                hidden = self._linear_join(gated, layer.down, residual, layer.after_mlp, then)
            else:
                hidden = self._join_of_sum(self._mlp(layer, hidden), residual, layer.after_mlp)
            if self._offload is not None:
                self._offload.leave(number)
            hidden = self._with_images(number, hidden, residual, inputs)
        return hidden

    def _begin(self, inputs: StepInputs, received: Tensor | None = None) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Return the residual before the first layer, [num_tokens, hidden], and cos and sin of each different rotary
        embedding. `received` is the output of the pipeline stage before; None on the first stage, which embeds tokens
        and images.
        """
        residual = embedded(self._embed, inputs) if received is None else received
        if received is None and self._scales.embedding != 1.0:
            residual = residual * self._scales.embedding
        if inputs.position_ids.dim() == 2:
            return residual, self._rotations.of_rows(inputs.position_ids)
        kinds = zip(self._rotations.frequencies, self._rotations.scaling, strict=True)
        return residual, [self._kernels.rotation(inputs.position_ids, *kind) for kind in kinds]

    def _with_images(self, number: int, hidden: Activations, residual: Tensor, inputs: StepInputs) -> Activations:
        """Add the image features for layer `number` (DeepStack) to `residual`, and return the input of the next layer.
        `hidden` is that input without them.
        """
        if not add_image_features(residual, inputs, number):
            return hidden
        following = self._layers[number + 1]  # images add nothing behind the last layer
        return self._input_of(residual, following.input_norm, following.qkv.weight)

    def _logits(self, hidden: Activations) -> Tensor:
        assert self._head is not None
        return self._scales.finish(self._kernels.linear(hidden, self._head.weight, self._head.bias))

    def _input_of(self, residual: Tensor, norm: Norm | None, then: Weight) -> Activations:
        """Return the normed `residual` as input of a product with the weight `then`, in the form that its kernel reads
        fastest. With `norm` None it is the residual itself.
        """
        if norm is not None and norm.is_plain:
            return self._kernels.norm_for(residual, norm, then)
        return residual if norm is None else self._kernels.norm(residual, norm)

    def _compute_row(
        self, residual: Tensor, rotation: tuple[Tensor, Tensor], layers: list[Tensor], inputs: StepInputs
    ) -> bool:
        """Compute all layers for a step of one token by a single kernel, in place in `residual`. Return False, with
        nothing done, if no such kernel supports this step.
        """
        has_other_steps = inputs.logit_rows is not None or inputs.after_layer is not None
        if self._row is None or has_other_steps or inputs.layer_metas is not None:
            return False
        return self._row(residual, rotation, layers, inputs.meta)

    def _linear_join(
        self, x: Activations, product: Linear, residual: Tensor, join: ResidualSum, then: Weight | None
    ) -> Activations:
        """Add the product of `x`, summed over the ranks, to `residual` in place. Return the normed sum, the input of
        the next product.

        `then` is the weight of the next product: some kernels prepare their output for it. None: return a plain tensor.
        """
        if self._is_alone and join.is_plain and join.next_norm is not None:
            return self._kernels.linear_norm(x, product, residual, join.next_norm, then)
        return self._join_of_sum(self._kernels.linear(x, product.weight, product.bias), residual, join)

    def _join_of_sum(self, output: Tensor, residual: Tensor, join: ResidualSum) -> Tensor:
        """Add `output`, summed over the ranks, to `residual` in place. Return the normed sum, the input of the next
        product.
        """
        norm = join.next_norm
        hidden: Activations | None = None
        if join.is_plain and norm is not None:
            hidden = self._collectives.sum_norm(output, residual, norm.weight, norm.eps)
        if hidden is None:
            hidden = self._joined(self._collectives.all_reduce(output), residual, join)
        assert isinstance(hidden, Tensor)  # it is prepared only for a weight that is named
        return hidden

    def _joined(self, output: Tensor, residual: Tensor, join: ResidualSum, then: Weight | None = None) -> Activations:
        """Add `output`, which is summed over the ranks already, to `residual` in place. Return the normed sum, in the
        form that is fastest for the weight `then` of the next product; None: as a plain tensor.
        """
        norm = join.next_norm
        if join.is_plain and norm is not None:
            if then is not None:
                return self._kernels.norm_for(output, norm, then, residual=residual)
            return self._kernels.rms_norm(output, norm.weight, norm.eps, residual=residual)
        if join.is_rms and norm is not None:
            offset = norm.has_offset
            return self._kernels.rms_norm(output, norm.weight, norm.eps, residual=residual, unit_offset=offset)
        if join.output_norm is not None:
            output = self._kernels.norm(output, join.output_norm)
        # In place: the caller keeps this tensor as the residual of all layers.
        residual.add_(output, alpha=join.scale)
        return residual if norm is None else self._kernels.norm(residual, norm)

    def _mix(
        self,
        number: int,
        heads: Tensor,
        rotations: list[tuple[Tensor, Tensor]],
        caches: list[Tensor],
        inputs: StepInputs,
    ) -> Tensor:
        """Compute attention of layer `number`, or what takes its place, from `heads`, the output of its first product
        (query, key and value). Return the input of its output projection. `caches` are the layers' views of the KV
        cache.
        """
        mixer, kv = self._layers[number].mixer, self._kv_number.get(number)
        if mixer is None:
            assert kv is not None
            mixed = self._attend(number, heads, rotations, caches[kv], inputs)
        else:
            cache, spec = (None, None) if kv is None else (caches[kv], self._specs[kv])
            rotation = rotations[self._rotations.of_layer[number]]
            own = inputs if kv is None or inputs.layer_metas is None else replace(inputs, meta=inputs.meta_of(kv))
            mixed = mixer(heads, MixerStep(own, rotation, cache, spec))
        if kv is not None and inputs.after_layer is not None:
            inputs.after_layer(kv)
        return mixed

    def _attend(
        self,
        number: int,
        heads: Tensor,
        rotations: list[tuple[Tensor, Tensor]],
        cache: Tensor,
        inputs: StepInputs,
    ) -> Tensor:
        """Store keys and values of the step's tokens in `cache` and compute attention of layer `number`: [num_tokens,
        num_heads * head_dim].

        `heads` are Q, K and V side by side.
        """
        layer, rotation = self._layers[number], rotations[self._rotations.of_layer[number]]
        # Layers without a mixer of their own are numbered as their KV.
        meta = inputs.meta_of(number)
        heads = heads.view(len(heads), -1, self._head_dim)
        has_plain_norms = layer.query_norm is None or (layer.query_norm.is_plain and not self._has_wide_norms)
        # The fused kernel knows norms of each head and pairs of halves; anything else runs in separate steps.
        if has_plain_norms and not self._is_interleaved:
            new = NewHeads(heads, rotation, layer.query_norm, layer.key_norm)
            # One fused kernel rotates, stores and attends; it returns None for steps that it does not support.
            attended = self._backend.attend_new(new, cache, meta, self._specs[number])
            if attended is not None:
                return attended.flatten(1)
        kv = self._num_kv_heads
        query, key, value = heads[:, : -2 * kv], heads[:, -2 * kv : -kv], heads[:, -kv:]
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = self._normed_heads(query, key, layer.query_norm, layer.key_norm)
        self._kernels.rotary_store(query, key, value, rotation, cache, meta.slots, interleaved=self._is_interleaved)
        return self._backend.attend(query, cache, meta, self._specs[number]).flatten(1)

    def _normed_heads(self, query: Tensor, key: Tensor, query_norm: Norm, key_norm: Norm) -> tuple[Tensor, Tensor]:
        """Return queries and keys after their norms, both [num_tokens, num_heads, head_dim]."""
        heads, norms = (query, key), (query_norm, key_norm)
        if not self._has_wide_norms:
            query, key = (self._kernels.norm(part, norm) for part, norm in zip(heads, norms, strict=True))
            return query, key
        rows = [part.flatten(1) for part in heads]
        if self._is_alone:
            normed = [self._kernels.norm(part, norm) for part, norm in zip(rows, norms, strict=True)]
        else:
            normed = self._joint_norms(rows, norms)
        query, key = (part.view(whole.shape) for part, whole in zip(normed, heads, strict=True))
        return query, key

    def _joint_norms(self, rows: list[Tensor], norms: tuple[Norm, Norm]) -> list[Tensor]:
        """Return queries and keys after RMSNorms over the heads of all ranks. `rows` are both, each [num_tokens, this
        rank's columns]; a single sum over the ranks serves both.
        """
        own = [part.float() for part in rows]
        squares = torch.cat([part.square().sum(dim=1, keepdim=True) for part in own], dim=1)
        summed = self._collectives.all_reduce(squares)
        # KV heads that several ranks hold are in the sum several times, as in this number of columns.
        columns = [part.shape[1] * self._num_ranks for part in rows]
        scales = [
            (summed[:, at : at + 1] / count + norm.eps).rsqrt()
            for at, (count, norm) in enumerate(zip(columns, norms, strict=True))
        ]
        return [
            (part * scale * norm.weight.float()).to(whole.dtype)
            for part, scale, norm, whole in zip(own, scales, norms, rows, strict=True)
        ]

    def _mlp(self, layer: Layer, hidden: Activations) -> Tensor:
        """Return the output of a layer's MLP or mixture of experts for `hidden`; with several ranks, this rank's
        summand.
        """
        if layer.gate_up is not None and layer.down is not None:
            gated = self._gated(layer.gate_up, hidden, layer.down)
            return self._kernels.linear(gated, layer.down.weight, layer.down.bias)
        assert isinstance(hidden, Tensor)  # only fused products ask for prepared activations
        if layer.mixture is not None:
            return layer.mixture(hidden, self._kernels)
        mixed = layer.mlp(hidden[None])  # older versions of transformers also return the router's logits
        return (mixed[0] if isinstance(mixed, tuple) else mixed)[0]

    def _gated(self, gate_up: Linear, hidden: Activations, down: Linear) -> Activations:
        if not self._is_gelu:
            return self._kernels.gated_linear(hidden, gate_up, down.weight)
        return self._activated(self._kernels.linear(hidden, gate_up.weight, gate_up.bias))

    def _activated(self, gate_up: Tensor) -> Tensor:
        """Return activation(gate) * up of `gate_up`, which holds both side by side; for an MLP without a gate, the
        activation of all columns.
        """
        if not self._has_gate:
            return functional.gelu(gate_up, approximate="tanh")
        return self._kernels.gelu_mul(gate_up) if self._is_gelu else self._kernels.silu_mul(gate_up)
