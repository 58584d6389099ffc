"""The life of a process: start, serve until a signal, stop in reverse order with a deadline for each phase.

Exit status: 0 after a stop that was asked for, 1 after a failure, 2 when starting again could not help (a bad setting,
a broken model, a port in use). Knows nothing of what it starts.
"""

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

import uvloop

from baton_serve.services.common.errors import ConfigurationError

_CANCEL_INTERVAL_S = 0.1


async def cancel_all(tasks: Iterable["asyncio.Task[Any]"]) -> None:
    """Cancels them until they have ended, however they do.

    Once is not enough before Python 3.12: `asyncio.wait_for`, within libraries too, forgets a cancellation that comes
    in the turn in which what it waits for is done.
    """
    running = set(tasks)
    while running:
        for task in running:
            task.cancel()
        ended, running = await asyncio.wait(running, timeout=_CANCEL_INTERVAL_S)
        for task in ended:
            if not task.cancelled():
                task.exception()  # told where it happened, or nobody's concern any more


MIN_DELAY_S = 0.5
MAX_DELAY_S = 15.0
MAX_FAILED_STARTS = 5
"""A process that has never become ready is given up after this many short lives in a row."""
STABLE_LIFE_S = 20.0


@dataclass(slots=True)
class RestartPolicy:
    """Of one process, over all its lives. `has_served`: it has become ready in one of them."""

    short_lives: int = 0
    failed_starts: int = 0
    has_served: bool = False

    def next_delay_s(self, *, lived_s: float, has_served: bool) -> float | None:
        """Return the delay before the next start, in seconds, or None to give the process up. `has_served`: it became
        ready in the life that has ended."""
        self.has_served = self.has_served or has_served
        self.short_lives = 1 if lived_s >= STABLE_LIFE_S else self.short_lives + 1
        self.failed_starts = 0 if lived_s >= STABLE_LIFE_S else self.failed_starts + 1
        if self.failed_starts >= MAX_FAILED_STARTS and not self.has_served:
            return None
        return float(min(MAX_DELAY_S, MIN_DELAY_S * 2 ** min(self.short_lives - 1, 10)))


logger = logging.getLogger(__name__)

EXIT_FAILURE = 1
EXIT_HOPELESS = 2
_FORCED_EXIT_S = 3.0
DUPLICATE_SIGNAL_S = 0.25
"""`timeout`, systemd and others signal a process and its group: what comes twice within this time was meant once."""


@dataclass(frozen=True, slots=True)
class _Phase:
    name: str
    stop: Callable[[], Awaitable[None]]
    deadline_s: float


class Lifecycle:
    """Given to the process's `start`, which registers how to stop each thing right after it started it."""

    def __init__(self) -> None:
        self._phases: list[_Phase] = []
        self._stopping = asyncio.Event()
        self._forced = asyncio.Event()
        self._signalled_at: float | None = None
        self._exit_timer: threading.Timer | None = None
        self.error: BaseException | None = None

    def on_stop(self, name: str, stop: Callable[[], Awaitable[None]], *, deadline_s: float = 5.0) -> None:
        """Phases run last registered first. One that misses its deadline is cancelled; the next one runs."""
        self._phases.append(_Phase(name, stop, deadline_s))

    @property
    def is_stopping(self) -> bool:
        return self._stopping.is_set()

    def request_stop(self, reason: str) -> None:
        if not self.is_stopping:
            logger.info("stopping: %s", reason)
            self._stopping.set()

    def signalled(self, name: str, now: float) -> None:
        """A second signal, later than `DUPLICATE_SIGNAL_S`, cuts the deadlines short. `now` in seconds."""
        if self._signalled_at is not None and now - self._signalled_at > DUPLICATE_SIGNAL_S:
            self._forced.set()
        self._signalled_at = self._signalled_at if self._signalled_at is not None else now
        self.request_stop(name)

    def fail(self, error: BaseException) -> None:
        """Stops the process because a part of it has ended that must not."""
        if self.error is None:
            self.error = error
            logger.error("this process cannot go on and stops: %s", error)
        self._stopping.set()

    async def stopping(self) -> None:
        await self._stopping.wait()

    def arm(self, status: int) -> None:
        """From now on a thread stuck in foreign code cannot keep the process from ending."""
        longest_s = sum(phase.deadline_s for phase in self._phases) + _FORCED_EXIT_S
        self._exit_timer = threading.Timer(longest_s, os._exit, [status or EXIT_FAILURE])
        self._exit_timer.daemon = True
        self._exit_timer.start()

    def disarm(self) -> None:
        if self._exit_timer is not None:
            self._exit_timer.cancel()

    async def stop_all(self) -> None:
        while self._phases:
            await self._stop_one(self._phases.pop())

    async def _stop_one(self, phase: _Phase) -> None:
        task = asyncio.ensure_future(phase.stop())
        hurry = asyncio.create_task(self._forced.wait())
        await asyncio.wait({task, hurry}, timeout=phase.deadline_s, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        if not task.done():
            how = "cut short by a second signal" if self._forced.is_set() else f"not done in {phase.deadline_s:g} s"
            logger.warning("stopping: %s: %s", phase.name, how)
            task.cancel()
            # Not waited for without end: what ignores its cancellation must not keep the process.
            await asyncio.wait({task}, timeout=0.5)
        elif not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s failed to stop", phase.name, exc_info=error)


def run(
    start: Callable[[Lifecycle], Awaitable[None]],
    *,
    program: str,
    expected: tuple[type[Exception], ...] = (),
) -> int:
    """Runs `start`, then serves until SIGINT, SIGTERM or `fail`. Returns the exit status.

    `start` returns when everything runs. What it raises of `expected`, `ConfigurationError` or `OSError` is told in one
    line; anything else is our bug and gets a traceback.
    """
    lifecycle = Lifecycle()
    try:
        return uvloop.run(_run_loop(start, lifecycle, program, (*expected, ConfigurationError, OSError)))
    finally:
        lifecycle.disarm()


async def _run_loop(
    start: Callable[[Lifecycle], Awaitable[None]],
    lifecycle: Lifecycle,
    program: str,
    expected: tuple[type[Exception], ...],
) -> int:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, _signalled, lifecycle, signal.Signals(number).name)
    status = await _start_and_serve(start, lifecycle, program, expected)
    lifecycle.arm(status)
    await lifecycle.stop_all()
    if status == EXIT_HOPELESS and lifecycle.error is not None:
        print_error(program, lifecycle.error)
    return status


def _signalled(lifecycle: Lifecycle, name: str) -> None:
    lifecycle.signalled(name, asyncio.get_running_loop().time())


async def _start_and_serve(
    start: Callable[[Lifecycle], Awaitable[None]],
    lifecycle: Lifecycle,
    program: str,
    expected: tuple[type[Exception], ...],
) -> int:
    starting = asyncio.ensure_future(start(lifecycle))
    stopping = asyncio.create_task(lifecycle.stopping())
    await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        await asyncio.wait({starting}, timeout=1.0)
    elif (error := starting.exception()) is not None:
        stopping.cancel()
        if isinstance(error, expected):
            # Told when everything has stopped, so that it is the last line.
            lifecycle.error = error
            return EXIT_HOPELESS
        logger.error("%s could not start", program, exc_info=error)
        return EXIT_FAILURE
    await stopping
    return EXIT_FAILURE if lifecycle.error is not None else 0


def print_error(program: str, error: BaseException) -> None:
    """One line for a human on stderr."""
    sys.stderr.write(f"{program}: {' '.join(str(error).split()) or type(error).__name__}\n")
    sys.stderr.flush()
