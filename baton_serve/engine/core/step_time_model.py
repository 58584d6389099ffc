"""Predicts how long steps take, and so how many prompt tokens (chunked prefill) fit beside decoding sequences with ITL
SLOs.

Pure: durations are passed in. The model learns, for each size class of steps, by how much a step with prompts takes
longer than a step without. An estimate rises quickly and falls slowly, because the slow steps violate an SLO, not the
average ones.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

GRAPH_SIZES_TOKENS = (16, 32, 64, 128, 192, 256, 320, 384, 512, 640, 768, 896, 1024)
"""Sizes of steps that are captured as graphs, in tokens; denser where padding costs most. 448 is left out because its
products take longer than those of 512 (docs/log/gpu-engine.md)."""
SIZE_CLASSES_TOKENS = (*GRAPH_SIZES_TOKENS, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384)
"""Upper bounds of the size classes, in tokens. Steps of one class are assumed to take equally long."""
MIN_PROMPT_TOKENS = 16
"""Minimum prompt tokens that a step may always have, rounded up to its size class, so that no prompt waits for ever."""
DECODE_MAX_STRETCH = 2.0
"""`StepTimeModel.max_stretch` of decode instances, where decoding has priority over the few prompts."""
MAX_ITL_SLO_RATIO, TOKEN_DELIVERY_S = 0.85, 0.003
"""Largest fraction of an ITL SLO that a step may take, and the minimum time in seconds that remains for the delivery of
the token to the client. On two H200, delivery accounted for 1.7 to 3.4 ms of the 99th percentile at 34 to 40
requests/s."""
EMA_WEIGHT = 0.1
"""Weight of the newest step in moving averages of all rates and durations."""
EMA_WEIGHT_IF_SLOWER, EMA_WEIGHT_IF_FASTER = 0.3, 0.03
"""Weight of the newest step with prompts if it took longer or shorter than expected, respectively."""
MIN_FILL_RATIO = 0.9
"""Smallest fraction of its class's tokens for which a faster step lowers the estimate of the class. A smaller step says
little about a full one, unless it was slower than expected."""
MAX_STEP_TIME_RATIO = 1.5
"""Upper bound of a step's duration, as a multiple of the expected one, so that a single outlier has little effect."""
MIN_MEASURED_TOKENS = 256
"""Prompt tokens in one step from which on its rate replaces the warm-up's estimate."""
MIN_MEASURED_TOKENS_IN_ALL = 16 * MIN_MEASURED_TOKENS
"""Prompt tokens in all steps since the warm-up from which on the average replaces the warm-up's estimate. For instances
that compute prompts only in small chunks beside decoding sequences."""
DECAY_PER_DECODE_STEP = 0.9998
"""Factor applied to all learned durations at each step without prompts, so that a size that was too slow once is tried
again after a while."""


@dataclass(slots=True)
class StepTimeModel:
    """Learns how long the steps of an engine take, to predict how many prompt tokens a step may have without violating
    the ITL SLOs of decoding sequences. The engine reports each step to it. Only the engine's thread may call it."""

    prefill_tokens_per_s: float = 0.0
    decode_step_s: float = 0.0
    """Duration of a step without prompts in seconds (moving average)."""
    max_stretch: float = inf
    """Longest duration of a step with prompts, as a multiple of a decode-only step. It protects decoding sequences that
    have no ITL SLO."""
    is_warm_up_estimate: bool = False
    """Whether `prefill_tokens_per_s` comes from the warm-up, which other processes on the host may have slowed down."""
    _num_measured_prompt_tokens: int = 0
    """Prompt tokens computed since the warm-up."""
    _extra_s: dict[int, float] = field(default_factory=dict)
    """Learned additional seconds of a step with prompts, by size class."""

    def decoded(self, seconds: float) -> None:
        """Record that a step without prompt tokens took `seconds`."""
        self.decode_step_s = _blend(self.decode_step_s, seconds)
        for size in self._extra_s:
            self._extra_s[size] *= DECAY_PER_DECODE_STEP

    def computed(self, num_prompt_tokens: int, seconds: float) -> None:
        """Update the prefill rate with a step that computed `num_prompt_tokens` prompt tokens in `seconds`.

        Decoding sequences in the step are not counted: their share of its time is small.
        """
        # In smaller steps the fixed cost of a step dominates, and the rate would look too low.
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
        """Record that a step with this many prompt tokens and decoding sequences took `seconds`."""
        # Without a decode-only step the additional time is unknown.
        if not self.decode_step_s:
            return
        num_tokens = num_prompt_tokens + num_decoding
        size = size_class(num_tokens)
        expected_s = self._expected_extra_s(num_decoding)[size]
        seconds = min(seconds, MAX_STEP_TIME_RATIO * (self.decode_step_s + expected_s))
        extra_s = max(0.0, seconds - self.decode_step_s)
        # A partly filled class may be fast because it has fewer tokens.
        if num_tokens < MIN_FILL_RATIO * size and extra_s <= expected_s:
            return
        if size not in self._extra_s:
            self._extra_s[size] = extra_s
        else:
            weight = EMA_WEIGHT_IF_SLOWER if extra_s > expected_s else EMA_WEIGHT_IF_FASTER
            self._extra_s[size] = expected_s + weight * (extra_s - expected_s)

    def chunk_budget(self, itl_slos_s: Sequence[float | None]) -> int | None:
        """Return how many prompt tokens a step may have beside decoding sequences with these ITL SLOs in seconds. None
        in the list: the sequence has no SLO, and the step may take `max_stretch` times as long as a step without
        prompts.

        The result is None if the SLOs do not limit the number.
        """
        fitting = self._largest_fitting_size(itl_slos_s)
        if fitting is None:
            return None
        # Always leave room for MIN_PROMPT_TOKENS, even if the SLOs are violated then.
        return max(fitting, size_class(len(itl_slos_s) + MIN_PROMPT_TOKENS)) - len(itl_slos_s)

    def meets_itl_slos(self, itl_slos_s: Sequence[float | None]) -> bool:
        """Return whether steps with the smallest allowed number of prompt tokens are short enough for these ITL SLOs,
        in seconds (None: no SLO)."""
        fitting = self._largest_fitting_size(itl_slos_s)
        return fitting is None or fitting >= size_class(len(itl_slos_s) + MIN_PROMPT_TOKENS)

    def _largest_fitting_size(self, itl_slos_s: Sequence[float | None]) -> int | None:
        """Return the largest number of tokens of a step, among the fixed size classes, with which the step is expected
        to meet these ITL SLOs (seconds); 0 if no class does, or None if all do."""
        default_limit_s = self.max_stretch * self.decode_step_s
        allowed_s = [default_limit_s if itl_slo_s is None else max_step_s(itl_slo_s) for itl_slo_s in itl_slos_s]
        # All sequences of a step wait for the same step, so the strictest SLO decides.
        spare_s = min(allowed_s, default=inf) - self.decode_step_s
        if spare_s == inf or not self.decode_step_s:
            return None
        return max(
            [size for size, by_s in self._expected_extra_s(len(itl_slos_s)).items() if by_s <= spare_s], default=0
        )

    def tokens_per_s(self, num_prompt_tokens: int, num_decoding: int) -> float:
        """Return how many prompt tokens per second are computed by steps with this many prompt tokens and decoding
        sequences."""
        extra_s = self._expected_extra_s(num_decoding)[size_class(num_prompt_tokens + num_decoding)]
        return num_prompt_tokens / max(1e-9, self.decode_step_s + extra_s)

    def _expected_extra_s(self, num_decoding: int) -> dict[int, float]:
        """Return, by the number of tokens of a step (its size class), how many seconds longer a step with prompt tokens
        is expected to take than a step without.

        A class that was never measured is extrapolated from the next smaller measured one (or from the decoding
        sequences alone) with the prefill rate, but it is never slower than a larger measured class.
        """
        rate, known = self.prefill_tokens_per_s, self._extra_s
        larger, larger_s = dict[int, float](), inf
        # `larger[size]`: the smallest measured time of all larger classes.
        for size in reversed(SIZE_CLASSES_TOKENS):
            larger[size] = larger_s
            larger_s = min(larger_s, known.get(size, inf))
        found: dict[int, float] = {}
        below, below_s = num_decoding, 0.0
        for size in SIZE_CLASSES_TOKENS:
            # Pessimistic: the tokens are counted as if they were computed in a step of their own. Without a rate the
            # class counts as too slow.
            alone_s = max(0, size - below) / rate if rate else inf
            found[size] = below_s = known[size] if size in known else min(below_s + alone_s, larger[size])
            below = max(below, size)
        return found


def max_step_s(itl_slo_s: float) -> float:
    """Return how many seconds a step may take, so that a client receives its next token within `itl_slo_s` seconds."""
    return min(MAX_ITL_SLO_RATIO * itl_slo_s, itl_slo_s - TOKEN_DELIVERY_S)


def size_class(num_tokens: int) -> int:
    """Return the size class of a step that computes `num_tokens` tokens: the smallest of the fixed sizes that is not
    smaller, or the largest size if the step has even more tokens."""
    return SIZE_CLASSES_TOKENS[min(bisect_left(SIZE_CLASSES_TOKENS, num_tokens), len(SIZE_CLASSES_TOKENS) - 1)]


def _blend(old: float, new: float) -> float:
    """Return the moving average `old` after a further value `new`. The first value replaces an `old` of 0."""
    return new if old == 0.0 else (1 - EMA_WEIGHT) * old + EMA_WEIGHT * new
