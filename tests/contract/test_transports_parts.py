"""Blocks that are published part by part: each part leaves at once, a block counts when all of it is there."""

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from baton_serve.contracts.identity import BlockHash
from baton_serve.kvtransfer import Corrupt, Incomplete, LocalTransferError, RemoteTransferError, SourceFailed
from tests.contract.test_transports import only, run, wanted
from tests.contract.transports_pair import LAYOUT, Meddler, Node, Pair, TensorMemory, content, name, pair_of

PARTS = 4
SIZE = LAYOUT.block_bytes // PARTS
TRANSPORTS = ("memory", "usm", "zeromq", "oneccl")


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def memories(kind: str) -> Sequence[Any]:
    return [TensorMemory(48, LAYOUT.block_bytes) if kind == "device" else None for _ in range(2)]


def compute(node: Node, blocks: Sequence[int], part: int) -> None:
    for block in blocks:
        node.memory.block(block)[part * SIZE : (part + 1) * SIZE] = content(block)[part * SIZE : (part + 1) * SIZE]


def has_part(node: Node, block: int, seed: int, part: int) -> bool:
    here, there = node.memory.block(block), content(seed)
    return bytes(here[part * SIZE : (part + 1) * SIZE]) == there[part * SIZE : (part + 1) * SIZE]


def one(part: int) -> range:
    return range(part, part + 1)


async def until(fact: Any) -> None:
    for _ in range(400):
        if fact():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not come")


@pytest.mark.parametrize(
    ("transport", "kind"), [*((t, "host") for t in TRANSPORTS), *((t, "device") for t in TRANSPORTS[1:])]
)
def test_each_part_travels_while_the_next_one_is_computed(transport: str, kind: str) -> None:
    async def test() -> None:
        async with pair_of(only(transport, parts=PARTS), memories=memories(kind)) as pair:
            ticket, heard = pair.ticket(), list[BlockHash]()
            source = pair.producer.node
            source.open(ticket)
            places = [(i, 40 - i) for i in range(6)]
            fetch = asyncio.create_task(pair.consumer.node.fetch(ticket, wanted(*places), on_blocks=heard.extend))
            compute(pair.producer, [0], 0)
            for part in range(PARTS):  # block 0 is whole before the tail begins
                compute(pair.producer, [0], part)
            source.publish(ticket.ticket, wanted((0, 0)))
            for part in range(PARTS):
                assert heard in ([], [name(0)])
                compute(pair.producer, range(1, 6), part)
                source.publish_parts(ticket.ticket, wanted(*((i, i) for i in range(1, 6))), one(part))
                await until(lambda part=part: all(has_part(pair.consumer, 40 - i, i, part) for i in range(1, 6)))
            await until(lambda: len(heard) == 6)
            assert not fetch.done()
            source.publish(ticket.ticket, wanted(*((i, i) for i in range(1, 6))))
            source.finish(ticket.ticket, b"first tokens")
            result = await fetch
            assert (result.num_blocks, result.num_bytes) == (6, 6 * LAYOUT.block_bytes)
            assert all(pair.consumer.holds(40 - i, seed=i) for i in range(6))
            assert pair.consumer.tally.bytes == {(transport, "received"): 6 * LAYOUT.block_bytes}
            assert await source.released(ticket.ticket) == "received"

    run(test())


def test_what_was_not_published_in_parts_leaves_when_the_block_is_whole(transport: str) -> None:
    async def test() -> None:
        async with pair_of(only(transport, parts=PARTS)) as pair:
            ticket = pair.ticket()
            for block in range(4):
                pair.producer.fill(block, seed=block)
            pair.producer.node.open(ticket)
            pair.producer.node.publish_parts(ticket.ticket, wanted((2, 2), (3, 3)), one(1))
            fetch = asyncio.create_task(pair.consumer.node.fetch(ticket, wanted(*((i, i + 8) for i in range(4)))))
            await pair.both_know()
            pair.producer.node.publish_parts(ticket.ticket, wanted((3, 3)), one(0))
            pair.producer.node.publish(ticket.ticket, wanted(*((i, i) for i in range(4))))
            pair.producer.node.finish(ticket.ticket, b"")
            await fetch
            assert all(pair.consumer.holds(i + 8, seed=i) for i in range(4))

    run(test())


def test_a_consumer_without_parts_of_its_own_takes_those_of_the_producer(transport: str) -> None:
    async def test() -> None:
        async with pair_of(only(transport, parts=PARTS), consumer_settings=only(transport)) as pair:
            await in_parts(pair)
        async with pair_of(only(transport), consumer_settings=only(transport, parts=PARTS)) as pair:
            ticket = pair.ticket()
            pair.producer.fill(1, seed=1)
            pair.producer.node.open(ticket)
            with pytest.raises(LocalTransferError):
                pair.producer.node.publish_parts(ticket.ticket, wanted((1, 1)), one(1))
            pair.producer.node.publish(ticket.ticket, wanted((1, 1)))
            pair.producer.node.finish(ticket.ticket, b"")
            await pair.consumer.node.fetch(ticket, wanted((1, 7)))
            assert pair.consumer.holds(7, seed=1)

    run(test())


async def in_parts(pair: Pair, count: int = 3) -> None:
    ticket, names = pair.ticket(), wanted(*((i, i) for i in range(count)))
    pair.producer.node.open(ticket)
    fetch = asyncio.create_task(pair.consumer.node.fetch(ticket, wanted(*((i, 20 + i) for i in range(count)))))
    await pair.both_know()  # what is whole when the fetch comes leaves whole
    for part in range(PARTS):
        compute(pair.producer, range(count), part)
        pair.producer.node.publish_parts(ticket.ticket, names, one(part))
        await asyncio.sleep(0.01)
    pair.producer.node.publish(ticket.ticket, names)
    pair.producer.node.finish(ticket.ticket, b"")
    await fetch
    assert all(pair.consumer.holds(20 + i, seed=i) for i in range(count))


def test_a_part_that_was_damaged_is_fetched_again(transport: str) -> None:
    meddler, damaged = Meddler(), list[int]()

    def damage(transport: str, placement: Any) -> object:
        if damaged:
            return None
        damaged.append(placement.index)
        return "damaged"

    meddler.after = damage  # type: ignore[assignment]

    async def test() -> None:
        async with pair_of(only(transport, parts=PARTS), meddler=meddler) as pair:
            await in_parts(pair)
            assert len(damaged) == pair.consumer.tally.mismatches == 1

    run(test())


def test_a_transport_that_breaks_in_the_middle_of_a_tail_is_replaced(transport: str) -> None:
    """Parts that came over the first one are fetched again over the second."""
    if transport == "zeromq":
        pytest.skip("it is the last resort")
    meddler = Meddler()
    meddler.after = lambda name, placement: "bad" if name == transport and placement.index % PARTS == 2 else None  # type: ignore[assignment]

    async def test() -> None:
        ladder = msgspec.structs.replace(only(transport, parts=PARTS), transports=(transport, "zeromq"))
        async with pair_of(ladder, meddler=meddler) as pair:
            await in_parts(pair)
            assert [link.transport for link in pair.consumer.node.links()] == ["zeromq"]

    run(test())


def test_on_the_last_transport_a_damaged_part_is_an_error(transport: str) -> None:
    meddler = Meddler()
    meddler.after = lambda name, placement: "bad" if placement.index % PARTS == 2 else None  # type: ignore[assignment]

    async def test() -> None:
        async with pair_of(only(transport, parts=PARTS), meddler=meddler) as pair:
            with pytest.raises(Corrupt):
                await in_parts(pair)

    run(test())


@pytest.mark.parametrize("end", ["fail", "cancel", "finish", "close"])
def test_a_tail_that_ends_in_the_middle_is_an_error(transport: str, end: str) -> None:
    async def test() -> None:
        async with pair_of(only(transport, parts=PARTS)) as pair:
            ticket, heard = pair.ticket(), list[BlockHash]()
            node = pair.producer.node
            node.open(ticket)
            fetch = asyncio.create_task(
                pair.consumer.node.fetch(ticket, wanted((0, 0), (1, 1)), on_blocks=heard.extend)
            )
            await pair.both_know()
            for part in range(PARTS - 1):
                compute(pair.producer, [0, 1], part)
                node.publish_parts(ticket.ticket, wanted((0, 0), (1, 1)), one(part))
            await until(lambda: has_part(pair.consumer, 1, 1, PARTS - 2))
            match end:
                case "fail":
                    node.fail(ticket.ticket, "out of memory")
                case "cancel":
                    node.cancel(ticket.ticket)
                case "finish":
                    node.finish(ticket.ticket, b"")
                case "close":
                    await node.close()
            ends: dict[str, type[Exception]] = {"finish": Incomplete, "close": RemoteTransferError}
            with pytest.raises(ends.get(end, SourceFailed)):
                await fetch
            assert heard == []

    run(test())
