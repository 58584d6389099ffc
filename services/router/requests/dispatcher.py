"""Admits prompts, launches their flights or lets them wait, and knows which are in the air."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from baton_serve.services.common.callbacks import call_each
from baton_serve.services.common.tracing import Span, Tracing
from baton_serve.services.router.cluster.cluster import Cluster
from baton_serve.services.router.placement.admission import AdmissionRules, Refusal, Waiting, breaks_promise, judge
from baton_serve.services.router.placement.fair_queue import FairQueue
from baton_serve.services.router.placement.policy import Placement
from baton_serve.services.router.placement.retry_budget import RetryBudget
from baton_serve.services.router.protocol.errors import ApiError, RateLimitError, UnavailableError
from baton_serve.services.router.quota.usage import UsageLedger
from baton_serve.services.router.requests.deadlines import Deadlines
from baton_serve.services.router.requests.lifecycle import Flight
from baton_serve.services.router.requests.metrics import RouterMetrics
from baton_serve.services.router.requests.prompt_request import Arrival, FlightRules, Job
from baton_serve.services.router.requests.request_log import Endings
from baton_serve.services.router.requests.span_attributes import attributes_of
from baton_serve.services.router.requests.token_queue import Outbox

_LOOK_AGAIN_S = 0.02
"""Requests of other routers end unseen: while something waits, the cluster is looked at so often."""
_FADE = 0.9


@dataclass(slots=True)
class Admission:
    """What a dispatcher decides with: rules, and what has been used so far."""

    rules: AdmissionRules
    max_flights: int
    ledger: UsageLedger = field(default_factory=UsageLedger)
    retries: RetryBudget = field(default_factory=lambda: RetryBudget(0.2))
    wall_clock: Callable[[], float] = time.time


class Dispatcher:
    """`services.router.requests.lifecycle.Owner`."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        rules: FlightRules,
        admission: Admission,
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
        self._flights: dict[Flight, Span] = {}
        self._deadlines = Deadlines(self._flights, clock=clock)
        self._waiting: FairQueue[Flight] = FairQueue()
        self._resuming: Flight | None = None
        self._look_again: asyncio.TimerHandle | None = None
        self._ended_at = 0.0
        self._ends_every_s = 1.0
        self.endings = Endings(metrics, clock=clock)
        cluster.listen(self._pump)
        metrics.in_flight.set_function(lambda: len(self._flights))

    @property
    def num_flights(self) -> int:
        return len(self._flights)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def launch(self, jobs: Sequence[Job], outbox: Outbox, *, arrival: Arrival) -> list[Flight]:
        """One flight a job, all or none; what comes back goes to `outbox`. Raises `ApiError`. After any exception
        none of them runs, and their tokens are not counted for the caller."""
        if not arrival.continues:
            self._check_limits(jobs, arrival)
        flights: list[Flight] = []
        try:
            for job in jobs:
                flights.append(self._start(job, outbox, arrival))
        except BaseException:
            for flight in flights:
                flight.cancel("another prompt of the request was refused")
            if not arrival.continues:
                self._refund(jobs, arrival)
            raise
        return flights

    def close(self) -> None:
        error = UnavailableError("the router stops", code="stopping")
        call_each("a request", [partial(flight.fail, error) for flight in self._flights])
        if self._look_again is not None:
            self._look_again.cancel()
        self._deadlines.close()
        self.endings.tell()

    def admits(self, flight: Flight, placement: Placement) -> bool:
        now, arrival = self._clock(), flight.arrival
        if arrival.continues:
            return True
        if flight is self._resuming:
            return self._admits_again(flight, placement)
        tokens = len(flight.job.token_ids)
        verdict = judge(
            placement,
            arrival.slo,
            self._admission.rules,
            waited_s=now - arrival.at,
            tokens=tokens,
            waiting=self._queue_before(flight),
        )
        if isinstance(verdict, Refusal):
            raise self._refused(verdict)
        if verdict == "wait":
            self._waiting.push(flight, arrival.caller, priority=flight.job.priority, tokens=tokens)
            self._count_waiting()
            self._look_soon()
        return verdict == "go"

    def prefilled(self, flight: Flight) -> None:
        if self._waiting:
            self._pump()

    def allows_retry(self) -> bool:
        return self._admission.retries.allows_retry(self._clock())

    def ended(self, flight: Flight) -> None:
        self._learn_end(self._clock())
        if self._waiting.remove(flight):
            self._count_waiting()
        span, admission = self._flights.pop(flight, None), self._admission
        admission.ledger.add(flight.arrival.caller, tokens=flight.num_generated, now=admission.wall_clock())
        self.endings.add(flight)
        if span is not None and span.is_recording:
            call_each("tracing", [partial(_record, span, flight)])
        self._pump()

    def _check_limits(self, jobs: Sequence[Job], arrival: Arrival) -> None:
        """Raises `RateLimitError`."""
        admission = self._admission
        if len(self._flights) + len(jobs) > admission.max_flights:
            message = f"{len(self._flights)} requests are being served and {admission.max_flights} is the limit"
            raise self._refused(Refusal("queue", message, None))
        tokens = sum([len(job.token_ids) for job in jobs])
        over = admission.ledger.admit(arrival.caller, tokens=tokens, now=admission.wall_clock())
        if over is not None:
            self._metrics.refused("key")
            raise RateLimitError(over.message, code="rate_limit_exceeded", retry_after_s=over.retry_after_s)
        admission.retries.request()

    def _refund(self, jobs: Sequence[Job], arrival: Arrival) -> None:
        """Nothing was computed: the caller has used no tokens."""
        admission, tokens = self._admission, sum([len(job.token_ids) for job in jobs])
        admission.ledger.refund(arrival.caller, tokens=tokens, now=admission.wall_clock())

    def _start(self, job: Job, outbox: Outbox, arrival: Arrival) -> Flight:
        span = self._tracing.span("llm_request", arrival.trace_headers, at=arrival.at)
        span.child("tokenize", at=arrival.tokenizing_at).end(at=arrival.tokenized_at)
        flight = Flight(
            msgspec.structs.replace(job, trace_headers=span.headers) if span.headers else job,
            cluster=self._cluster,
            outbox=outbox,
            rules=self._rules,
            clock=self._clock,
            arrival=arrival,
            owner=self,
        )
        try:
            flight.start()
            self._flights[flight] = span
            self._deadlines.watch(flight)
            self._metrics.started(flight)
        except BaseException as exc:
            if self._waiting.remove(flight):
                self._count_waiting()
            if self._flights.pop(flight, None) is not None:
                flight.cancel("the request was refused")
            span.end(error=exc.message if isinstance(exc, ApiError) else "an internal error")
            raise
        return flight

    def _admits_again(self, flight: Flight, placement: Placement) -> bool:
        """It is the first of those that wait."""
        waited_s = self._clock() - flight.arrival.at
        if (refusal := breaks_promise(placement, flight.arrival.slo, waited_s=waited_s)) is not None:
            raise self._refused(refusal)
        if placement.shortest_queue_s > self._admission.rules.dispatch_ahead_s:
            return False
        self._waiting.remove(flight)
        self._count_waiting()
        return True

    def _pump(self) -> None:
        """Lets go what may, in order. The first that must wait holds those behind it."""
        while (flight := self._waiting.first()) is not None and self._resuming is None:
            before = len(self._waiting)
            self._resuming = flight
            try:
                flight.resume()
            finally:
                self._resuming = None
            if len(self._waiting) == before:
                self._look_soon()
                return

    def _queue_before(self, flight: Flight) -> Waiting:
        rate = self._cluster.takers().prefill_tokens_per_s
        before = self._waiting.tokens_before(flight.arrival.caller, priority=flight.job.priority)
        return Waiting(queued_tokens=self._waiting.tokens, before_s=before / rate, tokens_per_s=rate)

    def _look_soon(self) -> None:
        if self._look_again is None:
            self._look_again = asyncio.get_running_loop().call_later(_LOOK_AGAIN_S, self._look)

    def _look(self) -> None:
        self._look_again = None
        self._pump()

    def _refused(self, refusal: Refusal) -> RateLimitError:
        self._metrics.refused(refusal.cause)
        retry_after_s = self._ends_every_s if refusal.retry_after_s is None else refusal.retry_after_s
        return RateLimitError(f"{refusal.message}: try again later", retry_after_s=retry_after_s)

    def _count_waiting(self) -> None:
        self._metrics.waiting(requests=len(self._waiting), tokens=self._waiting.tokens)

    def _learn_end(self, now: float) -> None:
        if self._ended_at:
            self._ends_every_s = _FADE * self._ends_every_s + (1 - _FADE) * (now - self._ended_at)
        self._ended_at = now


def _record(span: Span, flight: Flight) -> None:
    timeline = flight.timeline
    span.child("admit", at=flight.arrival.tokenized_at).end(at=timeline.placed_at or timeline.ended_at)
    span.set(attributes_of(flight))
    span.end(at=timeline.ended_at, error=None if flight.error is None else flight.error.message)
