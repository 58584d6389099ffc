"""Renewals of leases that were sent and not confirmed yet: when, and for which attempts. No I/O."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from baton_serve.contracts.identity import TicketId
from baton_serve.kvtransfer.frames import Renew, Renewed

MAX_UNCONFIRMED = 1024


@dataclass(frozen=True, slots=True)
class Confirmed:
    """One ticket of a renewal that the producer answered. Not `is_known`: it serves the ticket no more."""

    ticket: TicketId
    attempt: int
    sent_at: float
    is_known: bool


class Renewals:
    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._due_at = 0.0
        self._sequence = 0
        self._unconfirmed: OrderedDict[int, tuple[float, Mapping[TicketId, int]]] = OrderedDict()

    def is_due(self, now: float) -> bool:
        if now < self._due_at:
            return False
        self._due_at = now + self._interval_s
        return True

    def renew(self, attempts: Mapping[TicketId, int], now: float) -> Renew:
        """`attempts`: the current attempt of each ticket fetched over one connection."""
        self._sequence += 1
        self._unconfirmed[self._sequence] = (now, attempts)
        while len(self._unconfirmed) > MAX_UNCONFIRMED:
            self._unconfirmed.popitem(last=False)
        return Renew(self._sequence, list(attempts))

    def confirm(self, message: Renewed) -> list[Confirmed]:
        sent_at, attempts = self._unconfirmed.pop(message.sequence, (0.0, {}))
        unknown = set(message.unknown)
        return [Confirmed(ticket, attempt, sent_at, ticket not in unknown) for ticket, attempt in attempts.items()]
