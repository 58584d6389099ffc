"""Loads a quantized checkpoint (AWQ, GPTQ, FP8, …) layer by layer, and decides which layers keep their codes.

Some models have parameters that transformers converts from the checkpoint, such as experts that are stored one by one.
These become floats in host memory; the rest of the model stays quantized.
"""

import logging
from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from baton_serve.engine.errors import ModelError
from baton_serve.engine.kernels.quantized_weights import QuantizedWeight, StackedWeight
from baton_serve.engine.loading.quantization.checkpoints.checkpoint_format import CheckpointFormat, DecodedWeight
from baton_serve.engine.loading.quantization.layer_by_layer import Tensors, fits
from baton_serve.engine.model.pipeline_stage import is_within
from baton_serve.engine.model.quantized.experts import expert_names, place_experts
from baton_serve.engine.model.quantized.modules import QuantizedLinear, ReorderedLinear
from baton_serve.engine.model.quantized.quantization_plan import linear_names, share_head, tied_embedding
from baton_serve.engine.model.quantized.rank_slices import set_part, share_embedding, split_module, split_weights
from baton_serve.engine.model.rank_parts import WHOLE, RankParts

logger = logging.getLogger(__name__)

KV_SCALES = (".k_scale", ".v_scale", ".q_scale", ".k_zero_point", ".v_zero_point", ".kv_scale")
"""Ends of the names of scales for a quantized KV cache. They are ignored, since this engine computes its own."""
SHORT_GROUPS = (32, 64)
"""Group sizes below `GROUP_STEP` that all kernels support."""
GROUP_STEP = 128
"""Larger groups must be multiples of this number of inputs."""


@dataclass
class StoredModel:
    """The tensors of a quantized checkpoint, as functions that read them: `layers` are the quantized layers, by name
    and then by the ends of their tensors' names; `plain` are all other tensors."""

    form: CheckpointFormat
    plain: Tensors = field(default_factory=dict)
    layers: dict[str, Tensors] = field(default_factory=dict)

    def made(self, layer: str, target: torch.device) -> DecodedWeight:
        """Read and decode the quantized layer with this name on the device `target`. Raises `ModelError` if its tensors
        do not fit the checkpoint's format."""
        try:
            return self.form.read({part: read().to(target) for part, read in self.layers[layer].items()})
        except (ValueError, KeyError, RuntimeError) as exc:
            # A KeyError's text would be only the name of the missing part.
            cause = f"it has no {exc.args[0]}" if isinstance(exc, KeyError) else str(exc).partition("\n")[0]
            raise ModelError(f"{layer} is not stored as {self.form.label} says: {cause}") from exc

    def drop(self, modules: Collection[str]) -> None:
        """Leave out all tensors of the modules with these names, which other stages of a pipeline hold."""
        self.plain = {name: read for name, read in self.plain.items() if not is_within(name, modules)}
        self.layers = {name: parts for name, parts in self.layers.items() if not is_within(name, modules)}

    def names(self) -> Tensors:
        """Return a mapping whose keys are the names of all parameters of the model that this checkpoint holds. Only
        its keys may be used: those of quantized layers cannot be called; their codes are read elsewhere."""
        return {**self.plain, **{layer + self.form.target: _unread for layer in self.layers}}


def sort_tensors(tensors: Tensors, form: CheckpointFormat) -> StoredModel:
    """Divide the tensors of a checkpoint into those of quantized layers, as `form` recognizes them, and others. Scales
    of a KV cache are left out."""
    parts: dict[str, Tensors] = {}
    for name, read in tensors.items():
        if (end := _part_of(name, form)) is not None:
            parts.setdefault(name.removesuffix(end), {})[end] = read
    stored = StoredModel(form)
    stored.layers = {layer: found for layer, found in parts.items() if any(mark in found for mark in form.marks)}
    taken = {layer + end for layer, found in stored.layers.items() for end in found}
    stored.plain = {n: read for n, read in tensors.items() if n not in taken and not n.endswith(KV_SCALES)}
    if num_scales := len(tensors) - len(taken) - len(stored.plain):
        logger.info(
            "%d scales of a KV cache in the checkpoint are not used: with a KV cache in 8 bits each token and head gets"
            " a scale of its own",
            num_scales,
        )
    return stored


def fill_stored(
    module: nn.Module, stored: StoredModel, target: torch.device, dtype: torch.dtype, parts: RankParts = WHOLE
) -> bool:
    """Load a quantized checkpoint into a module on torch's meta device, with the codes of the checkpoint. `parts` says
    which part of each layer this rank keeps. Return False, with nothing loaded, if the module has other parameters."""
    _add_biases(module, stored)
    embedding, names = tied_embedding(module), stored.names()
    # Only the head is stored, quantized, and the embedding shares it.
    is_shared = embedding is not None and "lm_head" in stored.layers and f"{embedding}.weight" not in stored.plain
    if not fits(module, {**names, f"{embedding}.weight": _unread} if is_shared else names):
        return False
    for name, read in stored.plain.items():
        set_part(module, name, parts.of(name, read()).to(target, dtype))
    _place_all(module, stored, target, dtype, parts)
    if embedding is not None and is_shared:
        share_head(module, embedding, dtype)
    elif embedding is not None and "lm_head" not in stored.layers:
        share_embedding(module, embedding, parts)
    return True


def numbers(stored: StoredModel, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return all weights of a quantized checkpoint, converted to floats of `dtype` in host memory, by name.
    transformers then converts them to its own names and shapes."""
    cpu = torch.device("cpu")
    dense = {layer + stored.form.target: stored.made(layer, cpu).dense(dtype) for layer in stored.layers}
    return {**{name: read() for name, read in stored.plain.items()}, **dense}


def requantize(
    module: nn.Module, stored: StoredModel, target: torch.device, dtype: torch.dtype, parts: RankParts = WHOLE
) -> None:
    """Replace the linear layers of `module`, which transformers has made from the result of `numbers`, by quantized
    ones with the codes of the checkpoint. Then cut the module to the `parts` of this rank.

    Stored layers for which the module has no linear layer stay floats.
    """
    linears = set(linear_names(module))
    kept = StoredModel(stored.form, layers={name: parts for name, parts in stored.layers.items() if name in linears})
    # The layers have whole shapes and biases here. `parts` are taken afterwards.
    _place_all(module, kept, target, dtype, WHOLE)
    split_module(module, parts)
    if others := len(stored.layers) - len(kept.layers):
        logger.info(
            "%d quantized layers were converted to %s: the model has no linear layers for them (experts)", others, dtype
        )


def _unread() -> Tensor:
    """Stand in for a function that reads a tensor where only names are compared. Raises `AssertionError`."""
    raise AssertionError("only names are asked for")


def _part_of(name: str, form: CheckpointFormat) -> str | None:
    """Return the end of a tensor's name that marks it as a tensor of a quantized layer, such as `.qweight`, or None if
    it has no such end."""
    # the longest: one end may be the end of another
    return max((end for end in form.parts if name.endswith(end)), key=len, default=None)


def _add_biases(module: nn.Module, stored: StoredModel) -> None:
    """Add a bias to the linear layers of `module` for which the checkpoint stores one though the config does not
    mention it, as some tools do."""
    for layer in stored.layers:
        name = f"{layer}.bias"
        if name not in stored.plain:
            continue
        linear = dict(module.named_modules()).get(layer)
        if isinstance(linear, nn.Linear) and linear.bias is None:
            linear.bias = nn.Parameter(torch.empty(linear.out_features, device="meta"), requires_grad=False)


def _place_all(
    module: nn.Module, stored: StoredModel, target: torch.device, dtype: torch.dtype, parts: RankParts
) -> None:
    """Decode all quantized layers of a checkpoint and put them into `module`. Layers that no kernel supports as stored
    become floats of `dtype`. Raises `ModelError` if a layer is broken or has another shape than the config states."""
    linears, mixtures, as_numbers = set(linear_names(module)), expert_names(module), 0
    shapes = {name: parameter.shape for name, parameter in module.named_parameters(remove_duplicate=False)}
    for layer in stored.layers:
        made = stored.made(layer, target)
        name = layer + stored.form.target
        weight = made.weight
        _check_shape(shapes[name], weight, layer, stored.form)
        if layer in linears and isinstance(weight, QuantizedWeight) and _is_served(weight):
            _place(module, layer, weight, made.order)
            split_weights(module, layer, parts)
        elif isinstance(weight, StackedWeight) and layer.rpartition(".")[0] in mixtures:
            place_experts(module, layer, weight)
            split_weights(module, layer.rpartition(".")[0], parts, only=layer.rpartition(".")[2])
        else:
            set_part(module, name, parts.of(name, made.dense(dtype)).contiguous())
            as_numbers += 1
    logger.info(
        "read %d quantized layers (%s)%s", len(stored.layers), stored.form.label, _conversion_note(as_numbers, dtype)
    )


def _conversion_note(as_numbers: int, dtype: torch.dtype) -> str:
    """Return the text for the log that this number of layers was converted to floats; empty for 0."""
    return f"; converted {as_numbers} of them to {dtype}, which no kernel supports as stored" if as_numbers else ""


def _place(module: nn.Module, layer: str, weight: QuantizedWeight, order: Tensor | None) -> None:
    """Replace the linear layer with this name by a quantized one. `order` is that of its inputs
    (`DecodedWeight.order`)."""
    bias = getattr(module.get_submodule(layer), "bias", None)
    linear = QuantizedLinear(weight, None if bias is None else bias.detach().to(weight.device))
    module.set_submodule(layer, linear if order is None else ReorderedLinear(linear, order))


def _check_shape(
    asked: torch.Size, weight: QuantizedWeight | StackedWeight | Tensor, layer: str, form: CheckpointFormat
) -> None:
    """Check that a decoded layer has the shape `asked`, which the config states. Raises `ModelError` if not; `layer`
    and `form` name it in the message."""
    if isinstance(weight, StackedWeight):
        shape: tuple[int, ...] = (weight.count, weight.weight.inputs, weight.outputs)
    else:
        shape = tuple(weight.shape) if isinstance(weight, Tensor) else (weight.outputs, weight.inputs)
    if shape != tuple(asked):
        raise ModelError(
            f"{layer} is stored as {form.label} of shape {list(shape)}, but its config asks for {list(asked)}"
        )


def _is_served(weight: QuantizedWeight) -> bool:
    """Return whether the kernels of every device support the number of inputs that share a scale in this weight."""
    if weight.group >= weight.inputs:
        return True
    return weight.inputs % weight.group == 0 and (weight.group in SHORT_GROUPS or weight.group % GROUP_STEP == 0)
