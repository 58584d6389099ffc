"""Decides how fused layers add the products of LoRA adapters: from slots by kernels for captured graphs, or product by
product.

Steps without an adapter run as in `FusedForward`. Others run product by product, since the adapter's part must be added
before the next kernel uses the output. On devices with captured graphs, kernels add the parts of all adapters from
their slots. Elsewhere, and if all rows have one adapter and no graph fits, torch multiplies adapter by adapter.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from baton_serve.engine.collectives.backends import Collectives
from baton_serve.engine.kernels import AttentionBackend, LayerKernels, SlotRows
from baton_serve.engine.kernels.interfaces import Linear
from baton_serve.engine.model import fused_layers
from baton_serve.engine.model.batch_inputs import StepInputs, add_image_features
from baton_serve.engine.model.families import FamilyDescription, describe
from baton_serve.engine.model.fused_forward import FusedForward
from baton_serve.engine.model.fused_layers import Layer, ResidualSum
from baton_serve.engine.model.fused_mixers import has_mixers
from baton_serve.engine.model.loaded_model import LoadedModel
from baton_serve.engine.model.lora.products import OutputSlice, add_products, output_slices
from baton_serve.engine.model.lora.slots import AdaptedProduct, AdapterSlots
from baton_serve.engine.model.lora.store import AdapterRows, AdapterStore
from baton_serve.engine.model.mixture_of_experts import shared_expert

OutputSlices = tuple[OutputSlice, ...]


@dataclass(frozen=True, slots=True)
class _AdaptedProduct:
    """One fused product of a step with LoRA adapters: its weight, its number among the products that adapters can
    change, and the adapter slot of each token.
    """

    slots: AdapterSlots
    number: int
    product: Linear
    rows: SlotRows


@dataclass(frozen=True, slots=True)
class LayerParts:
    """The names and columns of a decoder layer's original linear layers within each of its four fused products, in
    their order. Experts have none: adapters cannot change them.
    """

    qkv: OutputSlices
    output: OutputSlices
    gate_up: OutputSlices
    down: OutputSlices

    def products(self) -> list[OutputSlices]:
        """Return the fused products of this layer that adapters can change, each as its original linear layers, in
        their order.
        """
        return [parts for parts in (self.qkv, self.output, self.gate_up, self.down) if parts]


def fits(module: Any) -> bool:
    """Return whether `AdaptedForward` supports a transformers model, so that it can use fused layers and LoRA adapters
    together.

    Models with shared experts are not supported: a single kernel computes a shared expert, without a place to add the
    adapter's product.
    """
    family = describe(module)
    if family is None or not fused_layers.fits(module) or has_mixers(module, family):
        return False
    mlps = [getattr(layer, family.mlp) for layer in module.model.layers]
    return all(shared_expert(mlp) is None for mlp in mlps)


class AdaptedForward(FusedForward):
    """A `FusedForward` that also adds the products of each token's LoRA adapter."""

    def __init__(
        self,
        model: LoadedModel,
        backend: AttentionBackend,
        kernels: LayerKernels,
        collectives: Collectives,
        store: AdapterStore,
    ) -> None:
        """Register in `store` which linear layers of the decoder adapters can change, and pack the weights."""
        module: Any = model.module
        self._store = store
        family = describe(module)
        assert family is not None  # `fits` is True
        self._parts = [_parts_of(layer, f"model.layers.{i}.", family) for i, layer in enumerate(module.model.layers)]
        products: list[AdaptedProduct] = []
        for parts in (product for layer in self._parts for product in layer.products()):
            inputs = int(module.get_submodule(parts[0].module).in_features)
            products.append(AdaptedProduct(parts, inputs))
            for part in parts:
                store.offer(part.module, inputs=inputs, outputs=part.end - part.start)
        super().__init__(model, backend, kernels, collectives)
        if store.slots is not None and self.is_capturable:
            self.adapter_slots = AdapterSlots(
                products,
                store.weights,
                store.slots,
                max_rank=store.max_rank,
                dtype=store.dtype,
                device=store.device,
            )

    def compute(self, inputs: StepInputs, layers: list[Tensor]) -> Tensor:
        """Compute a step with its LoRA adapters, and return this rank's columns of the logits. `layers` are the layers'
        views of the KV cache.
        """
        if inputs.slot_rows is not None and self.adapter_slots is not None:
            return self._compute_slots(inputs, layers, self.adapter_slots, inputs.slot_rows)
        step = self._store.rows(inputs.adapters)
        if not step:
            return super().compute(inputs, layers)
        residual, rotations = self._begin(inputs)
        hidden = self._first_input(residual)
        for number, (layer, parts) in enumerate(zip(self._layers, self._parts, strict=True)):
            heads = self._product(hidden, layer.qkv, parts.qkv, step)
            attended = self._attend(number, heads, rotations, layers[number], inputs)
            if inputs.after_layer is not None:
                inputs.after_layer(number)
            output = self._product(attended, layer.output, parts.output, step)
            summed = self._join_of_sum(output, residual, layer.after_attention)
            output = self._adapted_mlp(layer, hidden if self._is_parallel else summed, parts, step)
            is_last = number + 1 == len(self._layers)
            if is_last and inputs.logit_rows is not None:
                output, residual = output[inputs.logit_rows], residual[inputs.logit_rows]
            hidden = self._join_of_sum(output, residual, layer.after_mlp)
            hidden = self._with_added(number, hidden, residual, inputs)
        return self._logits(hidden)

    def _compute_slots(self, inputs: StepInputs, layers: list[Tensor], slots: AdapterSlots, rows: SlotRows) -> Tensor:
        """Compute a step by kernels that add all adapters at once, and return this rank's columns of the logits. `rows`
        has the adapter slot of each token. The work depends on shapes only, so that a graph can capture it.
        """
        residual, rotations = self._begin(inputs)
        hidden = self._first_input(residual)
        first = 0  # number of the layer's first product
        for number, (layer, parts) in enumerate(zip(self._layers, self._parts, strict=True)):
            heads = slots.product(first, hidden, rows, partial(self._linear_of, hidden, layer.qkv))
            attended = self._attend(number, heads, rotations, layers[number], inputs)
            if inputs.after_layer is not None:
                inputs.after_layer(number)
            adapted = _AdaptedProduct(slots, first + 1, layer.output, rows)
            summed = self._slots_join(adapted, attended, residual, layer.after_attention, None)
            if not self._is_parallel:
                hidden = summed
            last_rows = inputs.logit_rows if number + 1 == len(self._layers) else None
            if layer.gate_up is None or layer.down is None:
                hidden = self._join_rows(self._mlp(layer, hidden), residual, layer.after_mlp, last_rows)
            else:
                gate_up = slots.product(first + 2, hidden, rows, partial(self._linear_of, hidden, layer.gate_up))
                adapted = _AdaptedProduct(slots, first + 3, layer.down, rows)
                hidden = self._slots_join(adapted, self._activated(gate_up), residual, layer.after_mlp, last_rows)
            hidden = self._with_added(number, hidden, residual, inputs)
            first += len(parts.products())
        return self._logits(hidden)

    def _slots_join(
        self, adapted: "_AdaptedProduct", x: Tensor, residual: Tensor, join: ResidualSum, last_rows: Tensor | None
    ) -> Tensor:
        """Add the product of `x`, with the part of its LoRA adapters, to `residual` in place. Return the normed sum,
        the input of the next product.

        `last_rows` are the only tokens whose result is needed; None: all.
        """
        product, slots = adapted.product, adapted.slots
        norm = join.next_norm
        # A sum over ranks comes between the product and the norm.
        if not join.is_plain or norm is None or not self._is_alone:
            output = slots.product(adapted.number, x, adapted.rows, partial(self._linear_of, x, product))
            return self._join_rows(output, residual, join, last_rows)
        # The norm adds its input to the residual anyway. Adding the adapters' part there leaves product and norm fused.
        add = slots.add_beside(adapted.number, residual, x, adapted.rows)
        if last_rows is None:
            hidden = self._kernels.linear_norm(x, product, residual, norm, before_norm=add)
            assert isinstance(hidden, Tensor)  # it is prepared only for a weight that is named
            return hidden
        output = self._linear_of(x, product)
        add()
        return self._join_rows(output, residual, join, last_rows)

    def _join_rows(self, output: Tensor, residual: Tensor, join: ResidualSum, rows: Tensor | None) -> Tensor:
        """Add `output`, summed over the ranks, to `residual`, and return the normed sum. If `rows` is not None, only
        these tokens go on.
        """
        if rows is not None:
            output, residual = output[rows], residual[rows]
        return self._join_of_sum(output, residual, join)

    def _with_added(self, number: int, hidden: Tensor, residual: Tensor, inputs: StepInputs) -> Tensor:
        """Add the image features for layer `number` (DeepStack) to `residual`, and return the input of the next layer
        as a plain tensor. `hidden` is that input without them.
        """
        if not add_image_features(residual, inputs, number):
            return hidden
        norm = self._layers[number + 1].input_norm
        return residual if norm is None else self._kernels.norm(residual, norm)

    def _first_input(self, residual: Tensor) -> Tensor:
        """Return the normed `residual`, the input of the first layer's product, as a plain tensor, which adapters can
        multiply too.
        """
        norm = self._layers[0].input_norm
        return residual if norm is None else self._kernels.norm(residual, norm)

    def _linear_of(self, x: Tensor, linear: Linear) -> Tensor:
        return self._kernels.linear(x, linear.weight, linear.bias)

    def _adapted_mlp(self, layer: Layer, hidden: Tensor, parts: LayerParts, step: Sequence[AdapterRows]) -> Tensor:
        """Return the output of a layer's MLP for `hidden`, with the LoRA adapters of the step. Mixtures of experts have
        no adapters.
        """
        if layer.gate_up is None or layer.down is None:
            return self._mlp(layer, hidden)
        gate_up = self._product(hidden, layer.gate_up, parts.gate_up, step)
        return self._product(self._activated(gate_up), layer.down, parts.down, step)

    def _product(self, x: Tensor, linear: Linear, parts: OutputSlices, step: Sequence[AdapterRows]) -> Tensor:
        """Return the product of `x` with a fused weight, plus the products of the step's LoRA adapters."""
        output = self._linear_of(x, linear)
        add_products(output, x, parts, step)
        return output


def _parts_of(layer: Any, prefix: str, family: FamilyDescription) -> LayerParts:
    """Return the original linear layers of a transformers decoder layer that each fused product joins. `prefix` is the
    layer's name with a dot.
    """
    attention, mlp = layer.self_attn, getattr(layer, family.mlp)
    first = family.first_products(mlp)
    qkv = ["qkv_proj"] if hasattr(attention, "qkv_proj") else ["q_proj", "k_proj", "v_proj"]
    return LayerParts(
        qkv=_side_by_side(attention, qkv, f"{prefix}self_attn."),
        output=_side_by_side(attention, ["o_proj"], f"{prefix}self_attn."),
        gate_up=_side_by_side(mlp, first, f"{prefix}{family.mlp}."),
        down=_side_by_side(mlp, [family.down] if first else [], f"{prefix}{family.mlp}."),
    )


def _side_by_side(owner: Any, names: Sequence[str], prefix: str) -> OutputSlices:
    """Return the columns that each of the linear layers `names` of the module `owner` has when their outputs are
    joined.
    """
    return output_slices(prefix, [(name, getattr(owner, name)) for name in names])
