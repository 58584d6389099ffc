"""Block events over real sockets on loopback: order, gaps, generations."""

import asyncio
from collections.abc import Awaitable, Callable

from baton_serve.contracts.events import BlockEvent, BlocksStored, EventBatch
from baton_serve.contracts.identity import BlockHash, Generation, InstanceId
from baton_serve.services.common.zmq.block_events import EventPublisher, EventSubscriber

A = InstanceId("prefill-0")


def stored(number: int) -> list[BlockEvent]:
    return [BlocksStored([BlockHash(bytes([number]) * 16)])]


class Follower:
    def __init__(self, address: str, generation: int = 1) -> None:
        self.batches: asyncio.Queue[EventBatch] = asyncio.Queue()
        self.gaps = 0
        self.subscriber = EventSubscriber(
            address, generation=Generation(generation), on_batch=self.batches.put_nowait, on_gap=self.note_gap
        )

    def note_gap(self) -> None:
        self.gaps += 1

    async def first(self, publisher: EventPublisher) -> EventBatch:
        """Publishes until the subscription has taken effect."""
        while self.batches.empty():
            publisher.publish(stored(0))
            await asyncio.sleep(0.001)
        return await self.batches.get()


def run(body: Callable[[EventPublisher, Follower], Awaitable[None]]) -> None:
    async def whole() -> None:
        publisher = EventPublisher(instance=A, generation=Generation(1))
        await publisher.start()
        follower = Follower(publisher.address)
        await follower.subscriber.start()
        async with asyncio.timeout(10):
            await body(publisher, follower)
        await follower.subscriber.close()
        await publisher.close()

    asyncio.run(whole())


def test_batches_arrive_in_order_and_numbered() -> None:
    async def body(publisher: EventPublisher, follower: Follower) -> None:
        last = await follower.first(publisher)
        for number in range(100):
            publisher.publish(stored(number))
        while last.sequence < publisher.sequence:
            batch = await follower.batches.get()
            assert batch.sequence == last.sequence + 1
            last = batch
        assert last.events == stored(99)

    run(body)


def test_a_late_subscriber_gets_a_gap() -> None:
    async def body(publisher: EventPublisher, follower: Follower) -> None:
        late = Follower(publisher.address)
        publisher.publish(stored(1))
        await late.subscriber.start()
        assert (await late.first(publisher)).sequence > 1
        assert late.gaps == 1
        await late.subscriber.close()

    run(body)


def test_what_a_snapshot_contained_is_not_handed_on_again() -> None:
    async def body(publisher: EventPublisher, follower: Follower) -> None:
        await follower.first(publisher)
        follower.subscriber.rebase(publisher.sequence + 2)
        gaps = follower.gaps
        for number in range(3):
            publisher.publish(stored(number))
        batch = await follower.batches.get()
        while batch.sequence < publisher.sequence:
            batch = await follower.batches.get()
        assert batch.events == stored(2) and follower.gaps == gaps

    run(body)


def test_batches_of_another_generation_are_ignored() -> None:
    async def body(publisher: EventPublisher, follower: Follower) -> None:
        other = Follower(publisher.address, generation=2)
        await other.subscriber.start()
        await follower.first(publisher)
        assert other.batches.empty()
        await other.subscriber.close()

    run(body)


def test_no_events_make_no_batch() -> None:
    async def body(publisher: EventPublisher, follower: Follower) -> None:
        publisher.publish([])
        assert publisher.sequence == 0

    run(body)
