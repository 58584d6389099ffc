"""What share of the time an instance was busy, as it is remembered."""

from math import exp

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.busy_share import ASSUMED_S, RECENT_S, BusyShare


def test_at_first_it_has_been_idle() -> None:
    share = BusyShare()
    assert share.value(1e6) == 0.0
    share.observe(True, 1e6)
    assert share.value(1e6) == 0.0


def test_what_is_seen_soon_counts_more_than_what_was_assumed() -> None:
    share = BusyShare()
    share.observe(True, 1e6)
    assert share.value(1e6 + ASSUMED_S) == pytest.approx(0.5, abs=0.02)
    assert share.value(1e6 + 20 * ASSUMED_S) > 0.9


def test_it_is_forgotten() -> None:
    share = BusyShare()
    share.observe(True, 0.0)
    share.observe(False, 10 * RECENT_S)
    assert share.value(11 * RECENT_S) == pytest.approx(exp(-1.0), rel=1e-3)


def test_half_of_the_time_is_a_half() -> None:
    share = BusyShare()
    for second in range(1000):
        share.observe(second % 2 == 0, float(second))
    assert share.value(1000.0) == pytest.approx(0.5, abs=0.01)


def test_asking_changes_nothing() -> None:
    asked, silent = BusyShare(), BusyShare()
    for share in (asked, silent):
        share.observe(True, 5.0)
        if share is asked:
            assert 0.0 < asked.value(5.5) < asked.value(6.0)
        share.observe(False, 7.0)
    assert asked.value(20.0) == pytest.approx(silent.value(20.0))


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 500)), min_size=1))
def test_it_is_a_share(seen: list[tuple[bool, float]]) -> None:
    share, now = BusyShare(), 0.0
    for is_busy, after_s in seen:
        share.observe(is_busy, now)
        now += after_s
        share.found(is_busy, now)
        assert 0.0 <= share.value(now) <= 1.0 + 1e-9


def test_who_comes_when_the_last_one_is_done_finds_nobody_busy() -> None:
    share, now = BusyShare(), 0.0
    for _ in range(60):
        share.found(False, now)
        share.observe(True, now)
        now += 5.0
        share.observe(False, now)
    assert share.value(now) < 0.2, "busy all the time, but for nobody else"


def test_those_who_come_together_do_not_make_it_busier_than_the_time_says() -> None:
    share = BusyShare()
    for second in range(0, 1000, 10):
        share.found(False, float(second))
        share.observe(True, float(second))
        for _ in range(9):
            share.found(True, float(second))
        share.observe(False, second + 2.0)
    assert share.value(1000.0) == pytest.approx(0.2, abs=0.03)
