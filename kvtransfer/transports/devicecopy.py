"""Copies blocks between a device and host memory, on streams of their own.

A stream belongs to a thread, and every method waits for its own work only. Host memory that both processes map is
pinned if the device's runtime can pin existing memory (CUDA). Otherwise copies go through pinned memory of torch.
"""

import contextlib
import ctypes
import logging
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from baton_serve.kvtransfer.block_memory import DeviceMemory, PartitionedMemory, address_of
from baton_serve.kvtransfer.errors import TransportUnavailable

logger = logging.getLogger(__name__)

BOUNCE_BYTES = 16 << 20
"""Size in bytes of a thread's pinned memory for copies of memory that cannot be pinned."""
MAX_COPIES = 16
"""Largest number of separate copies within a device. One kernel moves the blocks if there are more."""


class DeviceBlocks:
    """Gives access by number to the KV blocks in a device's memory, and checks that the numbers exist. Several threads
    use it; each copies on a stream (CUDA stream or similar) of its own.
    """

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self.tensor: Tensor = memory.device_tensor
        self.num_blocks = memory.num_blocks
        self.block_bytes = memory.block_bytes
        self.device = self.tensor.device
        self._module: Any = None if self.device.type == "cpu" else torch.get_device_module(self.device)
        self._local = threading.local()
        self._parts: dict[int, DeviceBlocks] = {}

    def in_parts(self, count: int) -> "DeviceBlocks":
        """Return access to the same memory with each block divided into `count` parts. It shares the threads' streams
        with this object.
        """
        if count == 1:
            return self
        if count not in self._parts:
            made = DeviceBlocks(PartitionedMemory(self._memory, count))
            # Share the streams: copies of parts and of whole blocks by one thread then run in order.
            made._local = self._local
            self._parts[count] = made
        return self._parts[count]

    def total_bytes(self) -> int:
        """Return the size of all memory of the device in bytes, or the largest integer if the blocks lie on the CPU."""
        if self._module is None:
            return sys.maxsize
        return int(self._module.get_device_properties(self.device).total_memory)

    def check(self, blocks: Sequence[int]) -> None:
        """Raise `TransportUnavailable` if any of the block numbers `blocks` does not exist. Such numbers may come from
        another process.
        """
        if blocks and not 0 <= min(blocks) <= max(blocks) < self.num_blocks:
            raise TransportUnavailable(f"blocks {min(blocks)} to {max(blocks)} are not all of {self.num_blocks}")

    def stream(self) -> Any:
        """Return the calling thread's device stream, or None if the blocks lie on the CPU. The first
        call creates it.
        """
        made = getattr(self._local, "stream", None)
        if made is None:
            made = self._local.stream = self.new_stream()
        return made

    def new_stream(self) -> Any:
        """Return a new stream of the blocks' device, and make this device the current one of the calling thread. Return
        None if the blocks lie on the CPU.
        """
        if self._module is None:
            return None
        # CUDA keeps the current device for each thread: a stream must be created and used with its own.
        self._module.set_device(self.device)
        return self._module.Stream(self.device)

    @contextlib.contextmanager
    def on_stream(self, stream: Any = None) -> Iterator[None]:
        """Run the body of a `with` statement on `stream`; None means the calling thread's own stream. On the CPU the
        body just runs.
        """
        with torch.inference_mode():
            if self._module is None:
                yield
                return
            with self._module.stream(stream or self.stream()):
                yield

    def mark(self, stream: Any = None) -> Any:
        """Record an event on `stream` (None: the calling thread's own), behind the work that is queued so far, and
        return it. Return None if the blocks lie on the CPU.
        """
        return None if self._module is None else (stream or self.stream()).record_event()

    def after_computing(self, blocks: Sequence[int], stream: Any = None) -> None:
        """Make work that is queued later on `stream` (None: the calling thread's own) wait until the engine has
        finished its work on these blocks. The call itself does not wait.
        """
        if self._module is not None:
            for event in self._memory.ready_after(blocks):
                (stream or self.stream()).wait_event(event)

    def is_computed(self, blocks: Sequence[int]) -> bool:
        """Return whether the engine has finished its work on these blocks, so that `wait_for_computing` would return at
        once.
        """
        return all(event.query() for event in self._memory.ready_after(blocks))

    def wait_for_computing(self, blocks: Sequence[int]) -> None:
        """Block the calling thread until the engine has finished its work on these blocks."""
        for event in self._memory.ready_after(blocks):
            event.synchronize()

    def wait(self) -> None:
        """Block the calling thread until all work on its own stream has finished."""
        if self._module is not None:
            self.stream().synchronize()

    def read(self, blocks: Sequence[int], host: "HostArea", places: Sequence[int]) -> None:
        """Copy the device's `blocks` to the rows `places` of the host memory `host`, after the engine has computed
        them. Wait for the copies.
        """
        self.check(blocks)
        with self.on_stream():
            self.after_computing(blocks)
            for block, place, count in _runs(blocks, places):
                host.fill(place, self.tensor[block : block + count], self)
        self.wait()

    def write(self, host: "HostArea", places: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy the rows `places` of the host memory `host` to the device's `blocks`, after the engine has finished its
        work on these blocks. Wait for the copies.
        """
        self.check(blocks)
        with self.on_stream():
            self.after_computing(blocks)
            for place, block, count in _runs(places, blocks):
                host.empty(place, self.tensor[block : block + count], self)
        self.wait()

    def gather(self, blocks: Sequence[int], target: Tensor) -> None:
        """Queue copies of these blocks to consecutive rows of the device tensor `target`, uint8 [len(blocks),
        block_bytes], on the current stream.
        """
        self._move(self.tensor, blocks, target, range(len(blocks)))

    def scatter(self, source: Tensor, rows: Sequence[int], blocks: Sequence[int]) -> None:
        """Queue copies of the rows `rows` of the device tensor `source`, uint8 [rows, block_bytes], to these blocks,
        one row to each, on the current stream.
        """
        self._move(source, rows, self.tensor, blocks)

    def _move(self, source: Tensor, rows: Sequence[int], target: Tensor, places: Sequence[int]) -> None:
        runs = _runs(rows, places)
        if len(runs) <= MAX_COPIES or self.block_bytes % 8:
            for row, place, count in runs:
                target[place : place + count].copy_(source[row : row + count], non_blocking=True)
            return
        # Words of 8 bytes: an index kernel that moves single bytes would be slower.
        source, target = source.view(torch.int64), target.view(torch.int64)
        if is_run(places):
            torch.index_select(source, 0, index_of(rows, self.device), out=target[places[0] : places[0] + len(places)])
            return
        if is_run(rows):
            chosen = source[rows[0] : rows[0] + len(rows)]
        else:
            chosen = source.index_select(0, index_of(rows, self.device))
        target.index_copy_(0, index_of(places, self.device), chosen)


class HostArea:
    """Host memory that blocks of a device are copied to and from, divided into rows of `block_bytes`. `is_pinned` says
    that it is pinned already; `pin` tries to pin memory that two processes map.
    """

    def __init__(self, view: memoryview, block_bytes: int, device: torch.device, *, is_pinned: bool = False) -> None:
        self._view = view
        # torch warns about read-only buffers, such as a mapped KV cache; this one is only read.
        address = (ctypes.c_uint8 * view.nbytes).from_address(address_of(view))
        self.rows = torch.frombuffer(address, dtype=torch.uint8).view(-1, block_bytes)
        self._device = device
        self._is_pinned = is_pinned
        self._is_registered = False
        self._local = threading.local()

    def pin(self) -> None:
        """Pin this memory until `close`, if the device is a CUDA device; other kinds of devices cannot pin existing
        memory. Copies to memory that is not pinned go through pinned memory of torch.
        """
        if self._device.type == "cuda":
            # Remember that it was registered here: only then must `close` unregister it.
            self._is_pinned = self._is_registered = self._register()

    def fill(self, place: int, source: Tensor, blocks: DeviceBlocks) -> None:
        """Copy `source`, rows of the device's memory (blocks or parts), to consecutive rows of this host memory from
        `place` on, on the current stream.
        """
        self._copy(self._rows_for(source)[place : place + len(source)], source, blocks, to_host=True)

    def empty(self, place: int, target: Tensor, blocks: DeviceBlocks) -> None:
        """Copy consecutive rows of this host memory, from `place` on, to `target`, rows of the device's memory (blocks
        or parts), on the current stream.
        """
        self._copy(target, self._rows_for(target)[place : place + len(target)], blocks, to_host=False)

    def close(self) -> None:
        """Unpin this memory if `pin` has pinned it. Call it when no copy to or from it runs."""
        if self._is_registered:
            self._is_registered = False
            _runtime().cudaHostUnregister(self.rows.data_ptr())

    def _rows_for(self, blocks: Tensor) -> Tensor:
        """Return this memory divided into rows of the same size as those of `blocks`, uint8 [count, bytes of a block or
        part].
        """
        return self.rows.view(-1, blocks.shape[1])

    def _copy(self, target: Tensor, source: Tensor, blocks: DeviceBlocks, *, to_host: bool) -> None:
        if self._is_pinned or self._device.type == "cpu":
            target.copy_(source, non_blocking=True)
            return
        # This memory cannot be pinned itself: copy in pieces through pinned memory of this thread. The waits keep a
        # piece until its copy has ended.
        bounce = self._bounce()
        flat_target, flat_source = target.view(-1), source.view(-1)
        for first in range(0, len(flat_source), len(bounce)):
            part = bounce[: min(len(bounce), len(flat_source) - first)]
            there, here = flat_target[first : first + len(part)], flat_source[first : first + len(part)]
            if to_host:
                part.copy_(here, non_blocking=True)
                blocks.wait()
                there.copy_(part)
            else:
                part.copy_(here)
                there.copy_(part, non_blocking=True)
                blocks.wait()

    def _bounce(self) -> Tensor:
        """Return the calling thread's pinned host memory (on XPU: USM host memory), through which copies go if this
        memory cannot be pinned. The first call allocates it.
        """
        made: Tensor | None = getattr(self._local, "bounce", None)
        if made is None:
            made = self._local.bounce = torch.empty(BOUNCE_BYTES, dtype=torch.uint8, pin_memory=True)
        return made

    def _register(self) -> bool:
        torch.cuda.set_device(self._device)
        status = _runtime().cudaHostRegister(self.rows.data_ptr(), self.rows.numel(), 0)
        if int(status) != 0:
            logger.warning(
                "cudaHostRegister cannot pin shared memory (status %s): KV blocks are copied twice", int(status)
            )
        return int(status) == 0


def _runtime() -> Any:
    runtime: Any = torch.cuda.cudart  # torch has no type annotation for it
    return runtime()


def is_run(places: Sequence[int]) -> bool:
    """Return whether the row numbers `places` are consecutive and ascending, so that one copy moves all rows."""
    return all(place == places[0] + i for i, place in enumerate(places))


def index_of(places: Sequence[int], device: torch.device) -> Tensor:
    """Return the row numbers `places` as an int64 tensor on `device`, for kernels of the current stream. The copy to
    the device is queued on this stream; the call does not wait for it.
    """
    if device.type == "cpu":
        return torch.tensor(places)
    return torch.tensor(places, pin_memory=True).to(device, non_blocking=True)


def _runs(first: Sequence[int], second: Sequence[int]) -> list[tuple[int, int, int]]:
    """Divide the pairs (first[i], second[i]) of row numbers into runs that are consecutive on both sides, so that one
    call copies each run. Return (first row, second row, number of rows) for each run.
    """
    runs: list[tuple[int, int, int]] = []
    for a, b in zip(first, second, strict=True):
        if runs and (a, b) == (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]):
            runs[-1] = (runs[-1][0], runs[-1][1], runs[-1][2] + 1)
        else:
            runs.append((a, b, 1))
    return runs
