"""Decides when a pooling request goes to its instances, waits, or gets status 429.

Instances get work for about `dispatch_ahead_s`. Further requests wait in the router, ordered by priority and fairly
between callers; the number of their tokens is bounded. A request that is predicted to miss its SLO is rejected.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

from baton_serve.services.router.placement.admission import QueueState, Refusal, admission_verdict, slo_refusal
from baton_serve.services.router.placement.fair_queue import FairQueue
from baton_serve.services.router.placement.policy import UNMEASURED_TOKENS_PER_S, Candidate, Placement
from baton_serve.services.router.protocol.caller import Caller, Slo
from baton_serve.services.router.protocol.errors import RateLimitError
from baton_serve.services.router.requests.dispatcher import AdmissionControl
from baton_serve.services.router.requests.metrics import RouterMetrics

_POLL_INTERVAL_S = 0.02
"""Seconds between two looks at the cluster while requests wait. Requests of other routers end without an event here."""
_RETRY_AFTER_S = 1.0
"""Retry-After of a rejection whose cause has no predicted end."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PoolingDemand:
    """Describes one pooling request for the decision whether it may go to an instance: its tokens, its caller and its
    SLO.
    """

    num_tokens: int
    priority: int
    caller: Caller
    slo: Slo
    arrived_at: float
    """Moment of the router's monotonic clock."""
    candidates: Callable[[], Sequence[Candidate]]
    """Returns the instances that can compute it, with their load at that moment."""
    granted: "asyncio.Future[DispatchedTokens]"
    """Resolved when the waiting request may go to its instances."""


class DispatchedTokens:
    """Counts the tokens of a pooling request between its admission and the moment when they count as load of an
    instance.

    The holder calls `end` at that moment, or uses it as a context manager. Without this count several requests that are
    admitted at the same time would all see an idle instance.
    """

    __slots__ = ("_admission", "_num_tokens")

    def __init__(self, admission: "PoolingAdmission", num_tokens: int) -> None:
        self._admission = admission
        self._num_tokens = num_tokens
        admission.dispatched_tokens += num_tokens

    def end(self) -> None:
        """Stop counting the tokens here. Further calls do nothing."""
        self._admission.dispatched_tokens -= self._num_tokens
        self._num_tokens = 0

    def __enter__(self) -> "DispatchedTokens":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end()


class PoolingAdmission:
    """Decides when the pooling requests of one model may go to instances, and keeps the waiting ones in a queue. A
    `PoolingDispatcher` owns it. Use it on the event loop only.
    """

    def __init__(self, admission: AdmissionControl, metrics: RouterMetrics, *, clock: Callable[[], float]) -> None:
        self._rules = admission.rules
        self._metrics = metrics
        self._clock = clock
        self._waiting: FairQueue[PoolingDemand] = FairQueue()
        self.dispatched_tokens = 0
        """Tokens of admitted requests that are not counted as load of an instance yet."""
        self._poll_timer: asyncio.TimerHandle | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    async def admit(self, demand: PoolingDemand) -> DispatchedTokens:
        """Wait until a request may go to its instances. Return the object that counts its tokens; the caller calls
        `end` on it.

        Raises `RateLimitError` if the request is predicted to miss its SLO, or if the queue is full.
        """
        placement, rate = self._placement(demand)
        # Without any instance the request goes on: the dispatcher waits for one, or fails it.
        if placement is not None:
            before = self._waiting.tokens_before(demand.caller, priority=demand.priority)
            waiting = QueueState(queued_tokens=self._waiting.tokens, before_s=before / rate, tokens_per_s=rate)
            waited_s = self._clock() - demand.arrived_at
            verdict = admission_verdict(
                placement, demand.slo, self._rules, waited_s=waited_s, tokens=demand.num_tokens, waiting=waiting
            )
            if isinstance(verdict, Refusal):
                raise self._count_rejection(verdict)
            if verdict == "wait":
                return await self._wait(demand)
        return DispatchedTokens(self, demand.num_tokens)

    def dispatch_waiting(self) -> None:
        """Let waiting requests go to instances, in the queue's order, up to the first one that still must wait."""
        while (demand := self._waiting.first()) is not None:
            try:
                if self._must_wait(demand):
                    self._schedule_poll()
                    return
                self._remove(demand)
                if not demand.granted.done():
                    demand.granted.set_result(DispatchedTokens(self, demand.num_tokens))
            except Exception as exc:  # noqa: BLE001 - it fails this request only; the loop goes on with the next one
                self._remove(demand)
                if not demand.granted.done():
                    demand.granted.set_exception(exc)

    def _must_wait(self, demand: PoolingDemand) -> bool:
        """Return whether a waiting request must go on waiting.

        Raises `RateLimitError` if it is predicted to miss its SLO by now.
        """
        placement, _ = self._placement(demand)
        if placement is None:
            return False
        refusal = slo_refusal(placement, demand.slo, waited_s=self._clock() - demand.arrived_at)
        if refusal is not None:
            raise self._count_rejection(refusal)
        return placement.shortest_queue_s > self._rules.dispatch_ahead_s

    def close(self) -> None:
        """Stop the timer that looks at the queue. The dispatcher cancels the requests that wait."""
        if self._poll_timer is not None:
            self._poll_timer.cancel()

    async def _wait(self, demand: PoolingDemand) -> DispatchedTokens:
        """Put a request into the queue and wait until it may go to instances. Return the object that counts its
        tokens.
        """
        self._waiting.push(demand, demand.caller, priority=demand.priority, tokens=demand.num_tokens)
        try:
            self._update_waiting_metrics()
            self._schedule_poll()
            return await demand.granted
        except BaseException:
            # It may have been admitted and cancelled in the same turn of the event loop. Then the count ends here.
            if demand.granted.done() and not demand.granted.cancelled() and demand.granted.exception() is None:
                demand.granted.result().end()
            self._remove(demand)
            raise

    def _placement(self, demand: PoolingDemand) -> tuple[Placement | None, float]:
        """Return the placement on the instance that is predicted to finish the request first, and the speed of all
        instances together in tokens per second.

        The placement is None without any instance.
        """
        candidates = demand.candidates()
        rate = sum(c.prefill_tokens_per_s for c in candidates) or UNMEASURED_TOKENS_PER_S
        if not candidates:
            return None, rate
        best = min(candidates, key=lambda c: (c.time_to_first_token_s(demand.num_tokens), c.instance))
        dispatched_s = self.dispatched_tokens / rate
        placement = Placement(
            decision="prefill_only",
            prefill=best,
            predicted_ttft_s=dispatched_s + best.time_to_first_token_s(demand.num_tokens),
            shortest_queue_s=dispatched_s + min(c.queue_s for c in candidates),
        )
        return placement, rate

    def _count_rejection(self, refusal: Refusal) -> RateLimitError:
        """Count a rejected request in the metrics and return the error for its client."""
        self._metrics.refused(refusal.cause)
        retry_after_s = _RETRY_AFTER_S if refusal.retry_after_s is None else refusal.retry_after_s
        return RateLimitError(f"{refusal.message}: retry later", retry_after_s=retry_after_s)

    def _remove(self, demand: PoolingDemand) -> None:
        if self._waiting.remove(demand):
            self._update_waiting_metrics()

    def _update_waiting_metrics(self) -> None:
        self._metrics.waiting(requests=len(self._waiting), tokens=self._waiting.tokens)

    def _schedule_poll(self) -> None:
        if self._poll_timer is None:
            self._poll_timer = asyncio.get_running_loop().call_later(_POLL_INTERVAL_S, self._poll)

    def _poll(self) -> None:
        self._poll_timer = None
        self.dispatch_waiting()
