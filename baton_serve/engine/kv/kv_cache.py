"""The memory of the KV cache: one block-major tensor. Knows nothing of who owns which block.

On hosts it lies in a memfd, so that another process on this machine can map it and copy blocks straight out of
it; nothing is left behind when this process dies. On a device, transports read and write the tensor itself. Where
several ranks' devices each hold a part of every block, a memfd is the mirror in which blocks are whole: those that
travel are copied there and back, and only they take host memory, since the rest of the file is a hole.
"""

import mmap
import os
from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor

from baton_serve.contracts.layout import KVLayout
from baton_serve.engine import device as devices

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
}

KVMemoryKind = Literal["shared", "device", "mirrored"]


class KVCache:
    """`tensor` is [num_blocks, num_layers, num_planes, num_kv_heads, block_tokens (+ scale rows), head_dim]; of several
    ranks, each has its own heads there.

    `host_view` shows all blocks as bytes; it is their memory itself, or with `is_mirrored` the mirror. A device's has
    neither that nor a `shared_fd`: it is reached as `device_tensor`, after the events of `ready_after`.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        device: torch.device,
        *,
        place: KVMemoryKind | None = None,
        heads: slice | None = None,
        shared_fd: int | None = None,
    ) -> None:
        """`heads`: those of this process, where several share each block; one of them makes the memory, whose
        `shared_fd` the others are given and own from then on. `place`: shared on hosts, else the device alone, or
        mirrored when there are `heads`."""
        self.layout = layout
        self.num_blocks = num_blocks
        self.block_bytes = layout.block_bytes
        self.device = device
        place = place or _place(device, heads)
        self.is_mirrored = place == "mirrored"
        self.shared_fd: int | None = shared_fd
        self.host_view: memoryview | None = None
        self.versions = [0] * num_blocks
        """By block: counted up by its pool whenever it is given out, so that what is known of its bytes ends there."""
        self._ready: dict[int, devices.DeviceEvent] = {}
        self.copying: dict[int, devices.DeviceEvent] = {}
        """Copies to or from the host tier, by block: until then it must not be read or written by others."""
        rows = layout.block_tokens + layout.scale_rows
        shape = (num_blocks, layout.num_layers, layout.num_planes, layout.num_kv_heads, rows, layout.head_dim)
        dtype = DTYPES[layout.dtype]
        self._host = torch.empty(0)
        if place != "device":
            self._host = self._map().view(dtype).view(shape)[:, :, :, heads or slice(None)]
        if place == "shared":
            self.tensor = self._host
        else:
            # Zeros: a kernel may read the unwritten end of a block, and 0 * NaN would spoil its sum.
            self.tensor = torch.zeros(shape if place == "device" else self._host.shape, dtype=dtype, device=device)

    @property
    def device_tensor(self) -> Tensor:
        """uint8 [num_blocks, block_bytes]: the same memory as bytes."""
        return self.tensor.view(self.num_blocks, -1).view(torch.uint8)

    @property
    def whole_blocks(self) -> Tensor:
        """As `device_tensor`, all ranks' parts of each block included where they lie in one memory of the host."""
        if self.host_view is None:
            return self.device_tensor
        return torch.frombuffer(self._mapping, dtype=torch.uint8).view(self.num_blocks, self.block_bytes)

    def layers(self) -> list[Tensor]:
        """One strided view per layer, each [num_blocks, 2, num_kv_heads, block_tokens, head_dim]. Scales, where there
        are any, lie right after each head's tokens (`kernels.kv_codes`). A single plane is shown as both K and V."""
        tokens = self.tensor[:, :, :, :, : self.layout.block_tokens]
        return [layer.expand(-1, 2, -1, -1, -1) for layer in tokens.unbind(1)]

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Sources and targets are disjoint."""
        source = torch.tensor(sources, device=self.device)
        target = torch.tensor(targets, device=self.device)
        blocks = self.tensor.view(torch.uint8)
        blocks[target] = blocks[source]

    def reached(self) -> devices.DeviceEvent | None:
        """Done when what this thread has given the device so far is; None where transports need not wait for it."""
        return None if devices.is_host(self.device) or self.is_mirrored else devices.record(self.device)

    def mark(self, blocks: Iterable[int], *, after: devices.DeviceEvent | None = None) -> None:
        """What this thread has given the device so far, or until `after` was `reached`, must be done before a transport
        touches these blocks: it computes them, or still uses them for the request that had them before."""
        event = after or self.reached()
        if event is not None:
            self._ready.update(dict.fromkeys(blocks, event))

    def version(self, block: int) -> int:
        return self.versions[block]

    def ready_after(self, blocks: Iterable[int]) -> list[devices.DeviceEvent]:
        """Events after which these blocks may be read or written. From any thread."""
        found: dict[int, devices.DeviceEvent] = {}
        for block in blocks:
            for event in (self._ready.get(block), self.copying.get(block)):
                if event is not None:
                    found[id(event)] = event
        return list(found.values())

    def to_host(self, blocks: Iterable[int]) -> None:
        """The mirror holds what these blocks hold now."""
        if self.is_mirrored:
            for block in blocks:
                self._host[block].copy_(self.tensor[block])

    def from_host(self, blocks: Iterable[int]) -> None:
        """These blocks hold what the mirror holds."""
        if self.is_mirrored:
            for block in blocks:
                self.tensor[block].copy_(self._host[block])

    def forget_host(self, blocks: Iterable[int]) -> None:
        """The mirror gives these blocks' host memory back. Nobody may be reading or writing them there."""
        if self.is_mirrored and self.block_bytes % mmap.PAGESIZE == 0:
            for block in blocks:
                self._mapping.madvise(mmap.MADV_REMOVE, block * self.block_bytes, self.block_bytes)

    def close(self) -> None:
        """Gives up the descriptor. The memory goes with the last tensor that looks at it."""
        if self.shared_fd is not None:
            os.close(self.shared_fd)
            self.shared_fd = None
        if self.host_view is not None:
            self.host_view.release()
            self.host_view = None
        self._ready.clear()
        self.tensor = self._host = torch.empty(0)

    def _map(self) -> Tensor:
        """All blocks as bytes of the host."""
        size = self.num_blocks * self.block_bytes
        if self.shared_fd is None:
            self.shared_fd = os.memfd_create("baton-kv", os.MFD_CLOEXEC)
            os.ftruncate(self.shared_fd, size)
        self._mapping = mmap.mmap(self.shared_fd, size)
        self.host_view = memoryview(self._mapping)
        return torch.frombuffer(self._mapping, dtype=torch.uint8)


def _place(device: torch.device, heads: slice | None) -> KVMemoryKind:
    if devices.is_host(device):
        return "shared"
    return "device" if heads is None else "mirrored"
