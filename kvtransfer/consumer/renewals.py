"""Decides when the leases of fetches are renewed, and matches the answers. This module is pure."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from baton_serve.contracts.identity import TicketId
from baton_serve.kvtransfer.control_messages import Renew, Renewed

MAX_UNCONFIRMED = 1024
"""Largest number of renewals to remember while a producer does not answer; the oldest is dropped."""


@dataclass(frozen=True, slots=True)
class Confirmed:
    """One ticket of a lease renewal that the producer has answered: the ticket, the fetch's attempt and the time at
    which the renewal was sent. If `is_known` is False, the producer does not serve the ticket any more.
    """

    ticket: TicketId
    attempt: int
    sent_at: float
    is_known: bool


class Renewals:
    """Decides when a node renews the leases of its fetches, and matches the producers' answers with the renewals.

    A lease counts from the time when its renewal was sent, not from the answer: only then is it sure that the
    producer's lease does not end earlier.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._due_at = 0.0
        self._sequence = 0
        self._unconfirmed: OrderedDict[int, tuple[float, Mapping[TicketId, int]]] = OrderedDict()

    def is_due(self, now: float) -> bool:
        """Return whether leases must be renewed now. If so, the next renewal is due one interval after `now`."""
        if now < self._due_at:
            return False
        self._due_at = now + self._interval_s
        return True

    def renew(self, attempts: Mapping[TicketId, int], now: float) -> Renew:
        """Create the message that renews the leases of all fetches over one connection. `attempts` has the number of
        the current attempt of each fetched ticket.
        """
        self._sequence += 1
        self._unconfirmed[self._sequence] = (now, attempts)
        while len(self._unconfirmed) > MAX_UNCONFIRMED:
            self._unconfirmed.popitem(last=False)
        return Renew(self._sequence, list(attempts))

    def confirm(self, message: Renewed) -> list[Confirmed]:
        """Return one `Confirmed` for each ticket of the renewal that `message` answers; none if that renewal is unknown
        or was answered before.
        """
        # The time of sending is this node's own: an answer of the peer cannot extend a lease beyond it.
        sent_at, attempts = self._unconfirmed.pop(message.sequence, (0.0, {}))
        unknown = set(message.unknown)
        return [Confirmed(ticket, attempt, sent_at, ticket not in unknown) for ticket, attempt in attempts.items()]
