"""How long a decode step of one instance takes with a given number of sequences: learned from its load reports. Pure.

A line through (running sequences, duration), fitted by least squares whose old points fade. One point, the instance's
own warm-up, gives a flat line.
"""

from collections import deque
from dataclasses import dataclass

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


_DECAY = 0.98
_MIN_COUNT_VARIANCE = 0.25
"""Variance of the counts below which no slope can be told from noise."""


@dataclass(slots=True)
class StepTimeFit:
    _weight: float = 0.0
    _x: float = 0.0
    _y: float = 0.0
    _xx: float = 0.0
    _xy: float = 0.0
    _mean_x: float = 0.0
    _mean_y: float = 0.0
    _slope: float = 0.0

    def observe(self, running: int, step_s: float) -> None:
        """Nothing running or nothing measured teaches nothing, except the first time."""
        if step_s <= 0 or (self._weight and not running):
            return
        self._weight = self._weight * _DECAY + 1.0
        self._x = self._x * _DECAY + running
        self._y = self._y * _DECAY + step_s
        self._xx = self._xx * _DECAY + running * running
        self._xy = self._xy * _DECAY + running * step_s
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - mean_x * mean_x
        self._slope = (
            max(0.0, (self._xy / self._weight - mean_x * mean_y) / spread) if spread > _MIN_COUNT_VARIANCE else 0.0
        )
        self._mean_x, self._mean_y = mean_x, mean_y

    def predict(self, running: int) -> float:
        """Seconds; 0 when nothing is known."""
        return max(0.0, self._mean_y + self._slope * (running - self._mean_x))
