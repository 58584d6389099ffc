"""Start, serve, stop in reverse order; each phase has a deadline."""

import asyncio
import os
import signal

import pytest

from baton_serve.services.common.errors import ConfigurationError
from baton_serve.services.common.process_lifecycle import (
    DUPLICATE_SIGNAL_S,
    EXIT_FAILURE,
    EXIT_HOPELESS,
    Lifecycle,
    run,
)


def test_a_signal_stops_what_was_started_in_reverse_order() -> None:
    stopped: list[str] = []

    async def start(lifecycle: Lifecycle) -> None:
        for name in ("first", "second", "third"):

            async def stop(name: str = name) -> None:
                stopped.append(name)

            lifecycle.on_stop(name, stop)
        os.kill(os.getpid(), signal.SIGTERM)

    assert run(start, program="p") == 0
    assert stopped == ["third", "second", "first"]


def test_a_phase_that_hangs_is_cancelled_and_the_others_run() -> None:
    stopped: list[str] = []

    async def start(lifecycle: Lifecycle) -> None:
        async def good() -> None:
            stopped.append("good")

        async def hangs() -> None:
            await asyncio.Event().wait()

        async def fails() -> None:
            raise RuntimeError("no")

        lifecycle.on_stop("good", good)
        lifecycle.on_stop("hangs", hangs, deadline_s=0.02)
        lifecycle.on_stop("fails", fails)
        lifecycle.request_stop("test")

    assert run(start, program="p") == 0
    assert stopped == ["good"]


def test_a_second_signal_cuts_the_deadlines_short() -> None:
    async def start(lifecycle: Lifecycle) -> None:
        async def hangs() -> None:
            await asyncio.sleep(DUPLICATE_SIGNAL_S + 0.01)
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()

        lifecycle.on_stop("hangs", hangs, deadline_s=60)
        os.kill(os.getpid(), signal.SIGINT)

    assert run(start, program="p") == 0


def test_what_comes_twice_at_once_and_a_second_failure_hurry_nobody() -> None:
    stopped: list[str] = []

    async def start(lifecycle: Lifecycle) -> None:
        async def slow() -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            lifecycle.fail(RuntimeError("and this"))
            await asyncio.sleep(0.02)
            stopped.append("slow")

        lifecycle.on_stop("slow", slow)
        os.kill(os.getpid(), signal.SIGTERM)

    assert run(start, program="p") == 0
    assert stopped == ["slow"]


def test_a_signal_ends_a_start_that_takes_long() -> None:
    ended: list[str] = []

    async def start(lifecycle: Lifecycle) -> None:
        async def stop() -> None:
            ended.append("stopped")

        lifecycle.on_stop("part", stop)
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.Event().wait()

    assert run(start, program="p") == 0
    assert ended == ["stopped"]


@pytest.mark.parametrize("error", [ConfigurationError("no such\nfolder"), OSError("no such folder"), KeyError("x")])
def test_an_expected_error_at_start_is_reported_in_one_line(
    capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    async def start(lifecycle: Lifecycle) -> None:
        raise error

    assert run(start, program="baton prefill", expected=(KeyError,)) == EXIT_HOPELESS
    said = capsys.readouterr().err
    assert said.startswith("baton prefill: ") and said.count("\n") == 1 and "Traceback" not in said


def test_an_unexpected_error_at_start_stops_what_was_started() -> None:
    stopped: list[str] = []

    async def start(lifecycle: Lifecycle) -> None:
        async def stop() -> None:
            stopped.append("part")

        lifecycle.on_stop("part", stop)
        raise ZeroDivisionError

    assert run(start, program="p") == EXIT_FAILURE
    assert stopped == ["part"]


def test_a_part_that_fails_stops_the_process_with_a_status() -> None:
    async def start(lifecycle: Lifecycle) -> None:
        lifecycle.fail(RuntimeError("the engine broke"))
        assert lifecycle.is_stopping

    assert run(start, program="p") == EXIT_FAILURE
