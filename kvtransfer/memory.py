"""The memory that blocks lie in, as the transfer sees it: `num_blocks` pieces of `block_bytes` bytes.

The engine's KV cache satisfies `BlockMemory` without importing it. `HostMemory` is one in plain shared memory, for
tests and benchmarks. Nothing here knows what is in a block.
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
F_SEAL_GROW_SHRINK = 0x0002 | 0x0004


class BlockMemory(Protocol):
    """`host_view` shows all bytes where the host can address them, else it is None.

    `shared_fd` is a memfd with the same bytes from offset 0, else None. Memory of a device has neither: `DeviceMemory`.
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
    """Blocks that the host cannot address: `host_view` and `shared_fd` are None."""

    @property
    def device_tensor(self) -> Any:
        """torch uint8 `[num_blocks, block_bytes]`."""
        ...

    def ready_after(self, blocks: Iterable[int]) -> Sequence[Any]:
        """torch events after which these blocks may be read, or overwritten. Called from any thread."""
        ...


@runtime_checkable
class Versioned(Protocol):
    """A `BlockMemory` that counts what its places were given out for. The engine's KV cache does."""

    def version(self, block: int) -> int | None:
        """Another number when the bytes of a published block may be others than before; None: nobody counts."""
        ...


def version_of(memory: BlockMemory, block: int) -> int | None:
    """None where nobody counts."""
    return cast(Versioned, memory).version(block) if _counts_versions(type(memory)) else None


@functools.cache
def _counts_versions(kind: Any) -> bool:
    """By type: `isinstance` of a protocol takes 5 µs."""
    return issubclass(kind, Versioned)


class PartitionedMemory:
    """Each block as `count` neighbours, which can travel one by one: part `p` of block `b` is number `b * count + p`.

    `DeviceMemory` if `memory` is; nobody counts versions where `memory` does not.
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
        events: Sequence[Any] = self._memory.ready_after({block // self._count for block in blocks})
        return events


def parts_of(memory: BlockMemory, count: int) -> BlockMemory:
    return memory if count == 1 else PartitionedMemory(memory, count)


class HostMemory:
    """Blocks in a memfd that peers on this host can map. `close()` frees it."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self.shared_fd: int | None = os.memfd_create("baton-blocks", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.shared_fd, num_blocks * block_bytes)
        self._map = mmap.mmap(self.shared_fd, num_blocks * block_bytes)
        self.host_view: memoryview | None = memoryview(self._map)
        self.versions: list[int] | None = None
        """One for each block, once somebody counts."""

    def block(self, index: int) -> memoryview:
        assert self.host_view is not None
        return self.host_view[index * self.block_bytes : (index + 1) * self.block_bytes]

    def version(self, block: int) -> int | None:
        return self.versions[block] if self.versions is not None else None

    def close(self) -> None:
        if self.shared_fd is not None:
            os.close(self.shared_fd)
            self.shared_fd = None
            self.host_view = None


def address_of(buffer: "memoryview | mmap.mmap | bytes | bytearray") -> int:
    """Where a contiguous buffer starts. The caller keeps the buffer alive."""
    address: int = np.frombuffer(buffer, dtype=np.uint8).__array_interface__["data"][0]
    return address


def copy_bytes(destination: int, source: int, size: int) -> None:
    """memmove between two addresses; other Python threads run meanwhile."""
    ctypes.memmove(destination, source, size)


def view_at(address: int, size: int) -> memoryview:
    """The bytes at an address. The caller keeps the memory alive."""
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


def keep_freed_memory() -> None:
    """Tell glibc to reuse freed buffers of up to 32 MiB instead of giving them back to the kernel at once.

    ZeroMQ allocates each frame; without this its 1 MB come with 50 page faults and more on average, which is half of
    the receiver's time (docs/log/block-transfer.md). Holds for the process; up to 256 MiB of freed memory stay with it.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, 32 << 20)
        libc.mallopt(M_TRIM_THRESHOLD, 256 << 20)


def seal_size(fd: int) -> None:
    """Nobody can shrink the memory any more: reading a mapping of it can never fault. Ignored where not allowed."""
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, F_SEAL_GROW_SHRINK)
    except OSError:
        return
