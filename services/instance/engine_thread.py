"""Owns the engine: builds it and calls it, all in one thread. Knows nothing of requests, routers or transfers.

Commands enter through a queue, what a step produced leaves through one callback on the event loop. A thread with
nothing to do blocks on its queue. A command never waits for more than the step that is running.
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
from baton_serve.services.instance.ports import EnginePort, EngineStats, PoolingPort, SteppingPort, StepResult

logger = logging.getLogger(__name__)

T = TypeVar("T")
E = TypeVar("E", bound=SteppingPort)

SWITCH_INTERVAL_S = 0.0002
"""How soon the engine's thread gives way to the event loop while it runs Python code. Python's default is 5 ms."""


POLL_INTERVAL_S = 0.005
"""How soon a step that waits for its turn notices that it need not wait any more."""
STATS_INTERVAL_S = 0.05
"""A step that only adds tokens changes little: numbers are taken anew only so often while nothing begins or ends."""
STATS_DELAY_S = 0.002
"""An engine that comes to rest lets the event loop act on its last step first: a handoff waits for that."""


@dataclass(frozen=True, slots=True)
class TimedStepResult:
    """What one round of the engine's thread left: `at` is `time.monotonic()` when the step had ended."""

    result: StepResult
    at: float


class EngineCalls(Protocol):
    """What request handling may do with the engine."""

    def call(
        self, action: Callable[[EnginePort], T], *, then: Callable[[T], None] | None = None
    ) -> asyncio.Future[T]: ...

    def post(self, action: Callable[[EnginePort], object]) -> None: ...


class PoolingEngineCalls(Protocol):
    """The same for an engine that answers with vectors."""

    def call(self, action: Callable[[PoolingPort], T]) -> asyncio.Future[T]: ...

    def post(self, action: Callable[[PoolingPort], object]) -> None: ...


class EngineThread(Generic[E]):
    """`start` builds the engine; `attach` begins to run it; `call` and `post` belong to the event loop's thread."""

    def __init__(self, build: Callable[[], E], turns: TimeSlicer | None = None) -> None:
        self._build = build
        self._turns = turns or NoTimeSlicing()
        self._commands: SimpleQueue[_Command[E, object] | None] = SimpleQueue()
        self._attached = threading.Event()
        self._is_broken = False
        self._thread = threading.Thread(target=self._live, name="engine", daemon=True)
        self._ended: Future[None] = Future()
        self._ready: Future[E] = Future()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    async def start(self) -> E:
        """Builds the engine. Raises what that raised. An engine that nobody waits for any more is closed once built."""
        self._ready.set_running_or_notify_cancel()  # else the thread could not tell it what became of the engine
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
        """From now on steps run. All callbacks are called on this event loop; after `on_broken` nothing else is.
        Numbers come after the turns that changed them."""
        self._loop = asyncio.get_running_loop()
        self._on_turn = on_step_result
        self._on_stats = on_stats
        self._on_broken = on_broken
        self._attached.set()

    def call(self, action: Callable[[E], T], *, then: Callable[[T], None] | None = None) -> asyncio.Future[T]:
        """Runs `action` in the engine's thread, in order with all others, before its next step.

        `then` is called with what it returned before any later step is told of: who awaits the future may run after.
        """
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        if self._is_broken:
            future.set_exception(EngineBroken("the engine has stopped"))
        else:
            self._commands.put(_Command(action, future, then))  # type: ignore[arg-type]
        return future

    def post(self, action: Callable[[E], object]) -> None:
        """As `call`, for actions without an answer; an error is logged."""
        if not self._is_broken:
            self._commands.put(_Command(action, None))

    def give_up(self, reason: str) -> None:
        """From any thread: the engine cannot go on, though its thread may not have noticed."""
        if self._attached.is_set() and not self._is_broken:
            self._is_broken = True
            self.deliver(self._on_broken, EngineBroken(reason))

    async def stop(self) -> None:
        """Lets the running step end and closes the engine. Nobody touches its memory any more."""
        self._commands.put(None)
        self._attached.set()
        # A thread that is stuck in foreign code is waited for as long as this is, and no longer.
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
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        try:
            self._run(engine)
        except Exception as exc:
            logger.exception("the engine broke")
            self.give_up(f"the engine broke: {exc}")
            # Its memory stays until `stop`: transfers may still read it.
            while self._commands.get() is not None:
                pass
        engine.close()

    def _run(self, engine: E) -> None:
        stats, stats_at, is_due, is_idle = engine.stats(), 0.0, False, True
        while True:
            rest_s = STATS_DELAY_S if is_due else None
            commands = self._take(rest_s if is_idle else min(self._turns.wait_s(), POLL_INTERVAL_S))
            if commands is None:
                return
            if is_due:
                stats, stats_at, is_due = engine.stats(), time.monotonic(), False
                self.deliver(self._on_stats, stats)
                if is_idle and not commands:
                    continue
            must_wait = self._turns.wait_s() > 0
            if must_wait and not commands:
                continue
            for command in commands:
                command.run(engine)
            if any(command.future is not None for command in commands):
                self.deliver(_settle, commands)
            if must_wait:  # not for those who have just come: their first token is out already
                must_wait = _num_decoding(engine.stats()) <= _num_decoding(stats)
            result = StepResult() if must_wait or not engine.has_work() else self._step(engine)
            at = time.monotonic()
            is_idle = not engine.has_work()
            if is_idle:
                self._turns.rest()
            self.deliver(self._on_turn, TimedStepResult(result, at))
            is_due = is_idle or bool(commands) or _frees_something(result) or at - stats_at > STATS_INTERVAL_S

    def _step(self, engine: E) -> StepResult:
        self._turns.begin()
        try:
            return engine.step()
        finally:
            self._turns.end()

    def _take(self, wait_s: float | None) -> "list[_Command[E, object]] | None":
        """All commands that are there; waits for the first one so long, None: until it comes. None: stop."""
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
        """From any thread, once steps run: calls it on the event loop."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback, value)


class _Command(Generic[E, T]):
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
        try:
            self._value = self._action(engine)
        except EngineError as exc:
            self._error = exc
        except Exception as exc:
            logger.exception("a command to the engine failed")
            self._error = exc
        if self._error is not None and self.future is None:
            logger.error("a command to the engine failed: %s", self._error)

    def settle(self) -> None:
        if self.future is None or self.future.done():
            return
        if self._error is not None:
            self.future.set_exception(self._error)
            return
        self.future.set_result(self._value)  # type: ignore[arg-type]
        if self._then is not None:
            try:
                self._then(self._value)  # type: ignore[arg-type]
            except Exception:  # others' commands are settled in the same turn
                logger.exception("what follows a command to the engine failed")


def _frees_something(result: StepResult) -> bool:
    return bool(result.failed) or any(output.finish_reason is not None for output in result.tokens)


def _num_decoding(stats: EngineStats) -> int:
    return stats.running + stats.waiting


def _settle(commands: "list[_Command[E, object]]") -> None:
    for command in commands:
        command.settle()
