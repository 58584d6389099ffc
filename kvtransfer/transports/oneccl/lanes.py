"""The lanes on which messages of a device's pair are in flight: each has a stream, and memory for blocks that are not
neighbours.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from baton_serve.kvtransfer.transports.devicecopy import DeviceBlocks, is_run
from baton_serve.kvtransfer.transports.oneccl.pair import LANES

MIN_SUMS = 1024
"""Smallest number of sums to allocate memory for, so that it is rarely allocated again."""


class Lane:
    """A device stream with staging memory of its own. One message of a pair (a connection through a collective library)
    at a time uses it. The body of a `with` statement runs on the stream. Only the pair's thread uses it.
    """

    def __init__(self, blocks: DeviceBlocks) -> None:
        self._blocks = blocks
        self._memory: Tensor | None = None
        self._sums: Tensor | None = None
        self._context: Any = None
        self.stream = blocks.new_stream()

    def __enter__(self) -> None:
        self._context = self._blocks.on_stream(self.stream)
        self._context.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)

    def staging(self, count: int, parts: int) -> Tensor:
        """Return staging memory on the device for `count` blocks, or parts if each block has several `parts`: uint8
        `[count, bytes of each]`. The lane's next message uses the same memory.
        """
        size = self._blocks.block_bytes // parts
        if self._memory is None or len(self._memory) < count * size:
            self._memory = torch.empty(count * size, dtype=torch.uint8, device=self._blocks.device)
        return self._memory[: count * size].view(count, size)

    def sums(self, count: int) -> Tensor:
        """Return memory on the device for `count` checksums, int64 `[count]`. The lane's next message uses the same
        memory.
        """
        if self._sums is None or len(self._sums) < count:
            self._sums = torch.empty(max(count, MIN_SUMS), dtype=torch.int64, device=self._blocks.device)
        return self._sums[:count]

    def mark(self) -> Any:
        """Record an event on the lane's device stream, behind the work that is queued so far, and return it; return
        None on the CPU.
        """
        return self._blocks.mark(self.stream)


class Lanes:
    """The lanes (device streams with staging memory) of one pair, which are used in turn so that messages overlap. Any
    thread may create this object; only the pair's thread calls `next`.
    """

    def __init__(self, blocks: DeviceBlocks) -> None:
        self._blocks = blocks
        self._lanes: list[Lane] = []
        self._turn = 0

    def next(self) -> Lane:
        """Return the lane for the next message. The last message that used this lane has ended, because at most `LANES`
        messages of the pair are in flight.
        """
        if len(self._lanes) < LANES:
            # Created here, in the pair's thread, because `new_stream` sets the current device of the calling thread.
            self._lanes.append(Lane(self._blocks))
        lane = self._lanes[self._turn % LANES]
        self._turn += 1
        return lane


def neighbours(blocks: DeviceBlocks, places: Sequence[int]) -> Tensor | None:
    """Return the blocks with the numbers `places` as one tensor, uint8 [count, block_bytes], without a copy, if the
    numbers are consecutive and ascending; otherwise None.
    """
    if not places or not is_run(places):
        return None
    return blocks.tensor[places[0] : places[0] + len(places)]
