"""The server of an encode instance: what it publishes for a ticket, and that it frees everything however it ends."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import msgspec
import pytest

from baton_serve.contracts.block_layout import embedding_layout
from baton_serve.contracts.identity import BlockHash, RequestId
from baton_serve.contracts.media import digest_of
from baton_serve.contracts.messages import Encode, Failed, Generate, Heartbeat, LoadReport, Ticket
from baton_serve.contracts.vision.media_text import EmbeddingShape
from baton_serve.engine.core.outputs import EncodedFile, FailedRequest, NamedBlock, StepResult
from baton_serve.engine.errors import RequestError
from baton_serve.engine.model.vision.image_types import DecodedImage
from baton_serve.services.instance.encoding_server import EncodingServer
from baton_serve.services.instance.engine_thread import EncoderCalls, TimedStepResult
from tests.unit.instance.fakes import (
    IDENTITY,
    ROUTER,
    STATS,
    FakeEvents,
    FakeRouterPort,
    FakeTransfer,
    InlineCalls,
    name,
    run,
    ticket,
    work,
)

LAYOUT = embedding_layout("weights", width=4, dtype="float32")
FILE = b"a file"
SHAPE = EmbeddingShape(digest_of(FILE), 3, 10, 10)
BLOCKS = [NamedBlock(name(1), 1)]
INNER = RequestId("encode:t")


class FakeEncoder:
    def __init__(self) -> None:
        self.asked: list[str] = []
        self.is_cached = False

    def claim(self, request_id: RequestId, root: BlockHash, digests: Sequence[bytes]) -> list[bytes]:
        self.asked.append("claim")
        return [] if self.is_cached else list(digests)

    def add(self, request_id: RequestId, images: Mapping[bytes, DecodedImage]) -> None:
        self.asked.append("add")

    def blocks_of(self, request_id: RequestId) -> list[tuple[EmbeddingShape, list[NamedBlock]]]:
        return [(SHAPE, BLOCKS)] if self.is_cached else []

    def release(self, request_id: RequestId) -> None:
        self.asked.append("release")


class FakeReader:
    embedding_layout = LAYOUT

    def read(self, images: Iterable[bytes]) -> dict[bytes, DecodedImage]:
        if b"broken" in images:
            raise RequestError("invalid", "an image cannot be read")
        return {digest_of(file): DecodedImage({}, 10, 10) for file in images}


class Served:
    def __init__(self) -> None:
        self.engine, self.transfer, self.router = FakeEncoder(), FakeTransfer(), FakeRouterPort()
        self.server = EncodingServer(
            IDENTITY,
            engine=cast(EncoderCalls, InlineCalls(cast(Any, self.engine))),
            reader=FakeReader(),
            stats=STATS,
            router=self.router,
            events=FakeEvents(),
            transfer=self.transfer,
        )

    def encode(self, *files: bytes, **changes: Any) -> None:
        values = {"source_layout": LAYOUT, "source_root": BlockHash(b"e" * 16), **changes}
        asked: Ticket = msgspec.structs.replace(ticket(), **values)
        sent = files or (FILE,)
        self.server.on_message(ROUTER, Encode(asked, list(sent), [[digest_of(file)] for file in sent]))

    def step(self, **parts: Any) -> None:
        self.server.on_step_result(TimedStepResult(StepResult(**parts), at=1.0))

    async def until(self, fact: Callable[[], bool]) -> None:
        """Files are hashed and decoded in threads."""
        async with asyncio.timeout(5):
            while not fact():  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    async def end(self, reason: str) -> None:
        """End the transfer, and check that everything is free then."""
        if not self.transfer.release.done():
            self.transfer.release.set_result(reason)
        assert await self.server.idle(5.0)
        assert self.engine.asked[-1] == "release"


@pytest.mark.parametrize("is_cached", [True, False])
def test_embeddings_are_published_when_they_exist_and_freed_when_they_were_fetched(is_cached: bool) -> None:
    async def test() -> None:
        served = Served()
        served.engine.is_cached = is_cached
        served.encode()
        if not is_cached:
            await served.until(lambda: "add" in served.engine.asked)
            assert served.transfer.verbs() == ["open"]
            served.step(encoded=[EncodedFile(INNER, SHAPE, BLOCKS)], held=[INNER])
        await served.until(lambda: "finish" in served.transfer.verbs())
        published, finished = served.transfer.asked[1:]
        assert published == ("publish", [(name(1), 1)])
        assert msgspec.msgpack.decode(finished[1], type=list[EmbeddingShape]) == [SHAPE]
        assert "release" not in served.engine.asked and served.server.num_requests == 1
        await served.end("received")

    run(test())


def test_each_image_is_published_as_soon_as_it_is_encoded() -> None:
    """The other instance fetches it while later images are decoded and encoded."""

    async def test() -> None:
        served = Served()
        served.encode(b"first", b"second")
        await served.until(lambda: served.engine.asked.count("add") == 2)
        shapes = [EmbeddingShape(digest_of(file), 3, 10, 10) for file in (b"first", b"second")]
        served.step(encoded=[EncodedFile(INNER, shapes[0], BLOCKS)])
        assert served.transfer.asked[1:] == [("publish", [(name(1), 1)])]
        served.step(encoded=[EncodedFile(INNER, shapes[1], [NamedBlock(name(2), 2)])], held=[INNER])
        await served.until(lambda: "finish" in served.transfer.verbs())
        (published, finished) = served.transfer.asked[2:]
        assert published == ("publish", [(name(2), 2)])
        assert msgspec.msgpack.decode(finished[1], type=list[EmbeddingShape]) == shapes
        await served.end("received")

    run(test())


def test_a_file_that_is_not_sent_must_be_cached() -> None:
    async def test() -> None:
        for is_cached in (True, False):
            served = Served()
            served.engine.is_cached = is_cached
            served.encode(b"")
            end = "finish" if is_cached else "fail"
            await served.until(lambda served=served, end=end: end in served.transfer.verbs())  # type: ignore[misc]
            await served.end("received" if is_cached else "failed")
            assert "add" not in served.engine.asked

    run(test())


def test_a_prompt_that_is_cancelled_ends_its_images() -> None:
    async def test() -> None:
        served = Served()
        served.encode()
        await served.until(lambda: "add" in served.engine.asked)
        await served.end("cancelled")
        assert "publish" not in served.transfer.verbs()

    run(test())


@pytest.mark.parametrize("is_broken", [True, False])
def test_what_cannot_be_encoded_fails_the_ticket(is_broken: bool) -> None:
    async def test() -> None:
        served = Served()
        served.encode(b"broken" if is_broken else FILE)
        if not is_broken:
            await served.until(lambda: "add" in served.engine.asked)
            served.step(failed=[FailedRequest(INNER, "out of memory")])
        await served.until(lambda: "fail" in served.transfer.verbs())
        assert "an image cannot be read" in str(served.transfer.asked) or not is_broken
        await served.end("failed")

    run(test())


def test_other_layouts_and_new_requests_of_a_drain_are_refused() -> None:
    async def test() -> None:
        served = Served()
        served.encode(source_layout=embedding_layout("other", width=4, dtype="float32"))
        assert served.transfer.asked[-1] == ("fail", "this instance computes other embeddings")
        served.server.refuse_new()
        served.encode()
        assert served.transfer.verbs() == ["open", "fail", "open", "fail"]
        assert served.server.num_requests == 0

    run(test())


def test_routers_get_the_load_and_a_refusal_of_prompts() -> None:
    async def test() -> None:
        served = Served()
        served.server.on_message(ROUTER, Heartbeat())
        served.server.on_message(ROUTER, Generate(work()))
        report, failed = served.router.answers()
        assert isinstance(report, LoadReport) and report.load.total_blocks == STATS.total_blocks
        assert isinstance(failed, Failed) and failed.code == "invalid"

    run(test())
