"""How long a step may take before it counts as hung."""

from math import inf

import pytest

from baton_serve.engine.core.outputs import BatchSize
from baton_serve.services.instance.watchdog.step_limit import (
    COMMAND_LIMIT_S,
    FIRST_STEP_EXTRA_S,
    FIRST_STEP_RATIO,
    MIN_LIMIT_S,
    STEP_TIME_RATIO,
    StepLimit,
)

DECODE = BatchSize(num_sequences=8, num_tokens=8)
PROMPT = BatchSize(num_sequences=8, num_tokens=2048)


def measured(*seconds: float, batch: BatchSize = DECODE) -> StepLimit:
    """Return a limit that has seen the first step of `batch` and then steps of these durations."""
    limit = StepLimit()
    limit.record(batch, 250.0)
    for duration_s in seconds:
        limit.record(batch, duration_s)
    return limit


def test_the_first_step_of_a_size_has_time_to_compile_kernels() -> None:
    assert StepLimit().step_s(DECODE) == MIN_LIMIT_S + FIRST_STEP_EXTRA_S
    assert measured(0.02).step_s(PROMPT) == MIN_LIMIT_S + FIRST_STEP_EXTRA_S


def test_the_first_step_of_a_size_has_time_for_what_the_prefill_rate_predicts() -> None:
    limit = StepLimit()
    limit.prefill_tokens_per_s = 2.0
    assert limit.step_s(PROMPT) == MIN_LIMIT_S + FIRST_STEP_RATIO * 1024.0
    assert limit.step_s(DECODE) == MIN_LIMIT_S + FIRST_STEP_EXTRA_S
    assert limit.longest_step_s() > limit.step_s(PROMPT)


def test_short_steps_have_the_least_limit_and_the_time_of_the_first_step_does_not_count() -> None:
    assert measured(0.02).step_s(DECODE) == MIN_LIMIT_S


def test_long_steps_have_a_multiple_of_the_longest_of_their_size() -> None:
    limit = measured(30.0, 10.0, batch=PROMPT)
    assert limit.step_s(PROMPT) == pytest.approx(STEP_TIME_RATIO * 30.0 * 0.99)
    limit.record(DECODE, 1.0)
    limit.record(DECODE, 1.0)
    assert limit.step_s(DECODE) == MIN_LIMIT_S


def test_one_slow_step_is_forgotten() -> None:
    assert measured(100.0, *[0.1] * 1000).step_s(DECODE) == MIN_LIMIT_S


def test_decode_steps_and_prompts_of_as_many_tokens_are_measured_apart() -> None:
    limit = measured(40.0, batch=BatchSize(num_sequences=1, num_tokens=8))
    assert limit.step_s(DECODE) == MIN_LIMIT_S + FIRST_STEP_EXTRA_S


def test_the_longest_limit_covers_the_step_of_any_size() -> None:
    limit = measured(30.0, batch=PROMPT)
    assert limit.longest_step_s() >= max(limit.step_s(batch) for batch in (PROMPT, DECODE, BatchSize(1, 1)))


def test_a_setting_in_seconds_is_the_limit_of_every_step() -> None:
    limit = StepLimit(5.0)
    limit.record(DECODE, 100.0)
    assert limit.step_s(DECODE) == limit.step_s(PROMPT) == limit.longest_step_s() == 5.0
    assert limit.command_s() == COMMAND_LIMIT_S
    assert StepLimit(2 * COMMAND_LIMIT_S).command_s() == 2 * COMMAND_LIMIT_S


def test_zero_is_no_limit() -> None:
    limit = StepLimit(0.0)
    assert limit.is_off and not StepLimit().is_off
    assert limit.step_s(DECODE) == limit.command_s() == limit.longest_step_s() == inf
