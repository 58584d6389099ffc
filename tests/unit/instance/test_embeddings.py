"""Embeddings of images that do not come: the images are decoded here, and the router learns which instance failed."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial
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
from baton_serve.engine.errors import RequestError
from baton_serve.engine.model.vision.image_types import DecodedImage, EncodedImage
from baton_serve.kvtransfer import HostMemory, PeerLost, SourceFailed, TransferNode
from baton_serve.services.common.rpc.instance_link import RouterId
from baton_serve.services.instance.attempt_table import AttemptEntry
from baton_serve.services.instance.kv_sharing.encoded_images import ArrivingBlocks, EmbeddingFetcher
from baton_serve.services.instance.kv_sharing.prompt_image_source import ArrivedImages, PromptImageSource
from tests.unit.instance.fakes import work

WIDTH = 4
LAYOUT = embedding_layout("weights", width=WIDTH, dtype="float32")
FILES = [b"one", b"two"]
ROWS = EMBEDDING_BLOCK_ROWS + 3
ENCODER = InstanceId("encode-0")
OnBlocks = Callable[[list[BlockHash]], None]
Fetch = Callable[["Node", Sequence[tuple[BlockHash, int]]], Any]


class Node:
    """Stands in for a transfer node: `answer` does what a fetch does."""

    def __init__(self, memory: HostMemory, answer: Fetch) -> None:
        self.memory, self._answer = memory, answer

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def fetch(
        self, ticket: Ticket, wanted: Sequence[tuple[BlockHash, int]], *, partial: bool, on_blocks: OnBlocks
    ) -> Any:
        assert partial
        self.on_blocks = on_blocks
        return await self._answer(self, wanted)


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
            (images,) = [found async for found in PromptImageSource(reader, fetcher).arrivals(request, message)]
            assert not images.awaited
            return dict(images.pixels)
        finally:
            await fetcher.close()

    return asyncio.run(get()), request, reader, counter


async def _sends_the_first(node: Node, wanted: Sequence[tuple[BlockHash, int]]) -> Result:
    """The blocks of the first image arrive, and one of the second."""
    digests = [digest_of(file) for file in FILES]
    rows = torch.arange(ROWS * WIDTH, dtype=torch.float32).view(ROWS, WIDTH)
    names = embedding_hashes(BlockHash(b"e" * 16), digests[0], 2)
    places = dict(wanted)
    for name, part in zip(names, torch.split(rows, EMBEDDING_BLOCK_ROWS), strict=True):
        data = part.contiguous().numpy().tobytes()
        node.memory.block(places[name])[: len(data)] = data
    shapes = [EmbeddingShape(digest, ROWS, 640, 480) for digest in digests]
    other = embedding_hashes(BlockHash(b"e" * 16), digests[1], 1)
    return Result(msgspec.msgpack.encode(shapes), [*names, *other])


def test_what_arrives_is_used_and_the_rest_is_decoded() -> None:
    images, request, reader, counter = images_of(_sends_the_first)
    first = images[digest_of(FILES[0])]
    assert isinstance(first, EncodedImage) and first.text is not None and first.text.parts == (ROWS,)
    assert torch.equal(first.features, torch.arange(ROWS * WIDTH, dtype=torch.float32).view(ROWS, WIDTH))
    assert reader.read_files == [FILES[1]] and isinstance(images[digest_of(FILES[1])], DecodedImage)
    assert (counter.fetched, counter.missed) == (1, 1)
    assert request.failed_encoders == []


def arrivals_of(answer: Fetch, reader: Reader) -> tuple[list[ArrivedImages], AttemptEntry]:
    """Return what an engine that can await images gets, in order."""
    request, message = request_of()

    async def get() -> list[ArrivedImages]:
        fetcher = EmbeddingFetcher(
            LAYOUT,
            lambda layout, memory: cast(TransferNode, Node(memory, answer)),
            max_bytes=16 * LAYOUT.block_bytes,
            counter=Counter(),
        )
        source = PromptImageSource(reader, fetcher, can_await_images=True)
        try:
            return [found async for found in source.arrivals(request, message)]
        finally:
            await fetcher.close()

    return asyncio.run(get()), request


def names_of(number: int) -> list[BlockHash]:
    return embedding_hashes(BlockHash(b"e" * 16), digest_of(FILES[number]), 2)


def test_a_prompt_begins_with_its_first_image_while_others_come() -> None:
    digests = [digest_of(file) for file in FILES]

    async def send(order: tuple[int, int], node: Node, wanted: Sequence[tuple[BlockHash, int]]) -> Result:
        for number in order:
            node.on_blocks(names_of(number))
            await asyncio.sleep(0.05)
        shapes = [EmbeddingShape(digest, ROWS, 640, 480) for digest in digests]
        return Result(msgspec.msgpack.encode(shapes), [*names_of(0), *names_of(1)])

    for order in ((0, 1), (1, 0)):
        found, _ = arrivals_of(partial(send, order), Reader())
        kinds = [([digests.index(digest) for digest in pixels], len(awaited)) for pixels, awaited in found]
        assert kinds == ([([0], 1), ([1], 0)] if order == (0, 1) else [([1, 0], 0)])


def test_a_prompt_that_has_begun_fails_if_an_image_does_not_come() -> None:
    """It would wait until its deadline. The engine refuses a prompt that has not begun."""
    request, message = request_of()
    for files, begins in ((FILES[:1], True), (FILES[1:], False)):
        found: list[ArrivedImages] = []

        async def get(files: list[bytes] = files, found: list[ArrivedImages] = found) -> None:
            source = PromptImageSource(Reader(), can_await_images=True)
            sent = msgspec.structs.replace(message, images=files, embeddings=[])
            async for one in source.arrivals(request, sent):
                found.append(one)

        if begins:
            with pytest.raises(RequestError, match="was not sent"):
                asyncio.run(get())
        else:
            asyncio.run(get())
        assert [len(one.awaited) for one in found] == [1 if begins else 0]


def test_images_that_came_before_their_encode_instance_died_are_used() -> None:
    async def die(node: Node, wanted: Sequence[tuple[BlockHash, int]]) -> Result:
        node.on_blocks(names_of(0))
        raise PeerLost("dead")

    reader = Reader()
    found, request = arrivals_of(die, reader)
    assert reader.read_files == [FILES[1]] and request.failed_encoders == [ENCODER]
    images = {digest: image for pixels, _ in found for digest, image in pixels.items()}
    assert [type(images[digest_of(file)]) for file in FILES] == [EncodedImage, DecodedImage]


def test_files_without_an_encode_instance_are_decoded_while_others_are_fetched() -> None:
    request, message = request_of()
    (fetch,) = message.embeddings
    asked = msgspec.structs.replace(fetch, digests=fetch.digests[:1])
    reader, decoded = Reader(), asyncio.Event()

    async def wait(node: Node, wanted: Sequence[tuple[BlockHash, int]]) -> Result:
        async with asyncio.timeout(5):
            while not reader.read_files:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        decoded.set()
        return Result(msgspec.msgpack.encode([]), [])

    async def get() -> None:
        made = EmbeddingFetcher(
            LAYOUT,
            lambda layout, memory: cast(TransferNode, Node(memory, wait)),
            max_bytes=16 * LAYOUT.block_bytes,
            counter=Counter(),
        )
        source = PromptImageSource(reader, made)
        found = [one async for one in source.arrivals(request, msgspec.structs.replace(message, embeddings=[asked]))]
        assert decoded.is_set() and reader.read_files == FILES[::-1] and len(found[-1].pixels) == 2
        await made.close()

    asyncio.run(get())


def test_another_number_of_embeddings_than_the_prompt_has_places_for_is_refused() -> None:
    async def send(node: Node, wanted: Sequence[tuple[BlockHash, int]]) -> Result:
        shapes = [EmbeddingShape(digest_of(FILES[0]), ROWS + 1, 640, 480)]
        return Result(msgspec.msgpack.encode(shapes), names_of(0))

    with pytest.raises(RequestError, match="embeddings instead of"):
        arrivals_of(send, Reader())


def test_a_source_has_as_many_rows_as_the_model_states() -> None:
    """No token stands for it, so the length of its span says nothing."""
    asked: list[int] = []

    async def count(node: Node, wanted: Sequence[tuple[BlockHash, int]]) -> Result:
        asked.append(len(wanted))
        return Result(msgspec.msgpack.encode([]), [])

    images_of(count, source_tokens=3 * EMBEDDING_BLOCK_ROWS + 1)
    assert asked == [2 * 4]


@pytest.mark.parametrize(("error", "is_fault"), [(PeerLost("dead"), True), (SourceFailed("a broken file"), False)])
def test_a_fetch_that_fails_costs_no_request(error: Exception, is_fault: bool) -> None:
    async def fail(node: Node, wanted: Sequence[tuple[BlockHash, int]]) -> Result:
        raise error

    images, request, reader, counter = images_of(fail)
    assert sorted(reader.read_files) == FILES and len(images) == 2
    assert request.failed_encoders == ([ENCODER] if is_fault else [])
    assert (counter.fetched, counter.missed) == (0, 2)


def test_the_deadline_ends_the_wait_for_a_frozen_instance() -> None:
    async def hang(node: Node, wanted: Sequence[tuple[BlockHash, int]]) -> Result:
        return cast(Result, await asyncio.Event().wait())

    _, request, reader, _ = images_of(hang, timeout_s=0.02)
    assert sorted(reader.read_files) == FILES
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
