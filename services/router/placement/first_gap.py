"""How long the second token of a handed-over stream takes, and how long its first is held back for it. Pure.

The first comes from prefill; the second waits for the rest of the transfer, of the decode instance's running step and
of one launched ahead, and for its own: two to three times as long as later ones. A stream that was promised a time
between tokens keeps it here too if its first token goes out later by what that is too long: docs/adr/0012.
"""

from collections import deque

MAX_GAP_SAMPLES = 64
"""Handoffs that are remembered of a decode instance."""
GAP_QUANTILE = 0.95
"""Of the remembered gaps, so many are no longer than what is expected."""
MIN_GAP_SAMPLES = 8
MIN_GAP_STEPS = 3.0
"""Steps of the decode instance that a first gap is taken to last at least, while fewer than `MIN_GAP_SAMPLES` were
seen."""
FIRST_GAP_ITL_RATIO = 0.75
"""Part of the promised time that the first gap may fill: what is expected is exceeded now and then."""
HELD_TTFT_RATIO = 0.9
"""Part of the time to the first token that may be over when it goes out."""


class FirstGapQuantile:
    """Of one decode instance: from a first token's arrival at the router to the second's, held back or not."""

    __slots__ = ("_expected_s", "_recent")

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=MAX_GAP_SAMPLES)
        self._expected_s = 0.0

    def observe(self, gap_s: float) -> None:
        self._recent.append(gap_s)
        ordered = sorted(self._recent)
        self._expected_s = ordered[min(len(ordered) - 1, int(GAP_QUANTILE * len(ordered)))]

    def expected_s(self, step_s: float) -> float:
        """`step_s`: of a decode step there; 0: not known."""
        return (
            self._expected_s if len(self._recent) >= MIN_GAP_SAMPLES else max(self._expected_s, MIN_GAP_STEPS * step_s)
        )


def first_token_hold_s(expected_s: float, *, itl_s: float, max_itls: float, ttft_budget_s: float) -> float:
    """For a stream that was promised `itl_s` between tokens: at most `max_itls` times that, and no longer than
    `ttft_budget_s`, what is left of its time to the first token."""
    return max(0.0, min(expected_s - FIRST_GAP_ITL_RATIO * itl_s, max_itls * itl_s, ttft_budget_s))


def ttft_budget_s(ttft_s: float | None, waited_s: float) -> float:
    """Of an objective for the first token, after `waited_s`; inf without one."""
    return float("inf") if ttft_s is None else HELD_TTFT_RATIO * ttft_s - waited_s
