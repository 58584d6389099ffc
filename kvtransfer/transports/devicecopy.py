"""Copies between a device's blocks and host memory, on streams of their own so that both directions run at once.

A stream belongs to a thread; every method waits for its own work alone. Host memory that both ends map is pinned
where the device's runtime can pin what exists (CUDA); elsewhere copies go through torch's own pinned memory.
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

from baton_serve.kvtransfer.errors import TransportUnavailable
from baton_serve.kvtransfer.memory import DeviceMemory, PartitionedMemory, address_of

logger = logging.getLogger(__name__)

BOUNCE_BYTES = 16 << 20
MAX_COPIES = 16
"""More pieces than this are moved within a device by one kernel instead."""


class DeviceBlocks:
    """Blocks of a device by index, with bounds checked. Used by several threads."""

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
        """The same memory, each block as so many, with the same streams."""
        if count == 1:
            return self
        if count not in self._parts:
            made = DeviceBlocks(PartitionedMemory(self._memory, count))
            made._local = self._local
            self._parts[count] = made
        return self._parts[count]

    def total_bytes(self) -> int:
        """Of the device's memory; on the CPU without bound."""
        if self._module is None:
            return sys.maxsize
        return int(self._module.get_device_properties(self.device).total_memory)

    def check(self, blocks: Sequence[int]) -> None:
        if blocks and not 0 <= min(blocks) <= max(blocks) < self.num_blocks:
            raise TransportUnavailable(f"blocks {min(blocks)} to {max(blocks)} are not all of {self.num_blocks}")

    def stream(self) -> Any:
        """This thread's; None on the CPU."""
        made = getattr(self._local, "stream", None)
        if made is None:
            made = self._local.stream = self.new_stream()
        return made

    def new_stream(self) -> Any:
        """Makes its device this thread's; None on the CPU."""
        if self._module is None:
            return None
        self._module.set_device(self.device)
        return self._module.Stream(self.device)

    @contextlib.contextmanager
    def on_stream(self, stream: Any = None) -> Iterator[None]:
        """What is inside runs on `stream`, or this thread's own."""
        with torch.inference_mode():
            if self._module is None:
                yield
                return
            with self._module.stream(stream or self.stream()):
                yield

    def mark(self, stream: Any = None) -> Any:
        """An event after all that the stream was given; None on the CPU."""
        return None if self._module is None else (stream or self.stream()).record_event()

    def after_computing(self, blocks: Sequence[int], stream: Any = None) -> None:
        """What the stream does next waits until the engine's work on these blocks is done."""
        if self._module is not None:
            for event in self._memory.ready_after(blocks):
                (stream or self.stream()).wait_event(event)

    def is_computed(self, blocks: Sequence[int]) -> bool:
        """`wait_for_computing` would not wait."""
        return all(event.query() for event in self._memory.ready_after(blocks))

    def wait_for_computing(self, blocks: Sequence[int]) -> None:
        """The host waits until the engine's work on these blocks is done."""
        for event in self._memory.ready_after(blocks):
            event.synchronize()

    def wait(self) -> None:
        """For all of this thread's work."""
        if self._module is not None:
            self.stream().synchronize()

    def read(self, blocks: Sequence[int], host: "HostArea", places: Sequence[int]) -> None:
        """Copy blocks, once they are computed, to places of the host area."""
        self.check(blocks)
        with self.on_stream():
            self.after_computing(blocks)
            for block, place, count in _runs(blocks, places):
                host.fill(place, self.tensor[block : block + count], self)
        self.wait()

    def write(self, host: "HostArea", places: Sequence[int], blocks: Sequence[int]) -> None:
        self.check(blocks)
        with self.on_stream():
            self.after_computing(blocks)
            for place, block, count in _runs(places, blocks):
                host.empty(place, self.tensor[block : block + count], self)
        self.wait()

    def gather(self, blocks: Sequence[int], target: Tensor) -> None:
        """Blocks to consecutive rows of `target`, on the current stream."""
        self._move(self.tensor, blocks, target, range(len(blocks)))

    def scatter(self, source: Tensor, rows: Sequence[int], blocks: Sequence[int]) -> None:
        """Rows of `source` to blocks, on the current stream."""
        self._move(source, rows, self.tensor, blocks)

    def _move(self, source: Tensor, rows: Sequence[int], target: Tensor, places: Sequence[int]) -> None:
        runs = _runs(rows, places)
        if len(runs) <= MAX_COPIES or self.block_bytes % 8:
            for row, place, count in runs:
                target[place : place + count].copy_(source[row : row + count], non_blocking=True)
            return
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
    """Rows of `block_bytes` in host memory. What two processes map is pinned by `pin` where that can be done."""

    def __init__(self, view: memoryview, block_bytes: int, device: torch.device, *, is_pinned: bool = False) -> None:
        self._view = view
        address = (ctypes.c_uint8 * view.nbytes).from_address(address_of(view))  # torch wants it writable, we only read
        self.rows = torch.frombuffer(address, dtype=torch.uint8).view(-1, block_bytes)
        self._device = device
        self._is_pinned = is_pinned
        self._is_registered = False
        self._local = threading.local()

    def pin(self) -> None:
        """Until `close`. CUDA alone can pin memory that exists already; others take a detour."""
        if self._device.type == "cuda":
            self._is_pinned = self._is_registered = self._register()

    def fill(self, place: int, source: Tensor, blocks: DeviceBlocks) -> None:
        """Device to host, on the current stream."""
        self._copy(self._rows_for(source)[place : place + len(source)], source, blocks, to_host=True)

    def empty(self, place: int, target: Tensor, blocks: DeviceBlocks) -> None:
        """Host to device, on the current stream."""
        self._copy(target, self._rows_for(target)[place : place + len(target)], blocks, to_host=False)

    def close(self) -> None:
        if self._is_registered:
            self._is_registered = False
            _runtime().cudaHostUnregister(self.rows.data_ptr())

    def _rows_for(self, blocks: Tensor) -> Tensor:
        """Of the size of these, which are blocks or parts of them."""
        return self.rows.view(-1, blocks.shape[1])

    def _copy(self, target: Tensor, source: Tensor, blocks: DeviceBlocks, *, to_host: bool) -> None:
        if self._is_pinned or self._device.type == "cpu":
            target.copy_(source, non_blocking=True)
            return
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
        """This thread's pinned memory: on XPU it is USM host memory."""
        made: Tensor | None = getattr(self._local, "bounce", None)
        if made is None:
            made = self._local.bounce = torch.empty(BOUNCE_BYTES, dtype=torch.uint8, pin_memory=True)
        return made

    def _register(self) -> bool:
        torch.cuda.set_device(self._device)
        status = _runtime().cudaHostRegister(self.rows.data_ptr(), self.rows.numel(), 0)
        if int(status) != 0:
            logger.warning("shared memory could not be pinned (status %s): copies take a detour", int(status))
        return int(status) == 0


def _runtime() -> Any:
    runtime: Any = torch.cuda.cudart  # carries no types
    return runtime()


def is_run(places: Sequence[int]) -> bool:
    """Are they neighbours, in their order?"""
    return all(place == places[0] + i for i, place in enumerate(places))


def index_of(places: Sequence[int], device: torch.device) -> Tensor:
    """int64 on the device, for kernels of the current stream; the host does not wait."""
    if device.type == "cpu":
        return torch.tensor(places)
    return torch.tensor(places, pin_memory=True).to(device, non_blocking=True)


def _runs(first: Sequence[int], second: Sequence[int]) -> list[tuple[int, int, int]]:
    """Neighbours on both sides are copied at once: (first, second, count)."""
    runs: list[tuple[int, int, int]] = []
    for a, b in zip(first, second, strict=True):
        if runs and (a, b) == (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]):
            runs[-1] = (runs[-1][0], runs[-1][1], runs[-1][2] + 1)
        else:
            runs.append((a, b, 1))
    return runs
