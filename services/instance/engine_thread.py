"""Runs the engine in one thread: commands come through a queue, results leave as callbacks; decides when it sleeps and
reports load. It knows no requests, routers or transfers.

Commands enter through a queue and results leave through callbacks on the event loop. Without work the thread blocks on
its queue. A command waits at most for the step that is running.
"""

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Generic, Protocol, TypeVar

from baton_serve.engine.errors import EngineError
from baton_serve.services.instance.cpu_sharing.time_slicing import NoTimeSlicing, TimeSlicer
from baton_serve.services.instance.errors import EngineBroken
from baton_serve.services.instance.interfaces import (
    EncoderPort,
    EnginePort,
    EngineStats,
    PoolingPort,
    SteppingPort,
    StepResult,
)
from baton_serve.services.instance.watchdog.step_watchdog import NoStepWatchdog, StepWatchdog

logger = logging.getLogger(__name__)

T = TypeVar("T")
E = TypeVar("E", bound=SteppingPort)

SWITCH_INTERVAL_S = 0.0002
"""Seconds after which the engine thread yields the GIL to the event loop while it runs Python code. With Python's
default of 5 ms each message would wait that long."""


POLL_INTERVAL_S = 0.005
"""Seconds between two checks while a step waits for its time slice (`--core-turns`)."""
STATS_INTERVAL_S = 0.05
"""Minimum time in seconds between two reports of statistics while no request begins or ends: a step that only adds
tokens changes little."""
STATS_DELAY_S = 0.002
"""Seconds between the last step and the statistics of an idle engine. They let the event loop handle the results of
that step first, because a handoff may depend on it."""


@dataclass(frozen=True, slots=True)
class TimedStepResult:
    """The result of one step of the engine, and the time `at` which it ended (`time.monotonic()`)."""

    result: StepResult
    at: float


class EngineCalls(Protocol):
    """The interface by which code on the event loop runs functions in the engine thread; `EngineThread` implements and
    documents it.
    """

    def call(
        self, action: Callable[[EnginePort], T], *, then: Callable[[T], None] | None = None
    ) -> asyncio.Future[T]: ...

    def post(self, action: Callable[[EnginePort], object]) -> None: ...


class PoolingEngineCalls(Protocol):
    """The interface by which code on the event loop runs functions in the thread of an engine that computes vectors;
    `EngineThread` implements and documents it.
    """

    def call(self, action: Callable[[PoolingPort], T]) -> asyncio.Future[T]: ...

    def post(self, action: Callable[[PoolingPort], object]) -> None: ...


class EncoderCalls(Protocol):
    """The calls of request handling into an image encoder; implemented by `EngineThread`."""

    def call(
        self, action: Callable[[EncoderPort], T], *, then: Callable[[T], None] | None = None
    ) -> asyncio.Future[T]: ...

    def post(self, action: Callable[[EncoderPort], object]) -> None: ...


class EngineThread(Generic[E]):
    """Owns an engine and the thread that builds it and runs its steps.

    `start` builds the engine, `attach` starts to run steps, `stop` ends the thread. All methods belong to the event
    loop's thread, except `give_up` and `deliver`, which any thread may call.
    """

    def __init__(
        self,
        build: Callable[[], E],
        time_slicer: TimeSlicer | None = None,
        watchdog: StepWatchdog | None = None,
    ) -> None:
        self._build = build
        self._time_slicer = time_slicer or NoTimeSlicing()
        self._watchdog = watchdog or NoStepWatchdog()
        self._commands: SimpleQueue[_Command[E, object] | None] = SimpleQueue()
        self._attached = threading.Event()
        self._is_broken = False
        self._thread = threading.Thread(target=self._live, name="engine", daemon=True)
        self._ended: Future[None] = Future()
        self._ready: Future[E] = Future()

    @property
    def is_alive(self) -> bool:
        """Return whether the engine thread runs. After `stop` it still runs only if it is stuck, for example while
        loading.
        """
        return self._thread.is_alive()

    async def start(self) -> E:
        """Start the thread, build the engine in it and return the engine. Raises the exception of `build`.

        If this coroutine is cancelled, the thread closes the engine as soon as it is built.
        """
        # Without this, cancelling `start` would cancel the future, and `set_result` in the thread would raise.
        self._ready.set_running_or_notify_cancel()
        self._thread.start()
        try:
            return await asyncio.wrap_future(self._ready)
        except asyncio.CancelledError:
            self._commands.put(None)
            self._attached.set()
            raise

    def attach(
        self,
        *,
        on_step_result: Callable[[TimedStepResult], None],
        on_stats: Callable[[EngineStats], None],
        on_broken: Callable[[EngineBroken], None],
    ) -> None:
        """Start to run steps. All callbacks are called on this event loop: `on_step_result` after each step, `on_stats`
        with new statistics, and `on_broken`, as the last one, if the engine cannot continue.

        `on_stats` is called after `on_step_result` of the steps that changed the statistics.
        """
        self._loop = asyncio.get_running_loop()
        self._on_step_result = on_step_result
        self._on_stats = on_stats
        self._on_broken = on_broken
        self._attached.set()

    def call(self, action: Callable[[E], T], *, then: Callable[[T], None] | None = None) -> asyncio.Future[T]:
        """Run `action` in the engine thread, before the next step, and return a future of its result.

        Commands run in the order of their calls. `then` is called on the event loop with the result, before the results
        of any later step are delivered; a task that awaits the future may run after those. The future raises what
        `action` raised, or `EngineBroken` if the engine has stopped.
        """
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        if self._is_broken:
            future.set_exception(EngineBroken("the engine has stopped; see the instance's log for the cause"))
        else:
            self._commands.put(_Command(action, future, then))  # type: ignore[arg-type]
        return future

    def post(self, action: Callable[[E], object]) -> None:
        """Run `action` in the engine thread as `call` does, but without a result. An error is logged; nothing happens
        if the engine has stopped.
        """
        if not self._is_broken:
            self._commands.put(_Command(action, None))

    def give_up(self, reason: str) -> None:
        """Report that the engine cannot continue, because of `reason`: `on_broken` is called. Any thread may call it,
        even while the engine thread is stuck in a step.
        """
        if self._attached.is_set() and not self._is_broken:
            self._is_broken = True
            self.deliver(self._on_broken, EngineBroken(reason))

    async def stop(self) -> None:
        """Wait for the running step, close the engine and end the thread. Afterwards nothing uses the engine's memory
        any more.
        """
        self._commands.put(None)
        self._attached.set()
        # Shielded: the shutdown phase has a deadline and cancels this wait if the thread is stuck in native code, but
        # that must not cancel the future that the thread will set.
        await asyncio.shield(asyncio.wrap_future(self._ended))
        self._thread.join()

    def _live(self) -> None:
        try:
            self._main()
        finally:
            self._ended.set_result(None)

    def _main(self) -> None:
        try:
            engine = self._build()
        except BaseException as exc:  # noqa: BLE001 - start() raises it again in the thread that waits
            self._ready.set_exception(exc)
            return
        self._ready.set_result(engine)
        self._attached.wait()
        # Only from now on: while loading there is nothing on the event loop that is urgent.
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        try:
            self._run(engine)
        except Exception as exc:
            logger.exception("the engine failed, stopping the instance")
            self.give_up(f"the engine failed: {exc}")
            # Do not close the engine yet: its memory must stay mapped until `stop`, because transfers may still read
            # it.
            while self._commands.get() is not None:
                pass
        engine.close()

    def _run(self, engine: E) -> None:
        stats, stats_at, is_due, is_idle = engine.stats(), 0.0, False, True
        self._watchdog.on_prefill_rate(stats.prefill_tokens_per_s)
        while True:
            # While statistics are due, wait only briefly: they are reported after this wait. Else block until a command
            # arrives.
            idle_wait_s = STATS_DELAY_S if is_due else None
            commands = self._take(idle_wait_s if is_idle else min(self._time_slicer.wait_s(), POLL_INTERVAL_S))
            if commands is None:
                return
            if is_due:
                stats, stats_at, is_due = engine.stats(), time.monotonic(), False
                self._watchdog.on_prefill_rate(stats.prefill_tokens_per_s)
                self.deliver(self._on_stats, stats)
                if is_idle and not commands:
                    continue
            # Commands run even while the step waits for its time slice; they are short.
            must_wait = self._time_slicer.wait_s() > 0
            if must_wait and not commands:
                continue
            self._run_commands(commands, engine)
            # Deliver answers before the results of the step that follows: `call` specifies this order.
            if any(command.future is not None for command in commands):
                self.deliver(_settle, commands)
            # Newly added sequences do not wait for the time slice: their first token has been sent already, so a pause
            # would show as a long gap before the second one.
            if must_wait:
                must_wait = _num_decoding(engine.stats()) <= _num_decoding(stats)
            result = StepResult() if must_wait or not engine.has_work() else self._step(engine)
            at = time.monotonic()
            is_idle = not engine.has_work()
            if is_idle:
                self._time_slicer.rest()
            self.deliver(self._on_step_result, TimedStepResult(result, at))
            # Report immediately if capacity may have changed (a request began or ended), else at most every
            # STATS_INTERVAL_S.
            is_due = is_idle or bool(commands) or _frees_something(result) or at - stats_at > STATS_INTERVAL_S

    def _run_commands(self, commands: "list[_Command[E, object]]", engine: E) -> None:
        if commands:
            self._watchdog.begin_commands()
            for command in commands:
                command.run(engine)
            self._watchdog.end()

    def _step(self, engine: E) -> StepResult:
        self._time_slicer.begin()
        self._watchdog.begin_step(engine)
        try:
            return engine.step()
        finally:
            self._watchdog.end()
            self._time_slicer.end()

    def _take(self, wait_s: float | None) -> "list[_Command[E, object]] | None":
        """Return all functions that wait to run in the engine thread, or None if the thread must stop.

        Wait up to `wait_s` seconds for the first one; None waits without limit, 0 does not wait.
        """
        commands: list[_Command[E, object]] = []
        while (wait_s != 0 and not commands) or not self._commands.empty():
            try:
                command = self._commands.get(timeout=wait_s)
            except Empty:
                break
            if command is None:
                return None
            commands.append(command)
        return commands

    def deliver(self, callback: Callable[[T], None], value: T) -> None:
        """Call `callback(value)` on the event loop. Any thread may call it once `attach` has been called."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback, value)


class _Command(Generic[E, T]):
    """Carries one function to the engine thread, and its result or error back to the event loop."""

    def __init__(
        self,
        action: Callable[[E], T],
        future: "asyncio.Future[T] | None",
        then: Callable[[T], None] | None = None,
    ) -> None:
        self.future = future
        self._action = action
        self._then = then
        self._value: T | None = None
        self._error: Exception | None = None

    def run(self, engine: E) -> None:
        """Call the function with the engine, in the engine thread, and keep its result or exception for `settle`."""
        try:
            self._value = self._action(engine)
        # An expected error, such as a refused request: it belongs to the caller and needs no traceback here.
        except EngineError as exc:
            self._error = exc
        except Exception as exc:
            logger.exception("unexpected error in an engine command")
            self._error = exc
        if self._error is not None and self.future is None:
            logger.error("engine command failed: %s", self._error)

    def settle(self) -> None:
        """Pass the kept result or exception to the caller's future and, after a success, call `then`. Runs on the event
        loop.
        """
        # The caller may have been cancelled meanwhile: its future is done then.
        if self.future is None or self.future.done():
            return
        if self._error is not None:
            self.future.set_exception(self._error)
            return
        self.future.set_result(self._value)  # type: ignore[arg-type]
        if self._then is not None:
            try:
                self._then(self._value)  # type: ignore[arg-type]
            # The same call settles other commands: an error in one callback must not keep them waiting for ever.
            except Exception:
                logger.exception("unexpected error in the callback of an engine command")


def _frees_something(result: StepResult) -> bool:
    return bool(result.failed) or any(output.finish_reason is not None for output in result.tokens)


def _num_decoding(stats: EngineStats) -> int:
    return stats.running + stats.waiting


def _settle(commands: "list[_Command[E, object]]") -> None:
    for command in commands:
        command.settle()
