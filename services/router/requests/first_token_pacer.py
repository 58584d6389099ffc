"""A flight's tokens on their way out, in order for each sequence.

First tokens of handed-over sequences that were promised a time between tokens may be held back for a moment, so that
the second follow in it (`first_gap`). Nothing is held for longer than its time, nor when what it waits for has come or
will not; what is dropped was for a client that has gone.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from baton_serve.services.router.placement.estimators import first_token_hold_s, ttft_budget_s
from baton_serve.services.router.protocol.errors import ApiError
from baton_serve.services.router.requests.attempt import Attempt
from baton_serve.services.router.requests.prompt_request import RequestPolicy, RequestTiming
from baton_serve.services.router.requests.timeline import Timeline
from baton_serve.services.router.requests.token_queue import TokenQueue
from baton_serve.services.router.text.token_sequence import TokenSequence, TokenUpdate


@dataclass(frozen=True, slots=True)
class _Held:
    sequence: TokenSequence
    tokens: TokenUpdate
    came_at: float
    timer: asyncio.TimerHandle


class FirstTokenPacer:
    """`first_choice`: of the sequences' choices in the answer. Moments are those of the router's monotonic clock."""

    __slots__ = ("_arrival", "_clock", "_first_choice", "_held", "_outbox", "_rules", "_timeline")

    def __init__(
        self,
        token_queue: TokenQueue,
        timeline: Timeline,
        timing: RequestTiming,
        rules: RequestPolicy,
        *,
        first_choice: int,
        clock: Callable[[], float],
    ) -> None:
        self._outbox = token_queue
        self._timeline = timeline
        self._first_choice = first_choice
        self._arrival = timing
        self._rules = rules
        self._clock = clock
        self._held: dict[int, _Held] = {}

    def put(self, sequence: TokenSequence, updates: Sequence[TokenUpdate], now: float) -> None:
        if self._held:
            self._release(sequence.index)
        self._deliver(sequence, updates, now)

    def put_first_token(
        self, attempt: Attempt, sequence: TokenSequence, updates: Sequence[TokenUpdate], now: float
    ) -> None:
        """From an instance that will not write the others."""
        if attempt.decode is not None and len(updates) == 1 and not sequence.is_finished:
            attempt.first_token_at[sequence.index] = now
            for_s = self._hold_s(attempt, now)
            if for_s > 0:
                timer = asyncio.get_running_loop().call_later(for_s, partial(self._release, sequence.index))
                self._held[sequence.index] = _Held(sequence, updates[0], now, timer)
                return
        self.put(sequence, updates, now)

    def fail(self, error: ApiError) -> None:
        """After all that has come."""
        self.release()
        self._outbox.fail(error)

    def release(self) -> None:
        """Nothing that is held has anything to wait for any more."""
        for index in list(self._held):
            self._release(index)

    def discard(self) -> None:
        """Nobody wants what is held any more."""
        for held in self._held.values():
            held.timer.cancel()
        self._held.clear()

    def _hold_s(self, attempt: Attempt, now: float) -> float:
        """A stream that goes on after a loss has made its client wait long enough."""
        slo = self._arrival.slo
        if slo.itl_s is None or attempt.decode is None or attempt.position:
            return 0.0
        return first_token_hold_s(
            attempt.decode.first_gap_s(),
            itl_s=slo.itl_s,
            max_itls=self._rules.first_token_hold,
            ttft_budget_s=ttft_budget_s(slo.ttft_s, now - self._arrival.at),
        )

    def _release(self, index: int) -> None:
        held = self._held.pop(index, None)
        if held is None:
            return
        held.timer.cancel()
        now = self._clock()
        self._timeline.held_s = max(self._timeline.held_s, now - held.came_at)
        self._deliver(held.sequence, [held.tokens], now)

    def _deliver(self, sequence: TokenSequence, updates: Sequence[TokenUpdate], now: float) -> None:
        timeline = self._timeline
        timeline.last_token_at = now
        if timeline.first_token_at is None:
            timeline.first_token_at = now
        if len(sequence.token_ids) > timeline.num_later_tokens + 1:
            timeline.num_later_tokens = len(sequence.token_ids) - 1
        for tokens in updates:
            self._outbox.put(self._first_choice + sequence.index, tokens, now)
            if tokens.finish_reason is not None:
                timeline.finish_reasons.append(tokens.finish_reason)
