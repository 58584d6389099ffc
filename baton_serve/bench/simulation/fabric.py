"""Handoffs in virtual time: blocks are sent chunk by chunk while prefill computes, and transfers share the links of
both instances.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from baton_serve.bench.simulation.engine import SimulatedEngine
from baton_serve.contracts.identity import InstanceId, TicketId
from baton_serve.contracts.messages import Ticket
from baton_serve.services.router.placement.prefix_pull import PULL_LATENCY_S


@dataclass(frozen=True, slots=True)
class TransferArrival:
    """Result of a handoff for its sink when the last block has arrived. `first_token_at` is the time at which prefill
    ended."""

    handoff_s: float
    exposed_s: float
    num_tokens: int
    first_token_at: float


@dataclass(slots=True)
class _Handoff:
    """State of one handoff. Source and sink may create it in either order."""

    produced: int = 0
    sent: int = 0
    """Tokens that have been sent, or that the sink had already."""
    reserved_at: float | None = None
    first_token_at: float | None = None
    ends_at: float = 0.0
    num_tokens: int = 0
    on_arrived: Callable[[TransferArrival], None] | None = None
    on_sent: list[Callable[[], None]] = field(default_factory=list)


class Fabric:
    """The network of the cluster. An instance has one link per direction; a transfer occupies the source's and the
    sink's."""

    def __init__(self, *, bytes_per_token: int, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._seconds_per_token = bytes_per_token / bytes_per_s
        self._loop = asyncio.get_running_loop()
        self._handoffs: dict[TicketId, _Handoff] = {}
        self.engines: dict[InstanceId, SimulatedEngine] = {}
        """Engines of all instances, from whose caches prefixes can be pulled."""
        self._sending_until: dict[InstanceId, float] = {}
        self._receiving_until: dict[InstanceId, float] = {}

    @property
    def num_handoffs(self) -> int:
        return len(self._handoffs)

    def produced(self, ticket: Ticket, num_tokens: int) -> None:
        """The source has computed the first `num_tokens` tokens."""
        handoff = self._handoffs.setdefault(ticket.ticket, _Handoff())
        handoff.produced = num_tokens
        self._send(ticket, handoff)

    def finished(self, ticket: Ticket, on_sent: Callable[[], None]) -> None:
        """The source has computed the whole prompt. It keeps the blocks until `on_sent` is called."""
        handoff = self._handoffs.setdefault(ticket.ticket, _Handoff())
        handoff.first_token_at = self._loop.time()
        handoff.on_sent.append(on_sent)
        self._end(ticket, handoff)

    def reserved(self, ticket: Ticket, num_cached: int, on_arrived: Callable[[TransferArrival], None]) -> None:
        """The sink has reserved memory and has the first `num_cached` tokens already."""
        handoff = self._handoffs.setdefault(ticket.ticket, _Handoff())
        handoff.sent, handoff.reserved_at, handoff.on_arrived = num_cached, self._loop.time(), on_arrived
        self._send(ticket, handoff)
        self._end(ticket, handoff)

    def pull(self, ticket: Ticket, num_tokens: int, on_arrived: Callable[[], None]) -> None:
        """Send tokens that the source has cached to the sink."""
        ends_at = self._link_free_at(ticket) + PULL_LATENCY_S + num_tokens * self._seconds_per_token
        self._sending_until[ticket.source] = self._receiving_until[ticket.sink] = ends_at
        self._loop.call_at(ends_at, on_arrived)

    def forget(self, ticket: Ticket) -> None:
        """End a handoff for which the sink has no use any more: the source can release its blocks."""
        handoff = self._handoffs.pop(ticket.ticket, None)
        for on_sent in handoff.on_sent if handoff is not None else []:
            on_sent()

    def _send(self, ticket: Ticket, handoff: _Handoff) -> None:
        num_tokens = handoff.produced - handoff.sent
        if handoff.reserved_at is None or num_tokens <= 0:
            return
        handoff.ends_at = self._link_free_at(ticket) + num_tokens * self._seconds_per_token
        self._sending_until[ticket.source] = self._receiving_until[ticket.sink] = handoff.ends_at
        handoff.sent = handoff.produced
        handoff.num_tokens += num_tokens

    def _link_free_at(self, ticket: Ticket) -> float:
        return max(
            self._loop.time(), self._sending_until.get(ticket.source, 0.0), self._receiving_until.get(ticket.sink, 0.0)
        )

    def _end(self, ticket: Ticket, handoff: _Handoff) -> None:
        """Schedule the arrival once source and sink are both ready."""
        if handoff.on_arrived is None or handoff.first_token_at is None:
            return
        self._loop.call_at(max(self._loop.time(), handoff.ends_at), self._arrived, ticket)

    def _arrived(self, ticket: Ticket) -> None:
        handoff = self._handoffs.get(ticket.ticket)
        if handoff is None:
            return
        assert handoff.reserved_at is not None
        assert handoff.first_token_at is not None
        assert handoff.on_arrived is not None
        now = self._loop.time()
        arrival = TransferArrival(
            handoff_s=now - handoff.reserved_at,
            exposed_s=now - max(handoff.first_token_at, handoff.reserved_at),
            num_tokens=handoff.num_tokens,
            first_token_at=handoff.first_token_at,
        )
        on_arrived = handoff.on_arrived
        self.forget(ticket)
        on_arrived(arrival)
