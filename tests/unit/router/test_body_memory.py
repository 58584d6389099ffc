"""The memory that the bodies of all requests share in one router process."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from baton_serve.services.router.protocol.byte_budget import UNCOUNTED_BYTES, BodyMemory, BodyReservation
from baton_serve.services.router.protocol.errors import RateLimitError
from baton_serve.services.router.settings import RouterSettings
from tests.unit.router.conftest import Router, Serve, settle

KIB = 1024
LONG = {"prompt": [5, 6, 7], "seed": 0, "max_tokens": 4, "user": "u", "metadata": {"note": "x" * (200 * KIB)}}
SHORT = {"prompt": [5, 6, 7], "seed": 0, "max_tokens": 4}


def small_memory(router: Router) -> BodyMemory:
    """Give the router memory for one long body but not for two."""
    router.app.bodies = BodyMemory(300 * KIB, wait_s=0.01)
    return router.app.bodies


async def placed(router: Router, count: int) -> None:
    """Wait until the decode instance has so many requests. Long bodies are parsed in a thread."""
    while len(router.fakes["decode-0"].jobs) < count:
        await settle(1)


def test_a_long_body_is_counted_until_its_answer_has_ended_and_short_ones_are_still_served(serve: Serve) -> None:
    async def test(router: Router) -> None:
        memory = small_memory(router)
        router.fakes["decode-0"].hold = 0
        first = asyncio.create_task(router.http.post("/v1/completions", json=LONG))
        await placed(router, 1)
        assert memory.num_free < 100 * KIB

        refused = await router.http.post("/v1/completions", json=LONG)
        assert refused.status_code == 429
        assert "--max-body-memory-bytes" in refused.json()["error"]["message"]
        assert refused.headers["retry-after"] == "1"

        short = asyncio.create_task(router.http.post("/v1/completions", json=SHORT))
        await placed(router, 2)
        router.fakes["decode-0"].resume()
        assert (await first).status_code == (await short).status_code == 200
        assert memory.num_free == 300 * KIB
        assert (await router.http.post("/v1/completions", json=LONG)).status_code == 200

    serve(test)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", {**LONG, "max_tokens": "many"}, 400),
        ("/v1/completions", {**LONG, "model": "unknown"}, 404),
        ("/v1/chat/completions", {**LONG, "messages": 1}, 400),
        ("/v1/responses", {**LONG, "input": {}}, 400),
        ("/v1/messages", {**LONG, "messages": []}, 400),
        ("/v1/embeddings", {**LONG, "input": []}, 400),
        ("/tokenize", LONG, 400),
        ("/invocations", LONG, 200),
        ("/v1/completions", {**LONG, "more": "x" * (200 * KIB)}, 429),
        ("/v1/completions", {**LONG, "more": "x" * (10_000 * KIB)}, 413),
    ],
)
def test_every_end_of_a_request_returns_the_memory_of_its_body(
    serve: Serve, path: str, body: dict[str, Any], status: int
) -> None:
    async def test(router: Router) -> None:
        router.app.bodies = BodyMemory(300 * KIB if status != 413 else 1 << 30, wait_s=0.01)
        total = router.app.bodies.num_free
        answer = await router.http.post(path, json=body)
        assert answer.status_code == status, answer.text
        assert router.app.bodies.num_free == total

    serve(test)


@pytest.mark.parametrize("ends", ["is cancelled", "disconnects"])
def test_a_client_that_leaves_within_its_body_returns_its_memory(serve: Serve, ends: str) -> None:
    async def test(router: Router) -> None:
        memory = small_memory(router)
        may_end = asyncio.Event()

        async def pieces() -> AsyncIterator[bytes]:
            yield b"x" * (200 * KIB)
            await may_end.wait()

        headers = {"content-type": "application/json"}
        request = asyncio.create_task(router.http.post("/v1/completions", content=pieces(), headers=headers))
        await settle()
        assert memory.num_free == 100 * KIB
        if ends == "is cancelled":
            request.cancel()
        else:
            may_end.set()  # the body ends within a text
        await asyncio.wait([request])
        assert memory.num_free == 300 * KIB

    serve(test)


def test_a_body_waits_for_the_end_of_another_one() -> None:
    async def test() -> None:
        memory = BodyMemory(300 * KIB, wait_s=60.0)
        first, second = BodyReservation(memory), BodyReservation(memory)
        await first.grow(200 * KIB)
        waiting = asyncio.create_task(second.grow(250 * KIB))
        await settle()
        assert not waiting.done()
        first.release()
        await waiting
        assert memory.num_free == 50 * KIB
        second.release()
        second.release()
        assert memory.num_free == 300 * KIB

    asyncio.run(test())


def test_a_body_that_grows_too_long_keeps_what_it_has_until_its_release() -> None:
    async def test() -> None:
        memory = BodyMemory(300 * KIB, wait_s=0.01)
        body = BodyReservation(memory)
        await body.grow(UNCOUNTED_BYTES)
        assert memory.num_free == 300 * KIB
        await body.grow(100 * KIB)
        await body.grow(90 * KIB)
        assert memory.num_free == 200 * KIB
        with pytest.raises(RateLimitError):
            await body.grow(301 * KIB)
        body.release()
        assert memory.num_free == 300 * KIB

    asyncio.run(test())


def test_a_body_memory_below_the_largest_body_is_refused_at_the_start() -> None:
    with pytest.raises(ValueError, match="--max-body-memory-bytes 4194304"):
        RouterSettings(model="m", max_body_memory_bytes=4 << 20)


def test_one_of_several_api_keys_leaves_memory_for_the_long_bodies_of_others(serve: Serve) -> None:
    async def test(router: Router) -> None:
        router.app.bodies = BodyMemory(700 * KIB, wait_s=0.01, has_several_owners=router.app.keys.has_several_owners)
        memory = router.app.bodies
        router.fakes["decode-0"].hold = 0

        async def ask(key: str) -> httpx.Response:
            return await router.http.post("/v1/completions", json=LONG, headers={"authorization": f"Bearer {key}"})

        first = asyncio.create_task(ask("one"))
        await placed(router, 1)
        refused = await ask("one")
        assert refused.status_code == 429
        assert (
            "memory that one key may have (as much of --max-body-memory-bytes as stays free)"
            in refused.json()["error"]["message"]
        )
        assert memory.num_free > 200 * KIB
        second = asyncio.create_task(ask("two"))
        await placed(router, 2)
        router.fakes["decode-0"].resume()
        assert (await first).status_code == (await second).status_code == (await ask("one")).status_code == 200
        assert memory.num_free == 700 * KIB

    serve(test, keys=["one", "two"])


def test_a_single_api_key_may_use_all_memory_and_every_key_may_send_the_largest_body() -> None:
    async def test() -> None:
        memory = BodyMemory(300 * KIB, wait_s=0.01)
        alone = BodyReservation(memory, "one")
        await alone.grow(290 * KIB)
        alone.release()
        memory = BodyMemory(300 * KIB, wait_s=0.01, max_body_bytes=200 * KIB, has_several_owners=lambda: True)
        largest, other = BodyReservation(memory, "one"), BodyReservation(memory, "two")
        await largest.grow(200 * KIB)
        with pytest.raises(RateLimitError, match="no memory for more long requests"):
            await other.grow(150 * KIB)
        # The refused bytes of the second key were returned to its share.
        largest.release()
        await other.grow(200 * KIB)
        other.release()
        assert memory.num_free == 300 * KIB

    asyncio.run(test())
