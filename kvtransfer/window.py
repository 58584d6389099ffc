"""What a producer has still to send on one connection: fair between tickets, bounded by a window of bytes. No I/O."""

from collections import OrderedDict, deque
from dataclasses import dataclass

from contracts.identity import TicketId
from kvtransfer.settings import ChecksumMode

MAX_PIECES = 4096
SAMPLE = 8
"""`sampled` checks one piece in so many."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """Blocks of one ticket that travel in one message: (index among the wanted, block)."""

    ticket: TicketId
    attempt: int
    blocks: list[tuple[int, int]]


class SendQueue:
    """`window_bytes` None: the transport does not buffer, nothing is held back."""

    def __init__(
        self, *, block_bytes: int, batch_bytes: int, window_bytes: int | None, taper_bytes: int | None = None
    ) -> None:
        """`taper_bytes`: parcels begin and end that small, where a stage waits for the first and the last of them."""
        self._block_bytes = block_bytes
        self._batch = min(max(batch_bytes // block_bytes, 1), MAX_PIECES)
        self._taper = self._batch if taper_bytes is None else min(max(taper_bytes // block_bytes, 1), self._batch)
        self._window = window_bytes
        self._travelling = 0
        self._tickets: OrderedDict[TicketId, deque[tuple[int, int, int]]] = OrderedDict()

    @property
    def travelling_bytes(self) -> int:
        return self._travelling

    def add(self, ticket: TicketId, attempt: int, blocks: list[tuple[int, int]]) -> None:
        queue = self._tickets.setdefault(ticket, deque())
        queue.extend((attempt, index, block) for index, block in blocks)

    def drop(self, ticket: TicketId) -> None:
        """Forget what has not been taken yet."""
        self._tickets.pop(ticket, None)

    def credit(self, num_bytes: int) -> None:
        self._travelling = max(self._travelling - num_bytes, 0)

    def take(self) -> Parcel | None:
        """The next parcel if the window has room. Tickets take turns."""
        if not self._tickets:
            return None
        ticket, queue = next(iter(self._tickets.items()))
        room = self._tapered(len(queue))
        if self._window is not None and self._travelling:
            fitting = (self._window - self._travelling) // self._block_bytes
            if fitting < min(room, (self._batch + 1) // 2):
                return None  # a small parcel now would cost as much as a full one a moment later
            room = min(room, fitting)
        elif self._window is not None:
            room = min(room, max(self._window // self._block_bytes, 1))
        attempt = queue[0][0]
        blocks: list[tuple[int, int]] = []
        while queue and queue[0][0] == attempt and len(blocks) < room:
            _, index, block = queue.popleft()
            blocks.append((index, block))
        if queue:
            self._tickets.move_to_end(ticket)
        else:
            del self._tickets[ticket]
        if self._window is not None:
            self._travelling += len(blocks) * self._block_bytes
        return Parcel(ticket, attempt, blocks)

    def _tapered(self, waiting: int) -> int:
        """Blocks of the next parcel: few while nothing travels, then no more than half of what waits."""
        if self._window is not None and not self._travelling:
            return self._taper
        return min(self._batch, max(waiting // 2, self._taper))


def is_checked(mode: ChecksumMode, index: int, parts: int) -> bool:
    """Does this piece carry a checksum? `index` is its number in the fetch (`frames.Piece`).

    A sample takes turns: the part that is checked moves on from block to block, so that none is left out for good.
    """
    block, part = divmod(index, parts)
    return mode == "full" or (mode == "sampled" and (block + part) % SAMPLE == 0)
