"""Admits prompts, launches their flights, and tells logs and metrics how each ended."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from services.common.tracing import Span, Tracing
from services.router.cluster import Cluster
from services.router.errors import ApiError, RateLimitError, UnavailableError
from services.router.flight import Flight
from services.router.job import Arrival, FlightRules, Job
from services.router.metrics import RouterMetrics
from services.router.outbox import Outbox
from services.router.recent import RecentRequest, RecentRequests
from services.router.span import attributes_of

logger = logging.getLogger(__name__)

_RETRY_AFTER_S = 1.0


class Dispatcher:
    def __init__(
        self,
        cluster: Cluster,
        *,
        rules: FlightRules,
        max_flights: int,
        metrics: RouterMetrics,
        clock: Callable[[], float],
        tracing: Tracing | None = None,
    ) -> None:
        self._cluster = cluster
        self._rules = rules
        self._max_flights = max_flights
        self._metrics = metrics
        self._clock = clock
        self._tracing = tracing or Tracing()
        self._flights: dict[Flight, Span] = {}
        self.recent = RecentRequests()

    @property
    def num_flights(self) -> int:
        return len(self._flights)

    def launch(self, jobs: Sequence[Job], outbox: Outbox, *, arrival: Arrival) -> list[Flight]:
        """One flight a job, all or none; what comes back goes to `outbox`. Raises `ApiError`."""
        if len(self._flights) + len(jobs) > self._max_flights:
            raise RateLimitError(
                f"{len(self._flights)} requests are being served and {self._max_flights} is the limit: try again later",
                retry_after_s=_RETRY_AFTER_S,
            )
        flights: list[Flight] = []
        try:
            for job in jobs:
                flights.append(self._start(job, outbox, arrival))
        except ApiError:
            for flight in flights:
                flight.cancel("another prompt of the request was refused")
            raise
        return flights

    def close(self) -> None:
        for flight in list(self._flights):
            flight.fail(UnavailableError("the router stops", code="stopping"))

    def _start(self, job: Job, outbox: Outbox, arrival: Arrival) -> Flight:
        span = self._tracing.span("llm_request", arrival.trace_headers, at=arrival.at)
        span.child("tokenize", at=arrival.tokenizing_at).end(at=arrival.tokenized_at)
        flight = Flight(
            replace(job, trace_headers=span.headers),
            cluster=self._cluster,
            outbox=outbox,
            rules=self._rules,
            clock=self._clock,
            arrival=arrival,
            on_end=self._ended,
        )
        try:
            flight.start()
        except ApiError as exc:
            span.end(error=exc.message)
            raise
        self._flights[flight] = span
        self._metrics.in_flight.set(len(self._flights))
        self._metrics.started(flight)
        return flight

    def _ended(self, flight: Flight) -> None:
        if (span := self._flights.pop(flight, None)) is not None:
            span.set(attributes_of(flight))
            span.end(at=flight.timeline.ended_at, error=None if flight.error is None else flight.error.message)
        self._metrics.in_flight.set(len(self._flights))
        self._metrics.ended(flight)
        self.recent.add(
            RecentRequest(
                prompt_tokens=len(flight.job.token_ids),
                generated_tokens=sum(len(sequence.token_ids) for sequence in flight.sequences),
                finish_reasons=[str(reason) for reason in flight.timeline.finish_reasons],
                baton=flight.timeline.explain(flight.job.request_id, self._clock()),
            )
        )
        timeline, report, handoff = flight.timeline, flight.timeline.report, flight.timeline.handoff
        logger.info(
            "request ended",
            extra={
                "request_id": flight.job.request_id,
                "decision": timeline.decision,
                "prefill": timeline.prefill,
                "decode": timeline.decode,
                "finish_reasons": timeline.finish_reasons,
                "prompt_tokens": len(flight.job.token_ids),
                "generated_tokens": sum(len(sequence.token_ids) for sequence in flight.sequences),
                "cached_tokens": sum(timeline.cached_tokens.values()),
                "predicted_ttft_s": _rounded(timeline.predicted_ttft_s),
                "ttft_s": _rounded(timeline.ttft_s),
                "tokenize_s": _rounded(timeline.tokenize_s),
                "queue_s": _rounded(report.queue_s if report is not None else None),
                "prefill_s": _rounded(report.prefill_s if report is not None else None),
                "handoff_s": _rounded(handoff.handoff_s if handoff is not None else None),
                "exposed_s": _rounded(handoff.exposed_s if handoff is not None else None),
                "transport": handoff.transport if handoff is not None else None,
                "decode_s": _rounded(timeline.decode_s),
                "e2e_s": _rounded(self._clock() - timeline.arrived_at),
                "replays": timeline.replays,
            },
        )


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
