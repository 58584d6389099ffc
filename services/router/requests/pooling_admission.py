"""When a call that wants vectors may go to its instances: the same rules and the same fair order as for answers.

Instances get work for about `dispatch_ahead_s`; what is more waits here, bounded in tokens, by priority and fairly
between callers. A call whose time to the answer is predicted to be longer than was asked for is refused at once.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

from baton_serve.services.router.placement.admission import Refusal, Waiting, breaks_promise, judge
from baton_serve.services.router.placement.fair_queue import FairQueue
from baton_serve.services.router.placement.policy import UNMEASURED_TOKENS_PER_S, Candidate, Placement
from baton_serve.services.router.protocol.caller import Caller, Slo
from baton_serve.services.router.protocol.errors import RateLimitError
from baton_serve.services.router.requests.dispatcher import Admission
from baton_serve.services.router.requests.metrics import RouterMetrics

_LOOK_AGAIN_S = 0.02
_RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turn:
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

    def __init__(self, turns: "Turns", num_tokens: int) -> None:
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


class Turns:
    def __init__(self, admission: Admission, metrics: RouterMetrics, *, clock: Callable[[], float]) -> None:
        self._rules = admission.rules
        self._metrics = metrics
        self._clock = clock
        self._waiting: FairQueue[Turn] = FairQueue()
        self.going_tokens = 0
        """Of all `Going`: let go, and not yet counted by an instance."""
        self._look_again: asyncio.TimerHandle | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    async def take(self, turn: Turn) -> Going:
        """Wait until it may go; the caller ends the result. Raises `RateLimitError`."""
        placement, rate = self._placement(turn)
        if placement is not None:
            before = self._waiting.tokens_before(turn.caller, priority=turn.priority)
            waiting = Waiting(queued_tokens=self._waiting.tokens, before_s=before / rate, tokens_per_s=rate)
            waited_s = self._clock() - turn.arrived_at
            verdict = judge(
                placement, turn.slo, self._rules, waited_s=waited_s, tokens=turn.num_tokens, waiting=waiting
            )
            if isinstance(verdict, Refusal):
                raise self._refused(verdict)
            if verdict == "wait":
                return await self._wait(turn)
        return Going(self, turn.num_tokens)

    def pump(self) -> None:
        """Lets go what may, in order. The first that must wait holds those behind it."""
        while (turn := self._waiting.first()) is not None:
            try:
                if self._must_wait(turn):
                    self._look_soon()
                    return
                self._remove(turn)
                if not turn.granted.done():
                    turn.granted.set_result(Going(self, turn.num_tokens))
            except Exception as exc:  # noqa: BLE001 - this call's alone: those behind it still get their turn
                self._remove(turn)
                if not turn.granted.done():
                    turn.granted.set_exception(exc)

    def _must_wait(self, turn: Turn) -> bool:
        """Raises `RateLimitError` where it would take longer than was promised."""
        placement, _ = self._placement(turn)
        if placement is None:
            return False
        refusal = breaks_promise(placement, turn.slo, waited_s=self._clock() - turn.arrived_at)
        if refusal is not None:
            raise self._refused(refusal)
        return placement.shortest_queue_s > self._rules.dispatch_ahead_s

    def close(self) -> None:
        if self._look_again is not None:
            self._look_again.cancel()

    async def _wait(self, turn: Turn) -> Going:
        self._waiting.push(turn, turn.caller, priority=turn.priority, tokens=turn.num_tokens)
        try:
            self._count()
            self._look_soon()
            return await turn.granted
        except BaseException:
            if turn.granted.done() and not turn.granted.cancelled() and turn.granted.exception() is None:
                turn.granted.result().end()
            self._remove(turn)
            raise

    def _placement(self, turn: Turn) -> tuple[Placement | None, float]:
        """Where it would be computed first, None while no instance is there; and tokens per second of all."""
        candidates = turn.candidates()
        rate = sum(c.prefill_tokens_per_s for c in candidates) or UNMEASURED_TOKENS_PER_S
        if not candidates:
            return None, rate
        best = min(candidates, key=lambda c: (c.time_to_first_token_s(turn.num_tokens), c.instance))
        going_s = self.going_tokens / rate
        placement = Placement(
            decision="prefill_only",
            prefill=best,
            predicted_ttft_s=going_s + best.time_to_first_token_s(turn.num_tokens),
            shortest_queue_s=going_s + min(c.queue_s for c in candidates),
        )
        return placement, rate

    def _refused(self, refusal: Refusal) -> RateLimitError:
        self._metrics.refused(refusal.cause)
        retry_after_s = _RETRY_AFTER_S if refusal.retry_after_s is None else refusal.retry_after_s
        return RateLimitError(f"{refusal.message}: try again later", retry_after_s=retry_after_s)

    def _remove(self, turn: Turn) -> None:
        if self._waiting.remove(turn):
            self._count()

    def _count(self) -> None:
        self._metrics.waiting(requests=len(self._waiting), tokens=self._waiting.tokens)

    def _look_soon(self) -> None:
        if self._look_again is None:
            self._look_again = asyncio.get_running_loop().call_later(_LOOK_AGAIN_S, self._look)

    def _look(self) -> None:
        self._look_again = None
        self.pump()
