"""Runs the life of a process: start, serve until a signal, stop its parts in reverse order, each within a deadline.

The exit status is 0 after a requested stop, 1 after a failure, 2 if a restart could not help (a bad setting, a broken
model, a port in use), and 3 if a step of the engine hung. Every process's `main` uses `run`.
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


def call_each(what: str, callbacks: Iterable[Callable[[], object]]) -> None:
    """Call all of `callbacks` in order. An exception of one of them is logged with its traceback and the text `what`,
    and does not affect the others. `asyncio.CancelledError` and other exceptions that end a task or the process are
    raised.
    """
    for callback in callbacks:
        try:
            callback()
        except Exception:
            # Each callback belongs to another request or component, which must not suffer from this error.
            logger.exception("%s has failed", what)


_CANCEL_INTERVAL_S = 0.1
"""Time after which `cancel_all` cancels a task that still runs again."""


async def cancel_all(tasks: Iterable["asyncio.Task[Any]"]) -> None:
    """Cancel tasks and wait until all have ended, whether by the cancellation, an error or a result.

    Each task is cancelled again until it has ended: before Python 3.12, `asyncio.wait_for` loses a cancellation that
    arrives in the same iteration of the event loop as the result that it waits for.
    """
    running = set(tasks)
    while running:
        for task in running:
            task.cancel()
        ended, running = await asyncio.wait(running, timeout=_CANCEL_INTERVAL_S)
        for task in ended:
            if not task.cancelled():
                # Mark the exception as retrieved, or asyncio logs it. An error that matters was logged where it was
                # raised.
                task.exception()


logger = logging.getLogger(__name__)

EXIT_FAILURE = 1
EXIT_HOPELESS = 2
"""Exit status that asks the supervisor not to restart the process."""
EXIT_HUNG = 3
"""Exit status of an instance that has ended because a step of its engine hung."""
_FORCED_EXIT_S = 3.0
"""Time beyond all deadlines of the stop after which the process is ended by force."""
DUPLICATE_SIGNAL_S = 0.25
"""Signals within this time of the first one count as the same: `timeout`, systemd and others signal a process twice,
once directly and once through its process group."""


@dataclass(frozen=True, slots=True)
class _Phase:
    """One action of stopping a process: what it is called in the log, the function that does it, and its time limit in
    seconds.
    """

    name: str
    stop: Callable[[], Awaitable[None]]
    deadline_s: float


class Lifecycle:
    """Collects the actions that stop the parts of a process, and ends the process. `run` passes it to the process's
    `start`, which calls `on_stop` right after it has started each part. All methods run on the event loop.
    """

    def __init__(self) -> None:
        self._phases: list[_Phase] = []
        self._stopping = asyncio.Event()
        self._forced = asyncio.Event()
        self._signalled_at: float | None = None
        self._exit_timer: threading.Timer | None = None
        self.error: BaseException | None = None

    def on_stop(self, name: str, stop: Callable[[], Awaitable[None]], *, deadline_s: float = 5.0) -> None:
        """Register `stop`, an action for the end of the process, with its name for the log. The action that was
        registered last runs first. An action that takes longer than `deadline_s` is cancelled, and the next one runs.
        """
        self._phases.append(_Phase(name, stop, deadline_s))

    @property
    def is_stopping(self) -> bool:
        return self._stopping.is_set()

    def request_stop(self, reason: str) -> None:
        """Begin to stop the process, which exits with status 0; `reason` is logged. Further calls do nothing."""
        if not self.is_stopping:
            logger.info("stopping: %s", reason)
            self._stopping.set()

    def signalled(self, name: str, now: float) -> None:
        """Handle the signal `name` (SIGINT or SIGTERM) at the time `now` in seconds: the first one stops the process, a
        second one hurries the stop.

        A second signal counts only later than `DUPLICATE_SIGNAL_S` after the first. It cancels the running stop action
        and all later ones.
        """
        if self._signalled_at is not None and now - self._signalled_at > DUPLICATE_SIGNAL_S:
            self._forced.set()
        self._signalled_at = self._signalled_at if self._signalled_at is not None else now
        self.request_stop(name)

    def fail(self, error: BaseException) -> None:
        """Begin to stop the process, which exits with status 1, because a part without which it cannot work has failed
        with `error`.
        """
        # Only the first error is logged; later ones usually follow from it.
        if self.error is None:
            self.error = error
            logger.error("stopping this process after a failure: %s", error)
        self._stopping.set()

    async def stopping(self) -> None:
        """Wait until a signal, `request_stop` or `fail` asks the process to stop."""
        await self._stopping.wait()

    def arm(self, status: int) -> None:
        """Start a timer that ends the process with `status` (1 instead of 0) if stopping takes longer than all its
        deadlines together.

        Without it a thread that hangs in foreign code, such as a driver, would keep the process alive.
        """
        longest_s = sum(phase.deadline_s for phase in self._phases) + _FORCED_EXIT_S
        self._exit_timer = threading.Timer(longest_s, os._exit, [status or EXIT_FAILURE])
        self._exit_timer.daemon = True
        self._exit_timer.start()

    def disarm(self) -> None:
        """Cancel the timer that `arm` started, so that it does not end the process."""
        if self._exit_timer is not None:
            self._exit_timer.cancel()

    async def stop_all(self) -> None:
        """Run all actions that `on_stop` registered, the last registered one first. A failing action is logged, and the
        next one runs.
        """
        while self._phases:
            await self._stop_one(self._phases.pop())

    async def _stop_one(self, phase: _Phase) -> None:
        task = asyncio.ensure_future(phase.stop())
        hurry = asyncio.create_task(self._forced.wait())
        await asyncio.wait({task, hurry}, timeout=phase.deadline_s, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        if not task.done():
            how = "cut short by a second signal" if self._forced.is_set() else f"not done after {phase.deadline_s:g} s"
            logger.warning("stopping %s: %s", phase.name, how)
            task.cancel()
            # The wait has a timeout: a task that ignores its cancellation must not keep the process alive.
            await asyncio.wait({task}, timeout=0.5)
        elif not task.cancelled() and (error := task.exception()) is not None:
            logger.error("stopping %s has failed", phase.name, exc_info=error)


def run(
    start: Callable[[Lifecycle], Awaitable[None]],
    *,
    program: str,
    expected: tuple[type[Exception], ...] = (),
) -> int:
    """Run a whole process: call `start`, then serve until SIGINT, SIGTERM or `Lifecycle.fail`, then stop. Return the
    exit status.

    `start` returns when everything runs. If it raises an error of the types `expected`, `ConfigurationError` or
    `OSError`, one line with the name `program` is printed. Any other error is a bug and is logged with its traceback.
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
    # Printed after the stop, so that the reason is the last line: supervisors show the last line of a process.
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
        # A signal came during the start. Phases registered so far are run by the caller.
        starting.cancel()
        await asyncio.wait({starting}, timeout=1.0)
    elif (error := starting.exception()) is not None:
        stopping.cancel()
        if isinstance(error, expected):
            lifecycle.error = error
            return EXIT_HOPELESS
        logger.error("%s could not start", program, exc_info=error)
        return EXIT_FAILURE
    await stopping
    return EXIT_FAILURE if lifecycle.error is not None else 0


def print_error(program: str, error: BaseException) -> None:
    """Print `PROGRAM: ERROR` as one line on stderr, with the name `program` and the text of `error`."""
    sys.stderr.write(f"{program}: {' '.join(str(error).split()) or type(error).__name__}\n")
    sys.stderr.flush()
