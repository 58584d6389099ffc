"""How long steps take, and how many tokens of prompts one may hold so that those who write beside them get their next
tokens in time. Pure: durations are passed in.

What is learned of steps with prompts is by how much they are longer than steps without, by their number of tokens. It
rises quickly and falls slowly: a promise is broken by the long steps, not by the mean.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

GRAPH_SIZES_TOKENS = (16, 32, 64, 128, 192, 256, 320, 384, 512, 640, 768, 896, 1024)
"""Tokens of steps that are captured as graphs, fine where padding would cost most. Products of 448 rows take longer
than those of 512: docs/log/gpu-engine.md."""
SIZE_CLASSES_TOKENS = (*GRAPH_SIZES_TOKENS, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384)
"""Steps of up to so many tokens are taken to be equally long."""
MIN_PROMPT_TOKENS = 16
"""Tokens of prompts that a step may always hold, and what is then left of its class: no prompt waits for ever."""
DECODE_MAX_STRETCH = 2.0
"""`StepTimeModel.max_stretch` of decode instances: they compute prompts where nobody else can."""
MAX_ITL_SLO_RATIO, TOKEN_DELIVERY_S = 0.85, 0.003
"""Part of a promised time that a step may fill, and what is left at least: a token still has to reach its client, past
arrivals of others. On two H200 that made 1.7 to 3.4 ms of the 99th percentile at 34 to 40 requests/s."""
EMA_WEIGHT = 0.1
"""Of the newest step in moving averages."""
EMA_WEIGHT_IF_SLOWER, EMA_WEIGHT_IF_FASTER = 0.3, 0.03
"""The same where a step with prompts was longer or shorter than was expected."""
MIN_FILL_RATIO = 0.9
"""A step with less of the tokens of its class teaches only that the class takes longer than was expected."""
MAX_STEP_TIME_RATIO = 1.5
"""One step counts for at most so many times the time that was expected of it."""
MIN_MEASURED_TOKENS = 256
"""Tokens of prompts in a step whose speed is believed rather than the warm-up's."""
MIN_MEASURED_TOKENS_IN_ALL = 16 * MIN_MEASURED_TOKENS
"""In shorter steps, as beside those who write: their mean is then believed."""
DECAY_PER_DECODE_STEP = 0.9998
"""Of what was learned, with each step without prompts: a size that was once too slow is tried again after a while."""


@dataclass(slots=True)
class StepTimeModel:
    prefill_tokens_per_s: float = 0.0
    decode_step_s: float = 0.0
    """Of a step without prompts."""
    max_stretch: float = inf
    """So many times as long as a step without prompts may be one beside sequences that were promised nothing."""
    is_warm_up_estimate: bool = False
    """The rate is the warm-up's, which other processes may have slowed down by any factor."""
    _num_measured_prompt_tokens: int = 0
    """Tokens of prompts since the warm-up."""
    _extra_s: dict[int, float] = field(default_factory=dict)
    """By class."""

    def decoded(self, seconds: float) -> None:
        """A step without prompts took so long."""
        self.decode_step_s = _blend(self.decode_step_s, seconds)
        for size in self._extra_s:
            self._extra_s[size] *= DECAY_PER_DECODE_STEP

    def computed(self, num_prompt_tokens: int, seconds: float) -> None:
        """A step with so many tokens of prompts, whatever else was in it."""
        if num_prompt_tokens >= 32:
            rate = num_prompt_tokens / max(seconds, 1e-9)
            is_first = self.is_warm_up_estimate and num_prompt_tokens >= MIN_MEASURED_TOKENS
            self._num_measured_prompt_tokens += num_prompt_tokens
            self.is_warm_up_estimate = (
                self.is_warm_up_estimate
                and not is_first
                and self._num_measured_prompt_tokens < MIN_MEASURED_TOKENS_IN_ALL
            )
            self.prefill_tokens_per_s = rate if is_first else _blend(self.prefill_tokens_per_s, rate)

    def mixed(self, num_prompt_tokens: int, num_decoding: int, seconds: float) -> None:
        """A step of so many tokens of prompts, and of sequences that write one each, took so long."""
        if not self.decode_step_s:
            return
        num_tokens = num_prompt_tokens + num_decoding
        size = size_class(num_tokens)
        expected_s = self._expected_extra_s(num_decoding)[size]
        seconds = min(seconds, MAX_STEP_TIME_RATIO * (self.decode_step_s + expected_s))
        extra_s = max(0.0, seconds - self.decode_step_s)
        if num_tokens < MIN_FILL_RATIO * size and extra_s <= expected_s:
            return
        if size not in self._extra_s:
            self._extra_s[size] = extra_s
        else:
            weight = EMA_WEIGHT_IF_SLOWER if extra_s > expected_s else EMA_WEIGHT_IF_FASTER
            self._extra_s[size] = expected_s + weight * (extra_s - expected_s)

    def chunk_budget(self, itl_slos_s: Sequence[float | None]) -> int | None:
        """Tokens of prompts that a step may hold beside sequences with these promised times between tokens, one each.
        None: as many as there are."""
        fitting = self._largest_fitting_size(itl_slos_s)
        if fitting is None:
            return None
        return max(fitting, size_class(len(itl_slos_s) + MIN_PROMPT_TOKENS)) - len(itl_slos_s)

    def meets_itl_slos(self, itl_slos_s: Sequence[float | None]) -> bool:
        """Whether steps with what they may always hold of prompts are as short as these promises say."""
        fitting = self._largest_fitting_size(itl_slos_s)
        return fitting is None or fitting >= size_class(len(itl_slos_s) + MIN_PROMPT_TOKENS)

    def _largest_fitting_size(self, itl_slos_s: Sequence[float | None]) -> int | None:
        """The largest class that these promises allow; None: any."""
        default_limit_s = self.max_stretch * self.decode_step_s
        allowed = [default_limit_s if itl_slo_s is None else max_step_s(itl_slo_s) for itl_slo_s in itl_slos_s]
        spare_s = min(allowed, default=inf) - self.decode_step_s
        if spare_s == inf or not self.decode_step_s:
            return None
        return max(
            [size for size, by_s in self._expected_extra_s(len(itl_slos_s)).items() if by_s <= spare_s], default=0
        )

    def tokens_per_s(self, num_prompt_tokens: int, num_decoding: int) -> float:
        """Of prompts, in steps that hold so many of their tokens beside so many sequences that write."""
        extra_s = self._expected_extra_s(num_decoding)[size_class(num_prompt_tokens + num_decoding)]
        return num_prompt_tokens / max(1e-9, self.decode_step_s + extra_s)

    def _expected_extra_s(self, num_decoding: int) -> dict[int, float]:
        """Of each class, by how much a step with prompts is longer. What was not seen is as slow as prompts alone after
        the nearest smaller one that was, or after those who write, but no slower than a larger one."""
        rate, known = self.prefill_tokens_per_s, self._extra_s
        larger, larger_s = dict[int, float](), inf
        for size in reversed(SIZE_CLASSES_TOKENS):
            larger[size] = larger_s
            larger_s = min(larger_s, known.get(size, inf))
        found: dict[int, float] = {}
        below, below_s = num_decoding, 0.0
        for size in SIZE_CLASSES_TOKENS:
            alone_s = max(0, size - below) / rate if rate else inf
            found[size] = below_s = known[size] if size in known else min(below_s + alone_s, larger[size])
            below = max(below, size)
        return found


def max_step_s(itl_slo_s: float) -> float:
    """How long steps may be for a token to reach its client in this time after the one before."""
    return min(MAX_ITL_SLO_RATIO * itl_slo_s, itl_slo_s - TOKEN_DELIVERY_S)


def size_class(num_tokens: int) -> int:
    return SIZE_CLASSES_TOKENS[min(bisect_left(SIZE_CLASSES_TOKENS, num_tokens), len(SIZE_CLASSES_TOKENS) - 1)]


def _blend(old: float, new: float) -> float:
    return new if old == 0.0 else (1 - EMA_WEIGHT) * old + EMA_WEIGHT * new
