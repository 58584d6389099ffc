"""When a process that died is started again."""

from baton_serve.services.common.lifecycle import MAX_DELAY_S, MAX_FAILED_STARTS, STABLE_LIFE_S, RestartPolicy


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
