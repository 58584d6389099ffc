"""How long steps with prompts may be, learned from steps."""

from math import inf

import pytest

from baton_serve.engine.core.step_time_model import (
    EMA_WEIGHT_IF_FASTER,
    MAX_ITL_SLO_RATIO,
    MIN_MEASURED_TOKENS,
    MIN_MEASURED_TOKENS_IN_ALL,
    SIZE_CLASSES_TOKENS,
    TOKEN_DELIVERY_S,
    StepTimeModel,
    max_step_s,
)

PREFILL, STEP_S = 40_000.0, 0.006
"""Tokens a second; a step without prompts."""


def learned(longer_ms: dict[int, float], *, max_stretch: float = inf) -> StepTimeModel:
    """By tokens of a step, by how much prompts make it longer."""
    step_time_model = StepTimeModel(PREFILL, STEP_S, max_stretch)
    for size, ms in longer_ms.items():
        step_time_model.mixed(size - 1, 1, STEP_S + ms / 1e3)
    return step_time_model


def slo_of_step(seconds: float) -> float:
    """Return the ITL SLO that allows steps of this duration."""
    return max(seconds / MAX_ITL_SLO_RATIO, seconds + TOKEN_DELIVERY_S)


def slo_for(longer_s: float) -> float:
    return slo_of_step(STEP_S + longer_s)


def test_a_step_leaves_at_least_a_part_of_the_slo_and_a_time() -> None:
    assert max_step_s(0.100) == pytest.approx(0.085)
    assert max_step_s(0.012) == pytest.approx(0.009)
    assert max_step_s(slo_of_step(0.007)) == pytest.approx(0.007)


def test_without_an_slo_or_a_measurement_steps_are_not_bounded() -> None:
    assert StepTimeModel(PREFILL, STEP_S).chunk_budget([None, None]) is None
    assert StepTimeModel(PREFILL, STEP_S).chunk_budget([]) is None
    assert StepTimeModel().chunk_budget([0.001]) is None


def test_what_was_not_seen_is_as_slow_as_prompts_alone() -> None:
    """128 tokens take 3.2 ms alone."""
    step_time_model = StepTimeModel(PREFILL, STEP_S)
    assert step_time_model.chunk_budget([slo_for(0.0033)]) == 128 - 1
    assert step_time_model.chunk_budget([slo_for(0.0031)]) == 64 - 1


def test_what_was_seen_decides() -> None:
    step_time_model = learned({128: 0.6, 256: 2.0})
    assert step_time_model.chunk_budget([slo_for(0.0021)] * 40) == 256 - 40
    assert step_time_model.chunk_budget([slo_for(0.0019)] * 40) == 128 - 40
    assert step_time_model.chunk_budget([slo_for(0.0021 + 64 / PREFILL)]) == 320 - 1, "from the nearest that is known"


def test_the_tightest_slo_counts_and_sequences_without_one_count_by_the_stretch() -> None:
    step_time_model = learned({128: 0.6, 256: 2.0, 512: 6.5}, max_stretch=2.0)
    wide, tight = slo_for(0.007), slo_for(0.0007)
    assert step_time_model.chunk_budget([wide, tight, wide]) == 128 - 3
    assert step_time_model.chunk_budget([wide, None]) == 384 - 2, "6 ms more"
    assert step_time_model.chunk_budget([wide]) == 512 - 1


def test_no_prompt_waits_for_ever_and_what_is_left_of_a_class_costs_nothing() -> None:
    step_time_model = StepTimeModel(PREFILL, STEP_S)
    assert [step_time_model.chunk_budget([0.001] * writers) for writers in (1, 48, 49, 100, 128)] == [
        31,
        16,
        79,
        28,
        64,
    ]
    assert not step_time_model.meets_itl_slos([0.001])
    assert step_time_model.meets_itl_slos([slo_for(32 / PREFILL)]) and not step_time_model.meets_itl_slos(
        [slo_for(30 / PREFILL)]
    )


def test_unmeasured_step_times_are_extrapolated_from_decoding_sequences() -> None:
    """64 of its 128 tokens are theirs: the others take 1.6 ms alone."""
    step_time_model = StepTimeModel(PREFILL, STEP_S)
    assert step_time_model.chunk_budget([slo_for(0.0017)] * 64) == 64
    assert step_time_model.meets_itl_slos([slo_for(0.0017)] * 64) and not step_time_model.meets_itl_slos(
        [slo_for(0.0015)] * 64
    )


def test_a_long_step_counts_at_once_and_a_short_one_little() -> None:
    step_time_model = learned({64: 0.5, 256: 2.0})
    for _ in range(5):
        step_time_model.mixed(255, 1, STEP_S + 0.004)
    assert step_time_model.chunk_budget([slo_for(0.003)]) == 128 - 1
    step_time_model = learned({64: 0.5, 256: 4.0})
    for _ in range(5):
        step_time_model.mixed(255, 1, STEP_S + 0.002)
    slow_s = 0.002 + 0.002 * (1 - EMA_WEIGHT_IF_FASTER) ** 5
    assert step_time_model.chunk_budget([slo_for(slow_s + 1e-5)]) == 256 - 1
    assert step_time_model.chunk_budget([slo_for(slow_s - 1e-5)]) == 192 - 1


def test_a_step_that_does_not_fill_its_class_does_not_make_it_look_short() -> None:
    step_time_model = StepTimeModel(PREFILL, STEP_S)
    step_time_model.mixed(129, 1, STEP_S + 0.001)
    assert step_time_model.chunk_budget([slo_for(0.0045)]) == 128 - 1
    step_time_model.mixed(189, 1, STEP_S + 0.001)
    assert step_time_model.chunk_budget([slo_for(0.0011)]) == 192 - 1
    step_time_model.mixed(129, 1, STEP_S + 0.005)
    assert step_time_model.chunk_budget([slo_for(0.0011)]) == 32 - 1


def test_a_smaller_step_is_not_slower_than_a_larger_one() -> None:
    assert learned({512: 2.0}).chunk_budget([slo_for(0.0021)]) == 512 - 1
    assert learned({512: 2.0}).chunk_budget([slo_for(0.0019)]) == 64 - 1


def test_one_stumble_is_bounded_and_forgotten() -> None:
    step_time_model = learned({128: 1.0, 256: 2.0})
    step_time_model.mixed(255, 1, 10.0)
    assert step_time_model.chunk_budget([slo_for(0.0031)]) == 192 - 1
    assert step_time_model.chunk_budget([slo_for(0.0033)]) == 256 - 1, (
        "a half longer than was expected, and of that 0.3"
    )
    for _ in range(20_000):
        step_time_model.decoded(STEP_S)
    assert step_time_model.chunk_budget([slo_for(0.003)]) == 320 - 1


def test_prefill_rate_beside_decoding_sequences() -> None:
    step_time_model = learned({256: 2.0})
    assert step_time_model.tokens_per_s(216, 40) == pytest.approx(216 / 0.008)
    assert step_time_model.tokens_per_s(5 * SIZE_CLASSES_TOKENS[-1], 1) > 0


def test_the_first_long_prompt_is_believed_rather_than_the_warm_up() -> None:
    step_time_model = StepTimeModel(PREFILL, STEP_S, is_warm_up_estimate=True)
    step_time_model.computed(MIN_MEASURED_TOKENS - 1, (MIN_MEASURED_TOKENS - 1) / 10_000)
    assert step_time_model.is_warm_up_estimate
    assert step_time_model.prefill_tokens_per_s == pytest.approx(37_000)
    step_time_model.computed(MIN_MEASURED_TOKENS, MIN_MEASURED_TOKENS / 10_000)
    assert not step_time_model.is_warm_up_estimate
    assert step_time_model.prefill_tokens_per_s == pytest.approx(10_000)
    step_time_model.computed(MIN_MEASURED_TOKENS, MIN_MEASURED_TOKENS / 20_000)
    assert step_time_model.prefill_tokens_per_s == pytest.approx(11_000)


def test_many_short_prompts_measure_as_much_as_a_long_one() -> None:
    step_time_model = StepTimeModel(1_000, STEP_S, is_warm_up_estimate=True)
    for reported in range(100, MIN_MEASURED_TOKENS_IN_ALL + 100, 100):
        assert step_time_model.is_warm_up_estimate == (reported - 100 < MIN_MEASURED_TOKENS_IN_ALL)
        step_time_model.computed(100, 0.01)
    assert not step_time_model.is_warm_up_estimate
    assert step_time_model.prefill_tokens_per_s == pytest.approx(10_000, rel=0.02)
