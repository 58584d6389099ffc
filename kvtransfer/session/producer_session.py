"""Decides the course of a served ticket: when blocks are sent, expire (lease, deadline) and may be freed. This module
is pure.

The rules: The blocks stay until the consumer has released them, is known to be dead, or its lease has run out; and
until no transport reads them. The consumer checks its lease itself after each copy. If this process was suspended or
its clock jumped, that time does not count as waiting: leases are extended by it.
"""

from collections.abc import Sequence

from baton_serve.contracts.identity import BlockHash
from baton_serve.contracts.messages import Ticket
from baton_serve.kvtransfer.control_messages import Again, Done, Fail, FailCode, Fetch, Outcome, Ready, Release
from baton_serve.kvtransfer.session.states import PRODUCER, ProducerState, ProducerTrigger
from baton_serve.kvtransfer.session.steps import (
    Drain,
    ProducerStep,
    Released,
    ReleaseReason,
    Serve,
    SessionLimits,
    Tell,
)

State, Trigger = ProducerState, ProducerTrigger
REASON_OF: dict[Outcome, ReleaseReason] = {
    "received": "received",
    "cancelled": "cancelled",
    "failed": "failed",
    "unknown": "failed",
}
"""The reason for which blocks are released, by the outcome that the consumer reports."""
CODE_OF: dict[ReleaseReason, FailCode] = {
    "received": "unknown",
    "cancelled": "cancelled",
    "expired": "expired",
    "lost": "expired",
    "failed": "failed",
    "closed": "closed",
}
"""The code that a late fetch of an ended ticket is answered with, by the reason of its end."""


class ProducerSession:
    """The state machine of one served ticket; it does no I/O. It begins in state OPEN if the ticket is opened first, or
    PARKED if its fetch comes first. Most methods return the actions that the caller must carry out (`ProducerStep`).

    Blocks may be published part by part. A connection that carries no parts gets a block only when all of it is
    published.
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
        """Deadline of PARKED. The caller that opens the ticket got it at the same time as the consumer, so it opens it
        soon or never.
        """
        self._lease_until = now + limits.lease_s
        self._ticked_at = now
        self._published: dict[BlockHash, int] = {}
        self._begun: dict[tuple[BlockHash, int], int] = {}
        """Block numbers of published parts, by block hash and part. The blocks may be incomplete."""
        self._index: dict[BlockHash, int] = {}
        """Position in `Fetch.names` by block hash."""
        self._parts = 1
        self._served: set[int] = set()
        """Numbers of the parts that were served in this attempt."""
        self._payload: bytes | None = None
        self._finished_at = 0.0

    @property
    def pulls(self) -> bool:
        """Return whether the consumer reads this node's memory directly, in the current or an earlier attempt."""
        return self._pulls

    def open(self, ticket: Ticket, now: float) -> list[ProducerStep]:
        """Open a ticket whose fetch came first (state PARKED), and serve this fetch. Do nothing in any other state.
        Return the actions to carry out.
        """
        if self.state is not State.PARKED:
            return []
        self._deadline = max(self._deadline, now + ticket.timeout_s)
        self._lease(now)
        self._move(Trigger.OPENED)
        return self._serve_all()

    def fetch(self, fetch: Fetch, *, link: int, pulls: bool, now: float, parts: int = 1) -> list[ProducerStep]:
        """Start the consumer's attempt `fetch`. `link` is the number of its connection, on which each block travels in
        `parts` parts. With `pulls`, the consumer reads this node's memory directly. An attempt that is not newer than
        the last one is ignored. Return the actions to carry out.
        """
        # A message of an earlier attempt came late, over a connection that was replaced.
        if fetch.attempt <= self.attempt:
            return []
        self._fetch, self.attempt, self.link = fetch, fetch.attempt, link
        if self.state in (State.ENDING, State.DRAINING, State.ENDED):
            return [self._failed(CODE_OF[self.reason or "failed"], self.message)]
        # A copy of an earlier attempt may still read this memory, even if this attempt uses another transport.
        self._pulls = self._pulls or pulls
        self._deadline = max(self._deadline, now + fetch.timeout_s)
        self._index = {name: index for index, name in enumerate(fetch.names)}
        # The new attempt lists only blocks that the consumer lacks, so everything on this list has to be served again.
        self._parts, self._served = parts, set()
        self._lease(now)
        ready = Tell(Ready(fetch.ticket, fetch.attempt, self.state is not State.PARKED))
        if self.state is State.PARKED:
            return [ready]
        self._move(Trigger.FETCHED)
        return [ready, *self._serve_all()]

    def publish(self, blocks: Sequence[tuple[BlockHash, int]]) -> list[ProducerStep]:
        """Serve blocks that are complete (hash, block number in this node's memory). The blocks must not change until
        the ticket is released. Return the actions to carry out.
        """
        self._published.update(blocks)
        return self._serve(blocks)

    def publish_parts(self, blocks: Sequence[tuple[BlockHash, int]], parts: range) -> list[ProducerStep]:
        """Serve the parts with the numbers `parts` of each block (hash, block number). The other parts follow, or
        `publish` declares the whole block complete. Return the actions to carry out.
        """
        begun = [(name, block, part) for name, block in blocks for part in parts]
        self._begun.update(((name, part), block) for name, block, part in begun)
        return self._serve_parts(begun)

    def finish(self, payload: bytes, now: float) -> list[ProducerStep]:
        """Record that nothing more will be published, and report it to the consumer with `payload` as soon as it has
        fetched. Return the actions to carry out.
        """
        self._payload = payload
        self._finished_at = now
        return self._done()

    def again(self, message: Again, now: float) -> list[ProducerStep]:
        """Serve blocks or parts again, because their bytes did not match their checksums at the consumer; `message`
        names them. Return the actions to carry out.
        """
        if self.state is not State.STREAMING or message.attempt != self.attempt or self._fetch is None:
            return []
        self._lease(now)
        # The indexes come from the peer: ignore pieces that were never served.
        known = [self._part_at(index) for index in message.indexes if index in self._served]
        return [Serve(self.attempt, known, self._parts)] if known else []

    def renew(self, now: float) -> bool:
        """Renew the lease of the consumer. Return False if the ticket is not served any more, or has no
        consumer now.
        """
        if self.state not in (State.PARKED, State.STREAMING):
            return False
        self._lease(now)
        return True

    def release(self, message: Release) -> list[ProducerStep]:
        """End the ticket because the consumer has released it with `message`. Return the actions to carry out."""
        return self._let_go(REASON_OF[message.outcome], "the consumer let go")

    def link_lost(self, *, dead: bool) -> list[ProducerStep]:
        """React to the loss of the consumer's connection. With `dead`, its process has ended, and the ticket ends;
        otherwise the consumer may come back until its lease runs out. Return the actions to carry out.
        """
        # A parked fetch has nobody who waits for it here: its consumer can fetch again.
        if dead or self.state is State.PARKED:
            return self._let_go("lost", "the consumer is gone")
        self._move(Trigger.LINK_LOST)
        return []

    def give_up(self, reason: ReleaseReason, message: str) -> list[ProducerStep]:
        """Stop serving the ticket for `reason`: this node failed the ticket, cancelled it or closes, or a deadline
        passed. Report `message` to the consumer. Return the actions to carry out.
        """
        if Trigger.GIVE_UP not in PRODUCER[self.state]:
            return []
        notices = [self._failed(CODE_OF[reason], message)] if self._fetch is not None else []
        was_orphan = self.state is State.ORPHANED
        self.reason, self.message = reason, message
        self._move(Trigger.GIVE_UP)
        if self.state is State.DRAINING:
            return [*notices, Drain()]
        # If this node pushes the bytes, no consumer reads its memory: there is nothing to wait for but the transport.
        if self.state is State.ENDING and not self._pulls:
            return [*notices, *self._let_go(reason, message)]
        return [] if was_orphan else list(notices)

    def quiet(self) -> list[ProducerStep]:
        """End the ticket (state DRAINING), because no frame that is being sent and no thread reads its blocks any more.
        Return the action that frees the blocks.
        """
        assert self.reason is not None
        return [Released(self.reason)] if self._move(Trigger.QUIET) else []

    def tick(self, now: float) -> list[ProducerStep]:
        """Check the lease and the deadlines at the time `now`, and end the ticket if one has passed. Return the actions
        to carry out.
        """
        self._forgive(now)
        match self.state:
            case State.STREAMING if now >= self._lease_until:
                notice = self._failed("expired", "the lease ran out")
                return [notice, *self._let_go("expired", "the lease ran out")]
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
        """Return whether the ticket has ended and its blocks may be freed."""
        return self.state is State.ENDED

    def check_invariants(self) -> None:
        """Assert that the state of the ticket, the reason of its end and the served parts agree. Only tests call it."""
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
        """If `tick` was not called for longer than `lease_grace_s`, extend the lease and the deadline for opening the
        ticket by that time. This process, or the whole machine, may have been suspended, and the consumer's renewals
        may still wait in the socket.
        """
        gap, self._ticked_at = now - self._ticked_at, now
        if gap > self._limits.lease_grace_s:
            self._lease_until += gap
            self._open_until += gap

    def _serve_all(self) -> list[ProducerStep]:
        begun = [(name, block, part) for (name, part), block in self._begun.items()]
        return [*self._serve(list(self._published.items())), *self._serve_parts(begun), *self._done()]

    def _serve(self, blocks: Sequence[tuple[BlockHash, int]]) -> list[ProducerStep]:
        """Return the actions that send those of the complete `blocks` (hash, block number) that the consumer asks for.
        If some parts of a block were sent before, only its other parts are sent.
        """
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
                # No part has left yet: one message for the whole block is cheaper than one for each part.
                whole.append((position, block))
            else:
                rest += [(name, block, part) for part in range(count)]
        return [*([Serve(self.attempt, whole)] if whole else []), *self._serve_parts(rest)]

    def _serve_parts(self, blocks: Sequence[tuple[BlockHash, int, int]]) -> list[ProducerStep]:
        """Return the actions that send those of the parts (hash, block number, part) that the consumer asks for and
        that were not sent yet. A connection that carries no parts gets none.
        """
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
        """Return a part that was served, as (`index` in the fetch, number in this node's memory); both count parts of
        blocks.
        """
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
        """Enter the state DRAINING, in which the blocks are freed when nothing reads them any more. `reason` and
        `message` count only if none were recorded before. Return the actions to carry out.
        """
        if Trigger.LET_GO not in PRODUCER[self.state]:
            return []
        self.reason = self.reason or reason
        self.message = self.message or message
        self._move(Trigger.LET_GO)
        return [Drain()] if self.state is State.DRAINING else []

    def _failed(self, code: FailCode, reason: str) -> Tell:
        assert self._fetch is not None
        return Tell(Fail(self._fetch.ticket, self.attempt, code, reason))
