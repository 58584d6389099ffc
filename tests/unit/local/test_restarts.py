"""When a process that died is started again."""

from services.local.restarts import FAST_DEATHS, LONG_LIFE_S, LONGEST_DELAY_S, Restarts


def test_delays_grow_and_then_it_is_given_up() -> None:
    restarts = Restarts()
    delays = [restarts.died(lived_s=1.0) for _ in range(FAST_DEATHS)]
    assert delays == [0.5, 1.0, 2.0, 4.0, None]


def test_a_long_life_wipes_the_slate() -> None:
    restarts = Restarts()
    for _ in range(FAST_DEATHS - 1):
        restarts.died(lived_s=1.0)
    assert restarts.died(lived_s=LONG_LIFE_S) == 0.5
    assert restarts.died(lived_s=1.0) == 1.0


def test_no_delay_is_longer_than_the_longest() -> None:
    assert max(filter(None, [Restarts(2).died(lived_s=0.0)])) <= LONGEST_DELAY_S
