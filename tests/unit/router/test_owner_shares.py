"""The limits that the owners of API keys share: what one of them may hold while others ask too."""

import asyncio
from itertools import chain
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_serve.services.router.protocol.byte_budget import ByteBudget
from baton_serve.services.router.protocol.owner_shares import OwnerShares
from baton_serve.services.router.text.multimodal.image_memory import ImageMemory, ImageReservation
from tests.unit.router.conftest import Router, Serve, settle
from tests.unit.router.test_pooling import EMBEDS, WORKERS

OWNERS = st.sampled_from(["one", "two", "three", "four"])


def several() -> bool:
    return True


@given(
    limit=st.integers(1, 200),
    calls=st.lists(st.tuples(OWNERS, st.integers(1, 80), st.booleans()), max_size=60),
)
def test_an_owner_never_gets_more_than_stays_free_and_who_has_nothing_gets_a_place(
    limit: int, calls: list[tuple[str, int, bool]]
) -> None:
    shares = OwnerShares(limit, has_several_owners=several)
    held: dict[str, list[int]] = {}
    for owner, amount, gives_back in calls:
        if gives_back and held.get(owner):
            shares.remove(owner, held[owner].pop())
        elif amount <= shares.free and shares.permits(owner, amount):
            shares.add(owner, amount)
            held.setdefault(owner, []).append(amount)
            assert shares.held(owner) <= max(shares.free, 1)
        assert shares.total == sum(chain.from_iterable(held.values())) <= limit
        for name in ("one", "two", "three", "four", "five"):
            assert shares.held(name) == sum(held.get(name, ()))
            if not shares.held(name) and shares.free:
                assert shares.permits(name, 1)


@given(limit=st.integers(20, 500), num_owners=st.integers(1, 8))
def test_owners_that_always_ask_end_with_equal_shares_and_leave_one_more(limit: int, num_owners: int) -> None:
    shares = OwnerShares(limit, has_several_owners=several)
    names = [f"owner-{i}" for i in range(num_owners)]
    # The first one comes long before the others, and each request ends some time.
    while shares.permits(names[0], 1):
        shares.add(names[0], 1)
    assert shares.held(names[0]) == limit // 2
    for _ in range(4 * limit):
        for name in names:
            if shares.held(name):
                shares.remove(name, 1)
        for _ in range(limit):
            for name in names:
                if shares.free and shares.permits(name, 1):
                    shares.add(name, 1)
    fair = limit / (num_owners + 1)
    assert all(abs(shares.held(name) - fair) <= num_owners + 1 for name in names)
    assert shares.free >= min(shares.held(name) for name in names)


def test_an_owner_alone_gets_everything() -> None:
    shares = OwnerShares(10)
    assert shares.permits("one", 10) and shares.largest == 10


@given(limit=st.integers(1, 60), amounts=st.lists(st.tuples(OWNERS, st.integers(1, 40)), max_size=40))
def test_bytes_that_wait_for_shares_are_all_granted_when_others_give_back(
    limit: int, amounts: list[tuple[str, int]]
) -> None:
    async def scenario() -> None:
        budget = ByteBudget(limit, wait_s=30.0, smallest_share=ceil(limit / 2), has_several_owners=several)
        granted = 0

        async def use(owner: str, num_bytes: int) -> None:
            nonlocal granted
            assert await budget.acquire(num_bytes, owner)
            await asyncio.sleep(0)
            budget.release(num_bytes, owner)
            granted += 1

        wanted = [(owner, amount) for owner, amount in amounts if amount <= ceil(limit / 2)]
        await asyncio.gather(*(use(*one) for one in wanted))
        assert granted == len(wanted) and budget.num_free == limit

    asyncio.run(scenario())


def test_who_waits_for_its_share_does_not_hold_up_others() -> None:
    async def scenario() -> None:
        budget = ByteBudget(100, wait_s=30.0, has_several_owners=several)
        assert await budget.acquire(50, "one")
        waiting = asyncio.create_task(budget.acquire(10, "one"))
        await settle(1)
        assert not waiting.done()
        assert await budget.acquire(20, "two")
        budget.release(50, "one")
        assert await waiting

    asyncio.run(scenario())


def test_one_key_cannot_hold_all_places_for_requests(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        router.fakes["decode-0"].hold = 0

        async def ask(key: str) -> int:
            body = {"prompt": "a", "max_tokens": 2}
            answer = await router.http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
            if answer.status_code == 429:
                assert "--max-concurrent-requests): with several keys" in answer.json()["error"]["message"]
            return answer.status_code

        of_one = [asyncio.create_task(ask("one")) for _ in range(8)]
        await settle(50)
        assert sorted(task.result() for task in of_one if task.done()) == [429] * 4
        of_two = [asyncio.create_task(ask("two")) for _ in range(4)]
        await settle(50)
        assert sum(task.done() for task in of_two) == 2
        of_three = asyncio.create_task(ask("three"))
        await settle(50)
        assert not of_three.done()
        router.fakes["decode-0"].resume()
        answers = await asyncio.gather(*of_one, *of_two, of_three)
        assert sorted(answers) == [200] * 7 + [429] * 6
        assert await ask("one") == 200

    serve(scenario, keys=["one", "two", "three"], max_concurrent_requests=8)


def test_one_key_cannot_hold_all_places_for_inputs(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        router.fakes["prefill-0"].hold = 0

        async def ask(key: str, texts: list[str]) -> int:
            header = {"authorization": f"Bearer {key}"}
            return (await router.http.post("/v1/embeddings", json={"input": texts}, headers=header)).status_code

        # A request with more inputs than all places runs alone, and takes the places of its key.
        large = asyncio.create_task(ask("one", ["a"] * 20))
        await settle(50)
        assert not large.done()
        assert await ask("one", ["b"]) == 429
        other = asyncio.create_task(ask("two", ["c"]))
        await settle(50)
        assert not other.done()
        router.pooling.close()
        assert (await large, await other) == (503, 503)

    serve(scenario, keys=["one", "two"], max_concurrent_requests=4, pooling=EMBEDS, **WORKERS)


def test_one_key_cannot_hold_all_memory_and_connections_for_images() -> None:
    async def scenario() -> None:
        memory = ImageMemory(200 << 20, wait_s=0.01, max_fetches=4, has_several_owners=several)
        first, second, third = (ImageReservation(memory, owner) for owner in ("one", "one", "two"))
        await first.reserve(100 << 20)
        with pytest.raises(Exception, match="no memory for more images"):
            await second.reserve(1 << 20)
        await third.reserve(48 << 20)
        async with memory.fetch_slot("one"), memory.fetch_slot("one"):
            with pytest.raises(Exception, match="try again later"):
                async with memory.fetch_slot("one"):
                    pass
            async with memory.fetch_slot("two"):
                pass
        for reservation in (first, second, third):
            reservation.release()
        assert memory.budget.num_free == 200 << 20

    asyncio.run(scenario())
