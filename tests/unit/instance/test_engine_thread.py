import asyncio
import threading
import time
from collections.abc import Callable

import pytest

from baton_serve.engine.core.outputs import EngineStats, StepResult
from baton_serve.engine.errors import ModelError, RequestError
from baton_serve.services.instance.cpu_sharing.time_slicing import NoTimeSlicing
from baton_serve.services.instance.engine_thread import EngineThread, TimedStepResult
from baton_serve.services.instance.errors import EngineBroken
from tests.unit.instance.fakes import FakeEngine, output, run, work


class Watcher:
    def __init__(self) -> None:
        self.turns: list[TimedStepResult] = []
        self.stats: list[EngineStats] = []
        self.num_tokens = 0
        self.three_tokens = asyncio.Event()
        self.broken: asyncio.Future[EngineBroken] = asyncio.get_running_loop().create_future()

    def attach(self, thread: EngineThread[FakeEngine]) -> None:
        thread.attach(on_step_result=self.on_step_result, on_stats=self.stats.append, on_broken=self.broken.set_result)

    def on_step_result(self, turn: TimedStepResult) -> None:
        self.turns.append(turn)
        self.num_tokens += len(turn.result.tokens)
        if self.num_tokens >= 3:
            self.three_tokens.set()


async def started(engine: FakeEngine) -> EngineThread[FakeEngine]:
    thread = EngineThread(lambda: engine)
    assert await thread.start() is engine
    return thread


def test_commands_run_in_order_and_answer() -> None:
    async def test() -> None:
        engine = FakeEngine()
        thread, watcher = await started(engine), Watcher()
        watcher.attach(thread)
        thread.post(lambda e: e.add(work("a")))
        thread.post(lambda e: e.cancel(work("a").request_id))
        assert await thread.call(lambda e: e.max_model_len) == 128
        assert engine.verbs() == ["add", "cancel"]
        await thread.stop()
        assert engine.is_closed

    run(test())


def test_an_idle_engine_takes_no_steps() -> None:
    async def test() -> None:
        engine = FakeEngine()
        thread, watcher = await started(engine), Watcher()
        watcher.attach(thread)
        await thread.call(lambda e: None)
        await thread.call(lambda e: None)
        await thread.stop()
        assert engine.num_steps <= 2

    run(test())


def test_every_step_leaves_by_one_turn() -> None:
    async def test() -> None:
        engine = FakeEngine()
        engine.results = [StepResult(tokens=[output(work().request_id, n)]) for n in range(3)]
        thread, watcher = await started(engine), Watcher()
        watcher.attach(thread)
        thread.post(lambda e: None)
        await watcher.three_tokens.wait()
        assert [t.result.tokens[0].token_ids for t in watcher.turns if t.result.tokens] == [[0], [1], [2]]
        await thread.stop()

    run(test())


def test_what_follows_a_command_comes_before_the_steps_after_it() -> None:
    """However long the event loop had no time for either."""

    async def test() -> None:
        engine = FakeEngine()
        engine.results = [StepResult(tokens=[output(work().request_id, n)]) for n in range(3)]
        thread, seen = await started(engine), list[str]()
        thread.attach(
            on_step_result=lambda turn: seen.append("turn"), on_stats=lambda _: None, on_broken=lambda _: None
        )
        future = thread.call(lambda e: "begun", then=seen.append)
        while engine.num_steps < 3:
            time.sleep(0.001)  # noqa: ASYNC251 - the loop is busy
        assert not seen
        assert await future == "begun"
        await thread.stop()
        assert seen[:2] == ["begun", "turn"]

    run(test())


def test_a_bug_in_what_follows_a_command_is_not_the_next_ones(caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: object) -> None:
        raise ZeroDivisionError

    async def test() -> None:
        thread, watcher = await started(FakeEngine()), Watcher()
        first = thread.call(lambda e: 1, then=fail)
        second = thread.call(lambda e: 2)
        watcher.attach(thread)  # both are there: they are settled together
        assert (await first, await second) == (1, 2)
        await thread.stop()

    run(test())
    assert "ZeroDivisionError" in caplog.text


def test_numbers_follow_the_turn_that_changed_them() -> None:
    async def test() -> None:
        engine = FakeEngine()
        engine.results = [StepResult(tokens=[output(work().request_id, n)]) for n in range(3)]
        thread, seen = await started(engine), list[str]()
        reported = asyncio.Semaphore(0)

        def on_step_result(turn: TimedStepResult) -> None:
            seen.append("turn")

        def on_stats(stats: EngineStats) -> None:
            seen.append("stats")
            if seen.count("turn") >= 3:
                reported.release()

        thread.attach(on_step_result=on_step_result, on_stats=on_stats, on_broken=lambda error: None)
        thread.post(lambda e: None)
        await reported.acquire()
        assert engine.num_steps == 3
        assert seen[-2:] == ["turn", "stats"]
        before = len(seen)
        await thread.call(lambda e: None)
        await reported.acquire()
        assert seen[before:] == ["turn", "stats"]
        await thread.stop()

    run(test())


def test_an_error_of_a_command_reaches_its_caller_and_nobody_else() -> None:
    async def test() -> None:
        engine = FakeEngine()
        thread, watcher = await started(engine), Watcher()
        watcher.attach(thread)
        engine.error = RequestError("invalid", "no")
        with pytest.raises(RequestError):
            await thread.call(lambda e: e.add(work()))
        await thread.call(lambda e: e.add(work()))
        await thread.stop()

    run(test())


def test_a_step_that_raises_breaks_the_engine() -> None:
    async def test() -> None:
        engine = FakeEngine()
        thread, watcher = await started(engine), Watcher()

        def explode() -> StepResult:
            raise RuntimeError("device lost")

        engine.results = [StepResult()]
        engine.step = explode  # type: ignore[method-assign]
        watcher.attach(thread)
        thread.post(lambda e: None)
        assert "device lost" in str(await watcher.broken)
        with pytest.raises(EngineBroken):
            await thread.call(lambda e: None)
        await thread.stop()
        assert engine.is_closed

    run(test())


def test_what_stops_the_engine_from_being_built_is_raised_by_start() -> None:
    def build() -> FakeEngine:
        raise ModelError("no config.json")

    async def test() -> None:
        with pytest.raises(ModelError):
            await EngineThread(build).start()

    run(test())


@pytest.mark.parametrize("error", [None, ModelError("no memory")])
def test_an_engine_that_nobody_waits_for_any_more_is_closed_once_built(error: ModelError | None) -> None:
    async def test() -> None:
        engine, begun, go_on = FakeEngine(), threading.Event(), threading.Event()

        def build() -> FakeEngine:
            begun.set()
            go_on.wait(10.0)
            if error is not None:
                raise error
            return engine

        thread = EngineThread(build)
        starting = asyncio.ensure_future(thread.start())
        await asyncio.to_thread(begun.wait, 10.0)
        starting.cancel()
        await asyncio.wait({starting})
        assert starting.cancelled()
        go_on.set()
        await asyncio.wait_for(thread.stop(), 10.0)
        assert engine.is_closed == (error is None)

    run(test())


def test_a_command_that_was_given_up_still_runs() -> None:
    async def test() -> None:
        engine = FakeEngine()
        thread, watcher = await started(engine), Watcher()
        watcher.attach(thread)
        action: Callable[[object], None] = lambda e: engine.cancel(work().request_id)  # noqa: E731
        thread.call(action).cancel()
        await thread.call(lambda e: None)
        assert engine.verbs() == ["cancel"]
        await thread.stop()

    run(test())


class Turns(NoTimeSlicing):
    """Asks for a wait until `is_due`."""

    def __init__(self) -> None:
        self.is_due = False
        self.seen: list[str] = []

    def wait_s(self) -> float:
        return 0.0 if self.is_due else 60.0

    def begin(self) -> None:
        self.seen.append("begin")

    def end(self) -> None:
        self.seen.append("end")

    def rest(self) -> None:
        self.seen.append("rest")


async def with_three_tokens(turns: Turns) -> tuple[FakeEngine, EngineThread[FakeEngine], Watcher]:
    engine = FakeEngine()
    engine.results = [StepResult(tokens=[output(work("a").request_id, token)]) for token in range(3)]
    thread, watcher = EngineThread(lambda: engine, turns), Watcher()
    await thread.start()
    watcher.attach(thread)
    return engine, thread, watcher


def test_commands_run_while_a_step_waits_for_its_turn() -> None:
    async def test() -> None:
        turns = Turns()
        engine, thread, watcher = await with_three_tokens(turns)
        assert await thread.call(lambda e: e.max_model_len) == 128
        assert await thread.call(lambda e: e.max_model_len) == 128
        assert engine.num_steps == 0
        turns.is_due = True
        await watcher.three_tokens.wait()
        await thread.stop()
        assert turns.seen == ["begin", "end"] * 3 + ["rest"]

    run(test())


def test_a_sequence_that_comes_need_not_wait() -> None:
    async def test() -> None:
        turns = Turns()
        engine, thread, _ = await with_three_tokens(turns)

        def come(engine: FakeEngine) -> None:
            engine.num_running += 1

        for _ in range(2):
            await thread.call(come)
        await thread.call(lambda e: None)
        assert engine.num_steps == 2
        await thread.stop()

    run(test())
