"""Search the number of prefill and decode instances: the smallest pools that meet the targets, or the best split of a
given number.

Each trial is a whole simulation, so that no trial runs twice.
"""

from collections.abc import Callable
from functools import partial

from baton_serve.bench.simulation.summary import Summary

Trial = Callable[[int, int], Summary]
"""Simulates a cluster with this number of prefill and decode instances."""
_COARSE = 8
"""Number of splits in the first pass of `best_split`."""
_MORE_PREFILLS = 3
"""How many prefill instances beyond the minimum are tried: they may save decode instances."""


class Trials:
    """Runs trials and remembers their results. `all` has them in the order in which they were requested."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self._known: dict[tuple[int, int], Summary] = {}

    @property
    def all(self) -> list[Summary]:
        return list(self._known.values())

    def __call__(self, prefill: int, decode: int) -> Summary:
        if (prefill, decode) not in self._known:
            self._known[prefill, decode] = self._trial(prefill, decode)
        return self._known[prefill, decode]


def best_split(trials: Trials, instances: int) -> Summary:
    """Return the split with the most goodput, then the lowest mean TTFT. Try all splits of few instances; of many, try
    some at equal distances and then those near the best one."""
    step = max(1, (instances - 1) // _COARSE)
    tried = range(1, instances, step)
    best = _best(trials, instances, tried)
    while step > 1:
        step //= 2
        around = [p for p in (best.prefill - step, best.prefill, best.prefill + step) if 0 < p < instances]
        best = _best(trials, instances, around)
    return best


def smallest_pools(trials: Trials, *, attainment: float, most: int) -> Summary | None:
    """Return the smallest pools for which the fraction `attainment` of the requests is good, or None if `most`
    instances of each role are not enough. First find the fewest prefill instances that meet the TTFT target, then the
    fewest decode instances that meet all targets; also try a few more prefill instances."""
    first = _fewest(lambda prefill: trials(prefill, most).ttft_attainment >= attainment, most)
    if first is None:
        return None
    found: list[Summary] = []
    for prefill in range(first, min(most, first + _MORE_PREFILLS) + 1):
        decode = _fewest(partial(_meets, trials, attainment, prefill), most)
        if decode is not None:
            found.append(trials(prefill, decode))
            if len(found) > 1 and _size(found[-1]) >= _size(found[-2]):
                break
    return min(found, key=_size, default=None)


def _meets(trials: Trials, attainment: float, prefill: int, decode: int) -> bool:
    return trials(prefill, decode).attainment >= attainment


def _size(summary: Summary) -> int:
    return summary.prefill + summary.decode


def _best(trials: Trials, instances: int, prefills: range | list[int]) -> Summary:
    return max(
        (trials(prefill, instances - prefill) for prefill in prefills),
        key=lambda summary: (summary.goodput_per_s, -summary.ttft.mean_ms),
    )


def _fewest(is_enough: Callable[[int], bool], most: int) -> int | None:
    """Return the smallest sufficient number, by doubling and then bisection. It assumes that more instances are never
    worse."""
    low, high = 0, 1
    while not is_enough(high):
        if high == most:
            return None
        low, high = high, min(most, high * 2)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high
