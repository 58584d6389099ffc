"""Keeps the tickets that a producer serves, and the tombstones of ended tickets. This module does no I/O."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import TypeVar

from baton_serve.contracts.identity import Generation, InstanceId, TicketId
from baton_serve.kvtransfer.errors import LocalTransferError, UnknownTicket
from baton_serve.kvtransfer.session.producer_session import ProducerSession
from baton_serve.kvtransfer.session.steps import ReleaseReason

K = TypeVar("K")
V = TypeVar("V")
SinkKey = tuple[TicketId, InstanceId, Generation]
"""Identifies a served ticket: the ticket and its consumer. A ticket id alone could be fetched by the wrong instance."""


class Handoff:
    """One served ticket: its state machine (`session`), the name of the transport that carries its blocks, the bytes
    served, and the future `released`, which resolves when the blocks may be freed. `released` is None until the ticket
    is opened. `on_fetched` is called after each attempt of the consumer has arrived.
    """

    def __init__(self, key: SinkKey, session: ProducerSession) -> None:
        self.key = key
        self.session = session
        self.transport = ""
        self.released: asyncio.Future[ReleaseReason] | None = None
        self.on_fetched: Callable[[], None] | None = None
        self.served_bytes = 0


class HandoffTable:
    """The tickets that one node serves, each with its consumer. It also keeps tombstones of ended and of cancelled
    tickets, so that late calls and messages have no effect; each of these two lists keeps the last `max_tombstones`
    tickets.
    """

    def __init__(self, max_tombstones: int) -> None:
        self._max_tombstones = max_tombstones
        self._handoffs: dict[SinkKey, Handoff] = {}
        self._opened: dict[TicketId, Handoff] = {}
        self._outcomes: OrderedDict[TicketId, asyncio.Future[ReleaseReason]] = OrderedDict()
        self._tombstones: OrderedDict[SinkKey, ReleaseReason] = OrderedDict()
        self._cancelled: OrderedDict[TicketId, None] = OrderedDict()

    def __iter__(self) -> Iterator[Handoff]:
        """Iterate over a copy of the list of served tickets, so that the caller may end tickets meanwhile."""
        return iter(list(self._handoffs.values()))

    def __len__(self) -> int:
        return len(self._handoffs)

    def get(self, key: SinkKey) -> Handoff | None:
        """Return the handoff of this ticket and consumer if the ticket was opened here or fetched, and has not ended;
        otherwise None.
        """
        return self._handoffs.get(key)

    def add(self, key: SinkKey, session: ProducerSession) -> Handoff:
        """Create, keep and return the handoff of a ticket that is opened or fetched for the first time. `key` is the
        ticket with its consumer, and `session` its state machine.
        """
        handoff = self._handoffs[key] = Handoff(key, session)
        return handoff

    def expect(self, ticket: TicketId, released: "asyncio.Future[ReleaseReason]") -> None:
        """Keep `released`, the future of a ticket that is about to be opened; `outcome` returns it. Raises
        `LocalTransferError` if the ticket was opened before.
        """
        if ticket in self._outcomes:
            raise LocalTransferError(f"ticket {ticket} was opened before")
        self._outcomes[ticket] = released
        while len(self._outcomes) > self._max_tombstones:
            oldest, future = next(iter(self._outcomes.items()))
            if not future.done():
                return  # the oldest ticket is still being served, and its caller may ask for the outcome
            del self._outcomes[oldest]

    def open(self, handoff: Handoff, released: "asyncio.Future[ReleaseReason]") -> None:
        """Mark a handoff as opened by the code that owns its blocks, so that `find` returns the handoff. The future
        `released` resolves when these blocks may be freed.
        """
        handoff.released = released
        self._opened[handoff.key[0]] = handoff

    def find(self, ticket: TicketId) -> Handoff | None:
        """Return the handoff of a ticket that was opened here, or None if it has ended, in which case a late call of
        its owner is ignored. Raises `UnknownTicket` if it was never opened.
        """
        handoff = self._opened.get(ticket)
        if handoff is None:
            self.outcome(ticket)
        return handoff

    def outcome(self, ticket: TicketId) -> "asyncio.Future[ReleaseReason]":
        """Return the future that resolves, with the reason, when the blocks of a ticket may be freed. Raises
        `UnknownTicket` if the ticket was not opened here.
        """
        future = self._outcomes.get(ticket)
        if future is None:
            raise UnknownTicket(f"ticket {ticket} was not opened")
        return future

    def unresolved(self) -> "list[asyncio.Future[ReleaseReason]]":
        """Return the `released` futures of the opened tickets whose blocks may not be freed yet."""
        return [future for future in self._outcomes.values() if not future.done()]

    def count_of(self, peer: tuple[InstanceId, Generation]) -> int:
        """Return the number of tickets that are served to the consumer `peer` now."""
        return sum(key[1:] == peer for key in self._handoffs)

    def cancel(self, ticket: TicketId) -> list[Handoff]:
        """Leave a tombstone for a ticket, for whichever consumer it is. Return its running handoffs, which the caller
        must end.
        """
        self._remember(self._cancelled, ticket, None)
        return [handoff for key, handoff in self._handoffs.items() if key[0] == ticket]

    def is_cancelled(self, ticket: TicketId) -> bool:
        """Return whether `cancel` was called for this ticket (among the last `max_tombstones` calls)."""
        return ticket in self._cancelled

    def tombstone(self, key: SinkKey) -> ReleaseReason | None:
        """Return the reason why this ticket of this consumer has ended. Return None if it has not ended, or ended so
        long ago that its tombstone was dropped.
        """
        return self._tombstones.get(key)

    def entomb(self, key: SinkKey, reason: ReleaseReason) -> None:
        """Leave a tombstone for this ticket and consumer, so that a later fetch or `open` of the ticket ends
        immediately with `reason`.
        """
        self._remember(self._tombstones, key, reason)

    def release(self, handoff: Handoff, reason: ReleaseReason) -> None:
        """Resolve the future `released` of a served ticket with `reason`: the caller of `TransferNode.open` may now
        free the blocks.
        """
        self._opened.pop(handoff.key[0], None)
        if handoff.released is not None and not handoff.released.done():
            handoff.released.set_result(reason)

    def bury(self, handoff: Handoff) -> None:
        """Remove an ended handoff from the table and leave a tombstone, so that late messages are ignored. Leave none
        for a fetch whose ticket nobody had opened and whose connection broke, because its consumer may come again. A
        second call has no effect.
        """
        if self._handoffs.pop(handoff.key, None) is None:
            return
        if handoff.released is not None or handoff.session.reason != "lost":
            self.entomb(handoff.key, handoff.session.reason or "failed")

    def check_invariants(self) -> None:
        """Assert that the state of each served ticket is consistent and that its blocks were not freed too early. Only
        tests call it.
        """
        for handoff in self._handoffs.values():
            handoff.session.check_invariants()
            assert not handoff.session.is_over()
        for handoff in self._opened.values():
            assert handoff.released is not None and not handoff.released.done()

    def _remember(self, memory: "OrderedDict[K, V]", key: K, value: V) -> None:
        memory[key] = value
        while len(memory) > self._max_tombstones:
            memory.popitem(last=False)
