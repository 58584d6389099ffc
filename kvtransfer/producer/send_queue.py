"""What a producer has still to send on one connection: fair between tickets, bounded by a window of bytes. No I/O."""

from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from baton_serve.contracts.identity import TicketId
from baton_serve.kvtransfer.settings import ChecksumMode

MAX_PIECES = 4096
SAMPLE = 8
"""`sampled` checks one piece in so many."""


@dataclass(frozen=True, slots=True)
class SendBatch:
    """Blocks of one ticket that travel in one message, or one of `parts` of each: (index among the wanted, block)."""

    ticket: TicketId
    attempt: int
    blocks: list[tuple[int, int]]
    parts: int = 1


class SendQueue:
    """`window_bytes` None: the transport does not buffer, nothing is held back."""

    def __init__(
        self,
        *,
        block_bytes: int,
        batch_bytes: int,
        window_bytes: int | None,
        taper_bytes: int | None = None,
        in_blocks: bool = False,
    ) -> None:
        """`taper_bytes`: parcels begin and end that small, where a stage waits for the first and the last of them.
        `in_blocks`: a parcel of parts takes room for whole blocks."""
        self._block_bytes = block_bytes
        self._batch_bytes = batch_bytes
        self._taper_bytes = taper_bytes
        self._window = window_bytes
        self._in_blocks = in_blocks
        self._travelling = 0
        self._tickets: OrderedDict[TicketId, deque[tuple[int, int, int, int]]] = OrderedDict()
        self._gone: Counter[TicketId] = Counter()
        """Bytes that have left of what is queued."""

    @property
    def travelling_bytes(self) -> int:
        return self._travelling

    def add(self, ticket: TicketId, attempt: int, blocks: Sequence[tuple[int, int]], parts: int = 1) -> None:
        queue = self._tickets.setdefault(ticket, deque())
        queue.extend((attempt, parts, index, block) for index, block in blocks)

    def drop(self, ticket: TicketId) -> None:
        """Forget what has not been taken yet."""
        self._tickets.pop(ticket, None)
        del self._gone[ticket]

    def window_bytes_of(self, count: int, parts: int) -> int:
        """Bytes of the window that so many blocks, or parts of blocks, take."""
        return (-(-count // parts) * parts if self._in_blocks else count) * self._block_bytes // parts

    def credit(self, num_bytes: int) -> None:
        self._travelling = max(self._travelling - num_bytes, 0)

    def take(self) -> SendBatch | None:
        """The next parcel if the window has room. Tickets take turns."""
        if not self._tickets:
            return None
        ticket, queue = next(iter(self._tickets.items()))
        attempt, parts = queue[0][:2]
        room = self._num_sendable(len(queue), parts, self._gone[ticket])
        if not room:
            return None
        blocks: list[tuple[int, int]] = []
        while queue and queue[0][:2] == (attempt, parts) and len(blocks) < room:
            _, _, index, block = queue.popleft()
            blocks.append((index, block))
        num_bytes = self.window_bytes_of(len(blocks), parts)
        if queue:
            self._tickets.move_to_end(ticket)
            self._gone[ticket] += num_bytes
        else:
            self.drop(ticket)
        if self._window is not None:
            self._travelling += num_bytes
        return SendBatch(ticket, attempt, blocks, parts)

    def _num_sendable(self, waiting: int, parts: int, gone: int) -> int:
        """Blocks, or parts of blocks, of the next parcel: few while nothing travels (without a window: at first), then
        no more than half of what waits. 0: a small parcel now would cost as much as a full one a moment later."""
        size, window = self._block_bytes // parts, self._window
        batch = min(max(self._batch_bytes // size, 1), MAX_PIECES)
        taper = batch if self._taper_bytes is None else min(max(self._taper_bytes // size, 1), batch)
        if window is None:
            return min(batch, max(min(waiting // 2, gone // size), taper))
        if not self._travelling:
            return min(taper, max(window // size, 1))
        room, fitting = min(batch, max(waiting // 2, taper)), (window - self._travelling) // size
        if self._in_blocks:
            fitting -= fitting % parts
        return min(room, fitting) if fitting >= min(room, (batch + 1) // 2) else 0


def is_checked(mode: ChecksumMode, index: int, parts: int) -> bool:
    """Does this piece, one of `parts` of its block, carry a checksum? `index` is its number in the fetch.

    A sample takes turns: the part that is checked moves on from block to block, so that none is left out for good.
    """
    block, part = divmod(index, parts)
    return mode == "full" or (mode == "sampled" and (block + part) % SAMPLE == 0)
