"""When a call that wants vectors may go to its instances: the same rules and the same fair order as for answers.

Instances get work for about `dispatch_ahead_s`; what is more waits here, bounded in tokens, by priority and fairly
between callers. A call whose time to the answer is predicted to be longer than was asked for is refused at once.
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
_RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PoolingDemand:
    """What one call asks for. `candidates` are the instances that may compute it, as they are now."""

    num_tokens: int
    priority: int
    caller: Caller
    slo: Slo
    arrived_at: float
    candidates: Callable[[], Sequence[Candidate]]
    granted: "asyncio.Future[Going]"


class Going:
    """The tokens of a call that may go and is not counted by an instance yet. Its holder calls `end` when one counts
    it, or uses it as a context manager; later calls do nothing."""

    __slots__ = ("_num_tokens", "_turns")

    def __init__(self, turns: "PoolingAdmission", num_tokens: int) -> None:
        self._turns = turns
        self._num_tokens = num_tokens
        turns.going_tokens += num_tokens

    def end(self) -> None:
        self._turns.going_tokens -= self._num_tokens
        self._num_tokens = 0

    def __enter__(self) -> "Going":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end()


class PoolingAdmission:
    def __init__(self, admission: AdmissionControl, metrics: RouterMetrics, *, clock: Callable[[], float]) -> None:
        self._rules = admission.rules
        self._metrics = metrics
        self._clock = clock
        self._waiting: FairQueue[PoolingDemand] = FairQueue()
        self.going_tokens = 0
        """Of all `Going`: let go, and not yet counted by an instance."""
        self._poll_timer: asyncio.TimerHandle | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    async def admit(self, demand: PoolingDemand) -> Going:
        """Wait until it may go; the caller ends the result. Raises `RateLimitError`."""
        placement, rate = self._placement(demand)
        if placement is not None:
            before = self._waiting.tokens_before(demand.caller, priority=demand.priority)
            waiting = QueueState(queued_tokens=self._waiting.tokens, before_s=before / rate, tokens_per_s=rate)
            waited_s = self._clock() - demand.arrived_at
            verdict = admission_verdict(
                placement, demand.slo, self._rules, waited_s=waited_s, tokens=demand.num_tokens, waiting=waiting
            )
            if isinstance(verdict, Refusal):
                raise self._rejection(verdict)
            if verdict == "wait":
                return await self._wait(demand)
        return Going(self, demand.num_tokens)

    def dispatch_waiting(self) -> None:
        """Lets go what may, in order. The first that must wait holds those behind it."""
        while (demand := self._waiting.first()) is not None:
            try:
                if self._must_wait(demand):
                    self._schedule_poll()
                    return
                self._remove(demand)
                if not demand.granted.done():
                    demand.granted.set_result(Going(self, demand.num_tokens))
            except Exception as exc:  # noqa: BLE001 - this call's alone: those behind it still get their turn
                self._remove(demand)
                if not demand.granted.done():
                    demand.granted.set_exception(exc)

    def _must_wait(self, demand: PoolingDemand) -> bool:
        """Raises `RateLimitError` where it would take longer than was promised."""
        placement, _ = self._placement(demand)
        if placement is None:
            return False
        refusal = slo_refusal(placement, demand.slo, waited_s=self._clock() - demand.arrived_at)
        if refusal is not None:
            raise self._rejection(refusal)
        return placement.shortest_queue_s > self._rules.dispatch_ahead_s

    def close(self) -> None:
        if self._poll_timer is not None:
            self._poll_timer.cancel()

    async def _wait(self, demand: PoolingDemand) -> Going:
        self._waiting.push(demand, demand.caller, priority=demand.priority, tokens=demand.num_tokens)
        try:
            self._count()
            self._schedule_poll()
            return await demand.granted
        except BaseException:
            if demand.granted.done() and not demand.granted.cancelled() and demand.granted.exception() is None:
                demand.granted.result().end()
            self._remove(demand)
            raise

    def _placement(self, demand: PoolingDemand) -> tuple[Placement | None, float]:
        """Where it would be computed first, None while no instance is there; and tokens per second of all."""
        candidates = demand.candidates()
        rate = sum(c.prefill_tokens_per_s for c in candidates) or UNMEASURED_TOKENS_PER_S
        if not candidates:
            return None, rate
        best = min(candidates, key=lambda c: (c.time_to_first_token_s(demand.num_tokens), c.instance))
        dispatched_s = self.going_tokens / rate
        placement = Placement(
            decision="prefill_only",
            prefill=best,
            predicted_ttft_s=dispatched_s + best.time_to_first_token_s(demand.num_tokens),
            shortest_queue_s=dispatched_s + min(c.queue_s for c in candidates),
        )
        return placement, rate

    def _rejection(self, refusal: Refusal) -> RateLimitError:
        self._metrics.refused(refusal.cause)
        retry_after_s = _RETRY_AFTER_S if refusal.retry_after_s is None else refusal.retry_after_s
        return RateLimitError(f"{refusal.message}: try again later", retry_after_s=retry_after_s)

    def _remove(self, demand: PoolingDemand) -> None:
        if self._waiting.remove(demand):
            self._count()

    def _count(self) -> None:
        self._metrics.waiting(requests=len(self._waiting), tokens=self._waiting.tokens)

    def _schedule_poll(self) -> None:
        if self._poll_timer is None:
            self._poll_timer = asyncio.get_running_loop().call_later(_POLL_INTERVAL_S, self._poll)

    def _poll(self) -> None:
        self._poll_timer = None
        self.dispatch_waiting()
