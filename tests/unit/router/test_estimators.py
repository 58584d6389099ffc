"""For how long a first token is held back: values in, seconds out."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_serve.services.router.placement.decode_times import (
    FIRST_GAP_ITL_RATIO,
    MAX_GAP_SAMPLES,
    MIN_GAP_SAMPLES,
    MIN_GAP_STEPS,
    FirstGapQuantile,
    first_token_hold_s,
    ttft_budget_s,
)

seconds = st.floats(0.0, 10.0)


def test_the_hold_is_what_the_gap_would_be_too_long() -> None:
    assert first_token_hold_s(0.020, itl_s=0.010, max_itls=3.0, ttft_budget_s=inf) == pytest.approx(
        0.020 - FIRST_GAP_ITL_RATIO * 0.010
    )
    assert first_token_hold_s(0.007, itl_s=0.010, max_itls=3.0, ttft_budget_s=inf) == 0.0


@given(expected_s=seconds, itl_s=st.floats(0.001, 1.0), max_itls=st.floats(0.0, 5.0), ttft_left=st.floats(-5.0, 5.0))
def test_no_hold_is_longer_than_its_bounds(expected_s: float, itl_s: float, max_itls: float, ttft_left: float) -> None:
    held = first_token_hold_s(expected_s, itl_s=itl_s, max_itls=max_itls, ttft_budget_s=ttft_left)
    assert 0.0 <= held <= max(0.0, min(expected_s, max_itls * itl_s, ttft_left))


def test_nothing_is_held_beyond_what_the_first_tokens_objective_leaves() -> None:
    assert ttft_budget_s(None, 100.0) == inf
    assert first_token_hold_s(0.05, itl_s=0.01, max_itls=3.0, ttft_budget_s=ttft_budget_s(0.1, 0.08)) == pytest.approx(
        0.01
    )
    assert first_token_hold_s(0.05, itl_s=0.01, max_itls=3.0, ttft_budget_s=ttft_budget_s(0.1, 0.2)) == 0.0


def test_a_decode_instance_that_was_seen_too_little_is_taken_to_need_three_steps() -> None:
    gaps = FirstGapQuantile()
    assert gaps.expected_s(0.006) == pytest.approx(MIN_GAP_STEPS * 0.006)
    assert gaps.expected_s(0.0) == 0.0
    gaps.observe(0.030)
    assert gaps.expected_s(0.006) == 0.030
    for _ in range(MIN_GAP_SAMPLES):
        gaps.observe(0.010)
    assert gaps.expected_s(0.006) == 0.030


def test_rare_long_gaps_are_not_expected_and_old_ones_are_forgotten() -> None:
    gaps = FirstGapQuantile()
    for number in range(MAX_GAP_SAMPLES):
        gaps.observe(0.5 if number in (3, 40) else 0.015)
    assert gaps.expected_s(0.006) == 0.015
    for _ in range(MAX_GAP_SAMPLES):
        gaps.observe(0.025)
    assert gaps.expected_s(0.006) == 0.025
