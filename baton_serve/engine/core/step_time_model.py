"""How long steps take, and how many tokens of prompts one may hold so that those who write beside them get their next
tokens in time. Pure: durations are passed in.

What is learned of steps with prompts is by how much they are longer than steps without, by their number of tokens. It
rises quickly and falls slowly: a promise is broken by the long steps, not by the mean.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

SIZES = (16, 32, 64, 128, 192, 256, 320, 384, 512, 640, 768, 896, 1024)
"""Tokens of steps that are captured as graphs, fine where padding would cost most. Products of 448 rows take longer
than those of 512: docs/experiments.md."""
CLASSES = (*SIZES, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384)
"""Steps of up to so many tokens are taken to be equally long."""
LEAST = 16
"""Tokens of prompts that a step may always hold, and what is then left of its class: no prompt waits for ever."""
DECODE_STRETCH = 2.0
"""`Pace.stretch` of decode instances: they compute prompts where nobody else can."""
HEADROOM, DELIVERY_S = 0.85, 0.003
"""Part of a promised time that a step may fill, and what is left at least: a token still has to reach its client, past
arrivals of others. On two H200 that made 1.7 to 3.4 ms of the 99th percentile at 34 to 40 requests/s."""
WEIGHT = 0.1
"""Of the newest step in moving averages."""
RISING, FALLING = 0.3, 0.03
"""The same where a step with prompts was longer or shorter than was expected."""
FULL = 0.9
"""A step with less of the tokens of its class teaches only that the class takes longer than was expected."""
OUTLIER = 1.5
"""One step counts for at most so many times the time that was expected of it."""
TELLING = 256
"""Tokens of prompts in a step whose speed is believed rather than the warm-up's."""
TELLING_TOGETHER = 16 * TELLING
"""In shorter steps, as beside those who write: their mean is then believed."""
FADING = 0.9998
"""Of what was learned, with each step without prompts: a size that was once too slow is tried again after a while."""


@dataclass(slots=True)
class Pace:
    prefill_tokens_per_s: float = 0.0
    decode_step_s: float = 0.0
    """Of a step without prompts."""
    stretch: float = inf
    """So many times as long as a step without prompts may be one beside sequences that were promised nothing."""
    is_guess: bool = False
    """The rate is the warm-up's, which other processes may have slowed down by any factor."""
    _told: int = 0
    """Tokens of prompts since the warm-up."""
    _longer_s: dict[int, float] = field(default_factory=dict)
    """By class."""

    def decoded(self, seconds: float) -> None:
        """A step without prompts took so long."""
        self.decode_step_s = _blend(self.decode_step_s, seconds)
        for size in self._longer_s:
            self._longer_s[size] *= FADING

    def computed(self, num_prompt_tokens: int, seconds: float) -> None:
        """A step with so many tokens of prompts, whatever else was in it."""
        if num_prompt_tokens >= 32:
            rate = num_prompt_tokens / max(seconds, 1e-9)
            is_first = self.is_guess and num_prompt_tokens >= TELLING
            self._told += num_prompt_tokens
            self.is_guess = self.is_guess and not is_first and self._told < TELLING_TOGETHER
            self.prefill_tokens_per_s = rate if is_first else _blend(self.prefill_tokens_per_s, rate)

    def mixed(self, num_prompt_tokens: int, num_writers: int, seconds: float) -> None:
        """A step of so many tokens of prompts, and of sequences that write one each, took so long."""
        if not self.decode_step_s:
            return
        num_tokens = num_prompt_tokens + num_writers
        size = class_of(num_tokens)
        expected_s = self._expected(num_writers)[size]
        seconds = min(seconds, OUTLIER * (self.decode_step_s + expected_s))
        longer_s = max(0.0, seconds - self.decode_step_s)
        if num_tokens < FULL * size and longer_s <= expected_s:
            return
        if size not in self._longer_s:
            self._longer_s[size] = longer_s
        else:
            weight = RISING if longer_s > expected_s else FALLING
            self._longer_s[size] = expected_s + weight * (longer_s - expected_s)

    def room(self, promises_s: Sequence[float | None]) -> int | None:
        """Tokens of prompts that a step may hold beside sequences with these promised times between tokens, one each.
        None: as many as there are."""
        fitting = self._fitting(promises_s)
        if fitting is None:
            return None
        return max(fitting, class_of(len(promises_s) + LEAST)) - len(promises_s)

    def keeps(self, promises_s: Sequence[float | None]) -> bool:
        """Whether steps with what they may always hold of prompts are as short as these promises say."""
        fitting = self._fitting(promises_s)
        return fitting is None or fitting >= class_of(len(promises_s) + LEAST)

    def _fitting(self, promises_s: Sequence[float | None]) -> int | None:
        """The largest class that these promises allow; None: any."""
        unpromised_s = self.stretch * self.decode_step_s
        allowed = [unpromised_s if promise_s is None else step_within(promise_s) for promise_s in promises_s]
        spare_s = min(allowed, default=inf) - self.decode_step_s
        if spare_s == inf or not self.decode_step_s:
            return None
        return max([size for size, by_s in self._expected(len(promises_s)).items() if by_s <= spare_s], default=0)

    def tokens_per_s(self, num_prompt_tokens: int, num_writers: int) -> float:
        """Of prompts, in steps that hold so many of their tokens beside so many sequences that write."""
        longer_s = self._expected(num_writers)[class_of(num_prompt_tokens + num_writers)]
        return num_prompt_tokens / max(1e-9, self.decode_step_s + longer_s)

    def _expected(self, num_writers: int) -> dict[int, float]:
        """Of each class, by how much a step with prompts is longer. What was not seen is as slow as prompts alone after
        the nearest smaller one that was, or after those who write, but no slower than a larger one."""
        rate, known = self.prefill_tokens_per_s, self._longer_s
        larger, larger_s = dict[int, float](), inf
        for size in reversed(CLASSES):
            larger[size] = larger_s
            larger_s = min(larger_s, known.get(size, inf))
        found: dict[int, float] = {}
        below, below_s = num_writers, 0.0
        for size in CLASSES:
            alone_s = max(0, size - below) / rate if rate else inf
            found[size] = below_s = known[size] if size in known else min(below_s + alone_s, larger[size])
            below = max(below, size)
        return found


def step_within(promise_s: float) -> float:
    """How long steps may be for a token to reach its client in this time after the one before."""
    return min(HEADROOM * promise_s, promise_s - DELIVERY_S)


def class_of(num_tokens: int) -> int:
    return CLASSES[min(bisect_left(CLASSES, num_tokens), len(CLASSES) - 1)]


def _blend(old: float, new: float) -> float:
    return new if old == 0.0 else (1 - WEIGHT) * old + WEIGHT * new
