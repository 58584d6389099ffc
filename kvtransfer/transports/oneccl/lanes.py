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
    """A device stream with staging memory of its own. The body of a `with` statement runs on the stream. It belongs to
    the pair's thread.
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
        """Return memory for blocks or parts, uint8 `[count, bytes]`. It is in use until the lane's next message."""
        size = self._blocks.block_bytes // parts
        if self._memory is None or len(self._memory) < count * size:
            self._memory = torch.empty(count * size, dtype=torch.uint8, device=self._blocks.device)
        return self._memory[: count * size].view(count, size)

    def sums(self, count: int) -> Tensor:
        """Return memory for checksums, int64 `[count]`. It is in use until the lane's next message."""
        if self._sums is None or len(self._sums) < count:
            self._sums = torch.empty(max(count, MIN_SUMS), dtype=torch.int64, device=self._blocks.device)
        return self._sums[:count]

    def mark(self) -> Any:
        """Record an event behind the work that is queued on the lane so far, and return it; None on the CPU."""
        return self._blocks.mark(self.stream)


class Lanes:
    """The streams of one pair, which are used in turn so that messages overlap. Any thread may create it; one thread
    uses it.
    """

    def __init__(self, blocks: DeviceBlocks) -> None:
        self._blocks = blocks
        self._lanes: list[Lane] = []
        self._turn = 0

    def next(self) -> Lane:
        """Return the lane for the next message. Its last message has ended, because `PairThread` allows only `LANES`
        messages in flight.
        """
        if len(self._lanes) < LANES:
            # Created here, in the pair's thread, because `new_stream` sets the current device of the calling thread.
            self._lanes.append(Lane(self._blocks))
        lane = self._lanes[self._turn % LANES]
        self._turn += 1
        return lane


def neighbours(blocks: DeviceBlocks, places: Sequence[int]) -> Tensor | None:
    """Return the blocks at `places` as one tensor without a copy if they are adjacent in memory, otherwise None."""
    if not places or not is_run(places):
        return None
    return blocks.tensor[places[0] : places[0] + len(places)]
