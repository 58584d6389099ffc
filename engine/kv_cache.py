"""The memory of the KV cache: one block-major tensor. Knows nothing of who owns which block.

On hosts it lies in a memfd, so that another process on this machine can map it and copy blocks straight out of
it; nothing is left behind when this process dies. On devices a memfd of the same shape is its mirror: blocks that
travel are copied there and back, and only those take host memory, since the rest of the file is a hole.
"""

import mmap
import os
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from contracts.layout import KVLayout
from engine import device as devices

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
}


class KVCache:
    """`tensor` is [num_blocks, num_layers, num_planes, num_kv_heads, block_tokens (+ scale rows), head_dim].

    `host_view` shows all blocks as bytes; it is their memory itself, or with `is_mirrored` the mirror.
    """

    def __init__(
        self, layout: KVLayout, num_blocks: int, device: torch.device, *, mirrored: bool | None = None
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.block_bytes = layout.block_bytes
        self.device = device
        self.is_mirrored = not devices.is_host(device) if mirrored is None else mirrored
        size = num_blocks * self.block_bytes
        self.shared_fd: int | None = os.memfd_create("baton-kv", os.MFD_CLOEXEC)
        os.ftruncate(self.shared_fd, size)
        self._mapping = mmap.mmap(self.shared_fd, size)
        self.host_view: memoryview | None = memoryview(self._mapping)
        host_bytes = torch.frombuffer(self._mapping, dtype=torch.uint8)
        self._host_blocks = host_bytes.view(num_blocks, self.block_bytes)
        heads = (layout.num_kv_heads, layout.block_tokens + layout.scale_rows, layout.head_dim)
        shape = (num_blocks, layout.num_layers, layout.num_planes, *heads)
        dtype = DTYPES[layout.dtype]
        if self.is_mirrored:
            # Zeros: a kernel may read the unwritten end of a block, and 0 * NaN would spoil its sum.
            self.tensor = torch.zeros(shape, dtype=dtype, device=device)
        else:
            self.tensor = host_bytes.view(dtype).view(shape)

    @property
    def device_tensor(self) -> Tensor:
        """uint8 [num_blocks, block_bytes]: the same memory as bytes."""
        return self.tensor.view(self.num_blocks, -1).view(torch.uint8)

    def layers(self) -> list[Tensor]:
        """One strided view per layer, each [num_blocks, 2, num_kv_heads, block_tokens, head_dim]. Scales, where there
        are any, lie right after each head's tokens (`kernels.kv_codes`). A single plane is shown as both K and V."""
        tokens = self.tensor[:, :, :, :, : self.layout.block_tokens]
        return [layer.expand(-1, 2, -1, -1, -1) for layer in tokens.unbind(1)]

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Sources and targets are disjoint."""
        source = torch.tensor(sources, device=self.device)
        target = torch.tensor(targets, device=self.device)
        blocks = self.device_tensor
        blocks[target] = blocks[source]

    def to_host(self, blocks: Iterable[int]) -> None:
        """The mirror holds what these blocks hold now."""
        if self.is_mirrored:
            device_blocks = self.device_tensor
            for block in blocks:
                self._host_blocks[block].copy_(device_blocks[block])

    def from_host(self, blocks: Iterable[int]) -> None:
        """These blocks hold what the mirror holds."""
        if self.is_mirrored:
            device_blocks = self.device_tensor
            for block in blocks:
                device_blocks[block].copy_(self._host_blocks[block])

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
        self.tensor = self._host_blocks = torch.empty(0)
