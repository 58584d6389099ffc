"""Videos that take long to decode leave threads for the images of other requests, in instances of all roles."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from baton_serve.contracts.block_layout import embedding_layout
from baton_serve.contracts.identity import BlockHash, RequestId, TicketId
from baton_serve.contracts.media import Clip, MediaHeader, digest_of, with_header
from baton_serve.contracts.messages import Encode, Pool
from baton_serve.contracts.pooling import PoolingInput, PoolingSpec
from baton_serve.engine.errors import RequestError
from baton_serve.engine.model.vision.image_types import DecodedImage, Pixels
from baton_serve.services.instance.encoding_server import EncodingServer
from baton_serve.services.instance.engine_thread import EncoderCalls
from baton_serve.services.instance.kv_sharing.file_decoding import MAX_REQUEST_THREADS, MAX_VIDEO_REQUESTS, FileDecoding
from baton_serve.services.instance.kv_sharing.prompt_image_source import PromptImageSource
from baton_serve.services.instance.pooling_server import PoolingServer
from tests.unit.instance.fakes import (
    IDENTITY,
    ROUTER,
    STATS,
    FakeEvents,
    FakeRouterPort,
    FakeTransfer,
    InlineCalls,
    run,
    ticket,
)
from tests.unit.instance.test_pooling_server import Bench

CLIP = Clip(width=8, height=8, num_frames=1, fps=1.0, indexes=[0])
VIDEOS = [with_header(b"video %d" % number, MediaHeader(clip=CLIP)) for number in range(64)]
LAYOUT = embedding_layout("weights", width=4, dtype="float32")


class SlowVideos:
    """Reads images at once, and videos when `may_end` is set."""

    embedding_layout = LAYOUT

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.num_begun = 0

    def read(self, images: Iterable[bytes]) -> Pixels:
        files = list(images)
        if any(file != b"image" for file in files):
            self.num_begun += 1
            self.may_end.wait(30)
        return {digest_of(file): DecodedImage({}, 8, 8) for file in files}


async def until(fact: Callable[[], bool]) -> None:
    """Files are decoded in threads."""
    async with asyncio.timeout(20):
        while not fact():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def test_images_do_not_wait_for_many_videos() -> None:
    reader = SlowVideos()
    request = cast(Any, SimpleNamespace(work=SimpleNamespace(tenant=digest_of(b"root"), media=[], num_unsent_tokens=0)))

    def message(file: bytes) -> Any:
        return SimpleNamespace(images=[file], embeddings=[])

    async def scenario() -> None:
        source = PromptImageSource(reader)

        async def images(file: bytes) -> Pixels:
            (found,) = [one async for one in source.arrivals(request, message(file))]
            return found.pixels

        decoding = [asyncio.create_task(images(file)) for file in VIDEOS]
        await asyncio.sleep(0)
        try:
            shown = await asyncio.wait_for(images(b"image"), 20)
            assert shown.keys() == {digest_of(b"image")}
            assert reader.num_begun <= MAX_VIDEO_REQUESTS
        finally:
            reader.may_end.set()
            await asyncio.gather(*decoding)
        assert reader.num_begun == len(VIDEOS)

    run(scenario())


class Encoder:
    """Remembers which requests were given images to encode."""

    def __init__(self) -> None:
        self.added: list[RequestId] = []

    def claim(self, request_id: RequestId, root: BlockHash, digests: Sequence[bytes]) -> list[bytes]:
        return list(digests)

    def blocks_of(self, request_id: RequestId) -> list[Any]:
        return []

    def add(self, request_id: RequestId, images: Pixels) -> None:
        self.added.append(request_id)

    def release(self, request_id: RequestId) -> None: ...


def test_images_do_not_wait_for_many_videos_at_an_encode_instance() -> None:
    """Neither while videos are decoded, nor while the engine computes them: their embeddings take longer still."""
    reader, encoder = SlowVideos(), Encoder()

    async def scenario() -> None:
        server = EncodingServer(
            IDENTITY,
            engine=cast(EncoderCalls, InlineCalls(cast(Any, encoder))),
            reader=reader,
            stats=STATS,
            router=FakeRouterPort(),
            events=FakeEvents(),
            transfer=FakeTransfer(),
        )

        def send(number: str, file: bytes) -> None:
            values = {"ticket": TicketId(number), "source_layout": LAYOUT, "source_root": BlockHash(b"e" * 16)}
            server.on_message(ROUTER, Encode(msgspec.structs.replace(ticket(), **values), [file], [[digest_of(file)]]))

        for number, file in enumerate(VIDEOS):
            send(str(number), file)
        send("image", b"image")
        try:
            await until(lambda: RequestId("encode:image") in encoder.added)
            assert reader.num_begun <= MAX_VIDEO_REQUESTS
            reader.may_end.set()
            await until(lambda: len(encoder.added) == 1 + MAX_VIDEO_REQUESTS)
            send("later", b"image")
            await until(lambda: RequestId("encode:later") in encoder.added)
            assert len(encoder.added) == 2 + MAX_VIDEO_REQUESTS, "nothing has been encoded yet"
        finally:
            reader.may_end.set()
            server.fail_all("the test ends")

    run(scenario())


def test_images_do_not_wait_for_many_videos_at_a_pooling_instance() -> None:
    reader = SlowVideos()

    async def scenario() -> None:
        bench = Bench()
        serving = PoolingServer(
            IDENTITY, engine=bench, stats=STATS, router=bench.router, events=FakeEvents(), reader=reader
        )

        def send(number: str, file: bytes) -> None:
            params, given = PoolingSpec(task="embed"), [PoolingInput([1])]
            serving.on_message(ROUTER, Pool(request_id=RequestId(number), inputs=given, params=params, images=[file]))

        for number, file in enumerate(VIDEOS):
            send(str(number), file)
        send("image", b"image")
        try:
            await until(lambda: any(verb == "pool" for verb, *_ in bench.engine.asked))
            assert reader.num_begun <= MAX_VIDEO_REQUESTS
        finally:
            reader.may_end.set()
            serving.on_router_lost(ROUTER)

    run(scenario())


def test_files_of_a_request_are_decoded_side_by_side() -> None:
    """Each is passed on as soon as it and those before it are decoded: a prompt begins with its first image. The first
    error ends the others."""
    barrier = threading.Barrier(MAX_REQUEST_THREADS)

    def read(file: bytes) -> Pixels:
        barrier.wait(20)
        if file == b"a":
            time.sleep(0.02)  # the one behind it is decoded before it
        if file == b"broken":
            raise RequestError("invalid", "an image cannot be read")
        return {file: DecodedImage({}, 8, 8)}

    async def scenario() -> None:
        decoding, found = FileDecoding(), list[bytes]()

        async def keep(pixels: Pixels) -> None:
            found.extend(pixels)

        async with decoding.turn([b"a", b"b"]) as turn:
            await turn.decode([b"a", b"b"], read, keep)
        assert found == [b"a", b"b"]
        with pytest.raises(RequestError, match="cannot be read"):
            async with decoding.turn([b"a", b"broken", b"c", b"d"]) as turn:
                await turn.decode([b"a", b"broken", b"c", b"d"], read, keep)

    run(scenario())


def test_a_cancelled_video_keeps_its_place_until_its_thread_has_ended() -> None:
    """Otherwise clients that leave would fill the threads with videos that nobody wants."""
    reader = SlowVideos()

    async def scenario() -> None:
        decoding = FileDecoding()

        async def drop(pixels: Pixels) -> None: ...

        async def decode(file: bytes) -> None:
            async with decoding.turn([file]) as turn:
                await turn.decode([file], lambda one: reader.read([one]), drop)

        left = [asyncio.create_task(decode(file)) for file in VIDEOS[:MAX_VIDEO_REQUESTS]]
        await until(lambda: reader.num_begun == MAX_VIDEO_REQUESTS)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        waiting = asyncio.create_task(decode(VIDEOS[-1]))
        await asyncio.sleep(0.05)
        assert reader.num_begun == MAX_VIDEO_REQUESTS
        reader.may_end.set()
        await waiting
        assert reader.num_begun == MAX_VIDEO_REQUESTS + 1

    run(scenario())
