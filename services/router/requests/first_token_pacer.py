"""Holds back first tokens so that the ITL SLO is kept after a handoff; how long is decided in
`placement/decode_times.py`.

After a handoff the gap between first and second token is longer than later ones. If the request has an ITL SLO, its
first token is held back for a moment, so that the second one follows in time (docs/adr/0012-first-token-held.md). The
token is sent when its time is over, when the second one arrives, or when the request fails or is replayed. It is
discarded only if the request ends without a client that would read it.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from baton_serve.services.router.placement.decode_times import first_token_hold_s, ttft_budget_s
from baton_serve.services.router.protocol.errors import ApiError
from baton_serve.services.router.requests.attempt import Attempt
from baton_serve.services.router.requests.prompt_request import RequestPolicy, RequestTiming
from baton_serve.services.router.requests.timeline import Timeline
from baton_serve.services.router.requests.token_queue import TokenQueue
from baton_serve.services.router.text.token_sequence import TokenSequence, TokenUpdate


@dataclass(frozen=True, slots=True)
class _Held:
    """The first token of a sequence that is held back, and the timer that sends it to the client later."""

    sequence: TokenSequence
    tokens: TokenUpdate
    arrived_at: float
    timer: asyncio.TimerHandle


class FirstTokenPacer:
    """Passes the tokens of all sequences of one request to its `TokenQueue`. A `RequestLifecycle` owns it.

    With an ITL SLO it holds back the first token of a sequence for a moment, so that the gap before the second one is
    not too long.

    `first_choice` is the index, in the API call's answer, of the request's first sequence. Times are those of the
    router's monotonic clock, in seconds.
    """

    __slots__ = ("_clock", "_first_choice", "_held", "_policy", "_timeline", "_timing", "_token_queue")

    def __init__(
        self,
        token_queue: TokenQueue,
        timeline: Timeline,
        timing: RequestTiming,
        policy: RequestPolicy,
        *,
        first_choice: int,
        clock: Callable[[], float],
    ) -> None:
        self._token_queue = token_queue
        self._timeline = timeline
        self._first_choice = first_choice
        self._timing = timing
        self._policy = policy
        self._clock = clock
        self._held: dict[int, _Held] = {}

    def put(self, sequence: TokenSequence, updates: Sequence[TokenUpdate], now: float) -> None:
        """Put new tokens of a sequence into the request's `TokenQueue`, after its first token if that is still held
        back. They arrived at `now`.
        """
        if self._held:
            self._flush_sequence(sequence.index)
        self._deliver(sequence, updates, now)

    def put_first_token(
        self, attempt: Attempt, sequence: TokenSequence, updates: Sequence[TokenUpdate], now: float
    ) -> None:
        """Put the first token of a sequence, which came from a prefill worker, into the request's `TokenQueue`, or hold
        it back if the second token is expected late.
        """
        # With more than one update the second token is here already, and a finished sequence has no second one.
        if attempt.decode is not None and len(updates) == 1 and not sequence.is_finished:
            attempt.first_token_at[sequence.index] = now
            for_s = self._hold_s(attempt, now)
            if for_s > 0:
                timer = asyncio.get_running_loop().call_later(for_s, partial(self._flush_sequence, sequence.index))
                self._held[sequence.index] = _Held(sequence, updates[0], now, timer)
                return
        self.put(sequence, updates, now)

    def fail(self, error: ApiError) -> None:
        """Put the tokens that are held back into the request's `TokenQueue`, and after them `error`, which ends it."""
        self.flush()
        self._token_queue.fail(error)

    def flush(self) -> None:
        """Put the first tokens of all sequences that are held back into the request's `TokenQueue`."""
        for index in list(self._held):
            self._flush_sequence(index)

    def discard(self) -> None:
        """Drop all tokens that are held back, because the request has ended."""
        for held in self._held.values():
            held.timer.cancel()
        self._held.clear()

    def _hold_s(self, attempt: Attempt, now: float) -> float:
        """Return for how many seconds to hold back a first token that arrived at `now`; 0 if the client gets it
        immediately.
        """
        slo = self._timing.slo
        # `position` is not 0 in a replay of a stream that has begun: its client has waited long enough already.
        if slo.itl_s is None or attempt.decode is None or attempt.position:
            return 0.0
        return first_token_hold_s(
            attempt.decode.first_gap_s(),
            itl_s=slo.itl_s,
            max_itls=self._policy.first_token_hold,
            ttft_budget_s=ttft_budget_s(slo.ttft_s, now - self._timing.at),
        )

    def _flush_sequence(self, index: int) -> None:
        """Put the first token of the sequence with this index into the request's `TokenQueue`, if it is held back."""
        held = self._held.pop(index, None)
        if held is None:
            return
        held.timer.cancel()
        now = self._clock()
        self._timeline.held_s = max(self._timeline.held_s, now - held.arrived_at)
        self._deliver(held.sequence, [held.tokens], now)

    def _deliver(self, sequence: TokenSequence, updates: Sequence[TokenUpdate], now: float) -> None:
        """Put tokens of a sequence into the request's `TokenQueue`, and record `now` in the timeline as the time when
        the client gets them.
        """
        timeline = self._timeline
        timeline.last_token_at = now
        if timeline.first_token_at is None:
            timeline.first_token_at = now
        if len(sequence.token_ids) > timeline.num_later_tokens + 1:
            timeline.num_later_tokens = len(sequence.token_ids) - 1
        for tokens in updates:
            self._token_queue.put(self._first_choice + sequence.index, tokens, now)
            if tokens.finish_reason is not None:
                timeline.finish_reasons.append(tokens.finish_reason)
