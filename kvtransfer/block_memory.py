"""Defines the interface of the memory of KV blocks, seen as `num_blocks` pieces of `block_bytes` bytes.

The engine's KV cache satisfies `BlockMemory` without importing it. `HostMemory` implements it in plain shared memory,
for tests and benchmarks. This module does not know what a block contains.
"""

import ctypes
import fcntl
import functools
import mmap
import os
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameter numbers of `mallopt`, from glibc's malloc.h."""
F_SEAL_GROW_SHRINK = 0x0002 | 0x0004
"""`F_SEAL_SHRINK | F_SEAL_GROW` of linux/fcntl.h, which Python does not name for `F_ADD_SEALS`."""


class BlockMemory(Protocol):
    """The memory that holds an instance's KV blocks. `host_view` shows all its bytes, or is None if the CPU cannot
    address them. `shared_fd` is a memfd (anonymous file) that contains the same bytes from offset 0, or None. Memory of
    a device has neither of them and implements `DeviceMemory`.
    """

    @property
    def num_blocks(self) -> int: ...
    @property
    def block_bytes(self) -> int: ...
    @property
    def shared_fd(self) -> int | None: ...
    @property
    def host_view(self) -> memoryview | None: ...


class DeviceMemory(BlockMemory, Protocol):
    """Memory for KV blocks that the CPU cannot address, such as a GPU's: `host_view` and `shared_fd` are None."""

    @property
    def device_tensor(self) -> Any:
        """Return all blocks as one torch tensor on the device, uint8 `[num_blocks, block_bytes]`. It
        shares the memory.
        """
        ...

    def ready_after(self, blocks: Iterable[int]) -> Sequence[Any]:
        """Return torch events of the engine's work on these blocks: when all have happened, the blocks may be read or
        overwritten. Any thread may call it.
        """
        ...


@runtime_checkable
class Versioned(Protocol):
    """A `BlockMemory` that counts how often each block was reused for new content, as the engine's KV cache does."""

    def version(self, block: int) -> int | None:
        """Return a number that changes whenever the bytes of this published block may have changed, or None if this
        memory counts no versions.
        """
        ...


def version_of(memory: BlockMemory, block: int) -> int | None:
    """Return the version of the block with this number (see `Versioned`), or None if `memory` does not
    count versions.
    """
    return cast(Versioned, memory).version(block) if _counts_versions(type(memory)) else None


@functools.cache
def _counts_versions(kind: Any) -> bool:
    """Return whether the class `kind` implements `Versioned`. The answer is cached, because `isinstance` with a
    protocol takes 5 µs, which is too long for each block.
    """
    return issubclass(kind, Versioned)


class PartitionedMemory:
    """Presents each block of `memory` as `count` smaller blocks of equal size that can travel one by one. Part `p` of
    block `b` has the number `b * count + p`. If `memory` implements `DeviceMemory`, this object does too. `version`
    returns None if `memory` counts no versions.
    """

    def __init__(self, memory: BlockMemory, count: int) -> None:
        self._memory: Any = memory
        self._count = count
        self.num_blocks = memory.num_blocks * count
        self.block_bytes = memory.block_bytes // count

    @property
    def shared_fd(self) -> int | None:
        found: int | None = self._memory.shared_fd
        return found

    @property
    def host_view(self) -> memoryview | None:
        found: memoryview | None = self._memory.host_view
        return found

    @property
    def device_tensor(self) -> Any:
        return self._memory.device_tensor.view(self.num_blocks, self.block_bytes)

    def version(self, block: int) -> int | None:
        return version_of(self._memory, block // self._count)

    def ready_after(self, blocks: Iterable[int]) -> Sequence[Any]:
        # A set, because several parts may belong to one block, which has its events only once.
        events: Sequence[Any] = self._memory.ready_after({block // self._count for block in blocks})
        return events


def parts_of(memory: BlockMemory, count: int) -> BlockMemory:
    """Return a view of `memory` in which each block is divided into `count` parts, or `memory` itself if `count` is 1.
    No bytes are copied.
    """
    return memory if count == 1 else PartitionedMemory(memory, count)


class HostMemory:
    """KV blocks in host memory, in a memfd (anonymous file) that other processes on this host can map. It owns the
    memfd; `close()` frees it.
    """

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self.shared_fd: int | None = os.memfd_create("baton-blocks", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.shared_fd, num_blocks * block_bytes)
        # The mapping stays valid after the descriptor is closed; `host_view` keeps it alive.
        self._map = mmap.mmap(self.shared_fd, num_blocks * block_bytes)
        self.host_view: memoryview | None = memoryview(self._map)
        self.versions: list[int] | None = None
        """The version of each block, or None until a test starts to count."""

    def block(self, index: int) -> memoryview:
        """Return a view of the bytes of the block with the number `index`."""
        assert self.host_view is not None
        return self.host_view[index * self.block_bytes : (index + 1) * self.block_bytes]

    def version(self, block: int) -> int | None:
        return self.versions[block] if self.versions is not None else None

    def close(self) -> None:
        """Close the memfd. Processes that have mapped it keep their mappings."""
        if self.shared_fd is not None:
            os.close(self.shared_fd)
            self.shared_fd = None
            self.host_view = None


def address_of(buffer: "memoryview | mmap.mmap | bytes | bytearray") -> int:
    """Return the memory address of the first byte of a contiguous buffer. The caller must keep the buffer alive."""
    address: int = np.frombuffer(buffer, dtype=np.uint8).__array_interface__["data"][0]
    return address


def copy_bytes(destination: int, source: int, size: int) -> None:
    """Copy `size` bytes from the address `source` to the address `destination`. Other Python threads run meanwhile,
    since ctypes releases the GIL.
    """
    ctypes.memmove(destination, source, size)


def view_at(address: int, size: int) -> memoryview:
    """Return a view of the `size` bytes at a memory address. The caller must keep the memory alive as long as the view
    is used.
    """
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


def keep_freed_memory() -> None:
    """Make glibc reuse freed buffers of up to 32 MiB instead of returning them to the kernel immediately.

    ZeroMQ allocates memory for each frame. Without this setting, each frame of 1 MB cost more than 50 page faults on
    average, half of the receiver's time (docs/log/block-transfer.md). It applies to the whole process, which keeps up
    to 256 MiB of freed memory.
    """
    libc = ctypes.CDLL(None)
    # musl has no `mallopt`; there the setting is skipped.
    if hasattr(libc, "mallopt"):
        # Frames of up to 32 MiB come from the heap instead of a mapping of their own, which would be unmapped when they
        # are freed.
        libc.mallopt(M_MMAP_THRESHOLD, 32 << 20)
        libc.mallopt(M_TRIM_THRESHOLD, 256 << 20)


def seal_size(fd: int) -> None:
    """Prevent any process from changing the size of the memfd `fd`, because reading a mapping behind a shortened file
    would end the process. Do nothing if the kernel forbids sealing.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, F_SEAL_GROW_SHRINK)
    except OSError:
        return
