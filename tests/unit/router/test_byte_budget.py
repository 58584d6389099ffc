"""The bound of memory that requests share: order, deadlines and cancelled requests."""

import asyncio

import pytest

from baton_serve.services.router.protocol.byte_budget import ByteBudget

LONG_S = 30.0


def test_requests_get_bytes_in_the_order_in_which_they_asked() -> None:
    async def scenario() -> None:
        budget = ByteBudget(100, wait_s=LONG_S)
        assert await budget.acquire(80)
        large, small = asyncio.create_task(budget.acquire(60)), asyncio.create_task(budget.acquire(10))
        await asyncio.sleep(0)
        assert not large.done() and not small.done(), "a small request must not overtake a large one for ever"
        budget.release(80)
        assert await large and await small
        assert budget.num_free == 30

    asyncio.run(scenario())


def test_a_request_waits_no_longer_than_its_deadline() -> None:
    async def scenario() -> None:
        budget = ByteBudget(100, wait_s=0.01)
        assert await budget.acquire(100)
        assert not await budget.acquire(1)
        budget.release(100)
        assert budget.num_free == 100 and await budget.acquire(100)

    asyncio.run(scenario())


def test_more_than_the_whole_budget_is_refused_at_once() -> None:
    assert not asyncio.run(ByteBudget(100, wait_s=LONG_S).acquire(101))


@pytest.mark.parametrize("is_granted", [True, False])
def test_a_cancelled_request_keeps_no_bytes_and_lets_the_next_one_pass(is_granted: bool) -> None:
    async def scenario() -> None:
        budget = ByteBudget(100, wait_s=LONG_S)
        assert await budget.acquire(60)
        first, second = asyncio.create_task(budget.acquire(90)), asyncio.create_task(budget.acquire(40))
        await asyncio.sleep(0)
        if is_granted:
            budget.release(60)
        first.cancel()
        assert await second
        with pytest.raises(asyncio.CancelledError):
            await first
        assert budget.num_free == (60 if is_granted else 0)

    asyncio.run(scenario())


def test_more_bytes_cannot_be_released_than_were_granted() -> None:
    with pytest.raises(AssertionError, match="more was released than granted"):
        ByteBudget(100, wait_s=LONG_S).release(1)
