"""Images of a prompt go to encode instances, and their embeddings are named in the message to prefill."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

import msgspec
import pytest

from baton_serve.contracts.block_hash import embedding_hashes, hash_blocks
from baton_serve.contracts.block_layout import embedding_layout
from baton_serve.contracts.identity import InstanceId
from baton_serve.contracts.media import digest_of
from baton_serve.contracts.messages import Encode, Prefill
from baton_serve.services.router.placement.circuit_breaker import FAILURE_THRESHOLD
from baton_serve.services.router.text.served_model import ServedModel
from tests.images import picture
from tests.unit.router.conftest import Router, Serve, settle
from tests.unit.router.fakes import LAYOUT, record
from tests.unit.router.test_images import PATH, A, B, shown, vision_model

__all__ = ["vision_model"]

EMBEDDINGS = embedding_layout("tiny", width=8, dtype="float32")
C = picture(3)


@pytest.fixture
def see(serve: Serve, vision_model: ServedModel) -> Callable[[Callable[[Router], Awaitable[None]]], None]:
    """`serve` with a prefill instance that reads images, and two encode instances of the same weights."""

    def run(test: Callable[[Router], Awaitable[None]]) -> None:
        async def scenario(router: Router) -> None:
            router.service.model = vision_model
            for worker in router.cluster.workers():
                if worker.record.role == "prefill":
                    changes = {"reads_images": True, "embedding_layout": EMBEDDINGS}
                    worker.record = msgspec.structs.replace(worker.record, **changes)
            for name in ("encode-0", "encode-1"):
                router.fakes.add(record(name, "encode", layout=EMBEDDINGS))
            await settle()
            await test(router)

        serve(scenario)

    return run


async def ask(router: Router, *content: str | bytes) -> Prefill:
    """Ask for a chat, and return the message that prefill got."""
    answer = await router.http.post(PATH, json=shown(*content))
    assert answer.status_code == 200, answer.text
    message = router.fakes["prefill-0"].assignments()[-1]
    assert isinstance(message, Prefill)
    return message


def encoded(router: Router, name: str) -> list[Sequence[bytes]]:
    """Return the images that an encode instance got, by message."""
    return [message.images for message in router.fakes[name].received if isinstance(message, Encode)]


def test_images_are_divided_and_each_goes_where_its_embeddings_are(
    see: Callable[[Callable[[Router], Awaitable[None]]], None],
) -> None:
    async def scenario(router: Router) -> None:
        first = await ask(router, "ab", A, "c", B, A)
        assert encoded(router, "encode-0") == [[A]] and encoded(router, "encode-1") == [[B]]
        assert sorted(first.images) == sorted([A, B]), "prefill can encode them too"
        by_source = {one.ticket.source: one for one in first.embeddings}
        assert by_source[InstanceId("encode-1")].digests == [digest_of(B)]
        (message,) = [m for m in router.fakes["encode-1"].received if isinstance(m, Encode)]
        assert message.ticket == by_source[InstanceId("encode-1")].ticket
        assert (message.ticket.sink, message.ticket.source_layout) == ("prefill-0", EMBEDDINGS)
        assert message.ticket.source_root != first.work.root
        await ask(router, "x", B)
        assert encoded(router, "encode-1") == [[B], [B]], "it will have the embeddings soon"
        router.fakes["encode-1"].store(embedding_hashes(message.ticket.source_root, digest_of(B), 1))
        await ask(router, "y", B)
        assert encoded(router, "encode-1")[2:] == [[b""]], "it has reported them"
        health = (await router.http.get("/health")).json()
        assert health["pools"] == {"prefill": 1, "decode": 1, "unified": 0, "encode": 2}
        assert 'role="encode"} 2.0' in (await router.http.get("/metrics")).text

    see(scenario)


def test_images_whose_kv_is_cached_are_sent_to_nobody(
    see: Callable[[Callable[[Router], Awaitable[None]]], None],
) -> None:
    async def scenario(router: Router) -> None:
        work = (await ask(router, "ab", A, "and some text behind it")).work
        full = len(work.token_ids) // LAYOUT.block_tokens * LAYOUT.block_tokens
        names = hash_blocks(work.root, work.token_ids[:full], LAYOUT.block_tokens, media=work.media)
        router.fakes["prefill-0"].store(names)
        again = await ask(router, "ab", A, "and some text behind it", B)
        assert [one.digests for one in again.embeddings] == [[digest_of(B)]]
        assert again.images == [A, B]

    see(scenario)


def test_files_whose_kv_is_cached_are_not_sent_and_come_if_it_was_evicted(
    see: Callable[[Callable[[Router], Awaitable[None]]], None],
) -> None:
    """Then the instance gets all files for a while, and nobody is blamed."""

    async def scenario(router: Router) -> None:
        (worker,) = [one for one in router.cluster.workers() if one.record.role == "prefill"]
        worker.record = msgspec.structs.replace(worker.record, finds_unsent_images=True)
        fake, chat = router.fakes["prefill-0"], ("ab", A, "and some text behind it")
        work = (await ask(router, *chat)).work
        assert (await ask(router, *chat)).images == [A], "nothing has been reported yet"
        full = len(work.token_ids) // LAYOUT.block_tokens * LAYOUT.block_tokens
        fake.store(hash_blocks(work.root, work.token_ids[:full], LAYOUT.block_tokens, media=work.media))
        again = await ask(router, *chat, B)
        assert again.images == [B] and work.media[0].end <= again.work.num_unsent_tokens <= full
        # The image stands in the prompt once more, behind what is cached.
        twice = await ask(router, *chat, A)
        assert twice.images == [A] and not twice.work.num_unsent_tokens

        fake.refuses = "overloaded"
        asked = asyncio.create_task(ask(router, *chat))
        while not fake.assignments()[-1].work.num_unsent_tokens:  # noqa: ASYNC110
            await asyncio.sleep(0)
        fake.refuses = None
        replayed = await asked
        assert replayed.images == [A] and not replayed.work.num_unsent_tokens
        assert (await ask(router, *chat)).images == [A]
        assert worker.needs_images_until > time.monotonic()
        worker.needs_images_until = time.monotonic()
        assert (await ask(router, *chat)).images == []

    see(scenario)


def test_an_instance_that_fails_again_and_again_gets_no_images(
    see: Callable[[Callable[[Router], Awaitable[None]]], None],
) -> None:
    async def scenario(router: Router) -> None:
        router.fakes["encode-1"].die()
        router.fakes["prefill-0"].failed_encoders = [InstanceId("encode-0")]
        for number in range(FAILURE_THRESHOLD):
            assert len((await ask(router, f"{number}", C)).embeddings) == 1
        assert (await ask(router, "without an encode instance", C)).embeddings == []
        assert len(encoded(router, "encode-0")) == FAILURE_THRESHOLD

    see(scenario)


def test_embeddings_of_other_weights_are_not_asked_for(
    see: Callable[[Callable[[Router], Awaitable[None]]], None],
) -> None:
    async def scenario(router: Router) -> None:
        for worker in router.cluster.workers():
            if worker.record.role == "encode":
                other = embedding_layout("other", width=8, dtype="float32")
                worker.record = msgspec.structs.replace(worker.record, layout=other)
        assert (await ask(router, "ab", A)).embeddings == []

    see(scenario)
