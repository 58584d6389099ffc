"""Quantizes while loading (`--quantization`), layer by layer, so that the unrounded model is never in memory as a
whole.

A skeleton is built without memory; each tensor of the checkpoint is copied to the device and rounded there, the largest
first. If the checkpoint's names are not the model's own, transformers loads it into host memory, and it is rounded from
there: this saves memory only on the device.
"""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from baton_serve.contracts.flag_choices import LoadFormat
from baton_serve.engine.errors import UnsupportedModelError
from baton_serve.engine.loading.weight_files import map_tensors
from baton_serve.engine.model.quantized.experts import WEIGHTS, check_experts, expert_names, quantize_experts
from baton_serve.engine.model.quantized.modules import QuantizedLinear
from baton_serve.engine.model.quantized.quantization_plan import (
    QuantizationPlan,
    linear_names,
    quantize_layer,
    share_head,
    tied_embedding,
)
from baton_serve.engine.model.quantized.rank_slices import (
    set_part,
    share_embedding,
    split_layer,
    split_parameters,
    split_weights,
)
from baton_serve.engine.model.rank_parts import WHOLE, RankParts
from baton_serve.engine.model.vision.text_part import decoder_tensors
from baton_serve.engine.model_folder import is_pickled, weight_files

logger = logging.getLogger(__name__)

Tensors = dict[str, Callable[[], Tensor]]
"""Functions that read or generate a tensor, by the model's parameter names."""


def round_loaded(
    module: nn.Module, plan: QuantizationPlan, target: torch.device, dtype: torch.dtype, parts: RankParts = WHOLE
) -> nn.Module:
    """Quantize the layers of a loaded model as `plan` says, one after the other, and move the model from host memory to
    `target`. `dtype` is that of the other weights; `parts` says which part of each layer this rank keeps."""
    check_experts(module)
    for name in expert_names(module):
        if quantize_experts(module, name, lambda full: module.get_parameter(full).detach().to(target), plan):
            split_layer(module, name, parts)
    embedding = tied_embedding(module)
    for name in linear_names(module):
        linear = module.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        if quantize_layer(module, name, linear.weight.detach().to(target), plan):
            split_layer(module, name, parts)
    _share(module, embedding, dtype)
    _report(module)
    split_parameters(module, parts)
    return module.to(target)


def fill(
    module: nn.Module,
    tensors: Tensors,
    plan: QuantizationPlan,
    target: torch.device,
    dtype: torch.dtype,
    parts: RankParts = WHOLE,
) -> nn.Module:
    """Load the weights into a module on torch's meta device, whose parameters have shapes only, and quantize layers as
    `plan` says. `tensors` read the weights by name; `parts` says which part of each layer this rank keeps. Call it only
    if `fits` returns True."""
    check_experts(module)
    mixtures = expert_names(module)
    stacked = {f"{name}.{leaf}" for name in mixtures for leaf in WEIGHTS}
    embedding = tied_embedding(module)
    linears = {f"{name}.weight": name for name in linear_names(module)}
    # A tied weight is read once, as the head; the embedding then shares its rounded rows.
    if embedding is not None and plan.scheme_of("lm_head") is not None:
        tensors = {**tensors, "lm_head.weight": tensors.get("lm_head.weight", tensors[f"{embedding}.weight"])}
        tensors.pop(f"{embedding}.weight")
    for name, read in tensors.items():
        if name not in linears and name not in stacked:
            set_part(module, name, parts.of(name, read()).to(target, dtype))
    _fill_experts(module, mixtures, {name: tensors[name] for name in stacked}, plan, (target, dtype), parts)
    # The largest come first, while most memory of the device is still free.
    for name in sorted(linears, key=lambda n: -module.get_parameter(n).numel()):
        if name in tensors:  # a tied head that is skipped has no tensor
            # Outputs are rounded independently of each other, so those of other ranks need not be copied.
            weight = parts.rows(name, tensors[name]()).to(target, dtype)
            if quantize_layer(module, linears[name], weight, plan):
                split_weights(module, linears[name], parts, has_rows=True)
            else:
                set_part(module, name, parts.columns(name, weight))
            del weight  # free it before the next one is read
    _share(module, embedding, dtype)
    if embedding is not None and not isinstance(module.get_submodule("lm_head"), QuantizedLinear):
        share_embedding(module, embedding, parts)
    _report(module)
    return module


def _fill_experts(
    module: nn.Module,
    mixtures: list[str],
    tensors: Tensors,
    plan: QuantizationPlan,
    kind: tuple[torch.device, torch.dtype],
    parts: RankParts,
) -> None:
    """Load the experts of the mixtures with these names, and quantize them as `plan` says. `kind` is the device that
    holds them, and the dtype of experts that are not quantized."""
    for name in mixtures:
        if quantize_experts(module, name, lambda full: tensors[full]().to(*kind), plan):
            split_weights(module, name, parts)
            continue
        for full in (f"{name}.{leaf}" for leaf in WEIGHTS):
            set_part(module, full, parts.of(full, tensors[full]()).to(*kind))


def fits(module: nn.Module, tensors: Tensors) -> bool:
    """Return whether `tensors` are exactly the parameters of `module`, which is on torch's meta device, and its buffers
    could be computed again; this computes them.

    Return False if layers share weights, as in Zamba 2: only the first of them would get them.
    """
    names = {name for name, _ in module.named_parameters()}
    if {name for name, _ in module.named_parameters(remove_duplicate=False)} - names - {"lm_head.weight"}:
        return False
    embedding = tied_embedding(module)
    missing = names - set(tensors) - ({"lm_head.weight"} if embedding is not None else set())
    return not missing and not set(tensors) - names - {"lm_head.weight"} and _revive_buffers(module)


def random_tensors(module: nn.Module, target: torch.device, dtype: torch.dtype, std: float) -> Tensors:
    """Return functions that draw random weights for each parameter of `module`, by name, on `target`. `std` is the
    standard deviation; norms are 1 and biases 0."""

    def draw(name: str, shape: torch.Size) -> Tensor:
        # Random norms or biases would make activations grow from layer to layer.
        if name.endswith("bias"):
            return torch.zeros(shape, dtype=dtype, device=target)
        if len(shape) == 1:
            return torch.ones(shape, dtype=dtype, device=target)
        return torch.empty(shape, dtype=dtype, device=target).normal_(0.0, std)

    def later(name: str, shape: torch.Size) -> Callable[[], Tensor]:
        return lambda: draw(name, shape)

    return {name: later(name, parameter.shape) for name, parameter in module.named_parameters()}


def checkpoint_tensors(folder: Path, stack: ExitStack, load_format: LoadFormat, pattern: str) -> Tensors:
    """Return functions that read each tensor of a checkpoint, by name; of a model with a vision tower, only those of
    its decoder. `pattern` is how the files of the format sharded_state are named.

    `stack` closes the files; the functions work until then.
    """
    files = weight_files(folder, load_format, pattern)
    if load_format == "sharded_state" or is_pickled(files):
        return {name: partial(_same, tensor) for name, tensor in map_tensors(folder, load_format, pattern).items()}
    tensors: Tensors = {}
    for path in files:
        file = stack.enter_context(safe_open(path, framework="pt"))
        tensors.update(_readers(file))
    return decoder_tensors(tensors)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _readers(file: Any) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    # A function of its own, so that each reader keeps its own name.
    """Yield the name of each tensor in an opened safetensors file, with a function that reads it."""

    def later(name: str) -> Callable[[], Tensor]:
        return lambda: file.get_tensor(name)

    return ((name, later(name)) for name in file.keys() if not name.endswith("rotary_emb.inv_freq"))  # noqa: SIM118


def _share(module: nn.Module, embedding: str | None, dtype: torch.dtype) -> None:
    """Let the embedding of a model with tied weights look its rows up in the quantized head. `embedding` is its name;
    None: the weights are not tied."""
    if embedding is not None and isinstance(module.get_submodule("lm_head"), QuantizedLinear):
        share_head(module, embedding, dtype)


def _revive_buffers(module: nn.Module) -> bool:
    """Compute the rotary frequencies of a module on torch's meta device, since checkpoints do not store them. Return
    False if it has other buffers, which cannot be computed."""
    for name, part in list(module.named_modules()):
        if not any(buffer.is_meta for buffer in part.buffers(recurse=False)):
            continue
        # Only rotary embeddings of transformers can be rebuilt from their config.
        config = getattr(part, "config", None)
        if config is None or not type(part).__name__.endswith("RotaryEmbedding"):
            return False
        with torch.device("cpu"):
            module.set_submodule(name, type(part)(config=config))
    return True


def _report(module: nn.Module) -> None:
    """Log how many layers were quantized, and which were not. Raises `UnsupportedModelError` if no layer but the head
    was."""
    layers = [part.weight for part in module.modules() if isinstance(part, QuantizedLinear)]
    # Layers that are still plain linear layers.
    left = list(linear_names(module))
    if sum(1 for _ in layers) - (type(getattr(module, "lm_head", None)) is QuantizedLinear) < 1:
        raise UnsupportedModelError(f"{type(module).__name__} has no linear layers that --quantization supports")
    size = sum(layer.nbytes for layer in layers if hasattr(layer, "nbytes"))
    logger.info(
        "quantized %d linear layers (%.2f GiB)%s",
        len(layers),
        size / math.pow(2, 30),
        f"; not quantized:{', '.join(left[:4])}{' …' if len(left) > 4 else ''}" if left else "",
    )
