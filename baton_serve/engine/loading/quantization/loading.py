"""Loads a model whose linear layers are rounded as they come: the whole of it is never in memory unrounded.

The skeleton is built without memory; each tensor of the checkpoint goes to the device by itself, the largest first.
Checkpoints whose names are not the model's own (transformers converts those) are loaded by transformers into host
memory, and rounded from there: then only the device is spared.
"""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from baton_serve.engine.errors import UnsupportedModelError
from baton_serve.engine.model.quantized.experts import WEIGHTS, check_experts, expert_names, quantize_experts
from baton_serve.engine.model.quantized.modules import QuantizedLinear
from baton_serve.engine.model.quantized.online import (
    QuantizationPlan,
    linear_names,
    quantize_layer,
    share_head,
    tied_embedding,
)
from baton_serve.engine.model.vision.decoder import decoder_tensors

logger = logging.getLogger(__name__)

Tensors = dict[str, Callable[[], Tensor]]
"""By the model's parameter names: reads one from the checkpoint, or makes it up."""


def round_loaded(module: nn.Module, plan: QuantizationPlan, target: torch.device, dtype: torch.dtype) -> nn.Module:
    """Rounds a model that lies whole in host memory, layer by layer, and moves the rest of it to `target`."""
    check_experts(module)
    for name in expert_names(module):
        quantize_experts(module, name, lambda full: module.get_parameter(full).detach().to(target), plan)
    embedding = tied_embedding(module)
    for name in linear_names(module):
        linear = module.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        quantize_layer(module, name, linear.weight.detach().to(target), plan)
    _share(module, embedding, dtype)
    _report(module)
    return module.to(target)


def fill(
    module: nn.Module, tensors: Tensors, plan: QuantizationPlan, target: torch.device, dtype: torch.dtype
) -> nn.Module:
    """Gives a skeleton on torch's meta device its tensors. `fits` has said that these are all of them."""
    check_experts(module)
    mixtures = expert_names(module)
    stacked = {f"{name}.{leaf}" for name in mixtures for leaf in WEIGHTS}
    embedding = tied_embedding(module)
    linears = {f"{name}.weight": name for name in linear_names(module)}
    if embedding is not None and plan.scheme_of("lm_head") is not None:
        tensors = {**tensors, "lm_head.weight": tensors.get("lm_head.weight", tensors[f"{embedding}.weight"])}
        tensors.pop(f"{embedding}.weight")
    for name, read in tensors.items():
        if name not in linears and name not in stacked:
            set_parameter(module, name, read().to(target, dtype))
    _fill_experts(module, mixtures, {name: tensors[name] for name in stacked}, plan, (target, dtype))
    for name in sorted(linears, key=lambda n: -module.get_parameter(n).numel()):
        if name in tensors:  # a head that is tied and skipped is not
            weight = tensors[name]().to(target, dtype)
            if not quantize_layer(module, linears[name], weight, plan):
                set_parameter(module, name, weight)
            del weight
    _share(module, embedding, dtype)
    if embedding is not None and not isinstance(module.get_submodule("lm_head"), QuantizedLinear):
        setattr(module.get_submodule("lm_head"), "weight", module.get_parameter(f"{embedding}.weight"))  # noqa: B010
    _report(module)
    return module


def _fill_experts(
    module: nn.Module,
    mixtures: list[str],
    tensors: Tensors,
    plan: QuantizationPlan,
    kind: tuple[torch.device, torch.dtype],
) -> None:
    for name in mixtures:
        if not quantize_experts(module, name, lambda full: tensors[full]().to(*kind), plan):
            for leaf in WEIGHTS:
                set_parameter(module, f"{name}.{leaf}", tensors[f"{name}.{leaf}"]().to(*kind))


def fits(module: nn.Module, tensors: Tensors) -> bool:
    """Whether these are the skeleton's own parameters, all of them, and its buffers can be made again."""
    names = {name for name, _ in module.named_parameters()}
    embedding = tied_embedding(module)
    missing = names - set(tensors) - ({"lm_head.weight"} if embedding is not None else set())
    return not missing and not set(tensors) - names - {"lm_head.weight"} and _revive_buffers(module)


def random_tensors(module: nn.Module, target: torch.device, dtype: torch.dtype, std: float) -> Tensors:
    """Random numbers in the shapes of a skeleton, drawn when asked for."""

    def draw(name: str, shape: torch.Size) -> Tensor:
        if name.endswith("bias"):
            return torch.zeros(shape, dtype=dtype, device=target)
        if len(shape) == 1:
            return torch.ones(shape, dtype=dtype, device=target)
        return torch.empty(shape, dtype=dtype, device=target).normal_(0.0, std)

    def later(name: str, shape: torch.Size) -> Callable[[], Tensor]:
        return lambda: draw(name, shape)

    return {name: later(name, parameter.shape) for name, parameter in module.named_parameters()}


def checkpoint_tensors(folder: Path, stack: ExitStack) -> Tensors:
    """Of all files of a folder, which stay open as long as `stack`; of a model that reads images, its decoder's."""
    tensors: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        file = stack.enter_context(safe_open(path, framework="pt"))
        tensors.update(_readers(file))
    return decoder_tensors(tensors)


def _readers(file: Any) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    def later(name: str) -> Callable[[], Tensor]:
        return lambda: file.get_tensor(name)

    return ((name, later(name)) for name in file.keys() if not name.endswith("rotary_emb.inv_freq"))  # noqa: SIM118


def set_parameter(module: nn.Module, name: str, value: Tensor) -> None:
    """In the place of the parameter of that name."""
    owner, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(owner), leaf, nn.Parameter(value, requires_grad=False))


def _share(module: nn.Module, embedding: str | None, dtype: torch.dtype) -> None:
    if embedding is not None and isinstance(module.get_submodule("lm_head"), QuantizedLinear):
        share_head(module, embedding, dtype)


def _revive_buffers(module: nn.Module) -> bool:
    """Rotary frequencies are computed, not stored; a skeleton has none."""
    for name, part in list(module.named_modules()):
        if not any(buffer.is_meta for buffer in part.buffers(recurse=False)):
            continue
        config = getattr(part, "config", None)
        if config is None or not type(part).__name__.endswith("RotaryEmbedding"):
            return False
        with torch.device("cpu"):
            module.set_submodule(name, type(part)(config=config))
    return True


def _report(module: nn.Module) -> None:
    layers = [part.weight for part in module.modules() if isinstance(part, QuantizedLinear)]
    left = list(linear_names(module))
    if sum(1 for _ in layers) - (type(getattr(module, "lm_head", None)) is QuantizedLinear) < 1:
        raise UnsupportedModelError(f"{type(module).__name__} has no linear layers that --quantization could round")
    size = sum(layer.nbytes for layer in layers if hasattr(layer, "nbytes"))
    logger.info(
        "%d linear layers are quantized (%.2f GiB)%s",
        len(layers),
        size / math.pow(2, 30),
        f"; as they were: {', '.join(left[:4])}{' …' if len(left) > 4 else ''}" if left else "",
    )
