"""The memory of the KV cache: one block-major tensor. Knows nothing of who owns which block.

On hosts it lies in a memfd, so that another process on this machine can map it and copy blocks straight out of
it; nothing is left behind when this process dies.
"""

import mmap
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from contracts.layout import KVLayout
from engine import device as devices

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class KVCache:
    """`tensor` is [num_blocks, num_layers, 2, num_kv_heads, block_tokens, head_dim]."""

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.block_bytes = layout.block_bytes
        self.device = device
        self.shared_fd: int | None = None
        self.host_view: memoryview | None = None
        self._mapping: mmap.mmap | None = None
        shape = (num_blocks, layout.num_layers, 2, layout.num_kv_heads, layout.block_tokens, layout.head_dim)
        dtype = DTYPES[layout.dtype]
        if devices.is_host(device):
            size = num_blocks * self.block_bytes
            self.shared_fd = os.memfd_create("baton-kv", os.MFD_CLOEXEC)
            os.ftruncate(self.shared_fd, size)
            self._mapping = mmap.mmap(self.shared_fd, size)
            self.host_view = memoryview(self._mapping)
            self.tensor = torch.frombuffer(self._mapping, dtype=dtype).view(shape)
        else:
            # Zeros: a kernel may read the unwritten end of a block, and 0 * NaN would spoil its sum.
            self.tensor = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def device_tensor(self) -> Tensor:
        """uint8 [num_blocks, block_bytes]: the same memory as bytes."""
        return self.tensor.view(self.num_blocks, -1).view(torch.uint8)

    def layers(self) -> list[Tensor]:
        """One strided view per layer, each [num_blocks, 2, num_kv_heads, block_tokens, head_dim]."""
        return list(self.tensor.unbind(1))

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Sources and targets are disjoint."""
        source = torch.tensor(sources, device=self.device)
        target = torch.tensor(targets, device=self.device)
        self.tensor[target] = self.tensor[source]

    def close(self) -> None:
        """Gives up the descriptor. The memory goes with the last tensor that looks at it."""
        if self.shared_fd is not None:
            os.close(self.shared_fd)
            self.shared_fd = None
        if self.host_view is not None:
            self.host_view.release()
            self.host_view = None
        self.tensor = torch.empty(0)
