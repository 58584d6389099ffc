"""Decides which blocks a producer sends next: fair between tickets, within a window of bytes; and which have checksums.
This module is pure.
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
    """Blocks of one ticket that one message announces, or parts of blocks if `parts` is above 1. `blocks` has pairs:
    the index of the block (or part) in the fetch, and its number in this node's memory.
    """

    ticket: TicketId
    attempt: int
    blocks: list[tuple[int, int]]
    parts: int = 1


class SendQueue:
    """Decides which blocks a producer sends next by one transport of one connection. At most `window_bytes` are in
    flight; more are sent when the consumer returns credit. If `window_bytes` is None, blocks never wait for credit,
    because the transport sends no bytes that could pile up at the consumer.
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
        """Create an empty queue for parcels of at most `batch_bytes`. At most `window_bytes` are in flight (None: no
        limit).

        With `taper_bytes`, the first and the last parcels of a prompt are only about this large, because one end of the
        transfer waits while they are copied. None makes all parcels equally large. With `in_blocks`, a parcel that
        contains only parts of blocks counts as whole blocks in flight, because each block occupies a whole slot of
        staging memory.
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
        """Return the number of bytes that were sent and for which the consumer has not returned credit yet."""
        return self._travelling

    def add(self, ticket: TicketId, attempt: int, blocks: Sequence[tuple[int, int]], parts: int = 1) -> None:
        """Queue blocks of a ticket for sending, in this order, for the consumer's `attempt` to fetch them. Each pair is
        the index in the fetch and the number in this node's memory; with `parts` above 1, both count parts of blocks.
        """
        queue = self._tickets.setdefault(ticket, deque())
        queue.extend((attempt, parts, index, block) for index, block in blocks)

    def drop(self, ticket: TicketId) -> None:
        """Remove all queued blocks of a ticket, so that they are not sent."""
        self._tickets.pop(ticket, None)
        del self._gone[ticket]

    def window_bytes_of(self, count: int, parts: int) -> int:
        """Return how many bytes in flight a parcel of `count` blocks counts as; or a parcel of `count` parts, if each
        block is divided into several `parts`.
        """
        return (-(-count // parts) * parts if self._in_blocks else count) * self._block_bytes // parts

    def credit(self, num_bytes: int) -> None:
        """Count `num_bytes` fewer bytes in flight, because the consumer has read them: as many more may be sent."""
        # Credit comes from the peer: too much of it must not enlarge the window.
        self._travelling = max(self._travelling - num_bytes, 0)

    def take(self) -> SendBatch | None:
        """Remove the next parcel from the queue and return it. Return None if nothing is queued or too many bytes are
        in flight. Tickets with queued blocks take turns.
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
        """Return how many blocks or parts the next parcel of a ticket carries. `waiting` of them are queued, and `gone`
        bytes of the ticket were sent before.

        The first parcel is small, so that copying begins early (with a limit of bytes in flight: whenever nothing is in
        flight). Later parcels carry at most half of what waits, so that the last ones are small again. Return 0 to wait
        for more credit if only a small parcel could be sent now.
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
    """Return whether a block or part is sent with a checksum, by the setting `mode`. `index` is its number in the
    fetch, and each block has `parts` parts. In the mode `sampled`, one of `SAMPLE` has a checksum. Which part of a
    block it is differs from block to block, so that no part always goes unchecked.
    """
    block, part = divmod(index, parts)
    return mode == "full" or (mode == "sampled" and (block + part) % SAMPLE == 0)
