"""When a process that died is started again, and when a device that hangs is taken out."""

from baton_serve.services.common.restart_policy import (
    HANG_WINDOW_S,
    MAX_DELAY_S,
    MAX_FAILED_STARTS,
    MAX_HANGS,
    STABLE_LIFE_S,
    HangPolicy,
    RestartPolicy,
)


def test_delays_grow_and_a_start_that_keeps_failing_is_given_up() -> None:
    restarts = RestartPolicy()
    delays = [restarts.next_delay_s(lived_s=1.0, has_served=False) for _ in range(MAX_FAILED_STARTS)]
    assert delays == [0.5, 1.0, 2.0, 4.0, None]


def test_a_long_life_wipes_the_slate() -> None:
    restarts = RestartPolicy()
    for _ in range(MAX_FAILED_STARTS - 1):
        restarts.next_delay_s(lived_s=1.0, has_served=False)
    assert restarts.next_delay_s(lived_s=STABLE_LIFE_S, has_served=False) == 0.5
    assert restarts.next_delay_s(lived_s=1.0, has_served=False) == 1.0


def test_a_process_that_was_once_ready_is_never_given_up_even_where_it_does_not_become_ready_again() -> None:
    restarts = RestartPolicy()
    assert restarts.next_delay_s(lived_s=100.0, has_served=True) == 0.5
    delays = [restarts.next_delay_s(lived_s=1.0, has_served=False) for _ in range(2_000)]
    assert None not in delays and delays[-1] == MAX_DELAY_S


def test_who_has_served_is_started_again_however_often_it_dies() -> None:
    restarts = RestartPolicy()
    delays = [restarts.next_delay_s(lived_s=5.0, has_served=True) for _ in range(20)]
    assert delays[:3] == [0.5, 1.0, 2.0] and delays[-1] == MAX_DELAY_S


def test_a_device_is_taken_out_at_its_third_hang_within_half_an_hour() -> None:
    hangs = HangPolicy()
    assert [hangs.must_take_out("device 0", now) for now in (0.0, 900.0, 1799.0)] == [False, False, True]


def test_hangs_that_lie_far_apart_do_not_take_a_device_out() -> None:
    hangs = HangPolicy()
    times = [number * HANG_WINDOW_S / (MAX_HANGS - 1) for number in range(20)]
    assert not any(hangs.must_take_out("device 0", now) for now in times)


def test_hangs_are_counted_for_each_device_alone() -> None:
    hangs = HangPolicy()
    assert not any(hangs.must_take_out(f"device {number}", 0.0) for number in range(MAX_HANGS))
