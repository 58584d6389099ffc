"""Loads a model whose checkpoint holds quantized weights, layer by layer: each goes to the device as it is stored.

A model whose parameters are not the checkpoint's own (transformers converts those, such as experts that are stored
one by one) gets numbers for them, in host memory; the rest of it stays quantized.
"""

import logging
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from baton_serve.engine.errors import ModelError
from baton_serve.engine.kernels.quantized import QuantizedWeight, StackedWeight
from baton_serve.engine.loading.quantization.checkpoints.layout import CheckpointFormat, DecodedWeight
from baton_serve.engine.loading.quantization.loading import Tensors, fits, set_parameter
from baton_serve.engine.model.quantized.experts import expert_names, place_experts
from baton_serve.engine.model.quantized.modules import QuantizedLinear, ReorderedLinear
from baton_serve.engine.model.quantized.online import linear_names, share_head, tied_embedding

logger = logging.getLogger(__name__)

KV_SCALES = (".k_scale", ".v_scale", ".q_scale", ".k_zero_point", ".v_zero_point", ".kv_scale")
"""Of a KV cache in few bits; ours makes its own."""
SHORT_GROUPS = (32, 64)
GROUP_STEP = 128


@dataclass
class StoredModel:
    """A checkpoint's tensors: `plain` as they are, `layers` by name, with their parts."""

    form: CheckpointFormat
    plain: Tensors = field(default_factory=dict)
    layers: dict[str, Tensors] = field(default_factory=dict)

    def made(self, layer: str, target: torch.device) -> DecodedWeight:
        """Raises `ModelError`."""
        try:
            return self.form.read({part: read().to(target) for part, read in self.layers[layer].items()})
        except (ValueError, KeyError, RuntimeError) as exc:
            cause = f"it has no {exc.args[0]}" if isinstance(exc, KeyError) else str(exc).partition("\n")[0]
            raise ModelError(f"{layer} is not stored as {self.form.label} says: {cause}") from exc

    def names(self) -> Tensors:
        """Of the model's parameters that this gives. To look at, not to read."""
        return {**self.plain, **{layer + self.form.target: _unread for layer in self.layers}}


def sort_tensors(tensors: Tensors, form: CheckpointFormat) -> StoredModel:
    parts: dict[str, Tensors] = {}
    for name, read in tensors.items():
        if (end := _part_of(name, form)) is not None:
            parts.setdefault(name.removesuffix(end), {})[end] = read
    stored = StoredModel(form)
    stored.layers = {layer: found for layer, found in parts.items() if any(mark in found for mark in form.marks)}
    taken = {layer + end for layer, found in stored.layers.items() for end in found}
    stored.plain = {n: read for n, read in tensors.items() if n not in taken and not n.endswith(KV_SCALES)}
    return stored


def fill_stored(module: nn.Module, stored: StoredModel, target: torch.device, dtype: torch.dtype) -> bool:
    """Gives a skeleton on torch's meta device its weights. False, and nothing done: its parameters are others."""
    _add_biases(module, stored)
    embedding, names = tied_embedding(module), stored.names()
    is_shared = embedding is not None and "lm_head" in stored.layers and f"{embedding}.weight" not in stored.plain
    if not fits(module, {**names, f"{embedding}.weight": _unread} if is_shared else names):
        return False
    for name, read in stored.plain.items():
        set_parameter(module, name, read().to(target, dtype))
    _place_all(module, stored, target, dtype)
    if embedding is not None and is_shared:
        share_head(module, embedding, dtype)
    elif embedding is not None and "lm_head" not in stored.layers:
        setattr(module.get_submodule("lm_head"), "weight", module.get_parameter(f"{embedding}.weight"))  # noqa: B010
    return True


def numbers(stored: StoredModel, dtype: torch.dtype) -> dict[str, Tensor]:
    """Every weight as numbers, in host memory, for transformers to convert."""
    cpu = torch.device("cpu")
    dense = {layer + stored.form.target: stored.made(layer, cpu).dense(dtype) for layer in stored.layers}
    return {**{name: read() for name, read in stored.plain.items()}, **dense}


def requantize(module: nn.Module, stored: StoredModel, target: torch.device, dtype: torch.dtype) -> None:
    """Puts quantized layers into a model made of `numbers`, wherever it has such a layer."""
    linears = set(linear_names(module))
    kept = StoredModel(stored.form, layers={name: parts for name, parts in stored.layers.items() if name in linears})
    _place_all(module, kept, target, dtype)
    if others := len(stored.layers) - len(kept.layers):
        logger.info("%d layers are kept in %s: the model has no linear layers for them (experts)", others, dtype)


def _unread() -> Tensor:
    raise AssertionError("only names are asked for")


def _part_of(name: str, form: CheckpointFormat) -> str | None:
    return max((end for end in form.parts if name.endswith(end)), key=len, default=None)


def _add_biases(module: nn.Module, stored: StoredModel) -> None:
    """Some tools store a bias for layers that have none."""
    for layer in stored.layers:
        name = f"{layer}.bias"
        if name not in stored.plain:
            continue
        linear = dict(module.named_modules()).get(layer)
        if isinstance(linear, nn.Linear) and linear.bias is None:
            linear.bias = nn.Parameter(torch.empty(linear.out_features, device="meta"), requires_grad=False)


def _place_all(module: nn.Module, stored: StoredModel, target: torch.device, dtype: torch.dtype) -> None:
    linears, mixtures, as_numbers = set(linear_names(module)), expert_names(module), 0
    shapes = {name: parameter.shape for name, parameter in module.named_parameters(remove_duplicate=False)}
    for layer in stored.layers:
        made = stored.made(layer, target)
        name = layer + stored.form.target
        weight = made.weight
        _check_shape(shapes[name], weight, layer, stored.form)
        if layer in linears and isinstance(weight, QuantizedWeight) and _is_served(weight):
            _place(module, layer, weight, made.order)
        elif isinstance(weight, StackedWeight) and layer.rpartition(".")[0] in mixtures:
            place_experts(module, layer, weight)
        else:
            set_parameter(module, name, made.dense(dtype))
            as_numbers += 1
    logger.info("%d layers are %s%s", len(stored.layers), stored.form.label, _told(as_numbers, dtype))


def _told(as_numbers: int, dtype: torch.dtype) -> str:
    return f"; {as_numbers} of them became {dtype} while loading" if as_numbers else ""


def _place(module: nn.Module, layer: str, weight: QuantizedWeight, order: Tensor | None) -> None:
    bias = getattr(module.get_submodule(layer), "bias", None)
    linear = QuantizedLinear(weight, None if bias is None else bias.detach().to(weight.device))
    module.set_submodule(layer, linear if order is None else ReorderedLinear(linear, order))


def _check_shape(
    asked: torch.Size, weight: QuantizedWeight | StackedWeight | Tensor, layer: str, form: CheckpointFormat
) -> None:
    if isinstance(weight, StackedWeight):
        shape: tuple[int, ...] = (weight.count, weight.weight.inputs, weight.outputs)
    else:
        shape = tuple(weight.shape) if isinstance(weight, Tensor) else (weight.outputs, weight.inputs)
    if shape != tuple(asked):
        raise ModelError(
            f"{layer} is stored as {form.label} of shape {list(shape)}, but its config asks for {list(asked)}"
        )


def _is_served(weight: QuantizedWeight) -> bool:
    """Whether every device's kernels can read such groups."""
    if weight.group >= weight.inputs:
        return True
    return weight.inputs % weight.group == 0 and (weight.group in SHORT_GROUPS or weight.group % GROUP_STEP == 0)
