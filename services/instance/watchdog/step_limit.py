"""Decides how long a step of the engine may take before it counts as hung.

Pure: durations are passed in. The default limit comes from the durations of earlier steps of about the same size, so
that it fits a fast card and a slow CPU alike. The first step of a size gets more time: it may compile kernels, and
nothing is known about its duration.
"""

from dataclasses import dataclass, field
from math import inf

from baton_serve.engine.core.outputs import BatchSize
from baton_serve.engine.core.step_time_model import SIZE_CLASSES_TOKENS, size_class

MIN_LIMIT_S = 60.0
"""Smallest default limit, in seconds. Within a known size a kernel may still be compiled for another alignment of its
arguments, and other processes may take the CPU for a while."""
STEP_TIME_RATIO = 20.0
"""Default limit as a multiple of the longest recent step of the same size."""
FIRST_STEP_EXTRA_S = 120.0
"""Additional seconds of the default limit for the first step of a size."""
FIRST_STEP_RATIO = 5.0
"""The same as a multiple of the duration that the prefill rate predicts, if that is longer: a large model on a CPU
needs minutes for a full chunk."""
COMMAND_LIMIT_S = 600.0
"""Longest duration of the commands between two steps, in seconds; loading a LoRA adapter is the longest of them."""
DECAY_PER_STEP = 0.99
"""Factor applied to the longest duration of a size at each step of this size, so that one slow step does not make the
limit long for ever: it counts half after 69 steps."""

StepKind = tuple[int, bool]
"""Size class of a step in tokens, and whether it has prompt tokens. Steps of one kind take about equally long."""


@dataclass(slots=True)
class StepLimit:
    """Decides how long each step of one engine may take before it counts as hung.

    `setting_s` is `--engine-step-timeout-s`: None for a default from the durations of earlier steps, 0 for no limit,
    else the limit of every step in seconds.
    """

    setting_s: float | None = None
    prefill_tokens_per_s: float = 0.0
    """Prefill rate as the engine's statistics report it, at first from the warm-up; 0 if it is unknown."""
    _longest_s: dict[StepKind, float] = field(default_factory=dict)

    @property
    def is_off(self) -> bool:
        return self.setting_s == 0

    def step_s(self, batch: BatchSize) -> float:
        """Return how many seconds a step with the sequences and tokens of `batch` may take; infinity
        without a limit.
        """
        if self.setting_s is not None:
            return self.setting_s or inf
        longest_s = self._longest_s.get(step_kind(batch))
        return _limit_s(longest_s) if longest_s is not None else _limit_s(0.0) + self._first_extra_s(batch.num_tokens)

    def command_s(self) -> float:
        """Return how many seconds the commands that the engine thread runs between two steps may take; infinity without
        a limit.
        """
        return inf if self.is_off else max(COMMAND_LIMIT_S, self.setting_s or 0.0)

    def longest_step_s(self) -> float:
        """Return the largest limit in seconds that a step of any size may have now; infinity without a limit."""
        if self.setting_s is not None:
            return self.setting_s or inf
        # `list` copies in one step: the engine thread may add a size meanwhile.
        longest_s = max(list(self._longest_s.values()), default=0.0)
        return _limit_s(longest_s) + self._first_extra_s(SIZE_CLASSES_TOKENS[-1])

    def record(self, batch: BatchSize, seconds: float) -> None:
        """Record how many `seconds` a step of the size `batch` took, for the limits of later steps of about the same
        size.
        """
        kind = step_kind(batch)
        before_s = self._longest_s.get(kind)
        # The duration of the first step does not count: if kernels were compiled in it, later steps are much shorter.
        self._longest_s[kind] = 0.0 if before_s is None else max(seconds, before_s * DECAY_PER_STEP)

    def _first_extra_s(self, num_tokens: int) -> float:
        predicted_s = num_tokens / self.prefill_tokens_per_s if self.prefill_tokens_per_s else 0.0
        return max(FIRST_STEP_EXTRA_S, FIRST_STEP_RATIO * predicted_s)


def step_kind(batch: BatchSize) -> StepKind:
    """Return the kind of a step of the size `batch`: (its size class in tokens, whether it has prompt tokens). All
    steps of one kind have the same limit.
    """
    return size_class(batch.num_tokens), batch.num_tokens > batch.num_sequences


def _limit_s(longest_s: float) -> float:
    return max(MIN_LIMIT_S, STEP_TIME_RATIO * longest_s)
