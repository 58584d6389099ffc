"""A model that answers with vectors, between its routers and its engine."""

import asyncio
import struct
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import pytest

from baton_serve.contracts.identity import RequestId
from baton_serve.contracts.messages import (
    Batch,
    Cancel,
    Failed,
    Generate,
    Heartbeat,
    LoadReport,
    Pool,
    Pooled,
    SnapshotRequest,
)
from baton_serve.contracts.pooling import PoolingInput, PoolingSpec
from baton_serve.engine.core.outputs import EngineStats, FailedRequest, PooledOutput, StepResult
from baton_serve.engine.errors import RequestError
from baton_serve.engine.model.vision.image_types import NO_PIXELS, DecodedImage, Pixels
from baton_serve.services.common.rpc.instance_link import RouterId
from baton_serve.services.instance import pooling_server
from baton_serve.services.instance.engine_thread import TimedStepResult
from baton_serve.services.instance.interfaces import PoolingPort
from baton_serve.services.instance.pooling_server import MAX_BATCH_BYTES, PoolingServer, frames
from tests.unit.instance.fakes import (
    IDENTITY,
    OTHER_ROUTER,
    ROUTER,
    STATS,
    FakeEngine,
    FakeEvents,
    FakeRouterPort,
    run,
    settle,
    work,
)

T = TypeVar("T")


class FakePoolingEngine:
    layout = FakeEngine.layout
    last_batch = FakeEngine.last_batch
    max_model_len = 128

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.error: Exception | None = None
        self.pixels: Pixels = {}

    def pool(
        self,
        request_id: RequestId,
        inputs: list[PoolingInput],
        params: PoolingSpec,
        *,
        priority: int = 0,
        pixels: Pixels = NO_PIXELS,
    ) -> None:
        self.asked.append(("pool", request_id, len(inputs), priority))
        self.pixels = pixels
        if self.error is not None:
            raise self.error

    def cancel(self, request_id: RequestId) -> None:
        self.asked.append(("cancel", request_id))

    def step(self) -> StepResult:
        raise AssertionError("nobody steps a fake")

    def has_work(self) -> bool:
        return False

    def stats(self) -> EngineStats:
        return STATS

    def close(self) -> None:
        pass


class Bench:
    """As a real engine's thread, a call is answered later."""

    def __init__(self) -> None:
        self.engine = FakePoolingEngine()
        self.router = FakeRouterPort()
        self.serving = PoolingServer(IDENTITY, engine=self, stats=STATS, router=self.router, events=FakeEvents())

    def call(self, action: Callable[[PoolingPort], T]) -> "asyncio.Future[T]":
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        try:
            future.set_result(action(self.engine))
        except RequestError as exc:
            future.set_exception(exc)
        return future

    def post(self, action: Callable[[PoolingPort], object]) -> None:
        action(self.engine)

    def ask(
        self, request_id: str = "r", num_inputs: int = 2, *, router: RouterId = ROUTER, timeout_s: float = 60
    ) -> RequestId:
        """The id inside the process."""
        inputs = [PoolingInput([1, 2]) for _ in range(num_inputs)]
        params = PoolingSpec(task="embed")
        message = Pool(request_id=RequestId(request_id), inputs=inputs, params=params, priority=3, timeout_s=timeout_s)
        self.serving.on_message(router, message)
        inner: RequestId = self.engine.asked[-1][1]
        return inner

    def turn(self, *outputs: PooledOutput, failed: list[FailedRequest] | None = None) -> None:
        self.serving.on_step_result(TimedStepResult(StepResult(pooled=list(outputs), failed=failed or []), at=1.0))


def vector(inner: RequestId, index: int) -> PooledOutput:
    return PooledOutput(inner, index, [2], struct.pack("<2f", index, 0.5))


def test_answers_leave_with_the_pass_that_computed_them() -> None:
    async def test() -> None:
        bench = Bench()
        inner = bench.ask()
        other = bench.ask("r", router=OTHER_ROUTER)  # another router may use the same id
        assert bench.engine.asked == [("pool", inner, 2, 3), ("pool", other, 2, 3)]
        bench.turn(vector(inner, 1), vector(other, 0))
        bench.turn(vector(inner, 0), vector(other, 1))
        assert [(a.request_id, a.index, a.shape) for a in bench.router.answers()] == [("r", 1, [2]), ("r", 0, [2])]
        assert [a.index for a in bench.router.answers(OTHER_ROUTER)] == [0, 1]
        assert bench.serving.num_requests == 0
        await bench.serving.drain(0.0)

    run(test())


def test_a_request_that_the_engine_refuses_gets_the_reason() -> None:
    async def test() -> None:
        bench = Bench()
        bench.engine.error = RequestError("too_long", "far too long")
        bench.ask()
        await settle()
        (failed,) = bench.router.answers()
        assert (failed.code, failed.message) == ("too_long", "far too long")
        assert bench.serving.num_requests == 0

    run(test())


def test_what_nobody_waits_for_is_not_computed() -> None:
    async def test() -> None:
        bench = Bench()
        first, second, third = bench.ask("a"), bench.ask("b"), bench.ask("c", router=OTHER_ROUTER)
        bench.serving.on_message(ROUTER, Cancel(RequestId("a")))
        bench.serving.on_message(ROUTER, Cancel(RequestId("unknown")))
        bench.serving.on_router_lost(OTHER_ROUTER)
        assert bench.engine.asked[3:] == [("cancel", first), ("cancel", third)]
        again = bench.ask("b")  # a new attempt replaces the old
        assert ("cancel", second) in bench.engine.asked
        bench.turn(vector(first, 0), vector(second, 0), vector(again, 0), vector(again, 1))
        assert [a.index for a in bench.router.answers()] == [0, 1]

    run(test())


def test_a_pass_that_failed_and_a_deadline_end_requests() -> None:
    async def test() -> None:
        bench = Bench()
        inner = bench.ask("a")
        bench.turn(failed=[FailedRequest(inner, "out of memory")])
        bench.ask("b", timeout_s=0.0)
        await asyncio.sleep(0.01)
        codes = [(a.request_id, a.code) for a in bench.router.answers()]
        assert codes == [("a", "internal"), ("b", "timeout")]

    run(test())


def test_draining_lets_requests_end_and_takes_no_new_ones() -> None:
    async def test() -> None:
        bench = Bench()
        inner = bench.ask("a", 1)
        draining = asyncio.create_task(bench.serving.drain(5.0))
        await settle()
        assert isinstance(bench.router.answers()[-1], LoadReport) and bench.router.answers()[-1].draining
        bench.serving.on_message(ROUTER, Pool(request_id=RequestId("b"), inputs=[], params=PoolingSpec(task="embed")))
        assert bench.router.answers()[-1].code == "draining"
        bench.turn(vector(inner, 0))
        await draining
        assert isinstance(bench.router.answers()[-1], Pooled)

    run(test())


def test_draining_ends_what_takes_too_long() -> None:
    async def test() -> None:
        bench = Bench()
        bench.ask("a")
        await bench.serving.drain(0.0)
        assert (bench.router.answers()[-1].request_id, bench.router.answers()[-1].code) == ("a", "draining")

    run(test())


def test_text_is_not_written_here_and_probes_are_answered() -> None:
    async def test() -> None:
        bench = Bench()
        bench.serving.on_message(ROUTER, Generate(work("g")))
        bench.serving.on_message(ROUTER, Heartbeat())
        bench.serving.on_message(ROUTER, SnapshotRequest())
        failed, report, snapshot = bench.router.answers()
        assert isinstance(failed, Failed) and failed.code == "invalid"
        assert report.load.prefill_tokens_per_s == STATS.prefill_tokens_per_s
        assert snapshot.device == []

    run(test())


def test_a_result_that_fits_into_no_frame_fails_its_request_and_leaves_the_connection_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pooling_server, "MAX_RESULT_BYTES", 8)

    async def test() -> None:
        bench = Bench()
        large, small = bench.ask("large"), bench.ask("small", 1)
        matrix = PooledOutput(large, 0, [2, 2], bytes(16))
        bench.turn(matrix, vector(small, 0), vector(large, 1))
        failed, answer = bench.router.answers()
        assert (failed.request_id, failed.code) == ("large", "too_long") and "16 bytes" in failed.message
        assert (answer.request_id, answer.index) == ("small", 0)
        assert ("cancel", large) in bench.engine.asked and bench.serving.num_requests == 0

    run(test())


def test_frames_to_a_router_stay_small() -> None:
    def answer(index: int, size: int) -> Pooled:
        return Pooled(request_id=RequestId("r"), index=index, shape=[size // 4], data=bytes(size))

    half = MAX_BATCH_BYTES // 2
    answers = [answer(0, half), answer(1, half), answer(2, 4), answer(3, 3 * half), answer(4, 4)]
    grouped = frames(answers)
    assert [[a.index for a in group] for group in grouped] == [[0, 1], [2], [3], [4]]
    assert all(isinstance(message, Pooled) for message in Batch(list(grouped[0])).messages)


class FakeReader:
    embedding_layout = None

    def read(self, images: Iterable[bytes]) -> Pixels:
        if b"broken" in (found := list(images)):
            raise RequestError("invalid", "an image cannot be read")
        return {image: DecodedImage({}, 1, 1) for image in found}


def test_images_are_decoded_before_the_engine_sees_their_request() -> None:
    async def test() -> None:
        bench = Bench()
        bench.serving._reader = FakeReader()
        params = PoolingSpec(task="embed")

        def ask(name: str, image: bytes) -> None:
            given = [PoolingInput([1])]
            message = Pool(request_id=RequestId(name), inputs=given, params=params, images=[image])
            bench.serving.on_message(ROUTER, message)

        ask("a", b"one")
        assert bench.engine.asked == []
        await asyncio.sleep(0.05)
        assert bench.engine.asked == [("pool", "a#1", 1, 0)] and list(bench.engine.pixels) == [b"one"]
        ask("b", b"broken")
        await asyncio.sleep(0.05)
        (failed,) = bench.router.answers()
        assert (failed.request_id, failed.code, failed.message) == ("b", "invalid", "an image cannot be read")
        assert bench.serving.num_requests == 1
        bench.serving.on_message(ROUTER, Cancel(RequestId("a")))
        await asyncio.sleep(0.05)
        assert not bench.serving._tasks and bench.serving.num_requests == 0

    run(test())
