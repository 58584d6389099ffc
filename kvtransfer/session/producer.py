"""The producer's end of a transfer: it serves published blocks and says when they may be freed. No I/O, no clock.

Rules: the blocks stay until the consumer let go, is known to be dead, or its lease (which it checks itself after
each copy) has run out; and until nothing in a transport reads them. A process that stood still, or whose clock jumped,
has not waited: leases last longer by that.
"""

from collections.abc import Sequence

from baton_serve.contracts.identity import BlockHash
from baton_serve.contracts.messages import Ticket
from baton_serve.kvtransfer.frames import Again, Done, Fail, FailCode, Fetch, Outcome, Ready, Release
from baton_serve.kvtransfer.session.steps import (
    Drain,
    ProducerStep,
    Released,
    ReleaseReason,
    Serve,
    SessionLimits,
    Tell,
)
from baton_serve.kvtransfer.session.table import PRODUCER, ProducerState, ProducerTrigger

State, Trigger = ProducerState, ProducerTrigger
REASON_OF: dict[Outcome, ReleaseReason] = {
    "received": "received",
    "cancelled": "cancelled",
    "failed": "failed",
    "unknown": "failed",
}
CODE_OF: dict[ReleaseReason, FailCode] = {
    "received": "unknown",
    "cancelled": "cancelled",
    "expired": "expired",
    "lost": "expired",
    "failed": "failed",
    "closed": "closed",
}


class ProducerSession:
    """Begins with `open` (in state OPEN) or with a `fetch` that came before it (PARKED).

    A block may be published part by part; a connection without parts carries it when the whole of it is.
    """

    def __init__(self, *, now: float, limits: SessionLimits, ticket: Ticket | None = None) -> None:
        self.state = State.PARKED if ticket is None else State.OPEN
        self.link = 0
        self.attempt = 0
        self.reason: ReleaseReason | None = None
        self.message = ""
        self._limits = limits
        self._fetch: Fetch | None = None
        self._pulls = False
        self._deadline = now + (ticket.timeout_s if ticket is not None else 0.0)
        self._open_until = now + limits.answer_timeout_s
        """PARKED: who is to open the ticket was told of it when the consumer was, or never will be."""
        self._lease_until = now + limits.lease_s
        self._ticked_at = now
        self._published: dict[BlockHash, int] = {}
        self._begun: dict[tuple[BlockHash, int], int] = {}
        """Parts of blocks that are not whole yet."""
        self._index: dict[BlockHash, int] = {}
        self._parts = 1
        self._served: set[int] = set()
        self._payload: bytes | None = None
        self._finished_at = 0.0

    @property
    def pulls(self) -> bool:
        return self._pulls

    def open(self, ticket: Ticket, now: float) -> list[ProducerStep]:
        if self.state is not State.PARKED:
            return []
        self._deadline = max(self._deadline, now + ticket.timeout_s)
        self._lease(now)
        self._move(Trigger.OPENED)
        return self._serve_all()

    def fetch(self, fetch: Fetch, *, link: int, pulls: bool, now: float, parts: int = 1) -> list[ProducerStep]:
        """`link` names the connection it came by, on which blocks have `parts`; `pulls`: its consumer reads our memory
        directly."""
        if fetch.attempt <= self.attempt:
            return []
        self._fetch, self.attempt, self.link = fetch, fetch.attempt, link
        if self.state in (State.ENDING, State.DRAINING, State.ENDED):
            return [self._failed(CODE_OF[self.reason or "failed"], self.message)]
        self._pulls = self._pulls or pulls
        self._deadline = max(self._deadline, now + fetch.timeout_s)
        self._index = {name: index for index, name in enumerate(fetch.names)}
        self._parts, self._served = parts, set()
        self._lease(now)
        ready = Tell(Ready(fetch.ticket, fetch.attempt, self.state is not State.PARKED))
        if self.state is State.PARKED:
            return [ready]
        self._move(Trigger.FETCHED)
        return [ready, *self._serve_all()]

    def publish(self, blocks: Sequence[tuple[BlockHash, int]]) -> list[ProducerStep]:
        self._published.update(blocks)
        return self._serve(blocks)

    def publish_parts(self, blocks: Sequence[tuple[BlockHash, int]], parts: range) -> list[ProducerStep]:
        """These parts of each block are there. The others follow, or `publish` says that all are."""
        begun = [(name, block, part) for name, block in blocks for part in parts]
        self._begun.update(((name, part), block) for name, block, part in begun)
        return self._serve_parts(begun)

    def finish(self, payload: bytes, now: float) -> list[ProducerStep]:
        self._payload = payload
        self._finished_at = now
        return self._done()

    def again(self, message: Again, now: float) -> list[ProducerStep]:
        if self.state is not State.STREAMING or message.attempt != self.attempt or self._fetch is None:
            return []
        self._lease(now)
        known = [self._part_at(index) for index in message.indexes if index in self._served]
        return [Serve(self.attempt, known, self._parts)] if known else []

    def renew(self, now: float) -> bool:
        """False: the ticket is not served here any more."""
        if self.state not in (State.PARKED, State.STREAMING):
            return False
        self._lease(now)
        return True

    def release(self, message: Release) -> list[ProducerStep]:
        return self._let_go(REASON_OF[message.outcome], "the consumer let go")

    def link_lost(self, *, dead: bool) -> list[ProducerStep]:
        """The connection of the current attempt broke; `dead`: the consumer's process is known to be gone."""
        if dead or self.state is State.PARKED:
            return self._let_go("lost", "the consumer is gone")
        self._move(Trigger.LINK_LOST)
        return []

    def give_up(self, reason: ReleaseReason, message: str) -> list[ProducerStep]:
        """This side will not serve the ticket (any more): `fail`, `cancel`, `close`, a deadline."""
        if Trigger.GIVE_UP not in PRODUCER[self.state]:
            return []
        told = [self._failed(CODE_OF[reason], message)] if self._fetch is not None else []
        was_orphan = self.state is State.ORPHANED
        self.reason, self.message = reason, message
        self._move(Trigger.GIVE_UP)
        if self.state is State.DRAINING:
            return [*told, Drain()]
        if self.state is State.ENDING and not self._pulls:
            return [*told, *self._let_go(reason, message)]
        return [] if was_orphan else list(told)

    def quiet(self) -> list[ProducerStep]:
        """Nothing reads the blocks any more."""
        assert self.reason is not None
        return [Released(self.reason)] if self._move(Trigger.QUIET) else []

    def tick(self, now: float) -> list[ProducerStep]:
        self._forgive(now)
        match self.state:
            case State.STREAMING if now >= self._lease_until:
                told = self._failed("expired", "the lease ran out")
                return [told, *self._let_go("expired", "the lease ran out")]
            case State.ORPHANED if now >= self._lease_until:
                return self._let_go("lost", "the consumer did not come back")
            case State.ENDING if now >= self._lease_until:
                return self._let_go(self.reason or "expired", self.message)
            case State.PARKED if now >= self._open_until:
                return self.give_up("expired", "nobody has opened the ticket here")
            case State.PARKED | State.OPEN | State.STREAMING | State.ORPHANED if now >= self._deadline:
                return self.give_up("expired", "the ticket's time is over")
            case _:
                return []

    def is_over(self) -> bool:
        return self.state is State.ENDED

    def check_invariants(self) -> None:
        assert (self.reason is not None) or self.state not in (State.ENDING, State.DRAINING, State.ENDED)
        assert self._served <= set(range(len(self._index) * self._parts))

    def _move(self, trigger: ProducerTrigger) -> bool:
        following = PRODUCER[self.state].get(trigger)
        if following is None:
            return False
        self.state = following
        return True

    def _lease(self, now: float) -> None:
        self._lease_until = now + self._limits.lease_s + self._limits.lease_grace_s

    def _forgive(self, now: float) -> None:
        """Time that went by without a tick does not count: the consumer's clock may not have gone on, or its renewals
        may wait here."""
        gap, self._ticked_at = now - self._ticked_at, now
        if gap > self._limits.lease_grace_s:
            self._lease_until += gap
            self._open_until += gap

    def _serve_all(self) -> list[ProducerStep]:
        begun = [(name, block, part) for (name, part), block in self._begun.items()]
        return [*self._serve(list(self._published.items())), *self._serve_parts(begun), *self._done()]

    def _serve(self, blocks: Sequence[tuple[BlockHash, int]]) -> list[ProducerStep]:
        """Whole, but for those of which parts have left."""
        if self.state is not State.STREAMING:
            return []
        count, served = self._parts, self._served
        whole: list[tuple[int, int]] = []
        rest: list[tuple[BlockHash, int, int]] = []
        for name, block in blocks:
            position = self._index.get(name)
            if position is None:
                continue
            of_it = range(position * count, (position + 1) * count)
            if served.isdisjoint(of_it):
                served.update(of_it)
                whole.append((position, block))
            else:
                rest += [(name, block, part) for part in range(count)]
        return [*([Serve(self.attempt, whole)] if whole else []), *self._serve_parts(rest)]

    def _serve_parts(self, blocks: Sequence[tuple[BlockHash, int, int]]) -> list[ProducerStep]:
        """Parts that have not been served yet: (name, block, part)."""
        if self.state is not State.STREAMING or self._parts == 1:
            return []
        fresh: list[tuple[int, int]] = []
        for name, block, part in blocks:
            position = self._index.get(name)
            if position is None or (index := position * self._parts + part) in self._served:
                continue
            self._served.add(index)
            fresh.append((index, block * self._parts + part))
        return [Serve(self.attempt, fresh, self._parts)] if fresh else []

    def _part_at(self, index: int) -> tuple[int, int]:
        """Of what was served: with its place in memory."""
        assert self._fetch is not None
        position, part = divmod(index, self._parts)
        name = self._fetch.names[position]
        block = self._published[name] if name in self._published else self._begun[name, part]
        return index, block * self._parts + part

    def _done(self) -> list[ProducerStep]:
        if self.state is not State.STREAMING or self._payload is None or self._fetch is None:
            return []
        done = Done(
            ticket=self._fetch.ticket,
            attempt=self.attempt,
            num_blocks=len(self._served),
            payload=self._payload,
            finished_at=self._finished_at,
        )
        return [Tell(done)]

    def _let_go(self, reason: ReleaseReason, message: str) -> list[ProducerStep]:
        if Trigger.LET_GO not in PRODUCER[self.state]:
            return []
        self.reason = self.reason or reason
        self.message = self.message or message
        self._move(Trigger.LET_GO)
        return [Drain()] if self.state is State.DRAINING else []

    def _failed(self, code: FailCode, reason: str) -> Tell:
        assert self._fetch is not None
        return Tell(Fail(self._fetch.ticket, self.attempt, code, reason))
