"""One generation of an instance as this router knows it: its load, and what was placed on it and not reported yet.

Pure bookkeeping. Another router's work shows in the instance's reports, this router's own is known exactly and at once.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from math import exp, exp2, inf
from types import TracebackType
from typing import Literal, Protocol

import msgspec

from baton_serve.contracts.identity import InstanceId, RequestId
from baton_serve.contracts.instance import InstanceRecord, LinkStatus
from baton_serve.contracts.messages import Answer, LoadReport, ToInstance
from baton_serve.services.router.placement.block_index import Match
from baton_serve.services.router.placement.circuit_breaker import Circuit
from baton_serve.services.router.placement.first_gap import FirstGaps
from baton_serve.services.router.placement.policy import Candidate
from baton_serve.services.router.placement.step_time_fit import StepTimes

logger = logging.getLogger(__name__)

RECENT_S = 600.0
DOUBT_S = 120.0
"""An instance that computes no prompts for so long may be twice as fast as its last ones say: other processes may have
slowed them down by any factor, and nobody who is taken to be slow gets the chance to show more."""
MOST_DOUBT = 10.0
State = Literal["connecting", "ready", "lost"]
Sending = Callable[[], None]
"""Sends a message that has been encoded. Call it once."""


class Link(Protocol):
    """`services.common.zmq.rpc.InstanceLink`."""

    async def start(self) -> None: ...
    def prepare(self, message: ToInstance) -> Sending:
        """Encode `message`. Raises `contracts.wire.WireError`."""
        ...

    async def close(self) -> None: ...


class Assignment(Protocol):
    """Who gets the answers to one request id."""

    def on_answer(self, member: "Member", answer: Answer, now: float) -> None:
        """`now` is when it came, by the router's monotonic clock."""

    def on_lost(self, member: "Member", reason: str) -> None: ...


class Share(msgspec.Struct):
    """What one placed request is expected to use of an instance. `is_reported`: a load report already counts it."""

    assignment: Assignment
    prefill_tokens: int
    sequences: int
    blocks: int
    is_reported: bool = False


class Lease:
    """What one request occupies of one instance. The holder calls `release` when the request has ended there, or uses
    the lease as a context manager; later calls do nothing."""

    __slots__ = ("_is_released", "member", "request_id")

    def __init__(self, member: "Member", request_id: RequestId) -> None:
        self.member = member
        self.request_id = request_id
        self._is_released = False

    def release(self) -> None:
        if not self._is_released:
            self._is_released = True
            self.member.release(self.request_id)
            self.member.circuit.given_up()

    def __enter__(self) -> "Lease":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


@dataclass(slots=True, eq=False)
class Member:
    record: InstanceRecord
    state: State = "connecting"
    link: Link | None = None
    links: list[LinkStatus] = field(default_factory=list)
    link_speeds: dict[InstanceId, float] = field(default_factory=dict)
    draining: bool = False
    is_told_lost: bool = False
    """The log says that it cannot be reached."""
    shares: dict[RequestId, Share] = field(default_factory=dict)
    reported_at: float = 0.0
    rate_at: float = inf
    """When its rate was last seen to change, as it does with each prompt; inf: never."""
    step_at: float = inf
    """When sequences were last seen to run there, or it was first seen; inf: never."""
    own_tokens: int = 0
    own_sequences: int = 0
    unreported_blocks: int = 0
    foreign_tokens: int = 0
    """Queued there by other routers, as of the last report."""
    foreign_sequences: int = 0
    recent_tokens: float = 0.0
    """Placed here to be computed; fades with `RECENT_S`."""
    recent_at: float = 0.0
    steps: StepTimes = field(default_factory=StepTimes)
    first_gaps: FirstGaps = field(default_factory=FirstGaps)
    circuit: Circuit = field(default_factory=Circuit)

    @property
    def takes_work(self) -> bool:
        return self.state == "ready" and not self.draining and not self.record.draining

    def prepare(self, message: ToInstance) -> Sending:
        """Encode `message` before anything is counted for it. Raises `contracts.wire.WireError`."""
        return self.link.prepare(message) if self.link is not None else _send_nothing

    def send(self, message: ToInstance) -> None:
        """Send a message that belongs to no request that could fail by it: an error is logged."""
        try:
            self.prepare(message)()
        except Exception:
            logger.exception("%s could not be sent to %s", type(message).__name__, self.record.instance)

    def first_gap_s(self) -> float:
        """From the first token of a sequence that is handed to it to the second, as is to be expected."""
        return self.first_gaps.expected_s(self.steps.predict(self.own_sequences + self.foreign_sequences))

    def assign(self, request_id: RequestId, share: Share) -> Lease:
        """Count `share` until the returned lease is released, by its holder."""
        self.shares[request_id] = share
        self.own_tokens += share.prefill_tokens
        self.recent_tokens += share.prefill_tokens
        self.own_sequences += share.sequences
        self.unreported_blocks += share.blocks
        return Lease(self, request_id)

    def prefilled(self, request_id: RequestId) -> None:
        """Its prompt has been computed."""
        if share := self.shares.get(request_id):
            self.own_tokens -= share.prefill_tokens
            share.prefill_tokens = 0

    def release(self, request_id: RequestId) -> None:
        if share := self.shares.pop(request_id, None):
            self.own_tokens -= share.prefill_tokens
            self.own_sequences -= share.sequences
            if not share.is_reported:
                self.unreported_blocks -= share.blocks

    def report(self, report: LoadReport, now: float) -> None:
        load = report.load
        if self.rate_at == inf or load.prefill_tokens_per_s != self.record.load.prefill_tokens_per_s:
            self.rate_at = now
        if self.step_at == inf or load.running:
            self.step_at = now
        self.record = msgspec.structs.replace(self.record, load=load, adapters=report.adapters)
        self.links = report.links
        self.link_speeds = {link.peer: link.bytes_per_second for link in report.links}
        self.draining = report.draining
        self.reported_at = now
        self.steps.observe(load.running, load.decode_step_s)
        self.foreign_tokens = max(0, load.queued_tokens - self.own_tokens)
        self.foreign_sequences = max(0, load.running + load.waiting - self.own_sequences)
        self.unreported_blocks = 0
        for share in self.shares.values():
            share.is_reported = True

    def renew(self, record: InstanceRecord) -> None:
        """What the registry says of this generation now. Load and adapters it tells itself, and sooner."""
        if record.draining != self.record.draining:
            self.draining = record.draining

    def candidate(self, match: Match, now: float, *, held_blocks: int = 0, hoped_rate: float = 0.0) -> Candidate:
        """`held_blocks`: of the same prompt, as far as they are known to be there. `hoped_rate`: what it is taken to
        compute at least as long as it has shown nothing, or nothing of late, lest it never get the chance."""
        record, load = self.record, self.record.load
        rate = load.prefill_tokens_per_s
        rate_doubt = _doubt(now - self.rate_at)
        believed = rate
        if hoped_rate > rate:
            believed = max(rate, min(hoped_rate, rate * rate_doubt)) if load.prefill_is_measured else hoped_rate
        block_tokens = record.layout.block_tokens
        active_sequences = self.own_sequences + self.foreign_sequences
        queued_tokens: float = self.own_tokens
        if self.foreign_tokens:
            done = rate * max(0.0, now - self.reported_at)
            queued_tokens += max(0.0, self.foreign_tokens - done)
        if self.recent_tokens:
            self.recent_tokens *= exp((self.recent_at - now) / RECENT_S)
        self.recent_at = now
        return Candidate(
            instance=record.instance,
            role=record.role,
            layout=record.layout,
            free_blocks=max(0, load.free_blocks - self.unreported_blocks),
            total_blocks=load.total_blocks,
            active_sequences=active_sequences,
            queued_tokens=queued_tokens,
            prefill_tokens_per_s=believed,
            cached_tokens=match.device * block_tokens,
            host_cached_tokens=(match.total - match.device) * block_tokens,
            turnover=self.recent_tokens / max(1, load.total_blocks * block_tokens),
            machine=record.host,
            held_tokens=held_blocks * block_tokens,
            link_speeds=self.link_speeds,
            spare_tokens_per_s=load.spare_tokens_per_s * believed / rate if rate else load.spare_tokens_per_s,
            next_step_s=self.steps.predict(active_sequences + 1),
            rate_doubt=rate_doubt,
            step_doubt=1.0 if active_sequences else _doubt(now - self.step_at),
        )

    def check_invariants(self) -> None:
        assert self.own_tokens == sum(share.prefill_tokens for share in self.shares.values())
        assert self.own_sequences == sum(share.sequences for share in self.shares.values())
        unreported = (share.blocks for share in self.shares.values() if not share.is_reported)
        assert self.unreported_blocks == sum(unreported)


def _send_nothing() -> None:
    """There is no link: the instance is lost, and whoever waits for its answers has been notified."""


def _doubt(quiet_s: float) -> float:
    """How many times as fast one may be that has shown nothing for so long; -inf: it was never asked."""
    return exp2(min(quiet_s / DOUBT_S, MOST_DOUBT)) if quiet_s > 0 else 1.0
