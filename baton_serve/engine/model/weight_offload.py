"""Decides which layers' weights stay in host memory (`--cpu-offload-gb`), and copies them to the device in each step.

The device has two buffers, which these layers use in turn: while one layer computes, the weights of the next one are
copied on a second stream. The tensors of a layer are views of its buffer, so their addresses never change, and a
captured graph contains the copies. Norms and biases stay on the device, since kernels read them a layer early.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from baton_serve.engine import device as devices
from baton_serve.engine.errors import ConfigError
from baton_serve.engine.kernels import QuantizedWeight, StackedWeight
from baton_serve.engine.model.pipeline_stage import own_layers

logger = logging.getLogger(__name__)

NUM_BUFFERS = 2
LEAST_PIECE = 16 << 20
"""Bytes up to which a pinned allocation is not divided."""
ALIGNMENT = 256
"""Multiple of bytes at which a weight begins in a buffer, as kernels expect of memory from the allocator."""


@dataclass(frozen=True, slots=True)
class _View:
    """A tensor of a layer, and the number of bytes from the beginning of the buffer to its storage."""

    tensor: Tensor
    offset: int
    start: int
    """Elements from the beginning of the storage to the tensor."""


@dataclass(frozen=True, slots=True)
class _HostLayer:
    """The weights of one layer in pinned host memory, and the tensors that read them in a buffer of the device."""

    pieces: list[Tensor]
    views: list[_View]


class WeightOffload:
    """The decoder layers whose weights are in host memory. `enter` and `leave` are called around each layer of a step,
    in order; layers are counted from 0 within this rank's pipeline stage."""

    def __init__(self, device: torch.device, layers: list[int], common: list[Tensor]) -> None:
        """Prepare to hold the weights of `layers`, in ascending order, for a model on `device`. `common` are tensors
        that several layers read, which stay on the device."""
        self._device = device
        self._common = {id(tensor): tensor for tensor in common}
        self._order = {layer: place for place, layer in enumerate(layers)}
        self._layers = layers
        self._held: dict[int, _HostLayer] = {}
        self._buffers = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(NUM_BUFFERS)]
        # On the CPU, which only tests use, copies run at once.
        self._beside = devices.beside(device) or _at_once
        self._joins: dict[int, Callable[[], None]] = {}

    def __contains__(self, layer: int) -> bool:
        return layer in self._order

    @property
    def saved_bytes(self) -> int:
        """Return by how many bytes the weights on the device are smaller, buffers subtracted."""
        held = sum(piece.nbytes for layer in self._held.values() for piece in layer.pieces)
        return held - sum(buffer.nbytes for buffer in self._buffers)

    @torch.inference_mode()
    def to_device(self, layer: nn.Module) -> None:
        """Copy a layer's weights from the host to the device, so that they can be packed there. Pass them to `hold`
        afterwards."""
        _move(layer, self._device, copies=True)

    @torch.inference_mode()
    def hold(self, number: int, parts: tuple[object, ...], outside: tuple[object, ...]) -> None:
        """Move the weights of layer `number` to pinned host memory. `parts` are the layer's module and everything
        else that refers to its weights; a tensor that is not found in them stays on the device. `outside` are objects
        to which they refer and that are not the layer's own, such as kernels with their scratch memory."""
        seen = {id(one) for one in outside}
        found = {id(tensor): tensor for tensor in _tensors(parts, seen) if self._is_large(tensor)}
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in found.values()}
        offsets, size = {}, 0
        for address, storage in storages.items():
            offsets[address] = size
            size += -(-storage.nbytes() // ALIGNMENT) * ALIGNMENT
        place = self._order[number] % NUM_BUFFERS
        if size > self._buffers[place].numel():
            self._buffers[place] = torch.empty(size, dtype=torch.uint8, device=self._device)
        buffer = self._buffers[place]
        for address, storage in storages.items():
            whole = torch.empty(0, dtype=torch.uint8, device=self._device).set_(cast(Any, storage))
            buffer[offsets[address] : offsets[address] + storage.nbytes()].copy_(whole)
        pieces = [devices.pinned_memory(self._device, count) for count in piece_sizes(size)]
        for piece, source in zip(pieces, torch.split(buffer[:size], [len(piece) for piece in pieces]), strict=True):
            piece.copy_(source)
        views = [
            _View(tensor, offsets[tensor.untyped_storage().data_ptr()], int(tensor.storage_offset()))
            for tensor in found.values()
        ]
        self._held[number] = _HostLayer(pieces, views)
        # A larger buffer is also that of the earlier layers.
        for layer, held in self._held.items():
            if self._order[layer] % NUM_BUFFERS == place:
                self._point(held.views, self._buffers[place])

    def enter(self, layer: int) -> None:
        """Make the weights of `layer` ready on the device, for work that is queued from now on. The copies of the first
        layers begin when layer 0 is entered."""
        if layer == 0:
            self._joins.clear()
            for first in self._layers[:NUM_BUFFERS]:
                self._start(first)
        if layer in self._order:
            self._joins.pop(layer)()

    def leave(self, layer: int) -> None:
        """Let the buffer of `layer`, whose work is queued, be overwritten by the layer that uses it next."""
        if layer in self._order and (following := self._order[layer] + NUM_BUFFERS) < len(self._layers):
            self._start(self._layers[following])

    def add_hooks(self, layers: list[nn.Module]) -> None:
        """Make these modules, the decoder layers in order, call `enter` and `leave` when they run."""
        for number, layer in enumerate(layers):
            layer.register_forward_pre_hook(partial(_ignore_call, self.enter, number))
            layer.register_forward_hook(partial(_ignore_call, self.leave, number))

    def _start(self, layer: int) -> None:
        """Begin to copy the weights of `layer` to its buffer."""
        pieces, buffer = self._held[layer].pieces, self._buffers[self._order[layer] % NUM_BUFFERS]

        def copy() -> None:
            at = 0
            for piece in pieces:
                buffer[at : at + len(piece)].copy_(piece, non_blocking=True)
                at += len(piece)

        self._joins[layer] = self._beside(copy)

    def _is_large(self, tensor: Tensor) -> bool:
        is_plain = tensor.layout == torch.strided and tensor.device.type == self._device.type
        return is_plain and tensor.dim() > 1 and tensor.numel() > 0 and id(tensor) not in self._common

    @staticmethod
    def _point(views: list[_View], buffer: Tensor) -> None:
        """Make the tensors of `views` show the bytes of `buffer`. Their shapes do not change."""
        for view in views:
            start = view.offset // view.tensor.element_size() + view.start
            view.tensor.set_(cast(Any, buffer.untyped_storage()), start, view.tensor.shape, view.tensor.stride())


def refuse_offload(device: torch.device, num_gib: float) -> None:
    """Raise `ConfigError` if `num_gib` GiB of weights are to be kept in host memory although `device` is the CPU."""
    if num_gib and devices.is_host(device):
        raise ConfigError(
            f"cpu_offload_gb is {num_gib:g}, but the device is the CPU, which has all weights in host memory already:"
            " leave it out"
        )


@torch.inference_mode()
def offload_weights(module: nn.Module, name: str, device: torch.device, num_gib: float) -> WeightOffload | None:
    """Move a model that was loaded to host memory to `device`, except for as many decoder layers as save `num_gib` GiB
    there. The forward moves these one by one with `to_device` and `hold`. Return None if `num_gib` is 0.

    Raises `ConfigError` for the CPU, or if so few layers would stay that nothing is saved.
    """
    if not num_gib:
        return None
    refuse_offload(device, num_gib)
    found = getattr(getattr(module, "model", None), "layers", None)
    if found is None:
        raise ConfigError(f"cpu_offload_gb: {name} is not one list of decoder layers; leave it out")
    layers: list[nn.Module] = own_layers(found)
    sizes = [sum(tensor.nbytes for tensor in _tensors((layer,), set()) if tensor.dim() > 1) for layer in layers]
    chosen = choose_layers(sizes, int(num_gib * (1 << 30)))
    if not chosen:
        raise ConfigError(
            f"cpu_offload_gb is {num_gib:g}, but {name} has {len(layers)} layers here, and two of those in host memory"
            " need buffers on the device: nothing would be saved; leave it out"
        )
    offload = WeightOffload(device, chosen, _common_tensors(layers))
    kept = {part for number in chosen for part in layers[number].modules()}
    for part in module.modules():
        if part not in kept:
            _move_own(part, device, copies=False)
    held = sum(sizes[number] for number in chosen)
    logger.info("the weights of %d of %d layers (%.2f GiB) are in host memory", len(chosen), len(layers), held / 2**30)
    return offload


def piece_sizes(num_bytes: int) -> list[int]:
    """Divide `num_bytes` into powers of two, the largest first, and a rest of at most `LEAST_PIECE`. torch rounds each
    pinned allocation up to a power of two, which would take up to twice the memory."""
    sizes: list[int] = []
    while num_bytes:
        sizes.append(num_bytes if num_bytes <= LEAST_PIECE else 1 << (num_bytes.bit_length() - 1))
        num_bytes -= sizes[-1]
    return sizes


def choose_layers(sizes: list[int], num_bytes: int) -> list[int]:
    """Return the numbers of the layers whose weights go to host memory, evenly spread so that their copies run beside
    the work of the others. `sizes` are the bytes of each layer.

    They are as few as save `num_bytes` on the device, the buffers for two layers subtracted, or all layers if that many
    cannot be saved; [] if nothing would be saved.
    """
    total = len(sizes)
    for count in range(NUM_BUFFERS + 1, total + 1):
        chosen = [math.ceil((place + 1) * total / count) - 1 for place in range(count)]
        saved = sum(sizes[number] for number in chosen) - NUM_BUFFERS * max(sizes[number] for number in chosen)
        if saved > 0 and (saved >= num_bytes or count == total):
            return chosen
    return []


def _at_once(work: Callable[[], None]) -> Callable[[], None]:
    """Do `work` now; the returned function, which waits for it, does nothing."""
    work()
    return lambda: None


def _ignore_call(call: Callable[[int], None], number: int, *_: object) -> None:
    """Call `call` with `number` from a hook of a module, whose arguments are not needed."""
    call(number)


def _move(module: nn.Module, device: torch.device, *, copies: bool) -> None:
    """Move the weights of a module and its children to `device`. `copies`: also if they are there already."""
    for part in module.modules():
        _move_own(part, device, copies=copies)


def _move_own(part: nn.Module, device: torch.device, *, copies: bool) -> None:
    """Move a module's own weights to `device`, not those of its children. Quantized weights are plain attributes, which
    torch's `to` does not know."""
    for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False)):
        # Parameters keep their identity, so that tied weights stay tied.
        if copies or tensor.device != device:
            tensor.data = tensor.data.to(device, copy=copies)
    for name, value in list(vars(part).items()):
        if not name.startswith("_") and (moved := _moved(value, device)) is not value:
            setattr(part, name, moved)


def _moved(value: object, device: torch.device) -> Any:
    """Return `value` with its tensors on `device`: a tensor, a quantized weight, or a dict of tensors or of the stacked
    weights of experts. Return anything else as it is."""
    if isinstance(value, (Tensor, QuantizedWeight)):
        return value.to(device)
    if isinstance(value, StackedWeight):
        return replace(value, weight=value.weight.to(device))
    if isinstance(value, dict) and any(isinstance(one, (Tensor, StackedWeight)) for one in value.values()):
        return {key: _moved(one, device) for key, one in value.items()}
    return value


def _common_tensors(layers: list[nn.Module]) -> list[Tensor]:
    """Return the tensors to which more than one of these layers refers."""
    found = [list(_tensors((layer,), set())) for layer in layers]
    counts = Counter(id(tensor) for tensors in found for tensor in tensors)
    return [tensor for tensors in found for tensor in tensors if counts[id(tensor)] > 1]


def _tensors(value: object, seen: set[int]) -> Iterator[Tensor]:
    """Iterate over the tensors that `value` refers to: through containers, dataclasses, modules, methods and partial
    calls. `seen` are the ids of the objects that were visited."""
    if value is None or isinstance(value, (str, bytes, int, float, type)) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
        return
    for child in _children(value):
        yield from _tensors(child, seen)


def _children(value: object) -> list[object]:
    """Return the objects that `value` refers to directly and that may hold weights of its layer."""
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (list, tuple)):
        return list(value)
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, nn.Module):
        return [vars(value)]
    if is_dataclass(value):
        return [getattr(value, field.name) for field in fields(value)]
    if (owner := getattr(value, "__self__", None)) is not None:
        return [owner]
    # Functions hold weights in their closures.
    cells = getattr(value, "__closure__", None) or ()
    return [cell.cell_contents for cell in cells]
