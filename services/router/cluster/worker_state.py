"""Keeps an instance's state in this router: whether it takes new requests, and its load between two reports.

Bookkeeping only, without I/O of its own. Requests of this router are counted exactly and immediately; those of other
routers are seen in the load reports of the instance.
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
from baton_serve.services.router.placement.decode_times import FirstGapQuantile, StepTimeFit
from baton_serve.services.router.placement.policy import Candidate

logger = logging.getLogger(__name__)

RECENT_LOAD_DECAY_S = 600.0
"""Seconds after which a prompt counts by a factor e less in the turnover of an instance's cache."""
UNCERTAINTY_DOUBLING_S = 120.0
"""Seconds without prompts after which an instance is assumed to be possibly twice as fast as measured.

Its last prompts may have been slowed down by other processes. Without this assumption an instance that is believed to
be slow would get no prompts, and so could never show that it is fast.
"""
MAX_UNCERTAINTY_DOUBLINGS = 10.0
"""Upper bound of these doublings, which keeps the factor finite."""
ConnectionState = Literal["connecting", "ready", "lost"]
Sending = Callable[[], None]
"""Sends a message that was encoded before. Call it once."""


class WorkerLink(Protocol):
    """The connection to an instance, over which requests are sent. It is
    `services.common.rpc.instance_link.InstanceLink`, or a fake in tests and in the simulation.
    """

    async def start(self) -> None: ...
    def prepare(self, message: ToInstance) -> Sending:
        """Encode `message` and return a function that sends it. Raises `contracts.wire.WireError` if the message is too
        long.
        """
        ...

    async def close(self) -> None: ...


class AnswerHandler(Protocol):
    """Receives an instance's answers to one request id. An `Attempt` or a call for pooling implements it."""

    def on_answer(self, worker: "WorkerState", answer: Answer, now: float) -> None:
        """Handle one answer of `worker`. `now` is the time when its message arrived (router's monotonic clock, in
        seconds).
        """

    def on_lost(self, worker: "WorkerState", reason: str) -> None:
        """Handle the loss of the connection to `worker`: no more answers will come from it."""


class LoadEstimate(msgspec.Struct):
    """The load that one request of this router is expected to cause on an instance: tokens to compute, sequences and KV
    blocks.
    """

    handler: AnswerHandler
    prefill_tokens: int
    """Prompt tokens that the instance has to compute; 0 once it has done so."""
    sequences: int
    blocks: int
    """KV blocks that the request needs beyond the cached ones."""
    is_reported: bool = False
    """The last load report counts these blocks already."""


class Lease:
    """Counts one request as load of an instance until `release` is called.

    Its holder calls `release` when the request has ended on the instance, or uses the lease as a context manager.
    """

    __slots__ = ("_is_released", "request_id", "worker")

    def __init__(self, worker: "WorkerState", request_id: RequestId) -> None:
        self.worker = worker
        self.request_id = request_id
        self._is_released = False

    def release(self) -> None:
        """Stop counting the request as load of the instance. Further calls do nothing."""
        if not self._is_released:
            self._is_released = True
            self.worker.release(self.request_id)
            self.worker.circuit_breaker.abandon_attempt(self.request_id)

    def __enter__(self) -> "Lease":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


@dataclass(slots=True, eq=False)
class WorkerState:
    """The state of one instance, as this router process knows it: record, connection, load and measured speeds. An
    instance that restarts gets a new object.

    `Cluster` owns it. Use it on the event loop only.
    """

    record: InstanceRecord
    """The last record from the registry, with load and adapters of the last load report."""
    state: ConnectionState = "connecting"
    link: WorkerLink | None = None
    """The connection to the instance; None while it is lost."""
    links: list[LinkStatus] = field(default_factory=list)
    """Links over which the instance has fetched blocks from others."""
    link_speeds: dict[InstanceId, float] = field(default_factory=dict)
    """Measured speeds of these links in bytes per second, by source instance."""
    draining: bool = False
    is_loss_logged: bool = False
    """The log says already that the connection is lost; it is tried again each second and would fill the log."""
    load_estimates: dict[RequestId, LoadEstimate] = field(default_factory=dict)
    """Load of this router's running requests on the instance; the sums below are over these."""
    reported_at: float = 0.0
    """When the last load report arrived. This and the next moments are those of the router's monotonic clock."""
    rate_changed_at: float = inf
    """When a report last had another prefill rate, which changes with every prompt; inf before the first report."""
    last_step_at: float = inf
    """When a report last had running sequences; at first the moment of the first report, and inf before it."""
    own_tokens: int = 0
    """Prompt tokens of this router's requests that still have to be computed."""
    own_sequences: int = 0
    unreported_blocks: int = 0
    """Blocks of requests that were placed after the last load report, which therefore counts them as free."""
    unreported_images: int = 0
    """Images that this router has sent there to be encoded since the last load report."""
    needs_images_until: float = 0.0
    """Until then all images are sent there, since KV that it had reported as cached was evicted when it was needed."""
    foreign_tokens: int = 0
    """Prompt tokens that other routers have queued there, according to the last report."""
    foreign_sequences: int = 0
    recent_tokens: float = 0.0
    """Prompt tokens placed there, decaying exponentially with `RECENT_LOAD_DECAY_S`."""
    recent_at: float = 0.0
    """When `recent_tokens` was last made smaller."""
    step_time_fit: StepTimeFit = field(default_factory=StepTimeFit)
    first_gap_quantile: FirstGapQuantile = field(default_factory=FirstGapQuantile)
    circuit_breaker: CircuitBreaker = field(default_factory=CircuitBreaker)

    @property
    def takes_work(self) -> bool:
        """True if new requests may be sent to the instance: it is connected and not draining."""
        return self.state == "ready" and not self.draining and not self.record.draining

    @property
    def is_expected(self) -> bool:
        """True if the instance accepts no requests now but may soon do so: it is connecting, lost or draining.

        An instance that sleeps is not expected: nobody knows when an operator will wake it up. No request waits for an
        encode instance.
        """
        return not self.takes_work and not self.record.sleeping and self.record.role != "encode"

    def prepare(self, message: ToInstance) -> Sending:
        """Encode `message` and return a function that sends it to the instance.

        Callers encode before they count load: if encoding raises `contracts.wire.WireError`, nothing has to be undone.
        """
        return self.link.prepare(message) if self.link is not None else _send_nothing

    def send(self, message: ToInstance) -> None:
        """Send the instance a message whose loss fails no request, such as `Cancel`. An error is logged and not
        raised.
        """
        try:
            self.prepare(message)()
        except Exception:
            logger.exception("%s could not be sent to %s", type(message).__name__, self.record.instance)

    def first_gap_s(self) -> float:
        """Return the expected time in seconds between the first two tokens of a sequence whose KV blocks are handed off
        to this instance.
        """
        return self.first_gap_quantile.expected_s(
            self.step_time_fit.predict(self.own_sequences + self.foreign_sequences)
        )

    def assign(self, request_id: RequestId, estimate: LoadEstimate) -> Lease:
        """Count a request as load of the instance, with the sizes in `estimate`, until the caller releases the returned
        lease.
        """
        self.load_estimates[request_id] = estimate
        self.own_tokens += estimate.prefill_tokens
        self.recent_tokens += estimate.prefill_tokens
        self.own_sequences += estimate.sequences
        self.unreported_blocks += estimate.blocks
        return Lease(self, request_id)

    def on_prefill_done(self, request_id: RequestId) -> None:
        """Stop counting the prompt tokens of a request as load: the instance has computed them."""
        if estimate := self.load_estimates.get(request_id):
            self.own_tokens -= estimate.prefill_tokens
            estimate.prefill_tokens = 0

    def release(self, request_id: RequestId) -> None:
        """Stop counting a request as load of the instance. Callers use `Lease.release` instead."""
        if estimate := self.load_estimates.pop(request_id, None):
            self.own_tokens -= estimate.prefill_tokens
            self.own_sequences -= estimate.sequences
            if not estimate.is_reported:
                self.unreported_blocks -= estimate.blocks

    def report(self, report: LoadReport, now: float) -> None:
        """Store the load, adapters and speeds of a load report of the instance, which arrived at `now`."""
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
        # A report may be older than this router's last request or token, so the difference may even be negative.
        self.foreign_tokens = max(0, load.queued_tokens - self.own_tokens)
        self.foreign_sequences = max(0, load.running + load.waiting - self.own_sequences)
        self.unreported_blocks = self.unreported_images = 0
        for estimate in self.load_estimates.values():
            estimate.is_reported = True

    def renew(self, record: InstanceRecord) -> None:
        """Store what a new registry record of the same process has changed.

        Only `draining` is used: load and adapters come earlier, in the load reports of the instance.
        """
        if record.draining != self.record.draining:
            self.draining = record.draining

    def candidate(self, match: Match, now: float, *, held_blocks: int = 0, assumed_rate: float = 0.0) -> Candidate:
        """Return this instance as a candidate for a prompt, with its load at `now`.

        `match` is the length of the prompt's cached prefix on this instance, including blocks that are only expected
        there; `held_blocks` is the length of the part that the instance has reported, in blocks. Until the instance has
        measured its prefill rate, it is assumed to be `assumed_rate` tokens per second; later, while it computes no
        prompts, its rate gradually returns to that value.
        """
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
            # Other routers' prompts are only known from the report, and the instance has computed some of them since.
            done = rate * max(0.0, now - self.reported_at)
            queued_tokens += max(0.0, self.foreign_tokens - done)
        # The decay is applied when it is needed, instead of by a timer.
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
            embedding_layout=record.embedding_layout,
            can_generate=record.can_generate,
            machine=record.host,
            held_tokens=held_blocks * block_tokens,
            link_speeds=self.link_speeds,
            # The headroom was measured with `rate`; if the instance is believed to be faster, it is larger too.
            spare_tokens_per_s=load.spare_tokens_per_s * believed / rate if rate else load.spare_tokens_per_s,
            next_step_s=self.step_time_fit.predict(active_sequences + 1),
            rate_uncertainty=rate_uncertainty,
            # While sequences run there, every report has a current step time.
            step_uncertainty=1.0 if active_sequences else _uncertainty(now - self.last_step_at),
        )

    def check_invariants(self) -> None:
        """Assert that the counted load equals the sum of the load estimates of all requests placed on the instance. For
        tests.
        """
        assert self.own_tokens == sum(estimate.prefill_tokens for estimate in self.load_estimates.values())
        assert self.own_sequences == sum(estimate.sequences for estimate in self.load_estimates.values())
        unreported = (estimate.blocks for estimate in self.load_estimates.values() if not estimate.is_reported)
        assert self.unreported_blocks == sum(unreported)


def _send_nothing() -> None:
    """Do nothing, in place of sending a message to an instance whose connection is lost. The owners of its requests
    have been notified of the loss.
    """


def _uncertainty(quiet_s: float) -> float:
    """Return the factor, at least 1, by which an instance may be faster than it was last measured, `quiet_s` seconds
    ago.

    It is 1 if `quiet_s` is -inf, that is, before the first load report.
    """
    return exp2(min(quiet_s / UNCERTAINTY_DOUBLING_S, MAX_UNCERTAINTY_DOUBLINGS)) if quiet_s > 0 else 1.0
