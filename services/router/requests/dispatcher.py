"""Admits prompts by the limits of router and key (429), starts lifecycles and trace spans, and ends requests at their
deadline.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from baton_serve.services.common.process_lifecycle import call_each
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
from baton_serve.services.router.protocol.owner_shares import OwnerShares
from baton_serve.services.router.quota.usage_limits import UsageLedger
from baton_serve.services.router.requests.handoff_counts import HandoffCounts
from baton_serve.services.router.requests.lifecycle import RequestLifecycle
from baton_serve.services.router.requests.metrics import RouterMetrics
from baton_serve.services.router.requests.prompt_request import PromptRequest, RequestPolicy, RequestTiming
from baton_serve.services.router.requests.request_log import RequestLog, span_attributes
from baton_serve.services.router.requests.token_queue import TokenQueue


class Deadlines:
    """Ends requests whose deadline has passed. It uses one timer for all requests together."""

    def __init__(self, lifecycles: Collection[RequestLifecycle], *, clock: Callable[[], float]) -> None:
        """Watch the requests in `lifecycles`, a collection to which its owner adds requests, and from which it removes
        them. The deadlines are times of `clock`.
        """
        self._lifecycles = lifecycles
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None
        self._at = 0.0

    def watch(self, lifecycle: RequestLifecycle) -> None:
        """Set the timer for the deadline of a new request, if it is the earliest. The request must be in the
        collection.
        """
        if self._timer is None or lifecycle.deadline < self._at:
            self._schedule(lifecycle.deadline)

    def close(self) -> None:
        """Stop the timer, so that no request is ended any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _schedule(self, at: float) -> None:
        self.close()
        self._at = at
        self._timer = asyncio.get_running_loop().call_later(at - self._clock(), self._expire_due)

    def _expire_due(self) -> None:
        self._timer = None
        now = self._clock()
        # The list is complete before the first call, which removes its lifecycle from the collection.
        call_each(
            "expiring a request", [lifecycle.expire for lifecycle in self._lifecycles if lifecycle.deadline <= now]
        )
        if self._lifecycles:
            self._schedule(min(lifecycle.deadline for lifecycle in self._lifecycles))


_POLL_INTERVAL_S = 0.02
"""Seconds between two looks at the cluster while requests wait. Requests of other routers end without an event here."""
_DECAY = 0.9
"""Weight of the past in the moving average of the time between two ends of requests."""


@dataclass(slots=True)
class AdmissionControl:
    """The limits on all requests of the router together, and how much of each limit is in use. The dispatchers of all
    models share one object.
    """

    rules: AdmissionRules
    max_requests: int
    """Largest number of requests that one dispatcher runs or lets wait (`--max-concurrent-requests`)."""
    has_several_owners: Callable[[], bool] = lambda: False
    """Returns whether API keys of more than one owner are accepted now. Then no owner may hold all places."""
    ledger: UsageLedger = field(default_factory=UsageLedger)
    retries: RetryBudget = field(default_factory=lambda: RetryBudget(0.2))
    wall_clock: Callable[[], float] = time.time
    """Clock of the ledger, whose minutes and days are the same in all routers."""

    def shares(self) -> OwnerShares:
        """Return the places of one dispatcher, all of them free."""
        return OwnerShares(self.max_requests, has_several_owners=lambda: self.has_several_owners())

    def share_error(self, shares: OwnerShares, owner: str) -> str:
        """Return the message for an owner of API keys that must not have more of `shares`."""
        return (
            f"the requests of this API key hold {shares.held(owner)} of {shares.limit} places, and {shares.free} are "
            "free (--max-concurrent-requests): with several keys, none may hold more than are still free"
        )


class Dispatcher:
    """Owns the running requests of one model (a `RequestLifecycle` each) and the queue of waiting ones. Implements
    `LifecycleOwner`.

    Every request that `submit` has accepted ends with a call of `on_end`, exactly once. Use it on the event loop only.
    """

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
        self._shares = admission.shares()
        self._deadlines = Deadlines(self._lifecycles, clock=clock)
        self._waiting: FairQueue[RequestLifecycle] = FairQueue()
        self._resuming: RequestLifecycle | None = None
        """The waiting request that is being placed by `_dispatch_waiting` at this moment."""
        self._poll_timer: asyncio.TimerHandle | None = None
        self._ended_at = 0.0
        self._mean_end_interval_s = 1.0
        """Mean seconds between two ends of requests: the Retry-After of rejections that depend on such an end."""
        self.request_log = RequestLog(metrics, clock=clock, is_enabled=rules.logs_requests)
        self.handoff_counts = HandoffCounts(metrics, clock=clock)
        cluster.add_listener(self._dispatch_waiting)
        metrics.in_flight.set_function(lambda: len(self._lifecycles))
        # Not derived from `_lifecycles`, because load that an ended request has left behind must show. The dispatchers
        # of all models set the same function: they share the cluster.
        metrics.assigned.set_function(lambda: sum(len(worker.load_estimates) for worker in cluster.workers()))
        metrics.registry_connected.set_function(cluster.is_registry_connected)

    @property
    def num_running(self) -> int:
        return len(self._lifecycles)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def has_several_owners(self) -> bool:
        """Return whether API keys of more than one owner are accepted now."""
        return self._admission.has_several_owners()

    def num_without_tokens(self, *, below_priority: int) -> int:
        """Return how many running or waiting requests with a priority value below `below_priority` have no first token
        yet.
        """
        return sum(
            lifecycle.timeline.first_token_at is None
            for lifecycle in self._lifecycles
            if lifecycle.request.priority < below_priority
        )

    def submit(
        self, requests: Sequence[PromptRequest], token_queue: TokenQueue, *, timing: RequestTiming
    ) -> list[RequestLifecycle]:
        """Start a `RequestLifecycle` for each prompt of an API call, and return them in order. Their tokens go to
        `token_queue`.

        Raises `ApiError` if one of the prompts is rejected. After any exception none of them runs, and their prompt
        tokens are not counted for the caller.
        """
        # A later part of a call was admitted with its first part: it must not be counted again.
        if not timing.continues:
            self._count_against_limits(requests, timing)
        lifecycles: list[RequestLifecycle] = []
        try:
            for request in requests:
                lifecycles.append(self._start(request, token_queue, timing))
        except BaseException:
            for lifecycle in lifecycles:
                lifecycle.cancel("another prompt of the same API call was rejected")
            if not timing.continues:
                self._refund(requests, timing)
            raise
        return lifecycles

    def close(self) -> None:
        """Fail all running requests because the router stops, stop the timers, and log the requests that have ended."""
        error = UnavailableError("the router is shutting down", code="stopping")
        call_each("failing a request", [partial(lifecycle.fail, error) for lifecycle in self._lifecycles])
        if self._poll_timer is not None:
            self._poll_timer.cancel()
        self._deadlines.close()
        self.request_log.flush()

    def admit_or_queue(self, lifecycle: RequestLifecycle, placement: Placement) -> bool:
        """Return whether a request may be sent to the instances of `placement` now. If not, put it into the waiting
        queue and return False.

        Raises `RateLimitError` if the request is predicted to miss an SLO or if the queue is full.
        """
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
            raise self._count_rejection(verdict)
        if verdict == "wait":
            self._waiting.push(lifecycle, timing.caller, priority=lifecycle.request.priority, tokens=tokens)
            self._update_waiting_metrics()
            self._schedule_poll()
        return verdict == "go"

    def on_prefill_done(self, lifecycle: RequestLifecycle) -> None:
        """Send waiting requests to instances if they may go now: the instance of `lifecycle` has fewer prompt tokens
        left to compute.
        """
        if self._waiting:
            self._dispatch_waiting()

    def on_handoff_due(self) -> None:
        """Count a request whose placement needs a KV handoff."""
        self.handoff_counts.add_due()

    def on_handoff_completed(self) -> None:
        """Count a KV handoff whose blocks have all arrived."""
        self.handoff_counts.add_completed()

    def take_retry(self) -> bool:
        """Take one retry from the budget that all requests of the router share. Return False if the budget is used
        up.
        """
        return self._admission.retries.take_retry(self._clock())

    def on_end(self, lifecycle: RequestLifecycle) -> None:
        """Forget a request that has ended, count its generated tokens for the caller, and send waiting requests that
        may go now.
        """
        self._record_end(self._clock())
        # It may have ended while it was waiting: cancelled by its client, or at its deadline.
        if self._waiting.remove(lifecycle):
            self._update_waiting_metrics()
        span, admission = self._forget(lifecycle), self._admission
        admission.ledger.add(lifecycle.timing.caller, tokens=lifecycle.num_generated, now=admission.wall_clock())
        self.request_log.add(lifecycle)
        if span is not None and span.is_recording:
            call_each("ending the trace span of a request", [partial(_record, span, lifecycle)])
        self._dispatch_waiting()

    def _count_against_limits(self, requests: Sequence[PromptRequest], timing: RequestTiming) -> None:
        """Count an API call and its prompt tokens against the limits of the caller's API key.

        Raises `RateLimitError` (status 429) if the router serves too many requests already or the key is over a limit;
        then nothing is counted.
        """
        admission = self._admission
        if len(self._lifecycles) + len(requests) > admission.max_requests:
            message = (
                f"{len(self._lifecycles)} of at most {admission.max_requests} requests are running "
                f"(--max-concurrent-requests), {len(requests)} more do not fit"
            )
            raise self._count_rejection(Refusal("queue", message, None))
        if not self._shares.permits(timing.caller.name, len(requests)):
            raise self._count_rejection(Refusal("queue", admission.share_error(self._shares, timing.caller.name), None))
        tokens = sum([len(request.token_ids) for request in requests])
        over = admission.ledger.admit(timing.caller, tokens=tokens, now=admission.wall_clock())
        if over is not None:
            self._metrics.refused("key")
            raise RateLimitError(over.message, code="rate_limit_exceeded", retry_after_s=over.retry_after_s)
        admission.retries.record_request()

    def _refund(self, requests: Sequence[PromptRequest], timing: RequestTiming) -> None:
        """Take back the prompt tokens that were counted for the caller: these requests were rejected, so nothing was
        computed.
        """
        admission, tokens = self._admission, sum([len(request.token_ids) for request in requests])
        admission.ledger.refund(timing.caller, tokens=tokens, now=admission.wall_clock())

    def _start(self, request: PromptRequest, token_queue: TokenQueue, timing: RequestTiming) -> RequestLifecycle:
        """Start the request for one prompt and add it to the running ones. After any exception it is neither running
        nor waiting.
        """
        span = self._tracing.span("llm_request", timing.trace_headers, at=timing.at)
        span.child("tokenize", at=timing.tokenizing_at).end(at=timing.tokenized_at)
        # The headers are empty without tracing; then the request needs no copy.
        lifecycle = RequestLifecycle(
            msgspec.structs.replace(request, trace_headers=span.headers) if span.headers else request,
            cluster=self._cluster,
            token_queue=token_queue,
            policy=self._rules,
            clock=self._clock,
            timing=timing,
            owner=self,
        )
        try:
            lifecycle.start()
            self._lifecycles[lifecycle] = span
            self._shares.add(timing.caller.name, 1)
            self._deadlines.watch(lifecycle)  # only now: it looks at the registered lifecycles
            self._metrics.started(lifecycle)
        except BaseException as exc:
            # `start` may have queued it before it failed, and a failure after `start` leaves it registered.
            if self._waiting.remove(lifecycle):
                self._update_waiting_metrics()
            if self._forget(lifecycle) is not None:
                lifecycle.cancel("starting the request failed")
            span.end(error=exc.message if isinstance(exc, ApiError) else "internal error")
            raise
        return lifecycle

    def _forget(self, lifecycle: RequestLifecycle) -> Span | None:
        """Remove a request from the running ones and return its span, or None if it was not there."""
        span = self._lifecycles.pop(lifecycle, None)
        if span is not None:
            self._shares.remove(lifecycle.timing.caller.name, 1)
        return span

    def _admit_waiting(self, lifecycle: RequestLifecycle, placement: Placement) -> bool:
        """Return whether the first request of the waiting queue may be sent to the instances of `placement` now, and
        remove it from the queue if so. Raises `RateLimitError` if it is predicted to miss an SLO by now.
        """
        waited_s = self._clock() - lifecycle.timing.at
        if (refusal := slo_refusal(placement, lifecycle.timing.slo, waited_s=waited_s)) is not None:
            raise self._count_rejection(refusal)
        if placement.shortest_queue_s > self._admission.rules.dispatch_ahead_s:
            return False
        self._waiting.remove(lifecycle)
        self._update_waiting_metrics()
        return True

    def _dispatch_waiting(self) -> None:
        """Send waiting requests to instances, in the queue's order, up to the first one that still must wait."""
        # `resume` may end requests, and `on_end` calls this method again: `_resuming` stops the recursion.
        while (lifecycle := self._waiting.first()) is not None and self._resuming is None:
            before = len(self._waiting)
            self._resuming = lifecycle
            try:
                lifecycle.resume()
            finally:
                self._resuming = None
            # If it left the queue it was sent on or has failed; in both cases the next one may go.
            if len(self._waiting) == before:
                self._schedule_poll()
                return

    def _queue_ahead(self, lifecycle: RequestLifecycle) -> QueueState:
        """Return the length of the waiting queue, and how long a new request would wait behind the requests that go
        before it.
        """
        rate = self._cluster.routable_workers().prefill_tokens_per_s
        before = self._waiting.tokens_before(lifecycle.timing.caller, priority=lifecycle.request.priority)
        return QueueState(queued_tokens=self._waiting.tokens, before_s=before / rate, tokens_per_s=rate)

    def _schedule_poll(self) -> None:
        if self._poll_timer is None:
            self._poll_timer = asyncio.get_running_loop().call_later(_POLL_INTERVAL_S, self._poll)

    def _poll(self) -> None:
        self._poll_timer = None
        self._dispatch_waiting()

    def _count_rejection(self, refusal: Refusal) -> RateLimitError:
        """Count a rejected request in the metrics and return the error for its client."""
        self._metrics.refused(refusal.cause)
        retry_after_s = self._mean_end_interval_s if refusal.retry_after_s is None else refusal.retry_after_s
        return RateLimitError(f"{refusal.message}: retry later", retry_after_s=retry_after_s)

    def _update_waiting_metrics(self) -> None:
        self._metrics.waiting(requests=len(self._waiting), tokens=self._waiting.tokens)

    def _record_end(self, now: float) -> None:
        """Update the mean time between the ends of two requests, from which Retry-After is computed."""
        if self._ended_at:
            self._mean_end_interval_s = _DECAY * self._mean_end_interval_s + (1 - _DECAY) * (now - self._ended_at)
        self._ended_at = now


def _record(span: Span, lifecycle: RequestLifecycle) -> None:
    """End the trace span of a request, with its attributes and the time until it was sent to instances."""
    timeline = lifecycle.timeline
    span.child("admit", at=lifecycle.timing.tokenized_at).end(at=timeline.placed_at or timeline.ended_at)
    span.set(span_attributes(lifecycle))
    span.end(at=timeline.ended_at, error=None if lifecycle.error is None else lifecycle.error.message)
