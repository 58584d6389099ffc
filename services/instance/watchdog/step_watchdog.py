"""Ends an instance whose engine step does not end in time; how long that is, is decided in `step_limit.py`.

A thread that waits for a device cannot be interrupted, so the whole process must end and start again. The watchdog has
a thread of its own, which looks at the running step once per `CHECK_INTERVAL_S`. It needs the GIL; for a step that
blocks and never releases it, a timer of `faulthandler`, which runs without Python, ends the process a little later.
"""

import asyncio
import faulthandler
import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from baton_serve.engine.core.outputs import BatchSize
from baton_serve.services.common.process_lifecycle import EXIT_HUNG, print_error
from baton_serve.services.common.rpc.instance_link import InstanceServer
from baton_serve.services.instance.watchdog.step_limit import StepLimit

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S = 0.5
"""Seconds between two looks at the running step."""
REPORT_TIMEOUT_S = 2.0
"""Seconds that the event loop has to leave the registry and to close the connections to routers."""
FORCED_EXIT_S = 10.0
"""Seconds after which `faulthandler` ends the process if the watchdog's thread cannot: beyond the limit of the longest
step, and after a hang was found."""
_STDERR = 2


class WatchedEngine(Protocol):
    """The part of an engine that the watchdog reads while the engine thread runs it."""

    @property
    def last_batch(self) -> BatchSize: ...


@dataclass(slots=True)
class _RunningWork:
    """The current work of the engine thread: a step of `engine`, or commands between two steps (`engine` is None).

    `excluded_s` is the time in which this whole process did not run, for example because it was stopped.
    """

    started_at: float
    engine: WatchedEngine | None
    excluded_s: float = 0.0


class StepWatchdog:
    """Notices if a step of one engine hangs, reports it and ends the process. The engine thread calls `begin_step`,
    `begin_commands` and `end`.

    The owner calls `start` and `stop`, and sets `device`, the name of the device in the messages.
    """

    def __init__(
        self,
        limit: StepLimit,
        *,
        program: str,
        has_exit_timer: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Watch nothing before `start`. `program` is the process's name in messages. `has_exit_timer` allows the use of
        the timer of `faulthandler`, of which a process has only one; it ends the process even if Python code cannot
        run.
        """
        self._limit = limit
        self._program = program
        self._has_exit_timer = has_exit_timer and not limit.is_off
        self._clock = clock
        self._running: _RunningWork | None = None
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._report = self._kill_ranks = _do_nothing
        self.device = ""
        self.reported = threading.Event()
        """The owner sets it when the report has been sent. Then the process ends without waiting longer."""
        self.has_expired = False

    def begin_step(self, engine: WatchedEngine) -> None:
        """Record that the engine thread begins a step of `engine`."""
        self._running = _RunningWork(self._clock(), engine)

    def begin_commands(self) -> None:
        """Record that the engine thread begins to run commands between two steps."""
        self._running = _RunningWork(self._clock(), None)

    def end(self) -> None:
        """Record that the step, or the commands between two steps, have ended."""
        running, self._running = self._running, None
        if running is not None and running.engine is not None:
            self._limit.record(running.engine.last_batch, self._clock() - running.started_at)

    def on_prefill_rate(self, tokens_per_s: float) -> None:
        """Keep the engine's prefill rate in tokens per second, from which the limit of the first step of a size is
        predicted.
        """
        self._limit.prefill_tokens_per_s = tokens_per_s

    def step_age_s(self) -> float:
        """Return for how many seconds the current step, or commands between two steps, has run; 0 if the engine is
        idle. Any thread may call it.
        """
        running = self._running
        return self._clock() - running.started_at - running.excluded_s if running is not None else 0.0

    def start(self, report: Callable[[], None], kill_ranks: Callable[[], None] | None = None) -> None:
        """Start to watch the engine thread, unless `--engine-step-timeout-s` is 0.

        If a step hangs, `report` is called from the watchdog's thread; it must not block. `kill_ranks` is called right
        before the process ends: a rank whose own thread is blocked does not notice the end of this process.
        """
        self._report, self._kill_ranks = report, kill_ranks or _do_nothing
        if not self._limit.is_off:
            self._thread = threading.Thread(target=self._watch, name="step watchdog", daemon=True)
            self._thread.start()

    async def stop(self) -> None:
        """Stop the watchdog's thread and the exit timer."""
        self._stopping.set()
        # After a hang the watchdog ends the process, whatever else happens.
        if self._thread is not None and not self.has_expired:
            self._thread.join(REPORT_TIMEOUT_S)
            self._set_exit_timer(None)

    def overdue(self) -> str | None:
        """Return an error message if the running step or commands have exceeded their limit, else None."""
        running = self._running
        if running is None:
            return None
        age_s = self.step_age_s()
        batch = running.engine.last_batch if running.engine is not None else None
        limit_s = self._limit.step_s(batch) if batch is not None else self._limit.command_s()
        if age_s <= limit_s:
            return None
        what = (
            f"a step of {batch.num_sequences} sequences with {batch.num_tokens} tokens"
            if batch is not None
            else "a command between two steps"
        )
        return (
            f"the engine has hung on {self.device}: {what} has run for {age_s:.1f} s, longer than the limit of"
            f" {limit_s:g} s (--engine-step-timeout-s). This instance reports itself as failed, and its process ends"
            f" with status {EXIT_HUNG}; look for errors of the device's driver in the kernel log (dmesg)"
        )

    def exclude(self, seconds: float) -> None:
        """Subtract `seconds` from the duration of the running step, because the process was stopped or suspended during
        that time.
        """
        running = self._running
        if running is not None and seconds > 0:
            running.excluded_s += seconds

    def _watch(self) -> None:
        checked_at = self._clock()
        while not self._stopping.is_set():
            self._set_exit_timer(self._limit.longest_step_s() + FORCED_EXIT_S)
            self._stopping.wait(CHECK_INTERVAL_S)
            now = self._clock()
            # If this thread wakes much too late, the process was stopped (SIGSTOP, a debugger, a paused container), and
            # the step with it. One interval more is tolerated, because a busy machine also delays threads.
            self.exclude(now - checked_at - 2 * CHECK_INTERVAL_S)
            checked_at = now
            message = self.overdue()
            if message is not None and not self._stopping.is_set():
                self._expire(message)
                return

    def _expire(self, message: str) -> None:
        """Report that a step hangs (`message`), write the stacks of all threads and end the process with the status
        `EXIT_HUNG`.
        """
        self.has_expired = True
        # The report and the dump of the stacks must not hang either.
        self._set_exit_timer(FORCED_EXIT_S)
        logger.error("%s", message)
        self._report()
        self.reported.wait(REPORT_TIMEOUT_S)
        # Before the ranks are killed: their exits would let the hung thread go on.
        faulthandler.dump_traceback(file=_STDERR, all_threads=True)
        self._kill_ranks()
        # The last line of a process is the reason that its supervisor shows.
        print_error(self._program, RuntimeError(message))
        # Nothing is closed: that would wait for the hung thread.
        os._exit(EXIT_HUNG)

    def _set_exit_timer(self, after_s: float | None) -> None:
        """Let `faulthandler` write the stacks of all threads and end the process with status 1 after `after_s` seconds,
        in place of an earlier timer.

        None cancels the timer.
        """
        if self._has_exit_timer and after_s is not None:
            # A new call replaces the timer of the last one.
            faulthandler.dump_traceback_later(after_s, file=_STDERR, exit=True)
        elif self._has_exit_timer:
            faulthandler.cancel_dump_traceback_later()


class RefusingServer(Protocol):
    """The part of an instance's server that a report of a hanging step uses: it makes the server refuse
    new requests.
    """

    is_draining: bool


class HangReport:
    """Reports a hung step to the routers: it closes their connections, so that they lose this instance immediately and
    replay its requests elsewhere.

    `begin` belongs to the event loop. The owner sets `leave_registry` when the instance has registered.
    """

    def __init__(self, serving: Callable[[], RefusingServer], rpc: InstanceServer, reported: threading.Event) -> None:
        """Prepare the report. `serving` returns the present server of the instance, `rpc` has the connections to
        routers, and `reported` is set when the report is sent.
        """
        self._serving = serving
        self._rpc = rpc
        self._reported = reported
        self._task: asyncio.Task[None] | None = None
        self.leave_registry: Callable[[], Awaitable[None]] | None = None

    def begin(self, _: None) -> None:
        """Start to report the hang in a task; the event `reported` is set at its end. The argument is not used."""
        self._serving().is_draining = True
        self._task = asyncio.create_task(self._leave(), name="hang report")

    async def _leave(self) -> None:
        # For a router a closed connection means a lost instance, as after the end of this process. `Failed` for each
        # request would be wrong: their cleanup waits for the engine thread, and replays after an "internal" failure
        # wait and need the retry budget.
        await self._rpc.close()
        if self.leave_registry is not None:
            await self.leave_registry()
        self._reported.set()


class NoStepWatchdog:
    """A watchdog that watches nothing: the default of an engine thread that is not part of an instance process."""

    def begin_step(self, engine: WatchedEngine) -> None:
        pass

    def begin_commands(self) -> None:
        pass

    def end(self) -> None:
        pass

    def on_prefill_rate(self, tokens_per_s: float) -> None:
        pass


def _do_nothing() -> None:
    """Do nothing: the default of the callbacks that the owner passes to `StepWatchdog.start`."""
