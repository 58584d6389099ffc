"""The watchdog reports a step that runs for too long, and nothing else."""

from baton_serve.engine.core.outputs import BatchSize
from baton_serve.services.instance.watchdog.step_limit import (
    COMMAND_LIMIT_S,
    FIRST_STEP_EXTRA_S,
    MIN_LIMIT_S,
    StepLimit,
)
from baton_serve.services.instance.watchdog.step_watchdog import StepWatchdog
from tests.unit.instance.fakes import FakeEngine


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def watched(setting_s: float | None) -> tuple[StepWatchdog, FakeEngine, Clock]:
    clock = Clock()
    watchdog = StepWatchdog(StepLimit(setting_s), program="baton decode", clock=clock)
    watchdog.device = "device 1 (xpu:0, Arc)"
    engine = FakeEngine()
    engine.last_batch = BatchSize(num_sequences=4, num_tokens=36)
    return watchdog, engine, clock


def test_a_step_beyond_its_limit_is_reported_with_device_age_and_size() -> None:
    watchdog, engine, clock = watched(5.0)
    watchdog.begin_step(engine)
    clock.now += 5.0
    assert watchdog.overdue() is None and watchdog.step_age_s() == 5.0
    clock.now += 0.5
    message = watchdog.overdue()
    assert message is not None and message.startswith(
        "the engine has hung on device 1 (xpu:0, Arc): a step of 4 sequences with 36 tokens has run for 5.5 s, longer"
        " than the limit of 5 s (--engine-step-timeout-s)"
    )


def test_an_idle_engine_never_hangs() -> None:
    watchdog, engine, clock = watched(5.0)
    watchdog.begin_step(engine)
    watchdog.end()
    clock.now += 1000.0
    assert watchdog.overdue() is None and watchdog.step_age_s() == 0.0


def test_steps_that_ended_set_the_limit_of_later_ones() -> None:
    watchdog, engine, clock = watched(None)
    for duration_s in (150.0, 10.0):
        watchdog.begin_step(engine)
        clock.now += duration_s
        assert watchdog.overdue() is None
        watchdog.end()
    watchdog.begin_step(engine)
    clock.now += 199.0
    assert watchdog.overdue() is None
    clock.now += 2.0
    message = watchdog.overdue()
    assert message is not None and "limit of 200 s" in message


def test_commands_between_steps_have_a_longer_limit() -> None:
    watchdog, _, clock = watched(5.0)
    watchdog.begin_commands()
    clock.now += COMMAND_LIMIT_S - 1.0
    assert watchdog.overdue() is None
    clock.now += 2.0
    message = watchdog.overdue()
    assert message is not None and "a command between two steps has run for" in message


def test_time_in_which_the_process_was_stopped_does_not_count() -> None:
    watchdog, engine, clock = watched(5.0)
    watchdog.begin_step(engine)
    clock.now += 60.0
    watchdog.exclude(57.0)
    assert watchdog.overdue() is None and watchdog.step_age_s() == 3.0
    clock.now += 3.0
    assert watchdog.overdue() is not None


def test_the_first_step_of_a_size_may_take_minutes() -> None:
    watchdog, engine, clock = watched(None)
    watchdog.begin_step(engine)
    clock.now += MIN_LIMIT_S + FIRST_STEP_EXTRA_S
    assert watchdog.overdue() is None
    clock.now += 1.0
    assert watchdog.overdue() is not None
