"""How long steps with prompts may be, learned from steps."""

from math import inf

import pytest

from baton_serve.engine.core.step_time_model import (
    CLASSES,
    DELIVERY_S,
    FALLING,
    HEADROOM,
    TELLING,
    TELLING_TOGETHER,
    Pace,
    step_within,
)

PREFILL, STEP_S = 40_000.0, 0.006
"""Tokens a second; a step without prompts."""


def learned(longer_ms: dict[int, float], *, stretch: float = inf) -> Pace:
    """By tokens of a step, by how much prompts make it longer."""
    pace = Pace(PREFILL, STEP_S, stretch)
    for size, ms in longer_ms.items():
        pace.mixed(size - 1, 1, STEP_S + ms / 1e3)
    return pace


def promise_of_step(seconds: float) -> float:
    """That allows steps so long."""
    return max(seconds / HEADROOM, seconds + DELIVERY_S)


def promise_for(longer_s: float) -> float:
    return promise_of_step(STEP_S + longer_s)


def test_what_a_step_leaves_of_a_promise_is_a_part_and_a_time_at_least() -> None:
    assert step_within(0.100) == pytest.approx(0.085)
    assert step_within(0.012) == pytest.approx(0.009)
    assert step_within(promise_of_step(0.007)) == pytest.approx(0.007)


def test_without_a_promise_or_a_measure_there_is_no_bound() -> None:
    assert Pace(PREFILL, STEP_S).room([None, None]) is None
    assert Pace(PREFILL, STEP_S).room([]) is None
    assert Pace().room([0.001]) is None


def test_what_was_not_seen_is_as_slow_as_prompts_alone() -> None:
    """128 tokens take 3.2 ms alone."""
    pace = Pace(PREFILL, STEP_S)
    assert pace.room([promise_for(0.0033)]) == 128 - 1
    assert pace.room([promise_for(0.0031)]) == 64 - 1


def test_what_was_seen_decides() -> None:
    pace = learned({128: 0.6, 256: 2.0})
    assert pace.room([promise_for(0.0021)] * 40) == 256 - 40
    assert pace.room([promise_for(0.0019)] * 40) == 128 - 40
    assert pace.room([promise_for(0.0021 + 64 / PREFILL)]) == 320 - 1, "from the nearest that is known"


def test_the_tightest_promise_counts_and_whoever_has_none_counts_by_the_stretch() -> None:
    pace = learned({128: 0.6, 256: 2.0, 512: 6.5}, stretch=2.0)
    wide, tight = promise_for(0.007), promise_for(0.0007)
    assert pace.room([wide, tight, wide]) == 128 - 3
    assert pace.room([wide, None]) == 384 - 2, "6 ms more"
    assert pace.room([wide]) == 512 - 1


def test_no_prompt_waits_for_ever_and_what_is_left_of_a_class_costs_nothing() -> None:
    pace = Pace(PREFILL, STEP_S)
    assert [pace.room([0.001] * writers) for writers in (1, 48, 49, 100, 128)] == [31, 16, 79, 28, 64]
    assert not pace.keeps([0.001])
    assert pace.keeps([promise_for(32 / PREFILL)]) and not pace.keeps([promise_for(30 / PREFILL)])


def test_what_was_not_seen_is_counted_from_those_who_write() -> None:
    """64 of its 128 tokens are theirs: the others take 1.6 ms alone."""
    pace = Pace(PREFILL, STEP_S)
    assert pace.room([promise_for(0.0017)] * 64) == 64
    assert pace.keeps([promise_for(0.0017)] * 64) and not pace.keeps([promise_for(0.0015)] * 64)


def test_a_long_step_counts_at_once_and_a_short_one_little() -> None:
    pace = learned({64: 0.5, 256: 2.0})
    for _ in range(5):
        pace.mixed(255, 1, STEP_S + 0.004)
    assert pace.room([promise_for(0.003)]) == 128 - 1
    pace = learned({64: 0.5, 256: 4.0})
    for _ in range(5):
        pace.mixed(255, 1, STEP_S + 0.002)
    slow_s = 0.002 + 0.002 * (1 - FALLING) ** 5
    assert pace.room([promise_for(slow_s + 1e-5)]) == 256 - 1
    assert pace.room([promise_for(slow_s - 1e-5)]) == 192 - 1


def test_a_step_that_does_not_fill_its_class_does_not_make_it_look_short() -> None:
    pace = Pace(PREFILL, STEP_S)
    pace.mixed(129, 1, STEP_S + 0.001)
    assert pace.room([promise_for(0.0045)]) == 128 - 1
    pace.mixed(189, 1, STEP_S + 0.001)
    assert pace.room([promise_for(0.0011)]) == 192 - 1
    pace.mixed(129, 1, STEP_S + 0.005)
    assert pace.room([promise_for(0.0011)]) == 32 - 1


def test_a_smaller_step_is_not_slower_than_a_larger_one() -> None:
    assert learned({512: 2.0}).room([promise_for(0.0021)]) == 512 - 1
    assert learned({512: 2.0}).room([promise_for(0.0019)]) == 64 - 1


def test_one_stumble_is_bounded_and_forgotten() -> None:
    pace = learned({128: 1.0, 256: 2.0})
    pace.mixed(255, 1, 10.0)
    assert pace.room([promise_for(0.0031)]) == 192 - 1
    assert pace.room([promise_for(0.0033)]) == 256 - 1, "a half longer than was expected, and of that 0.3"
    for _ in range(20_000):
        pace.decoded(STEP_S)
    assert pace.room([promise_for(0.003)]) == 320 - 1


def test_speed_beside_those_who_write() -> None:
    pace = learned({256: 2.0})
    assert pace.tokens_per_s(216, 40) == pytest.approx(216 / 0.008)
    assert pace.tokens_per_s(5 * CLASSES[-1], 1) > 0


def test_the_first_long_prompt_is_believed_rather_than_the_warm_up() -> None:
    pace = Pace(PREFILL, STEP_S, is_guess=True)
    pace.computed(TELLING - 1, (TELLING - 1) / 10_000)
    assert pace.is_guess
    assert pace.prefill_tokens_per_s == pytest.approx(37_000)
    pace.computed(TELLING, TELLING / 10_000)
    assert not pace.is_guess
    assert pace.prefill_tokens_per_s == pytest.approx(10_000)
    pace.computed(TELLING, TELLING / 20_000)
    assert pace.prefill_tokens_per_s == pytest.approx(11_000)


def test_many_short_prompts_tell_as_much_as_a_long_one() -> None:
    pace = Pace(1_000, STEP_S, is_guess=True)
    for told in range(100, TELLING_TOGETHER + 100, 100):
        assert pace.is_guess == (told - 100 < TELLING_TOGETHER)
        pace.computed(100, 0.01)
    assert not pace.is_guess
    assert pace.prefill_tokens_per_s == pytest.approx(10_000, rel=0.02)
