"""Predicts a decode instance's step time, and decides how long a first token is held back for the ITL SLO. Pure.

`StepTimeFit` fits a line through (running sequences, step duration) by least squares, with the weight of old points
decaying. `FirstGapQuantile` and the functions below it decide how long the router holds back a first token so that the
second one follows within the ITL SLO (docs/adr/0012-first-token-held.md).
"""

from collections import deque
from dataclasses import dataclass

MAX_GAP_SAMPLES = 64
"""Number of recent handoffs per decode instance from which the first gap is estimated."""
GAP_QUANTILE = 0.95
"""Quantile of the recent first gaps that is used as the expected one."""
MIN_GAP_SAMPLES = 8
MIN_GAP_STEPS = 3.0
"""Lower bound of the expected first gap, in decode steps, until `MIN_GAP_SAMPLES` gaps have been measured.

A handed-off sequence waits for the running step and for the one launched ahead, and needs one step of its own.
"""
FIRST_GAP_ITL_RATIO = 0.75
"""Part of the ITL SLO that the expected first gap may fill. The margin is for gaps that are longer than expected."""
HELD_TTFT_RATIO = 0.9
"""Part of the TTFT SLO that may have passed when a first token that was held back is sent."""


class FirstGapQuantile:
    """Estimates, for one decode instance, the time between the first two tokens of a sequence whose KV blocks were
    handed off to it. The time is measured when the tokens arrive in the router, so that holding back the first token
    does not change it.
    """

    __slots__ = ("_expected_s", "_recent")

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=MAX_GAP_SAMPLES)
        self._expected_s = 0.0

    def observe(self, gap_s: float) -> None:
        """Add a measured time between the first two tokens of a sequence, in seconds."""
        self._recent.append(gap_s)
        ordered = sorted(self._recent)
        self._expected_s = ordered[min(len(ordered) - 1, int(GAP_QUANTILE * len(ordered)))]

    def expected_s(self, step_s: float) -> float:
        """Return the expected time between the first two tokens in seconds. `step_s` is the duration of a decode step,
        0 if unknown.
        """
        return (
            self._expected_s if len(self._recent) >= MIN_GAP_SAMPLES else max(self._expected_s, MIN_GAP_STEPS * step_s)
        )


def first_token_hold_s(expected_s: float, *, itl_s: float, max_itls: float, ttft_budget_s: float) -> float:
    """Return for how many seconds to hold back a first token; 0 if it should be sent immediately.

    Holding it shortens the gap before the second token, predicted as `expected_s`, to a part of the ITL SLO `itl_s`.
    The result is at most `max_itls` times that SLO, and at most `ttft_budget_s`, the time left within the TTFT SLO.
    """
    return max(0.0, min(expected_s - FIRST_GAP_ITL_RATIO * itl_s, max_itls * itl_s, ttft_budget_s))


def ttft_budget_s(ttft_s: float | None, waited_s: float) -> float:
    """Return for how many seconds a first token may still be held back without missing the TTFT SLO `ttft_s`; inf
    without such an SLO. `waited_s` is the time since the request's arrival.

    The result is negative if the SLO is already nearly used up.
    """
    return float("inf") if ttft_s is None else HELD_TTFT_RATIO * ttft_s - waited_s


_DECAY = 0.98
"""Factor by which the weight of earlier points shrinks with each new point."""
_MIN_COUNT_VARIANCE = 0.25
"""Variance of the number of running sequences below which the slope cannot be distinguished from noise."""


@dataclass(slots=True)
class StepTimeFit:
    """Predicts the duration of an instance's decode step from the number of running sequences, by a fitted line.

    The private fields are weighted sums of the measured points, as least squares needs them.
    """

    _weight: float = 0.0
    _x: float = 0.0
    _y: float = 0.0
    _xx: float = 0.0
    _xy: float = 0.0
    _mean_x: float = 0.0
    _mean_y: float = 0.0
    _slope: float = 0.0

    def observe(self, running: int, step_s: float) -> None:
        """Add a measured point from a load report: with `running` sequences a decode step took `step_s` seconds.

        Ignore points without a measured duration, and points without running sequences other than the first one.
        """
        # An idle instance repeats its last measured duration, which says nothing about a step without sequences. The
        # first report is used all the same: before any work the duration comes from the instance's warm-up.
        if step_s <= 0 or (self._weight and not running):
            return
        self._weight = self._weight * _DECAY + 1.0
        self._x = self._x * _DECAY + running
        self._y = self._y * _DECAY + step_s
        self._xx = self._xx * _DECAY + running * running
        self._xy = self._xy * _DECAY + running * step_s
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - mean_x * mean_x
        # A step never gets shorter with more sequences: a negative slope is noise.
        self._slope = (
            max(0.0, (self._xy / self._weight - mean_x * mean_y) / spread) if spread > _MIN_COUNT_VARIANCE else 0.0
        )
        self._mean_x, self._mean_y = mean_x, mean_y

    def predict(self, running: int) -> float:
        """Return the predicted duration of a decode step with `running` sequences in seconds, or 0 if nothing was
        measured yet.
        """
        return max(0.0, self._mean_y + self._slope * (running - self._mean_x))
