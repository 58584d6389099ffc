"""Admits prompts, launches their flights or lets them wait, and knows which are in the air."""

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from baton_serve.services.common.callbacks import call_each
from baton_serve.services.common.tracing import Span, Tracing
from baton_serve.services.router.cluster.cluster import Cluster
from baton_serve.services.router.placement.admission import (
    AdmissionRules,
    QueueState,
    Refusal,
    admission_verdict,
    slo_refusal,
)
from baton_serve.services.router.placement.circuit_breaker import RetryBudget
from baton_serve.services.router.placement.fair_queue import FairQueue
from baton_serve.services.router.placement.policy import Placement
from baton_serve.services.router.protocol.errors import ApiError, RateLimitError, UnavailableError
from baton_serve.services.router.quota.usage import UsageLedger
from baton_serve.services.router.requests.lifecycle import RequestLifecycle
from baton_serve.services.router.requests.metrics import RouterMetrics
from baton_serve.services.router.requests.prompt_request import PromptRequest, RequestPolicy, RequestTiming
from baton_serve.services.router.requests.request_log import RequestLog, span_attributes
from baton_serve.services.router.requests.token_queue import TokenQueue


class Deadlines:
    def __init__(self, lifecycles: Collection[RequestLifecycle], *, clock: Callable[[], float]) -> None:
        """`lifecycles` are those that run, now and at any later time."""
        self._lifecycles = lifecycles
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None
        self._at = 0.0

    def watch(self, lifecycle: RequestLifecycle) -> None:
        """One of `lifecycles`, from now on."""
        if self._timer is None or lifecycle.deadline < self._at:
            self._set(lifecycle.deadline)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set(self, at: float) -> None:
        self.close()
        self._at = at
        self._timer = asyncio.get_running_loop().call_later(at - self._clock(), self._expire_due)

    def _expire_due(self) -> None:
        self._timer = None
        now = self._clock()
        call_each("a request", [lifecycle.expire for lifecycle in self._lifecycles if lifecycle.deadline <= now])
        if self._lifecycles:
            self._set(min(lifecycle.deadline for lifecycle in self._lifecycles))


_POLL_INTERVAL_S = 0.02
"""Requests of other routers end unseen: while something waits, the cluster is looked at so often."""
_DECAY = 0.9


@dataclass(slots=True)
class AdmissionControl:
    """What a dispatcher decides with: rules, and what has been used so far."""

    rules: AdmissionRules
    max_requests: int
    ledger: UsageLedger = field(default_factory=UsageLedger)
    retries: RetryBudget = field(default_factory=lambda: RetryBudget(0.2))
    wall_clock: Callable[[], float] = time.time


class Dispatcher:
    """`services.router.requests.lifecycle.Owner`."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        rules: RequestPolicy,
        admission: AdmissionControl,
        metrics: RouterMetrics,
        clock: Callable[[], float],
        tracing: Tracing | None = None,
    ) -> None:
        self._cluster = cluster
        self._rules = rules
        self._admission = admission
        self._metrics = metrics
        self._clock = clock
        self._tracing = tracing or Tracing()
        self._lifecycles: dict[RequestLifecycle, Span] = {}
        self._deadlines = Deadlines(self._lifecycles, clock=clock)
        self._waiting: FairQueue[RequestLifecycle] = FairQueue()
        self._resuming: RequestLifecycle | None = None
        self._poll_timer: asyncio.TimerHandle | None = None
        self._ended_at = 0.0
        self._mean_end_interval_s = 1.0
        self.request_log = RequestLog(metrics, clock=clock)
        cluster.add_listener(self._dispatch_waiting)
        metrics.in_flight.set_function(lambda: len(self._lifecycles))

    @property
    def num_running(self) -> int:
        return len(self._lifecycles)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def submit(
        self, requests: Sequence[PromptRequest], token_queue: TokenQueue, *, timing: RequestTiming
    ) -> list[RequestLifecycle]:
        """One flight a job, all or none; what comes back goes to `token_queue`. Raises `ApiError`. After any exception
        none of them runs, and their tokens are not counted for the caller."""
        if not timing.continues:
            self._check_limits(requests, timing)
        lifecycles: list[RequestLifecycle] = []
        try:
            for request in requests:
                lifecycles.append(self._start(request, token_queue, timing))
        except BaseException:
            for lifecycle in lifecycles:
                lifecycle.cancel("another prompt of the request was refused")
            if not timing.continues:
                self._refund(requests, timing)
            raise
        return lifecycles

    def close(self) -> None:
        error = UnavailableError("the router stops", code="stopping")
        call_each("a request", [partial(lifecycle.fail, error) for lifecycle in self._lifecycles])
        if self._poll_timer is not None:
            self._poll_timer.cancel()
        self._deadlines.close()
        self.request_log.flush()

    def admit_request(self, lifecycle: RequestLifecycle, placement: Placement) -> bool:
        now, timing = self._clock(), lifecycle.timing
        if timing.continues:
            return True
        if lifecycle is self._resuming:
            return self._admit_waiting(lifecycle, placement)
        tokens = len(lifecycle.request.token_ids)
        verdict = admission_verdict(
            placement,
            timing.slo,
            self._admission.rules,
            waited_s=now - timing.at,
            tokens=tokens,
            waiting=self._queue_ahead(lifecycle),
        )
        if isinstance(verdict, Refusal):
            raise self._rejection(verdict)
        if verdict == "wait":
            self._waiting.push(lifecycle, timing.caller, priority=lifecycle.request.priority, tokens=tokens)
            self._count_waiting()
            self._schedule_poll()
        return verdict == "go"

    def on_prefill_done(self, lifecycle: RequestLifecycle) -> None:
        if self._waiting:
            self._dispatch_waiting()

    def take_retry(self) -> bool:
        return self._admission.retries.take_retry(self._clock())

    def on_end(self, lifecycle: RequestLifecycle) -> None:
        self._record_end(self._clock())
        if self._waiting.remove(lifecycle):
            self._count_waiting()
        span, admission = self._lifecycles.pop(lifecycle, None), self._admission
        admission.ledger.add(lifecycle.timing.caller, tokens=lifecycle.num_generated, now=admission.wall_clock())
        self.request_log.add(lifecycle)
        if span is not None and span.is_recording:
            call_each("tracing", [partial(_record, span, lifecycle)])
        self._dispatch_waiting()

    def _check_limits(self, requests: Sequence[PromptRequest], timing: RequestTiming) -> None:
        """Raises `RateLimitError`."""
        admission = self._admission
        if len(self._lifecycles) + len(requests) > admission.max_requests:
            message = f"{len(self._lifecycles)} requests are being served and {admission.max_requests} is the limit"
            raise self._rejection(Refusal("queue", message, None))
        tokens = sum([len(request.token_ids) for request in requests])
        over = admission.ledger.admit(timing.caller, tokens=tokens, now=admission.wall_clock())
        if over is not None:
            self._metrics.refused("key")
            raise RateLimitError(over.message, code="rate_limit_exceeded", retry_after_s=over.retry_after_s)
        admission.retries.record_request()

    def _refund(self, requests: Sequence[PromptRequest], timing: RequestTiming) -> None:
        """Nothing was computed: the caller has used no tokens."""
        admission, tokens = self._admission, sum([len(request.token_ids) for request in requests])
        admission.ledger.refund(timing.caller, tokens=tokens, now=admission.wall_clock())

    def _start(self, request: PromptRequest, token_queue: TokenQueue, timing: RequestTiming) -> RequestLifecycle:
        span = self._tracing.span("llm_request", timing.trace_headers, at=timing.at)
        span.child("tokenize", at=timing.tokenizing_at).end(at=timing.tokenized_at)
        lifecycle = RequestLifecycle(
            msgspec.structs.replace(request, trace_headers=span.headers) if span.headers else request,
            cluster=self._cluster,
            token_queue=token_queue,
            rules=self._rules,
            clock=self._clock,
            timing=timing,
            owner=self,
        )
        try:
            lifecycle.start()
            self._lifecycles[lifecycle] = span
            self._deadlines.watch(lifecycle)
            self._metrics.started(lifecycle)
        except BaseException as exc:
            if self._waiting.remove(lifecycle):
                self._count_waiting()
            if self._lifecycles.pop(lifecycle, None) is not None:
                lifecycle.cancel("the request was refused")
            span.end(error=exc.message if isinstance(exc, ApiError) else "an internal error")
            raise
        return lifecycle

    def _admit_waiting(self, lifecycle: RequestLifecycle, placement: Placement) -> bool:
        """It is the first of those that wait."""
        waited_s = self._clock() - lifecycle.timing.at
        if (refusal := slo_refusal(placement, lifecycle.timing.slo, waited_s=waited_s)) is not None:
            raise self._rejection(refusal)
        if placement.shortest_queue_s > self._admission.rules.dispatch_ahead_s:
            return False
        self._waiting.remove(lifecycle)
        self._count_waiting()
        return True

    def _dispatch_waiting(self) -> None:
        """Lets go what may, in order. The first that must wait holds those behind it."""
        while (lifecycle := self._waiting.first()) is not None and self._resuming is None:
            before = len(self._waiting)
            self._resuming = lifecycle
            try:
                lifecycle.resume()
            finally:
                self._resuming = None
            if len(self._waiting) == before:
                self._schedule_poll()
                return

    def _queue_ahead(self, lifecycle: RequestLifecycle) -> QueueState:
        rate = self._cluster.routable_workers().prefill_tokens_per_s
        before = self._waiting.tokens_before(lifecycle.timing.caller, priority=lifecycle.request.priority)
        return QueueState(queued_tokens=self._waiting.tokens, before_s=before / rate, tokens_per_s=rate)

    def _schedule_poll(self) -> None:
        if self._poll_timer is None:
            self._poll_timer = asyncio.get_running_loop().call_later(_POLL_INTERVAL_S, self._poll)

    def _poll(self) -> None:
        self._poll_timer = None
        self._dispatch_waiting()

    def _rejection(self, refusal: Refusal) -> RateLimitError:
        self._metrics.refused(refusal.cause)
        retry_after_s = self._mean_end_interval_s if refusal.retry_after_s is None else refusal.retry_after_s
        return RateLimitError(f"{refusal.message}: try again later", retry_after_s=retry_after_s)

    def _count_waiting(self) -> None:
        self._metrics.waiting(requests=len(self._waiting), tokens=self._waiting.tokens)

    def _record_end(self, now: float) -> None:
        if self._ended_at:
            self._mean_end_interval_s = _DECAY * self._mean_end_interval_s + (1 - _DECAY) * (now - self._ended_at)
        self._ended_at = now


def _record(span: Span, lifecycle: RequestLifecycle) -> None:
    timeline = lifecycle.timeline
    span.child("admit", at=lifecycle.timing.tokenized_at).end(at=timeline.placed_at or timeline.ended_at)
    span.set(span_attributes(lifecycle))
    span.end(at=timeline.ended_at, error=None if lifecycle.error is None else lifecycle.error.message)
