"""Decides the course of a fetch: requests, retries, when a block counts as whole, when all have arrived, and when it
is given up (deadline). This module is pure: no I/O, no clock.

The rules: Blocks count only when they are copied and verified and the lease held until then. Success needs `Done` and
every block that it counts. An end is final only when no copy into the destination runs, because the caller reuses the
blocks then.
"""

from collections.abc import Sequence
from typing import NamedTuple

from baton_serve.contracts.identity import BlockHash
from baton_serve.contracts.messages import Ticket
from baton_serve.kvtransfer.control_messages import Again, Blocks, Done, Fail, FailCode, Fetch, Outcome, Ready, Release
from baton_serve.kvtransfer.session.progress import Progress
from baton_serve.kvtransfer.session.states import CONSUMER, ConsumerState, ConsumerTrigger
from baton_serve.kvtransfer.session.steps import (
    Arrived,
    Ask,
    BlockPlacement,
    ConsumerStep,
    Copy,
    Fault,
    Give,
    Relink,
    SessionLimits,
    StopCopies,
    Succeed,
)

State, Trigger = ConsumerState, ConsumerTrigger
LIVE = (State.LINKING, State.REQUESTED, State.STREAMING, State.DRAINING)
"""States in which messages and events can still change a fetch."""

FAULT_OF: dict[FailCode, Fault] = {
    "unknown": Fault.REFUSED,
    "busy": Fault.REFUSED,
    "wrong_peer": Fault.REFUSED,
    "expired": Fault.TIMEOUT,
}
"""The fault that a `FailCode` of the producer means; other codes mean `SOURCE_FAILED`. `expired` is a timeout like one
of this node: it does not matter which clock noticed the deadline first.
"""


class Link(NamedTuple):
    """The properties of the connection to the producer that the next attempt of a fetch uses: the transport's name,
    whether copies read the producer's memory directly (`pulls`), and the number of parts of each block.
    """

    transport: str
    pulls: bool
    parts: int


class Copying(NamedTuple):
    """A running copy of a received block or part: the attempt of the fetch that started it, and the number of parts
    that it writes.
    """

    attempt: int
    num_parts: int


class ConsumerSession:
    """The state machine of one fetch; it does no I/O. `wanted` pairs the hash of each block with the number of the
    block of this node that it is written to. Most methods return the actions that the caller must carry out
    (`ConsumerStep`).

    If the connection carries blocks in parts, a block counts as received when all its parts have arrived. A new attempt
    begins with whole blocks: parts of incomplete blocks are fetched again.
    """

    def __init__(
        self,
        ticket: Ticket,
        wanted: Sequence[tuple[BlockHash, int]],
        *,
        now: float,
        limits: SessionLimits,
        partial: bool = False,
    ) -> None:
        self.ticket = ticket
        self.state = State.LINKING
        self.attempt = 0
        self.transport = ""
        self.received: list[BlockHash] = []
        self._wanted = wanted
        self._limits = limits
        self._partial = partial
        self._deadline = now + ticket.timeout_s
        self._state_deadline = now + limits.connect_timeout_s
        self._progress = Progress(len(wanted))
        self._requested: list[int] = []
        """Numbers of the wanted blocks that this attempt asks for, in the order of `Fetch.names`."""
        self._copying: dict[int, Copying] = {}
        """Placements whose copies run, by their first part."""
        self._under_way: set[int] = set()
        """Numbers of all parts of these placements."""
        self._arrived_now = 0
        self._mismatches = 0
        self._done: Done | None = None
        self._link: Link | None = None
        """The connection for the next attempt, or None until one is found."""
        self._pulls = False
        self._sent_at = now
        self._lease_until = now
        self._end: Give | None = None

    def linked(self, transport: str, *, pulls: bool, now: float, parts: int = 1) -> list[ConsumerStep]:
        """Start an attempt, because a connection to the producer is ready, on which each block travels in `parts` parts
        by `transport`. With `pulls`, copies read the producer's memory directly, so a copy counts only if the lease
        held until its end. Return the actions to carry out.
        """
        if self.state is not State.LINKING:
            return []
        self._link = Link(transport, pulls, parts)
        return self._request(now)

    def link_failed(self, fault: Fault, reason: str) -> list[ConsumerStep]:
        """End the fetch with `fault`, because no connection to the producer can be opened or no transport works. Return
        the actions to carry out.
        """
        return self._fail(fault, reason) if self.state is State.LINKING else []

    def link_lost(self, reason: str, *, dead: bool, now: float) -> list[ConsumerStep]:
        """React to the loss of the connection: try again, or end the fetch if the producer's process has ended
        (`dead`). Return the actions to carry out.
        """
        if self.state not in LIVE:
            return []
        # Without the process nobody will answer: a retry would only wait for `connect_timeout_s`.
        if dead:
            return self._fail(Fault.LOST, reason)
        return self._retry(reason, now) if self.state is not State.LINKING else []

    def handle(self, message: Ready | Blocks | Done | Fail, now: float) -> list[ConsumerStep]:
        """Apply a message of the producer and return the actions to carry out. A message of an earlier attempt comes
        late and changes nothing.
        """
        if self.state not in LIVE or message.attempt != self.attempt or self.state is State.LINKING:
            return []
        if isinstance(message, Fail):
            return self._fail(FAULT_OF.get(message.code, Fault.SOURCE_FAILED), message.reason)
        # Any message of this attempt shows that the producer has accepted it and that its lease runs since `Fetch` was
        # sent.
        if self._move(Trigger.ACCEPTED):
            self._lease_until = max(self._lease_until, self._sent_at + self._limits.lease_s)
        match message:
            case Blocks():
                return self._place(message)
            case Done():
                self._done = message
                self._move(Trigger.DONE)
                return self._conclude()
            case Ready():
                return []

    def renewed(self, sent_at: float) -> None:
        """Extend the lease, because the producer has confirmed a renewal. It counts from `sent_at`, when this node sent
        the renewal.
        """
        self._lease_until = max(self._lease_until, sent_at + self._limits.lease_s)

    def forgotten(self, attempt: int, now: float) -> list[ConsumerStep]:
        """Start another attempt, because the producer answered a renewal of `attempt` that it does not serve the ticket
        any more. Do nothing if that is not the current attempt. Return the actions to carry out.
        """
        if attempt != self.attempt or self.state not in LIVE or self.state is State.LINKING:
            return []
        return self._retry("the producer forgot the ticket", now)

    def copied(self, indexes: Sequence[int], now: float) -> list[ConsumerStep]:
        """Record that the bytes of these placements (`BlockPlacement.index`) were copied and match their checksums. If
        a copy read the producer's memory after the lease had ended, start another try, or fail the fetch if none is
        left. Return the actions to carry out.
        """
        _, parts = self._take(indexes)
        # After the lease the producer may have freed the blocks, so the copy may have read other content. A checksum
        # does not help: it may be off, or be skipped by sampling.
        if self._pulls and now > self._lease_until:
            return self._outdated(now)
        fresh = self._progress.arrived(parts)
        self._arrived_now += len(fresh)
        # A block counts when its last part has arrived; parts that came twice are not counted again.
        names = [self._wanted[number][0] for number in self._progress.whole(fresh)]
        self.received += names
        steps: list[ConsumerStep] = [Arrived(names)] if names and self.state in LIVE else []
        return steps + self._after_copies(now)

    def damaged(self, indexes: Sequence[int], now: float) -> list[ConsumerStep]:
        """React to placements (`BlockPlacement.index`) whose bytes do not match their checksums: ask for them again or,
        after `max_mismatches` of them, try again by another transport. Return the actions to carry out.
        """
        attempts, numbers = self._take(indexes)
        parts = self._progress.parts
        self._mismatches += len(indexes)
        if self.state not in (State.STREAMING, State.DRAINING) or attempts != {self.attempt}:
            return self._after_copies(now)
        # One damaged block may be an accident. Several mean that the transport damages bytes, as some peer copies on
        # Arc do.
        if self._mismatches >= self._limits.max_mismatches:
            self._mismatches = 0
            return self._retry("bytes did not match their checksum", now, demote=self.transport)
        # The producer knows blocks by their position in this attempt's `Fetch.names`, not by the number among all
        # wanted blocks.
        place = {index: position for position, index in enumerate(self._requested)}
        again = [place[number // parts] * parts + number % parts for number in numbers]
        return [Ask(Again(self.ticket.ticket, self.attempt, again))]

    def abandoned(self, indexes: Sequence[int], now: float, reason: str = "") -> list[ConsumerStep]:
        """React to placements (`BlockPlacement.index`) that were not copied. If `reason` is set, the transport failed,
        and the fetch tries another one; otherwise the copies were stopped on purpose. Return the actions to carry out.
        """
        attempts, _ = self._take(indexes)
        if reason and self.state in (State.STREAMING, State.DRAINING) and attempts == {self.attempt}:
            return self._retry(reason, now, demote=self.transport)
        return self._after_copies(now)

    def transport_lost(self, reason: str, now: float) -> list[ConsumerStep]:
        """Try again by another transport: the connection works, but the transport of this attempt delivers nothing
        more. Return the actions to carry out.
        """
        if self.state not in LIVE or self.state is State.LINKING:
            return []
        return self._retry(reason, now, demote=self.transport)

    def cancel(self) -> list[ConsumerStep]:
        """End the fetch because this node cancelled it. Return the actions that the caller must carry out."""
        return self._fail(Fault.CANCELLED, "cancelled") if self.state in LIVE else []

    def close(self) -> list[ConsumerStep]:
        """End the fetch because the node is closed. Return the actions that the caller must carry out."""
        return self._fail(Fault.CLOSED, "the node was closed") if self.state in LIVE else []

    def tick(self, now: float) -> list[ConsumerStep]:
        """Check the deadlines of the fetch at the time `now`: if one has passed, try again or end the fetch. Return the
        actions to carry out.
        """
        if self.state not in LIVE:
            return []
        if now >= self._deadline:
            return self._fail(Fault.TIMEOUT, f"not complete after {self.ticket.timeout_s:g} s ({self.state})")
        if now < self._state_deadline:
            return []
        if self.state is State.LINKING:
            return self._fail(Fault.LOST, "no connection to the producer")
        if self.state is State.REQUESTED:
            return self._retry("the fetch was not acknowledged", now)
        return []

    def is_over(self) -> bool:
        """Return whether the fetch has ended and none of its copies runs any more."""
        return self.state is State.ENDED

    def check_invariants(self) -> None:
        """Assert that the records of received blocks, missing parts and running copies agree. Only tests call it."""
        lacking = self._progress.lacking
        self._progress.check_invariants()
        assert not lacking & {i for i, n in enumerate(self._wanted) if n[0] in set(self.received)}
        assert self._under_way == {i + n for i, c in self._copying.items() for n in range(c.num_parts)}
        if self.state is State.ENDED:
            assert not self._copying
            assert self._end is not None or self._done is not None
            assert self._end is not None or self._partial or not lacking

    def _move(self, trigger: ConsumerTrigger) -> bool:
        following = CONSUMER[self.state].get(trigger)
        if following is None:
            return False
        self.state = following
        return True

    def _request(self, now: float) -> list[ConsumerStep]:
        # Copies of the last attempt may still write to blocks that this attempt asks for: wait until they end.
        if self._link is None or self._copying:
            return []
        if self.attempt >= self._limits.max_attempts:
            return self._fail(Fault.LOST, f"given up after {self.attempt} attempts")
        self.attempt += 1
        self.transport, self._pulls = self._link.transport, self._link.pulls
        self._progress.begin(self._link.parts)
        # Only blocks that are still incomplete are asked for: a retry does not send again what has arrived.
        self._requested = sorted(self._progress.lacking)
        self._arrived_now = 0
        self._done = None
        self._sent_at = now
        self._state_deadline = now + self._limits.answer_timeout_s
        self._move(Trigger.LINKED)
        return [
            Ask(
                Fetch(
                    ticket=self.ticket.ticket,
                    attempt=self.attempt,
                    source_generation=self.ticket.source_generation,
                    transport=self.transport,
                    names=[self._wanted[index][0] for index in self._requested],
                    # The wire demands a positive value.
                    timeout_s=max(self._deadline - now, 0.001),
                    partial=self._partial,
                )
            )
        ]

    def _place(self, message: Blocks) -> list[ConsumerStep]:
        parts, of_each, placements = message.parts, self._progress.parts, list[BlockPlacement]()
        # The number comes from the peer. It may send whole blocks, or parts as agreed in `Welcome`.
        if parts not in (1, of_each):
            return self._fail(Fault.SOURCE_FAILED, f"it sends {parts} parts of a block, not {of_each}")
        each = of_each // parts
        for position, piece in enumerate(message.pieces):
            number, part = divmod(piece.index, parts)
            # The index comes from the peer: check it before it is used.
            if number >= len(self._requested):
                return self._fail(Fault.SOURCE_FAILED, f"block {number} was never asked for")
            first = self._requested[number] * of_each + part
            # A block may be announced twice, for example after `Again`: ignore it while a copy runs or if it has
            # arrived.
            if self._is_free(first, each):
                self._copying[first] = Copying(self.attempt, each)
                self._under_way.update(range(first, first + each))
                place = self._wanted[self._requested[number]][1] * parts + part
                placements.append(BlockPlacement(first, position, piece.source, place, piece.checksum, parts))
        return [Copy(self.attempt, placements)] if placements else []

    def _is_free(self, first: int, count: int) -> bool:
        """Return whether the `count` parts from number `first` on have not arrived and none of them is being copied."""
        missing = self._progress.missing
        if count == 1:
            return first in missing and first not in self._under_way
        of_it = range(first, first + count)
        return missing.issuperset(of_it) and self._under_way.isdisjoint(of_it)

    def _take(self, indexes: Sequence[int]) -> tuple[set[int], list[int]]:
        """Remove the placements with these indexes from the running copies. Return (the attempts that started these
        copies, the numbers of all parts that they write).
        """
        copying = [self._copying.pop(index) for index in indexes]
        attempts = {copy.attempt for copy in copying}
        parts = [
            part for index, copy in zip(indexes, copying, strict=True) for part in range(index, index + copy.num_parts)
        ]
        self._under_way.difference_update(parts)
        return attempts, parts

    def _after_copies(self, now: float) -> list[ConsumerStep]:
        if self.state is State.SETTLING:
            return self._settle()
        if self.state is State.LINKING:
            return self._request(now)
        return self._conclude()

    def _outdated(self, now: float) -> list[ConsumerStep]:
        if self.state in (State.STREAMING, State.DRAINING):
            return self._retry("the lease ran out during a copy", now)
        return self._after_copies(now)

    def _conclude(self) -> list[ConsumerStep]:
        done = self._done
        if self.state is not State.DRAINING or done is None:
            return []
        if not self._partial and done.num_blocks < len(self._requested) * self._progress.parts:
            # `Done` counts parts; the message counts blocks.
            lacking = len(self._requested) - done.num_blocks // self._progress.parts
            return self._fail(Fault.INCOMPLETE, f"the producer finished without {lacking} wanted blocks")
        # `Done` may overtake `Blocks`, so blocks may still be on their way although no copy runs.
        if self._copying or self._arrived_now < done.num_blocks:
            return []
        self._move(Trigger.COMPLETE)
        return [Succeed(done.payload, done.finished_at), self._release("received")]

    def _retry(self, reason: str, now: float, demote: str | None = None) -> list[ConsumerStep]:
        self._move(Trigger.RETRY)
        self._link = None
        self._done = None
        self._state_deadline = now + self._limits.connect_timeout_s
        return [StopCopies(), Relink(reason, demote)]

    def _fail(self, fault: Fault, reason: str) -> list[ConsumerStep]:
        self._end = Give(fault, reason)
        self._move(Trigger.FAULT)
        return [StopCopies(), *self._settle()]

    def _settle(self) -> list[ConsumerStep]:
        if self._copying or self._end is None:
            return []
        self._move(Trigger.SETTLED)
        # Without an attempt the producer knows nothing of this fetch.
        if not self.attempt:
            return [self._end]
        return [self._release("cancelled" if self._end.fault is Fault.CANCELLED else "failed"), self._end]

    def _release(self, outcome: Outcome) -> Ask:
        return Ask(Release(self.ticket.ticket, self.attempt, outcome))
