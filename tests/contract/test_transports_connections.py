"""`zeromq` with several connections: blocks are distributed over them, and a broken one ends the link."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import msgspec
import pytest
import zmq

from baton_serve.contracts.wire import encode
from baton_serve.kvtransfer import TransferSettings
from baton_serve.kvtransfer.control_messages import Join
from tests.contract.test_transport_faults import behind_proxy, fetch_all, through
from tests.contract.test_transports import only, run, wanted
from tests.contract.transports_pair import LAYOUT, Pair, TensorMemory, by_three, pair_of
from tests.contract.transports_proxy import Proxy, proxy_of

THREE = by_three(only("zeromq"))


def with_key(settings: TransferSettings) -> TransferSettings:
    public, secret = zmq.curve_keypair()
    return msgspec.structs.replace(settings, curve_secret_key=secret, curve_public_key=public)


async def moved(pair: Pair, proxy: Proxy) -> None:
    ticket = through(proxy, pair)
    assert await fetch_all(pair, ticket)
    assert await pair.producer.node.released(ticket.ticket) == "received"


@contextlib.asynccontextmanager
async def in_use(settings: TransferSettings, *memories: TensorMemory) -> AsyncIterator[tuple[Pair, Proxy]]:
    """Blocks came over each connection: a link begins with one, and uses the others as they join."""
    async with behind_proxy(settings, memories or (None, None)) as (pair, proxy):
        await pair.consumer.node.connect(proxy.address)
        while len(proxy.received) < 3 or min(proxy.received) < 10 * LAYOUT.block_bytes:
            await moved(pair, proxy)
        yield pair, proxy


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_blocks_take_the_connections_in_turns(is_encrypted: bool) -> None:
    async def test() -> None:
        async with in_use(with_key(THREE) if is_encrypted else THREE) as (pair, proxy):
            assert len(proxy.received) == 3 and not pair.consumer.tally.retries
            assert "by 3 connections" in pair.consumer.node.links()[0].reason
            before = list(proxy.received)
            for _ in range(3):
                await moved(pair, proxy)
            each = [after - then for after, then in zip(proxy.received, before, strict=True)]
            assert max(each) < 1.5 * min(each)

    run(test())


def test_blocks_of_a_device_take_the_connections_in_turns() -> None:
    async def test() -> None:
        memories = [TensorMemory(48, LAYOUT.block_bytes) for _ in range(2)]
        async with in_use(THREE, *memories) as (pair, _):
            assert not pair.consumer.tally.mismatches

    run(test())


@pytest.mark.parametrize("connection", [0, 1, 2])
def test_the_reset_of_one_connection_loses_no_block(connection: int) -> None:
    async def test() -> None:
        async with in_use(THREE) as (pair, proxy):
            ticket, arrived = through(proxy, pair), asyncio.Event()
            pair.producer.node.open(ticket)
            places = wanted(*((i, i) for i in range(40)))
            for block in range(40):
                pair.consumer.memory.block(block)[:] = bytes(LAYOUT.block_bytes)
            fetch = asyncio.create_task(pair.consumer.node.fetch(ticket, places, on_blocks=lambda names: arrived.set()))
            pair.producer.node.publish(ticket.ticket, places[:20])
            await arrived.wait()
            proxy.reset(connection)
            pair.producer.node.publish(ticket.ticket, places[20:])
            pair.producer.node.finish(ticket.ticket, b"")
            assert (await fetch).num_blocks == 40
            assert all(pair.consumer.holds(i, seed=i) for i in range(40))
            assert await pair.producer.node.released(ticket.ticket) == "received"
            assert len(pair.consumer.tally.retries) == 1 and len(proxy.received) == 6

    run(test())


def test_a_changed_byte_on_a_further_connection_is_never_used() -> None:
    async def test() -> None:
        async with in_use(THREE) as (pair, proxy):
            start, changed = max(proxy.received) + LAYOUT.block_bytes, list[int]()

            def change(data: bytearray, before: int) -> None:
                if not changed and before >= start and len(data) > 4096:
                    data[2048] ^= 1
                    changed.append(before)

            proxy.change = change
            while not changed:
                await moved(pair, proxy)
            assert pair.consumer.tally.mismatches + len(pair.consumer.tally.retries) >= 1

    run(test())


@pytest.mark.parametrize(("here", "there", "made"), [(3, 1, 1), (1, 3, 1), (2, 3, 2), (3, 2, 2)])
def test_the_smaller_number_of_both_ends_counts(here: int, there: int, made: int) -> None:
    ends = [msgspec.structs.replace(THREE, zeromq_connections=number) for number in (here, there)]

    async def test() -> None:
        async with (
            pair_of(ends[0], consumer_settings=ends[1]) as pair,
            proxy_of(pair.producer.node.address) as proxy,
        ):
            await moved(pair, proxy)
            await moved(pair, proxy)
            assert len(proxy.received) == made

    run(test())


def test_who_does_not_know_the_secret_cannot_join() -> None:
    async def test() -> None:
        async with in_use(THREE) as (pair, proxy):
            stranger: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
            stranger.connect(pair.producer.node.address)
            stranger.send(encode(Join(bytes(16))))
            assert await asyncio.to_thread(stranger.poll, 5_000)
            assert b"no connection with this secret" in stranger.recv()
            stranger.close(0)
            await moved(pair, proxy)
            assert not pair.consumer.tally.retries

    run(test())
