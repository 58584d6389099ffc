"""Starts the processes of one service, restarts each that dies, and stops them in order; delays:
`restart_policy.py`.

`baton serve` supervises a router and its instances, and `baton router --workers` supervises several routers. Each of
the two decides how a process is started, when it counts as ready, and what users see of it.
"""

import asyncio
import contextlib
import logging
import signal
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable
from typing import Generic, Protocol, TypeVar

import msgspec

from baton_serve.services.common.errors import LocalError
from baton_serve.services.common.process_lifecycle import EXIT_HOPELESS, cancel_all
from baton_serve.services.common.restart_policy import RestartPolicy

logger = logging.getLogger(__name__)

_POLL_S = 0.1
"""Time between two looks at whether the start is complete."""
_KILL_S = 3.0
"""Time that processes get to end after SIGKILL. One that hangs in a driver may take longer."""


class ProcessRun(Protocol):
    """One run of a supervised process, from its start to its exit. A restart is another run."""

    is_ready: bool
    """True once the process has reported that it is ready."""
    status: int | None
    """Exit status, negative for a signal; None while it runs."""

    async def wait(self) -> None:
        """Wait until the process has exited and all its output has been read."""

    def signal(self, number: int) -> None:
        """Send the signal `number` to the process. Do nothing if it has exited."""


class WatchRules(msgspec.Struct, frozen=True):
    """The rules by which a process counts as hung: it did not answer `max_missed` queries in a row."""

    interval_s: float = 2.0
    """Time in seconds between two queries."""
    timeout_s: float = 5.0
    """Longest time in seconds for an answer."""
    max_missed: int = 3


async def until_hung(is_hung: Callable[[float], Awaitable[bool]], rules: WatchRules) -> None:
    """Query a process again and again, and return once it counts as hung by `rules`.

    `is_hung` makes one query with a time limit in seconds, and returns True if no answer came within it.
    """
    num_missed = 0
    while num_missed < rules.max_missed:
        await asyncio.sleep(rules.interval_s)
        num_missed = num_missed + 1 if await is_hung(rules.timeout_s) else 0


R = TypeVar("R", bound=ProcessRun)


class ProcessSupervisor(ABC, Generic[R]):
    """Base class that starts the processes of one service by name, starts a process again when it has died, and stops
    all at the end. All methods run on the event loop.
    """

    def __init__(self) -> None:
        self.runs: dict[str, R] = {}
        """The last run of each process; it may have ended."""
        self._restarts: dict[str, RestartPolicy] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._stopping = asyncio.Event()

    @abstractmethod
    async def _spawn(self, name: str) -> R:
        """Start the process `name` and return its run. Subclasses implement it."""

    @abstractmethod
    def _report(self, text: str) -> None:
        """Show the user `text` about a process, such as that it died and is restarted. Subclasses implement it."""

    @abstractmethod
    def _given_up(self, name: str, run: R) -> LocalError:
        """Return the error to raise for the process `name`, which failed too often to be restarted again; `run` was its
        last run. Subclasses implement it.
        """

    def _taken_out(self, name: str, run: R) -> LocalError | None:
        """Return an error if the process `name`, which has just ended (`run`), must not be restarted even if it has
        served before. Return None if it may be restarted. Called after each run.
        """
        return None

    def _is_starting(self, name: str) -> bool:
        """Return whether the process `name` has never served. Only such a process is given up if it keeps failing, or
        exits with `EXIT_HOPELESS`.
        """
        return not self._restarts[name].has_served

    def _keep_running(self, names: Iterable[str]) -> None:
        """Start the processes with these names, and restart each one that exits, until `_stop`."""
        for name in names:
            self._restarts[name] = RestartPolicy()
            self._tasks[name] = asyncio.create_task(self._supervise(name), name=name)
            self._tasks[name].add_done_callback(_log_bug)

    async def _wait_until(self, is_complete: Callable[[], Awaitable[bool]]) -> None:
        """Call `is_complete` again and again until it returns True. If a process fails so often that it is not
        restarted any more, raise the error of this process.
        """
        while not await is_complete():
            for task in self._tasks.values():
                if task.done():
                    task.result()
            await asyncio.sleep(_POLL_S)

    async def _stop(self, *groups: tuple[Iterable[str], float | None]) -> None:
        """Stop the processes: send SIGTERM to one of `groups` after the other, then kill each process that still runs.

        Each group is (names of processes, longest time in seconds to wait after its signal; None: without limit). The
        wait ends earlier when the processes of this group and of those before it have exited. If the caller cancels
        this, all processes are killed.
        """
        self._stopping.set()
        stopped: list[str] = []
        try:
            for names, timeout_s in groups:
                stopped += names
                for run in [self.runs[name] for name in names if name in self.runs]:
                    run.signal(signal.SIGTERM)
                await self._wait_ended(stopped, timeout_s)
        finally:
            for name, run in self.runs.items():
                if run.status is None:
                    self._report(f"{name} did not exit in time and is killed")
                    run.signal(signal.SIGKILL)
            await self._wait_ended(self.runs, _KILL_S)
            await cancel_all(self._tasks.values())

    async def _wait_ended(self, names: Iterable[str], timeout_s: float | None) -> None:
        if tasks := [self._tasks[name] for name in names if name in self._tasks]:
            await asyncio.wait(tasks, timeout=timeout_s)

    async def _supervise(self, name: str) -> None:
        """Run the process `name` and restart it whenever it exits, until `_stop`. Raises the error of `_given_up` or
        `_taken_out`.
        """
        loop, restarts = asyncio.get_running_loop(), self._restarts[name]
        while not self._stopping.is_set():
            started_at = loop.time()
            run = self.runs[name] = await self._spawn(name)
            if self._stopping.is_set():
                # `_stop` sent its signal before this process existed. It has no requests that it should finish.
                run.signal(signal.SIGKILL)
            await run.wait()
            if self._stopping.is_set():
                return
            if (error := self._taken_out(name, run)) is not None:
                raise error
            has_served = run.is_ready or not self._is_starting(name)
            delay_s = restarts.next_delay_s(lived_s=loop.time() - started_at, has_served=has_served)
            # With this status a process reports that a restart cannot help: a bad flag, a broken model, a port in use.
            if delay_s is None or (run.status == EXIT_HOPELESS and self._is_starting(name)):
                raise self._given_up(name, run)
            self._report(f"{name} has died ({end_reason(run)}) and is restarted in {delay_s:g} s")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay_s)


def _log_bug(task: "asyncio.Task[None]") -> None:
    """Log the error with which the task of a process has ended, unless it is the expected error of a process that is
    not restarted any more.
    """
    if not task.cancelled() and (error := task.exception()) and not isinstance(error, LocalError):
        logger.error("%s cannot be supervised any more", task.get_name(), exc_info=error)


def end_reason(run: ProcessRun) -> str:
    """Return how the process of `run` ended, such as `status 1` or `SIGKILL`."""
    assert run.status is not None, "the process still runs"
    return f"status {run.status}" if run.status >= 0 else signal.Signals(-run.status).name
