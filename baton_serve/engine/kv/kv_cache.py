"""Allocates the KV cache as one block-major tensor, orders copies behind steps, and decides which layers and heads each
rank holds. It does not know which request owns which block.

On hosts it lies in a memfd (an anonymous file), so that another process on this machine can map it and copy blocks
directly; nothing is left behind when this process dies. On a device, transports read and write the tensor itself. With
several ranks, each device holds a part of every block, and a memfd serves as the mirror in which blocks are whole:
blocks are copied there for transport. Only those blocks occupy host memory, since the rest of the file is a hole. A
rank on another host than the mirror has its part alone, and sends or receives copies of it.
"""

import mmap
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from baton_serve.contracts.block_layout import KVLayout, KVShape
from baton_serve.engine import device as devices

DTYPES = {  # by `KVLayout.dtype`
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
}

KVMemoryKind = Literal["shared", "device", "mirrored"]
"""Place of whole blocks: host memory that is the cache itself, the device, or a mirror in host memory."""


@dataclass(frozen=True, slots=True)
class BlockPart:
    """The part of every KV block that one of several ranks holds: a range of the layers, and for each of these a range
    of the KV heads. None stands for all layers or heads."""

    layers: slice | None = None
    heads: tuple[slice, ...] | None = None

    def has_layer(self, number: int) -> bool:
        return self.layers is None or self.layers.start <= number < self.layers.stop

    def of(self, blocks: Tensor, layout: KVLayout) -> Tensor:
        """Return a view of this part in a tensor of whole blocks. If the layers have different shapes, the view has all
        heads of its layers."""
        if blocks.dim() > 2:
            return blocks[:, self.layers or slice(None), :, slice(None) if self.heads is None else self.heads[0]]
        return blocks[:, slice(*self._elements(layout))]

    def share(self, layout: KVLayout) -> float:
        """Return the size of this part as a fraction of the whole block, from 0 to 1."""
        start, end = self._elements(layout)
        whole = sum(num_layers * shape.num_elements(layout) for num_layers, shape in layout.runs)
        if self.heads is None:
            return (end - start) / whole
        return sum(shape.num_elements(layout) for shape in self.own_shapes(layout)) / whole

    def own_shapes(self, layout: KVLayout) -> list[KVShape]:
        """Return the shapes of this part's layers, with only the heads that belong to this part."""
        shapes = [shape for num_layers, shape in layout.runs for _ in range(num_layers)][self.layers or slice(None)]
        if self.heads is None:
            return shapes
        counts = [part.stop - part.start for part in self.heads]
        return [KVShape(count, s.head_dim, s.num_planes) for count, s in zip(counts, shapes, strict=True)]

    def _elements(self, layout: KVLayout) -> tuple[int, int]:
        """Return the first element, and the end, of this part's layers in a whole block, with all heads."""
        sizes = [shape.num_elements(layout) for num_layers, shape in layout.runs for _ in range(num_layers)]
        chosen = self.layers or slice(0, len(sizes))
        return sum(sizes[: chosen.start]), sum(sizes[: chosen.stop])


class CopyOrder:
    """Lets copies of blocks wait for the step that has used them last, and run beside later steps that are queued
    already. Without a second stream, copies wait for all of them.
    """

    KEPT_STEPS = 16
    """Number of steps whose ends are known. More are never in flight."""

    def __init__(self, device: torch.device, *, has_copies: bool) -> None:
        """Without `has_copies` nothing is recorded before `begin`, and `copying` must not be called."""
        self._device = device
        self._stream: devices.SideStream | None = None
        if has_copies and devices.has_side_streams(device):
            self._stream = devices.SideStream(device)
        self._is_recording = self._stream is not None
        self.num_steps = 0
        """Number of steps that have been queued so far."""
        self._step_ends: deque[devices.DeviceEvent] = deque(maxlen=self.KEPT_STEPS)
        self._used: dict[int, devices.DeviceEvent] = {}
        """By block: the end of work other than a step that uses it."""

    @property
    def has_stream(self) -> bool:
        """Return whether copies run beside later steps that are queued already."""
        return self._stream is not None

    def begin(self) -> None:
        """Record the ends of steps and of other work from now on, for copies on other streams than this object's."""
        self._is_recording = True

    def end_step(self) -> None:
        """Record that all work of a step has been queued."""
        self.num_steps += 1
        if self._is_recording:
            self._step_ends.append(devices.record(self._device))

    def end_use(self, blocks: Iterable[int]) -> None:
        """Record that work other than a step, such as a copy, has been queued that uses these blocks."""
        if self._is_recording:
            self._used = {block: event for block, event in self._used.items() if not event.query()}
            self._used.update(dict.fromkeys(blocks, devices.record(self._device)))

    def wait(self, stream: devices.SideStream, blocks: Sequence[int], steps_after: int | None) -> None:
        """Make `stream` wait for the work that has used these blocks last. `steps_after` steps have been queued after
        the last one that uses them; None: wait for all work that is queued."""
        if steps_after is None or not self._step_ends:
            stream.wait(devices.record(self._device))
            return
        # A step that is not known any more ended before the oldest one that is.
        stream.wait(self._step_ends[max(0, len(self._step_ends) - 1 - steps_after)])
        for event in devices.distinct(self._used.get(block) for block in blocks):
            stream.wait(event)

    @contextmanager
    def copying(
        self, blocks: Sequence[int], steps_after: int | None, running: Iterable[devices.DeviceEvent] = ()
    ) -> Iterator[None]:
        """Inside the context, queue copies of these blocks behind the work that has written them. `steps_after` is as
        in `wait`; `running` are events at the end of other copies that fill the blocks.
        """
        if self._stream is None:
            yield
            return
        self.wait(self._stream, blocks, steps_after)
        for event in running:
            self._stream.wait(event)
        with self._stream:
            yield


class KVCache:
    """The memory of all KV blocks: a tensor [num_blocks, num_layers, num_planes, num_kv_heads, block_tokens (+ scale
    rows), head_dim], or [num_blocks, elements] if the layers have different shapes. The planes are K and V.

    With several ranks, each rank's tensor has only the rank's own layers and heads. If the ranks are on accelerators,
    `is_mirrored` is True: whole blocks are copied to shared host memory, the mirror, for transports. `host_view` shows
    all blocks in host memory as bytes: the cache itself on the CPU, or the mirror. A single accelerator has none;
    transports then use `device_tensor` after the events of `ready_after`.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        device: torch.device,
        *,
        place: KVMemoryKind | None = None,
        part: "BlockPart | None" = None,
        shared_fd: int | None = None,
    ) -> None:
        """Allocate the memory of `num_blocks` blocks, filled with zeros.

        `part` is the part of each block that this process holds, if several ranks share the blocks. The first rank
        creates the shared memory; the others get its file descriptor `shared_fd` and own it from then on. `place` is
        where the memory lies; None: shared memory on the CPU, otherwise the device, with a mirror in host memory if
        `part` is given.
        """
        self.layout = layout
        self.num_blocks = num_blocks
        self.block_bytes = layout.block_bytes
        self.device = device
        place = place or _place(device, part)
        self._part = part or BlockPart()
        self.is_mirrored = place == "mirrored"
        self.order = CopyOrder(device, has_copies=part is not None)
        self.shared_fd: int | None = shared_fd
        self.host_view: memoryview | None = None
        self.versions = [0] * num_blocks
        """By block: a counter that the pool increases whenever the block is allocated.

        Knowledge about its bytes, such as a checksum, is valid for one version only.
        """
        self._ready: dict[int, devices.DeviceEvent] = {}  # by block: the end of the work that transports must wait for
        self.copying: dict[int, devices.DeviceEvent] = {}
        """Running copies to or from the host tier, by block.

        Until they end, nothing else may read or write the block.
        """
        shape, dtype = (num_blocks, *_block_shape(layout)), DTYPES[layout.dtype]
        self._own_layers: list[Tensor] | None = None
        self._host_layers: list[Tensor] = []
        self._host = torch.empty(0)
        if place != "device":
            self._host = self._part.of(self._map().view(dtype).view(shape), layout)
        own = self._part.own_shapes(layout)
        if place == "shared":
            self.tensor = self._host
        else:
            # Not `empty`: a kernel may read the unwritten end of a block, and 0 * NaN is NaN.
            own_shape = (num_blocks, *_own_shape(layout, own, is_flat=len(shape) == 2))
            self.tensor = torch.zeros(own_shape, dtype=dtype, device=device)
        if self._part.heads is not None and len(shape) == 2:
            if place != "device":
                self._host_layers = _layers_of_part(self._host, layout, self._part)
            is_shared = place == "shared"
            self._own_layers = self._host_layers if is_shared else list(_unequal_layers(self.tensor, layout, own))

    @property
    def part(self) -> BlockPart:
        """Return which layers and KV heads of every block this rank holds."""
        return self._part

    @property
    def device_tensor(self) -> Tensor:
        """The cache's memory as bytes, uint8 [num_blocks, block_bytes]. With a mirror, it is this rank's part."""
        return self.tensor.flatten(1).view(torch.uint8)

    @property
    def has_whole_blocks(self) -> bool:
        """Return whether this process sees whole blocks: not if it is one of several ranks and on another host than the
        mirror."""
        return self.host_view is not None or self._part == BlockPart()

    @property
    def whole_blocks(self) -> Tensor:
        """The cache's blocks as bytes, uint8 [num_blocks, block_bytes]. If the ranks share one memory of the host, they
        contain the heads of all ranks."""
        if self.host_view is None:
            return self.device_tensor
        return torch.frombuffer(self._mapping, dtype=torch.uint8).view(self.num_blocks, self.block_bytes)

    def copies_of(self, part: BlockPart) -> "PartCopies":
        """Return access to another rank's part of the blocks in host memory. Only with `host_view`."""
        shape = (self.num_blocks, *_block_shape(self.layout))
        host = part.of(self.whole_blocks.view(DTYPES[self.layout.dtype]).view(shape), self.layout)
        is_equal = part.heads is None or host.dim() > 2
        views = [host] if is_equal else _layers_of_part(host, self.layout, part)
        return PartCopies([view.view(torch.uint8) for view in views])

    def read_part(self, blocks: Sequence[int], steps_after: int | None = None) -> memoryview:
        """Return a copy of this rank's part of some blocks, one after another. `steps_after` is as in `to_host`."""
        with self.order.copying(blocks, steps_after, self._running(blocks)):
            chosen = self.device_tensor[torch.tensor(blocks, device=self.device)].cpu()
            # A stage without attention has no part.
            return chosen.numpy().data.cast("B") if chosen.numel() else memoryview(b"")

    def write_part(self, blocks: Sequence[int], data: memoryview) -> None:
        """Overwrite this rank's part of some blocks with bytes in the form of `read_part`."""
        if not data:
            return
        # A copy, because torch wants writable memory.
        parts = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(len(blocks), -1)
        self.order_after_copies(blocks)
        self.device_tensor[torch.tensor(blocks, device=self.device)] = parts.to(self.device)
        self.order.end_use(blocks)

    def layers(self) -> list[Tensor]:
        """Return one strided view of the cache for each layer, [num_blocks, 2, num_kv_heads, block_tokens, head_dim],
        in the layer's own shape.

        Scales of quantized KV lie behind each head's tokens (`kernels.quantized_kv`). Latent attention (MLA) has one
        plane, which appears as both K and V, with a stride of 0.
        """
        if self._own_layers is not None:
            parts: Iterable[Tensor] = self._own_layers
        else:
            shapes = self._part.own_shapes(self.layout)
            is_equal = self.tensor.dim() > 2
            parts = self.tensor.unbind(1) if is_equal else _unequal_layers(self.tensor, self.layout, shapes)
        return [part[:, :, :, : self.layout.block_tokens].expand(-1, 2, -1, -1, -1) for part in parts]

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy block `sources[i]` to block `targets[i]` on the device. No block may be in both lists."""
        source = torch.tensor(sources, device=self.device)
        target = torch.tensor(targets, device=self.device)
        # As bytes: index kernels do not support float8.
        for part in [self.tensor] if self._own_layers is None else self._own_layers:
            blocks = part.view(torch.uint8)
            blocks[target] = blocks[source]
        # The sources too: once they are free, the host tier may fill them with other blocks.
        self.order.end_use([*sources, *targets])

    def reached(self) -> devices.DeviceEvent | None:
        """Return a new event at the end of all work that this thread has queued on the device so far; None if
        transports do not have to wait, because the blocks lie in host memory or have a mirror there."""
        return None if devices.is_host(self.device) or self.is_mirrored else devices.record(self.device)

    def mark(self, blocks: Iterable[int], *, after: devices.DeviceEvent | None = None) -> None:
        """Make transports that read or write these blocks wait for the event `after`; if it is None, for all work that
        is queued on the device so far.

        That work computes the blocks, or still uses them for the request that had them before.
        """
        event = after or self.reached()
        if event is not None:
            self._ready.update(dict.fromkeys(blocks, event))

    def version(self, block: int) -> int:
        return self.versions[block]

    def ready_after(self, blocks: Iterable[int]) -> list[devices.DeviceEvent]:
        """Return the events for which a transport waits before it reads or writes these blocks. Any thread may call
        it."""
        blocks = list(blocks)
        return devices.distinct([*map(self._ready.get, blocks), *map(self.copying.get, blocks)])

    def order_after_copies(self, blocks: Iterable[int]) -> None:
        """Make all work that this thread queues on the device from now on wait for the running copies of these blocks
        from or to the host tier."""
        for event in self._running(blocks):
            devices.order_after(self.device, event)

    def _running(self, blocks: Iterable[int]) -> list[devices.DeviceEvent]:
        return devices.distinct(map(self.copying.get, blocks))

    def to_host(self, blocks: Iterable[int], steps_after: int | None = None) -> None:
        """Copy this rank's part of these blocks from the device to the mirror, the shared host memory that transports
        read, and wait until it is there. Do nothing without a mirror.

        `steps_after` is how many steps have been queued after the one that has computed the blocks: the copy does not
        wait for them. None: it waits for all work that is queued on the device.
        """
        if not self.is_mirrored:
            return
        blocks = list(blocks)
        with self.order.copying(blocks, steps_after, self._running(blocks)):
            # From the device to ordinary memory, a copy returns when it has ended.
            for block in blocks:
                for own, mirror in self._mirror():
                    mirror[block].copy_(own[block])

    def from_host(self, blocks: Iterable[int]) -> None:
        """Copy this rank's part of these blocks to the device from the mirror, the shared host memory that transports
        write. Do nothing without a mirror."""
        if self.is_mirrored:
            blocks = list(blocks)
            self.order_after_copies(blocks)
            for block in blocks:
                for own, mirror in self._mirror():
                    own[block].copy_(mirror[block])
            self.order.end_use(blocks)

    def _mirror(self) -> list[tuple[Tensor, Tensor]]:
        """Return pairs of tensors: this rank's part of the cache on the device, and the same part of the mirror in
        shared host memory. There is one pair, or one for each layer if the layers have different shapes."""
        if self._own_layers is None:
            return [(self.tensor, self._host)]
        return list(zip(self._own_layers, self._host_layers, strict=True))

    def forget_host(self, blocks: Iterable[int]) -> None:
        """Give the memory of these blocks in the mirror (shared host memory) back to the system. Nothing may be reading
        or writing them there."""
        # MADV_REMOVE works on whole pages; blocks that share a page keep their memory.
        if self.is_mirrored and self.block_bytes % mmap.PAGESIZE == 0:
            for block in blocks:
                self._mapping.madvise(mmap.MADV_REMOVE, block * self.block_bytes, self.block_bytes)

    def close(self) -> None:
        """Close the descriptor of shared memory, and free this memory at once. Other memory is freed with the last
        tensor that uses it."""
        # Other processes may have mapped the file, and would keep its memory as long as they do.
        if self.host_view is not None:
            self._mapping.madvise(mmap.MADV_REMOVE)
        if self.shared_fd is not None:
            os.close(self.shared_fd)
            self.shared_fd = None
        if self.host_view is not None:
            self.host_view.release()
            self.host_view = None
        self._ready.clear()
        self.tensor = self._host = torch.empty(0)
        self._own_layers, self._host_layers = None, []

    def _map(self) -> Tensor:
        """Map the memory that all ranks share, and return it as bytes. It is created first if this rank has no
        descriptor of it."""
        size = self.num_blocks * self.block_bytes
        if self.shared_fd is None:
            self.shared_fd = os.memfd_create("baton-kv", os.MFD_CLOEXEC)
            os.ftruncate(self.shared_fd, size)
        self._mapping = mmap.mmap(self.shared_fd, size)
        self.host_view = memoryview(self._mapping)
        return torch.frombuffer(self._mapping, dtype=torch.uint8)


class PartCopies:
    """Reads and writes the part of blocks that a rank on another host holds, in the memory with whole blocks. The bytes
    are those of `KVCache.read_part` of that rank.
    """

    def __init__(self, views: Sequence[Tensor]) -> None:
        """`views` are uint8 views of the part in all blocks: one, or one for each layer if the layers differ."""
        self._views = views
        self._sizes = [view[0].numel() for view in views]

    def read(self, blocks: Sequence[int]) -> memoryview:
        """Return a copy of the part of some blocks, one after another."""
        index = torch.tensor(blocks)
        packed = torch.cat([view[index].flatten(1) for view in self._views], dim=1)
        return packed.numpy().data.cast("B") if packed.numel() else memoryview(b"")

    def write(self, blocks: Sequence[int], data: memoryview) -> None:
        """Overwrite the part of some blocks."""
        if not data:
            return
        index, packed = torch.tensor(blocks), torch.frombuffer(bytearray(data), dtype=torch.uint8)
        columns = torch.split_with_sizes(packed.view(len(blocks), -1), self._sizes, dim=1)
        for view, part in zip(self._views, columns, strict=True):
            view[index] = part.reshape(len(blocks), *view.shape[1:])


def _layers_of_part(host: Tensor, layout: KVLayout, part: BlockPart) -> list[Tensor]:
    """Return the view of each layer of a part with own heads. `host` is `part.of` blocks whose layers differ."""
    assert part.heads is not None
    whole = _unequal_layers(host, layout, BlockPart(part.layers).own_shapes(layout))
    return [layer[:, :, heads] for layer, heads in zip(whole, part.heads, strict=True)]


def _num_elements(layout: KVLayout) -> int:
    return sum(num_layers * shape.num_elements(layout) for num_layers, shape in layout.runs)


def _own_shape(layout: KVLayout, own: Sequence[KVShape], *, is_flat: bool) -> tuple[int, ...]:
    """Return the dimensions of one block in this rank's tensor: for its layers with the shapes `own`. `is_flat` says
    that the layers of a block have different shapes; then it is one dimension."""
    if is_flat:
        return (sum(shape.num_elements(layout) for shape in own),)
    # A stage without attention has no layer in a block.
    shape = own[0] if own else layout.runs[0].shape
    return (
        len(own),
        shape.num_planes,
        shape.num_kv_heads,
        layout.block_tokens + shape.scale_rows(layout),
        shape.head_dim,
    )


def _unequal_layers(memory: Tensor, layout: KVLayout, shapes: Sequence[KVShape]) -> Iterator[Tensor]:
    """Yield one view for each layer of `memory` [num_blocks, elements], whose layers have the different shapes
    `shapes`: [num_blocks, planes, KV heads, rows, head_dim].

    The last rows of a head hold the scales of its one-byte codes, if the KV dtype has scales.
    """
    start = 0
    for shape in shapes:
        end = start + shape.num_elements(layout)
        rows = layout.block_tokens + shape.scale_rows(layout)
        yield memory[:, start:end].view(len(memory), shape.num_planes, shape.num_kv_heads, rows, shape.head_dim)
        start = end


def _block_shape(layout: KVLayout) -> tuple[int, ...]:
    """Return the dimensions of one whole block in a tensor; it is one dimension if the layers have different shapes."""
    if len(layout.runs) > 1:
        return (_num_elements(layout),)
    ((num_layers, shape),) = layout.runs
    rows = layout.block_tokens + shape.scale_rows(layout)
    return (num_layers, shape.num_planes, shape.num_kv_heads, rows, shape.head_dim)


def _place(device: torch.device, part: BlockPart | None) -> KVMemoryKind:
    if devices.is_host(device):
        return "shared"
    return "device" if part is None else "mirrored"
