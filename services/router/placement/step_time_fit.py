"""How long a decode step of one instance takes with a given number of sequences: learned from its load reports. Pure.

A line through (running sequences, duration), fitted by least squares whose old points fade. One point, the instance's
own warm-up, gives a flat line.
"""

from dataclasses import dataclass

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
