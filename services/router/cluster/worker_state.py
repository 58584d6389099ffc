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
from baton_serve.services.router.placement.circuit_breaker import CircuitBreaker
from baton_serve.services.router.placement.estimators import FirstGapQuantile, StepTimeFit
from baton_serve.services.router.placement.policy import Candidate

logger = logging.getLogger(__name__)

RECENT_LOAD_DECAY_S = 600.0
UNCERTAINTY_DOUBLING_S = 120.0
"""An instance that computes no prompts for so long may be twice as fast as its last ones say: other processes may have
slowed them down by any factor, and nobody who is taken to be slow gets the chance to show more."""
MAX_UNCERTAINTY_DOUBLINGS = 10.0
ConnectionState = Literal["connecting", "ready", "lost"]
Sending = Callable[[], None]
"""Sends a message that has been encoded. Call it once."""


class WorkerLink(Protocol):
    """`services.common.zmq.rpc.InstanceLink`."""

    async def start(self) -> None: ...
    def prepare(self, message: ToInstance) -> Sending:
        """Encode `message`. Raises `contracts.wire.WireError`."""
        ...

    async def close(self) -> None: ...


class AnswerHandler(Protocol):
    """Who gets the answers to one request id."""

    def on_answer(self, worker: "WorkerState", answer: Answer, now: float) -> None:
        """`now` is when it came, by the router's monotonic clock."""

    def on_lost(self, worker: "WorkerState", reason: str) -> None: ...


class LoadEstimate(msgspec.Struct):
    """What one placed request is expected to use of an instance. `is_reported`: a load report already counts it."""

    handler: AnswerHandler
    prefill_tokens: int
    sequences: int
    blocks: int
    is_reported: bool = False


class Lease:
    """What one request occupies of one instance. The holder calls `release` when the request has ended there, or uses
    the lease as a context manager; later calls do nothing."""

    __slots__ = ("_is_released", "request_id", "worker")

    def __init__(self, worker: "WorkerState", request_id: RequestId) -> None:
        self.worker = worker
        self.request_id = request_id
        self._is_released = False

    def release(self) -> None:
        if not self._is_released:
            self._is_released = True
            self.worker.release(self.request_id)
            self.worker.circuit_breaker.abandon_attempt()

    def __enter__(self) -> "Lease":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


@dataclass(slots=True, eq=False)
class WorkerState:
    record: InstanceRecord
    state: ConnectionState = "connecting"
    link: WorkerLink | None = None
    links: list[LinkStatus] = field(default_factory=list)
    link_speeds: dict[InstanceId, float] = field(default_factory=dict)
    draining: bool = False
    is_loss_logged: bool = False
    """The log says that it cannot be reached."""
    load_estimates: dict[RequestId, LoadEstimate] = field(default_factory=dict)
    reported_at: float = 0.0
    rate_changed_at: float = inf
    """When its rate was last seen to change, as it does with each prompt; inf: never."""
    last_step_at: float = inf
    """When sequences were last seen to run there, or it was first seen; inf: never."""
    own_tokens: int = 0
    own_sequences: int = 0
    unreported_blocks: int = 0
    foreign_tokens: int = 0
    """Queued there by other routers, as of the last report."""
    foreign_sequences: int = 0
    recent_tokens: float = 0.0
    """Placed here to be computed; fades with `RECENT_LOAD_DECAY_S`."""
    recent_at: float = 0.0
    step_time_fit: StepTimeFit = field(default_factory=StepTimeFit)
    first_gap_quantile: FirstGapQuantile = field(default_factory=FirstGapQuantile)
    circuit_breaker: CircuitBreaker = field(default_factory=CircuitBreaker)

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
        return self.first_gap_quantile.expected_s(
            self.step_time_fit.predict(self.own_sequences + self.foreign_sequences)
        )

    def assign(self, request_id: RequestId, estimate: LoadEstimate) -> Lease:
        """Count `estimate` until the returned lease is released, by its holder."""
        self.load_estimates[request_id] = estimate
        self.own_tokens += estimate.prefill_tokens
        self.recent_tokens += estimate.prefill_tokens
        self.own_sequences += estimate.sequences
        self.unreported_blocks += estimate.blocks
        return Lease(self, request_id)

    def on_prefill_done(self, request_id: RequestId) -> None:
        """Its prompt has been computed."""
        if estimate := self.load_estimates.get(request_id):
            self.own_tokens -= estimate.prefill_tokens
            estimate.prefill_tokens = 0

    def release(self, request_id: RequestId) -> None:
        if estimate := self.load_estimates.pop(request_id, None):
            self.own_tokens -= estimate.prefill_tokens
            self.own_sequences -= estimate.sequences
            if not estimate.is_reported:
                self.unreported_blocks -= estimate.blocks

    def report(self, report: LoadReport, now: float) -> None:
        load = report.load
        if self.rate_changed_at == inf or load.prefill_tokens_per_s != self.record.load.prefill_tokens_per_s:
            self.rate_changed_at = now
        if self.last_step_at == inf or load.running:
            self.last_step_at = now
        self.record = msgspec.structs.replace(self.record, load=load, adapters=report.adapters)
        self.links = report.links
        self.link_speeds = {link.peer: link.bytes_per_second for link in report.links}
        self.draining = report.draining
        self.reported_at = now
        self.step_time_fit.observe(load.running, load.decode_step_s)
        self.foreign_tokens = max(0, load.queued_tokens - self.own_tokens)
        self.foreign_sequences = max(0, load.running + load.waiting - self.own_sequences)
        self.unreported_blocks = 0
        for estimate in self.load_estimates.values():
            estimate.is_reported = True

    def renew(self, record: InstanceRecord) -> None:
        """What the registry says of this generation now. Load and adapters it tells itself, and sooner."""
        if record.draining != self.record.draining:
            self.draining = record.draining

    def candidate(self, match: Match, now: float, *, held_blocks: int = 0, assumed_rate: float = 0.0) -> Candidate:
        """`held_blocks`: of the same prompt, as far as they are known to be there. `assumed_rate`: what it is taken to
        compute at least as long as it has shown nothing, or nothing of late, lest it never get the chance."""
        record, load = self.record, self.record.load
        rate = load.prefill_tokens_per_s
        rate_uncertainty = _uncertainty(now - self.rate_changed_at)
        believed = rate
        if assumed_rate > rate:
            believed = (
                max(rate, min(assumed_rate, rate * rate_uncertainty)) if load.prefill_is_measured else assumed_rate
            )
        block_tokens = record.layout.block_tokens
        active_sequences = self.own_sequences + self.foreign_sequences
        queued_tokens: float = self.own_tokens
        if self.foreign_tokens:
            done = rate * max(0.0, now - self.reported_at)
            queued_tokens += max(0.0, self.foreign_tokens - done)
        if self.recent_tokens:
            self.recent_tokens *= exp((self.recent_at - now) / RECENT_LOAD_DECAY_S)
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
            next_step_s=self.step_time_fit.predict(active_sequences + 1),
            rate_uncertainty=rate_uncertainty,
            step_uncertainty=1.0 if active_sequences else _uncertainty(now - self.last_step_at),
        )

    def check_invariants(self) -> None:
        assert self.own_tokens == sum(estimate.prefill_tokens for estimate in self.load_estimates.values())
        assert self.own_sequences == sum(estimate.sequences for estimate in self.load_estimates.values())
        unreported = (estimate.blocks for estimate in self.load_estimates.values() if not estimate.is_reported)
        assert self.unreported_blocks == sum(unreported)


def _send_nothing() -> None:
    """There is no link: the instance is lost, and whoever waits for its answers has been notified."""


def _uncertainty(quiet_s: float) -> float:
    """How many times as fast one may be that has shown nothing for so long; -inf: it was never asked."""
    return exp2(min(quiet_s / UNCERTAINTY_DOUBLING_S, MAX_UNCERTAINTY_DOUBLINGS)) if quiet_s > 0 else 1.0
