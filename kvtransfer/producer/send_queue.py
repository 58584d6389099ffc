"""Queue the blocks that a producer has to send over one transport of a connection: fair between tickets, and bounded by
a window of bytes. This module is pure.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from baton_serve.contracts.identity import TicketId
from baton_serve.kvtransfer.settings import ChecksumMode

MAX_PIECES = 4096
"""Largest number of blocks or parts in one message, which bounds the size of its announcement."""
SAMPLE = 8
"""The mode `sampled` checks one piece in this many."""


@dataclass(frozen=True, slots=True)
class SendBatch:
    """Blocks of one ticket, or parts of them, that one message announces: pairs of their index in the fetch and their
    number in this node's memory.
    """

    ticket: TicketId
    attempt: int
    blocks: list[tuple[int, int]]
    parts: int = 1


class SendQueue:
    """Decides which blocks are sent next on one connection. With `window_bytes` None, the transport queues nothing
    itself and no block waits for credit.
    """

    def __init__(
        self,
        *,
        block_bytes: int,
        batch_bytes: int,
        window_bytes: int | None,
        taper_bytes: int | None = None,
        in_blocks: bool = False,
    ) -> None:
        """Create an empty queue.

        With `taper_bytes`, the first and the last parcels of a prompt are about this small, because one end of the
        transfer waits while they are staged. With `in_blocks`, a parcel of parts occupies room for whole blocks.
        """
        self._block_bytes = block_bytes
        self._batch_bytes = batch_bytes
        self._taper_bytes = taper_bytes
        self._window = window_bytes
        self._in_blocks = in_blocks
        self._travelling = 0
        self._tickets: OrderedDict[TicketId, deque[tuple[int, int, int, int]]] = OrderedDict()
        self._gone: Counter[TicketId] = Counter()
        """Bytes that have left of each queued ticket."""

    @property
    def travelling_bytes(self) -> int:
        """Return the bytes that were sent and for which no credit has come back yet."""
        return self._travelling

    def add(self, ticket: TicketId, attempt: int, blocks: Sequence[tuple[int, int]], parts: int = 1) -> None:
        """Queue blocks of a ticket, in the order in which they are to leave."""
        queue = self._tickets.setdefault(ticket, deque())
        queue.extend((attempt, parts, index, block) for index, block in blocks)

    def drop(self, ticket: TicketId) -> None:
        """Forget the queued blocks of a ticket."""
        self._tickets.pop(ticket, None)
        del self._gone[ticket]

    def window_bytes_of(self, count: int, parts: int) -> int:
        """Return how many bytes of the window `count` blocks, or parts if each block has several `parts`, occupy."""
        return (-(-count // parts) * parts if self._in_blocks else count) * self._block_bytes // parts

    def credit(self, num_bytes: int) -> None:
        """Free `num_bytes` of the window, because the consumer has read them."""
        # Credit comes from the peer: too much of it must not enlarge the window.
        self._travelling = max(self._travelling - num_bytes, 0)

    def take(self) -> SendBatch | None:
        """Return the next parcel, or None if nothing is queued or the window has no room. Tickets with queued blocks
        alternate.
        """
        if not self._tickets:
            return None
        ticket, queue = next(iter(self._tickets.items()))
        attempt, parts = queue[0][:2]
        room = self._num_sendable(len(queue), parts, self._gone[ticket])
        if not room:
            return None
        blocks: list[tuple[int, int]] = []
        # One message has one attempt and one size of pieces.
        while queue and queue[0][:2] == (attempt, parts) and len(blocks) < room:
            _, _, index, block = queue.popleft()
            blocks.append((index, block))
        num_bytes = self.window_bytes_of(len(blocks), parts)
        if queue:
            # The next parcel is of another ticket, so that a long prompt does not hold up short ones.
            self._tickets.move_to_end(ticket)
            self._gone[ticket] += num_bytes
        else:
            self.drop(ticket)
        if self._window is not None:
            self._travelling += num_bytes
        return SendBatch(ticket, attempt, blocks, parts)

    def _num_sendable(self, waiting: int, parts: int, gone: int) -> int:
        """Return how many blocks or parts the next parcel carries.

        They are few while nothing travels (without a window: at the start), and later at most half of what waits, so
        that the last parcels are small again. Return 0 if a small parcel now would cost as much as a full one a moment
        later.
        """
        size, window = self._block_bytes // parts, self._window
        batch = min(max(self._batch_bytes // size, 1), MAX_PIECES)
        taper = batch if self._taper_bytes is None else min(max(self._taper_bytes // size, 1), batch)
        if window is None:
            return min(batch, max(min(waiting // 2, gone // size), taper))
        if not self._travelling:
            return min(taper, max(window // size, 1))
        room, fitting = min(batch, max(waiting // 2, taper)), (window - self._travelling) // size
        if self._in_blocks:
            # A slot of the ring holds whole blocks: a rest of parts would occupy a whole slot.
            fitting -= fitting % parts
        return min(room, fitting) if fitting >= min(room, (batch + 1) // 2) else 0


def is_checked(mode: ChecksumMode, index: int, parts: int) -> bool:
    """Return whether a block or part is sent with a checksum. `index` is its number in the fetch, and each block has
    `parts` parts. In the mode `sampled`, one of `SAMPLE` has a checksum; which part of a block that is differs from
    block to block, so that every part is checked sometimes.
    """
    block, part = divmod(index, parts)
    return mode == "full" or (mode == "sampled" and (block + part) % SAMPLE == 0)
