"""Reads a tensor-parallel rank's part of unquantized weights; which part that is, is decided in `model/rank_parts.py`.
Of each stored tensor only this part is read.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from baton_serve.engine.loading.quantization.layer_by_layer import random_tensors
from baton_serve.engine.loading.weight_files import TensorCopy, fill, tensor_copies
from baton_serve.engine.model.quantized.rank_slices import set_part
from baton_serve.engine.model.rank_parts import RankParts

Progress = Callable[[float], None]
"""Called with the finished fraction."""


def load_parts(
    module: nn.Module,
    stored: dict[str, Tensor],
    parts: RankParts,
    target: torch.device,
    progress: Progress,
    num_threads: int | None,
) -> bool:
    """Load this rank's part of the weights into a module on the host, whose weights are not initialized. They are put
    on `target`. `stored` are the whole weights by name, and `parts` says which part of each this rank holds.

    Return False, with nothing loaded, if transformers has to convert the weights first.
    """
    copies = tensor_copies(module, stored)
    if copies is None:
        return False
    # Replacing a parameter ends its sharing, so who shares is noted first.
    owners = _first_names(module)
    pieces: list[TensorCopy] = []
    for name, copy in copies.items():
        # The whole tensor of the module was never written, so that it takes no memory.
        part = parts.tensors.get(name)
        shape = list(copy.target.shape)
        if part is not None:
            shape[part.dim] = part.size
        own = torch.empty(shape, dtype=copy.target.dtype, device=target)
        _set(module, name, own)
        if name in parts.zeros:
            own.zero_()
        elif part is None:
            pieces.append(TensorCopy(own, copy.source))
        else:
            at = 0
            for columns in part.ranges:
                count = columns.stop - columns.start
                source = copy.source.narrow(part.dim, columns.start, count)
                pieces.append(TensorCopy(own.narrow(part.dim, at, count), source))
                at += count
    fill(pieces, target, progress, num_threads)
    _tie(module, owners, parts)
    return True


def draw_parts(
    module: nn.Module, parts: RankParts, target: torch.device, dtype: torch.dtype, seed: int, std: float
) -> None:
    """Give a module on the host this rank's part of random weights, on `target`, with the standard deviation `std`.
    `parts` says which part of each weight this rank holds.

    Each rank draws the whole weights, so that weights which all ranks hold are equal.
    """
    torch.manual_seed(seed)
    owners = _first_names(module)
    for name, draw in random_tensors(module, target, dtype, std).items():
        set_part(module, name, parts.of(name, draw()).clone())
    _tie(module, owners, parts)


def _first_names(module: nn.Module) -> dict[str, str]:
    """Return, for each parameter that is the same tensor as an earlier parameter, its name and that of the earlier
    one."""
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    every = module.named_parameters(remove_duplicate=False)
    return {name: first[id(parameter)] for name, parameter in every if first[id(parameter)] != name}


def _tie(module: nn.Module, owners: dict[str, str], parts: RankParts) -> None:
    """Let parameters share the memory of others again after the others were replaced: `owners` maps the name of each to
    that of the other. A head gets the rows of the embedding that this rank holds."""
    for name, owner in owners.items():
        set_part(module, name, parts.of(name, module.get_parameter(owner).data))


def _set(module: nn.Module, name: str, value: Tensor) -> None:
    """Replace the parameter or buffer with this name by `value`."""
    owner, _, leaf = name.rpartition(".")
    if leaf in cast(Any, module.get_submodule(owner))._buffers:
        setattr(module.get_submodule(owner), leaf, value)
    else:
        set_part(module, name, value)
