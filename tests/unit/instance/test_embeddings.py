"""Embeddings of images that do not come: the images are decoded here, and the router learns which instance failed."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import msgspec
import pytest
import torch

from baton_serve.contracts.block_hash import embedding_hashes
from baton_serve.contracts.block_layout import EMBEDDING_BLOCK_ROWS, embedding_layout
from baton_serve.contracts.identity import BlockHash, Generation, InstanceId, RequestId, TicketId
from baton_serve.contracts.media import MediaSpan, digest_of
from baton_serve.contracts.messages import FetchEmbeddings, Generate, Ticket
from baton_serve.contracts.vision.media_text import EmbeddingShape
from baton_serve.engine.model.vision.image_types import DecodedImage, EncodedImage
from baton_serve.kvtransfer import HostMemory, PeerLost, SourceFailed, TransferNode
from baton_serve.services.common.rpc.instance_link import RouterId
from baton_serve.services.instance.attempt_table import AttemptEntry
from baton_serve.services.instance.kv_sharing.encoded_images import ArrivingBlocks, EmbeddingFetcher, PromptImageSource
from tests.unit.instance.fakes import work

WIDTH = 4
LAYOUT = embedding_layout("weights", width=WIDTH, dtype="float32")
FILES = [b"one", b"two"]
ROWS = EMBEDDING_BLOCK_ROWS + 3
ENCODER = InstanceId("encode-0")
Fetch = Callable[[HostMemory, Sequence[tuple[BlockHash, int]]], Any]


class Node:
    """Stands in for a transfer node: `answer` does what a fetch does."""

    def __init__(self, memory: HostMemory, answer: Fetch) -> None:
        self._memory, self._answer = memory, answer

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def fetch(self, ticket: Ticket, wanted: Sequence[tuple[BlockHash, int]], *, partial: bool) -> Any:
        assert partial
        return await self._answer(self._memory, wanted)


class Result(msgspec.Struct):
    payload: bytes
    names: list[BlockHash]


class Reader:
    """Decodes nothing, and keeps which files it was given."""

    embedding_layout = LAYOUT

    def __init__(self) -> None:
        self.read_files: list[bytes] = []

    def read(self, images: Iterable[bytes]) -> dict[bytes, DecodedImage]:
        self.read_files += images
        return {digest_of(file): DecodedImage({}, 1, 1) for file in self.read_files}


class Counter:
    def __init__(self) -> None:
        self.fetched = self.missed = 0

    def fetched_embeddings(self, num_images: int, seconds: float) -> None:
        self.fetched += num_images

    def missed_embeddings(self, num_images: int) -> None:
        self.missed += num_images


def request_of(timeout_s: float = 5.0) -> tuple[AttemptEntry, Generate]:
    media = [MediaSpan(at, ROWS, digest_of(file)) for at, file in zip((0, 100), FILES, strict=True)]
    prompt = msgspec.structs.replace(work("r"), token_ids=[0] * 200, num_prompt_tokens=200, media=media)
    ticket = Ticket(
        ticket=TicketId("t"),
        source=ENCODER,
        source_generation=Generation(1),
        source_address="tcp://x",
        sink=InstanceId("prefill-0"),
        sink_generation=Generation(1),
        timeout_s=timeout_s,
        source_layout=LAYOUT,
        source_root=BlockHash(b"e" * 16),
    )
    fetch = FetchEmbeddings(ticket=ticket, digests=[digest_of(file) for file in FILES])
    return AttemptEntry(RouterId(b"x"), RequestId("r"), prompt), Generate(prompt, None, FILES, [fetch])


def images_of(
    answer: Fetch, timeout_s: float = 5.0, **options: Any
) -> tuple[dict[bytes, Any], AttemptEntry, Reader, Counter]:
    reader, counter = Reader(), Counter()
    request, message = request_of(timeout_s)

    async def get() -> dict[bytes, Any]:
        fetcher = EmbeddingFetcher(
            LAYOUT,
            lambda layout, memory: cast(TransferNode, Node(memory, answer)),
            max_bytes=16 * LAYOUT.block_bytes,
            counter=counter,
            **options,
        )
        try:
            return dict(await PromptImageSource(reader, fetcher).images(request, message))
        finally:
            await fetcher.close()

    return asyncio.run(get()), request, reader, counter


async def _sends_the_first(memory: HostMemory, wanted: Sequence[tuple[BlockHash, int]]) -> Result:
    """The blocks of the first image arrive, and one of the second."""
    digests = [digest_of(file) for file in FILES]
    rows = torch.arange(ROWS * WIDTH, dtype=torch.float32).view(ROWS, WIDTH)
    names = embedding_hashes(BlockHash(b"e" * 16), digests[0], 2)
    places = dict(wanted)
    for name, part in zip(names, torch.split(rows, EMBEDDING_BLOCK_ROWS), strict=True):
        data = part.contiguous().numpy().tobytes()
        memory.block(places[name])[: len(data)] = data
    shapes = [EmbeddingShape(digest, ROWS, 640, 480) for digest in digests]
    other = embedding_hashes(BlockHash(b"e" * 16), digests[1], 1)
    return Result(msgspec.msgpack.encode(shapes), [*names, *other])


def test_what_arrives_is_used_and_the_rest_is_decoded() -> None:
    images, request, reader, counter = images_of(_sends_the_first)
    first = images[digest_of(FILES[0])]
    assert isinstance(first, EncodedImage) and (first.width, first.height) == (640, 480)
    assert torch.equal(first.features, torch.arange(ROWS * WIDTH, dtype=torch.float32).view(ROWS, WIDTH))
    assert reader.read_files == [FILES[1]] and isinstance(images[digest_of(FILES[1])], DecodedImage)
    assert (counter.fetched, counter.missed) == (1, 1)
    assert request.failed_encoders == []


def test_a_source_has_as_many_rows_as_the_model_states() -> None:
    """No token stands for it, so the length of its span says nothing."""
    asked: list[int] = []

    async def count(memory: HostMemory, wanted: Sequence[tuple[BlockHash, int]]) -> Result:
        asked.append(len(wanted))
        return Result(msgspec.msgpack.encode([]), [])

    images_of(count, source_tokens=3 * EMBEDDING_BLOCK_ROWS + 1)
    assert asked == [2 * 4]


@pytest.mark.parametrize(("error", "is_fault"), [(PeerLost("dead"), True), (SourceFailed("a broken file"), False)])
def test_a_fetch_that_fails_costs_no_request(error: Exception, is_fault: bool) -> None:
    async def fail(memory: HostMemory, wanted: Sequence[tuple[BlockHash, int]]) -> Result:
        raise error

    images, request, reader, counter = images_of(fail)
    assert reader.read_files == FILES and len(images) == 2
    assert request.failed_encoders == ([ENCODER] if is_fault else [])
    assert (counter.fetched, counter.missed) == (0, 2)


def test_the_deadline_ends_the_wait_for_a_frozen_instance() -> None:
    async def hang(memory: HostMemory, wanted: Sequence[tuple[BlockHash, int]]) -> Result:
        return cast(Result, await asyncio.Event().wait())

    _, request, reader, _ = images_of(hang, timeout_s=0.02)
    assert reader.read_files == FILES
    assert request.failed_encoders == [ENCODER]


def test_fetches_wait_for_room() -> None:
    async def take() -> list[str]:
        blocks, seen = ArrivingBlocks(3), list[str]()

        async def use(name: str, count: int) -> None:
            async with blocks.take(count) as taken:
                assert len(set(taken)) == count
                seen.append(f"{name} begins")
                await asyncio.sleep(0)
                seen.append(f"{name} ends")

        await asyncio.gather(use("a", 2), use("b", 2), use("c", 1))
        return seen

    seen = asyncio.run(take())
    assert seen.index("a ends") < seen.index("b begins")
    assert seen.index("c begins") < seen.index("a ends")
