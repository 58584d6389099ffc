"""Transfers under faults of networks and hosts: connections reset, bytes changed, no room for shared memory.

Each fetch ends within its deadline, correctly or with an error; no wrong byte is used and no block stays held.
"""

import asyncio
import contextlib
import errno
import gc
import mmap
import os
import random
import socket
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton_serve.contracts.messages import Ticket
from baton_serve.kvtransfer import PeerLost, TransferError
from tests.contract.test_transports import handoff, only, run, transport_of, wanted
from tests.contract.transports_pair import LAYOUT, NUM_BLOCKS, SETTINGS, THREE, Pair, TensorMemory, pair_of
from tests.contract.transports_proxy import Proxy, proxy_of

SIZE = 40 * LAYOUT.block_bytes


@pytest.fixture(params=("usm", "zeromq", "oneccl", THREE))
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    return transport_of(request, monkeypatch)


@contextlib.asynccontextmanager
async def behind_proxy(settings: Any, memories: Sequence[Any] = (None, None)) -> AsyncIterator[tuple[Pair, Proxy]]:
    async with (
        pair_of(settings, memories=memories) as pair,
        proxy_of(pair.producer.node.address) as proxy,
    ):
        yield pair, proxy


def through(proxy: Proxy, pair: Pair, timeout_s: float = 10.0) -> Ticket:
    return msgspec.structs.replace(pair.ticket(timeout_s), source_address=proxy.address)


async def fetch_all(pair: Pair, ticket: Ticket) -> bool:
    """40 blocks, published at once. False: it failed, by an error of ours. Wrong bytes fail the test."""
    for block in range(40):
        pair.producer.fill(block, seed=block)
    pair.producer.node.open(ticket)
    places = wanted(*((i, i) for i in range(40)))
    pair.producer.node.publish(ticket.ticket, places)
    pair.producer.node.finish(ticket.ticket, b"payload")
    try:
        result = await pair.consumer.node.fetch(ticket, places)
    except TransferError:
        return False
    assert result.payload == b"payload"
    assert all(pair.consumer.holds(i, seed=i) for i in range(40))
    return True


def test_a_reset_in_the_middle_loses_no_block(transport: str) -> None:
    async def test() -> None:
        async with behind_proxy(only(transport)) as (pair, proxy):
            ticket, arrived = through(proxy, pair), asyncio.Event()
            for block in range(40):
                pair.producer.fill(block, seed=block)
            pair.producer.node.open(ticket)
            places = wanted(*((i, i) for i in range(40)))
            fetch = asyncio.create_task(pair.consumer.node.fetch(ticket, places, on_blocks=lambda names: arrived.set()))
            pair.producer.node.publish(ticket.ticket, places[:20])
            await arrived.wait()
            proxy.reset()
            pair.producer.node.publish(ticket.ticket, places[20:])
            pair.producer.node.finish(ticket.ticket, b"")
            result = await fetch
            assert result.transport == transport and result.num_blocks == 40
            assert all(pair.consumer.holds(i, seed=i) for i in range(40))
            assert await pair.producer.node.released(ticket.ticket) == "received"
            assert len(pair.consumer.tally.retries) == 1

    run(test())


@pytest.mark.parametrize("cut_at", [70, 300, 1_000, 5_000, LAYOUT.block_bytes + 3, SIZE // 2, SIZE - 1])
def test_a_connection_cut_at_any_byte_is_made_again(cut_at: int) -> None:
    """Also inside a frame, or inside the handshake of ZeroMQ: then the peer is lost at once."""

    async def test() -> None:
        async with behind_proxy(only("zeromq")) as (pair, proxy):
            proxy.cut_at = cut_at
            ticket = through(proxy, pair)
            if await fetch_all(pair, ticket):
                assert len(proxy.received) == 2
                assert await pair.producer.node.released(ticket.ticket) == "received"
            else:
                assert cut_at < 1_000
                pair.producer.node.cancel(ticket.ticket)

    run(test())


@pytest.mark.parametrize("by", ["usm", "zeromq"])
def test_late_bytes_of_a_cancelled_fetch_change_no_block_that_was_given_away(by: str) -> None:
    """The caller has its blocks back when the fetch ends, while messages of the producer are still on their way."""

    async def test() -> None:
        async with behind_proxy(only(by)) as (pair, proxy):
            ticket, arrived = through(proxy, pair), asyncio.Event()
            for block in range(44):
                pair.producer.fill(block, seed=block)
            pair.producer.node.open(ticket)
            places = wanted(*((i, i) for i in range(40)))
            fetch = asyncio.create_task(pair.consumer.node.fetch(ticket, places, on_blocks=lambda names: arrived.set()))
            pair.producer.node.publish(ticket.ticket, places[:10])
            await arrived.wait()
            proxy.hold_at = proxy.received[-1]
            pair.producer.node.publish(ticket.ticket, places[10:])
            async with asyncio.timeout(5):
                while not proxy.num_held:  # noqa: ASYNC110 - a fact of another task
                    await asyncio.sleep(0.001)
            fetch.cancel()
            with pytest.raises(asyncio.CancelledError):
                await fetch
            for block in range(40):
                pair.consumer.fill(block, seed=1000 + block)
            proxy.release()
            assert await pair.producer.node.released(ticket.ticket) == "cancelled"
            # The next fetch uses the same connection: when it ends, the late messages have been handled.
            following, others = through(proxy, pair), wanted(*((i, i) for i in range(40, 44)))
            pair.producer.node.open(following)
            pair.producer.node.publish(following.ticket, others)
            pair.producer.node.finish(following.ticket, b"")
            await pair.consumer.node.fetch(following, others)
            assert await pair.producer.node.released(following.ticket) == "received"
            assert all(pair.consumer.holds(i, seed=1000 + i) for i in range(40))
            assert all(pair.consumer.holds(i, seed=i) for i in range(40, 44))

    run(test())


@pytest.mark.parametrize("seed", range(8))
def test_a_changed_byte_is_never_used(seed: int) -> None:
    """Wherever it is: in a block, in a message, in ZeroMQ's own framing."""
    position = random.Random(seed).randrange(100, SIZE)
    changed: list[int] = []

    def change(data: bytearray, before: int) -> None:
        if before <= position < before + len(data) and not changed:
            data[position - before] ^= 0x55
            changed.append(position)

    async def test() -> None:
        async with behind_proxy(only("zeromq")) as (pair, proxy):
            proxy.change = change
            ticket = through(proxy, pair)
            assert await fetch_all(pair, ticket)
            assert changed
            assert pair.consumer.tally.mismatches + len(pair.consumer.tally.retries) >= 1
            assert await pair.producer.node.released(ticket.ticket) == "received"

    run(test())


def test_bytes_that_change_on_every_way_are_an_error() -> None:
    async def test() -> None:
        async with behind_proxy(only("zeromq")) as (pair, proxy):

            def change(data: bytearray, before: int) -> None:
                if before > 4 * LAYOUT.block_bytes and len(data) > 4096:
                    data[2048] ^= 1

            proxy.change = change
            ticket = through(proxy, pair)
            assert not await fetch_all(pair, ticket)
            pair.producer.node.cancel(ticket.ticket)

    run(test())


def test_bytes_that_a_collective_library_changes_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    from baton_serve.kvtransfer.transports.oneccl.torch_pair import TorchPair

    receive, calls = TorchPair.receive, 0

    def damaging(self: TorchPair, parts: Sequence[memoryview]) -> None:
        nonlocal calls
        receive(self, parts)
        calls += 1
        if calls == 1:
            parts[0][11] ^= 1

    monkeypatch.setattr(TorchPair, "receive", damaging)

    async def test() -> None:
        async with pair_of(only("oneccl", oneccl_backend="gloo")) as pair:
            assert await handoff(pair, 20) == "oneccl"
            assert pair.consumer.tally.mismatches == 1

    run(test())


def test_a_reset_of_a_collective_library_s_own_connections_demotes_it() -> None:
    async def test() -> None:
        settings = msgspec.structs.replace(
            SETTINGS, transports=("oneccl", "zeromq"), oneccl_backend="gloo", stall_timeout_s=2.0
        )
        async with pair_of(settings) as pair:
            before = tcp_connections()
            await pair.consumer.node.connect(pair.producer.node.address)
            control = int(pair.producer.node.address.rpartition(":")[2])
            made = {fd: ports for fd, ports in tcp_connections().items() if fd not in before and control not in ports}
            assert made
            for fd in made:
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
                    connection.shutdown(socket.SHUT_RDWR)
            assert await handoff(pair, 10) == "zeromq"
            assert ("oneccl", "demoted") in pair.consumer.tally.changes

    run(test())


def tcp_connections() -> dict[int, tuple[int, ...]]:
    """Ports of this process's connected TCP sockets, by descriptor."""
    found: dict[int, tuple[int, ...]] = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as one:
                    if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                        found[int(name)] = (one.getsockname()[1], one.getpeername()[1])
    return found


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.ENOMEM])
@pytest.mark.parametrize("what", ["memfd_create", "posix_fallocate"])
def test_without_room_for_a_ring_the_next_transport_is_used(
    monkeypatch: pytest.MonkeyPatch, what: str, code: int
) -> None:
    def full(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    async def test() -> None:
        settings = msgspec.structs.replace(SETTINGS, transports=("usm", "zeromq"), probe=False)
        memories = [TensorMemory(NUM_BLOCKS, LAYOUT.block_bytes) for _ in range(2)]
        async with pair_of(settings, memories=memories) as pair:
            gc.collect()  # rings of tests before this one
            before = len(os.listdir("/proc/self/fd"))
            monkeypatch.setattr(os, what, full)
            assert await handoff(pair, 3) == "zeromq"
            (link,) = pair.consumer.node.links()
            assert link.choice == "fallback" and os.strerror(code) in link.reason
            assert not [fd for fd in memfds() if "baton-ring" in fd]
            assert len(os.listdir("/proc/self/fd")) < before + 30

    run(test())


def test_a_consumer_that_cannot_map_the_memory_uses_the_next_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    async def test() -> None:
        settings = msgspec.structs.replace(SETTINGS, transports=("usm", "zeromq"), probe=False)
        async with pair_of(settings) as pair:
            monkeypatch.setattr(mmap, "mmap", full)
            assert await handoff(pair, 3) == "zeromq"
            assert "Cannot allocate memory" in pair.consumer.node.links()[0].reason

    run(test())


def test_the_only_transport_is_tried_again_once_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with pair_of(only("usm", probe=False)) as pair:
            with monkeypatch.context() as patch:

                def full(*_: object, **__: object) -> None:
                    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

                patch.setattr(mmap, "mmap", full)
                with pytest.raises(TransferError, match="Too many open files"):
                    await pair.consumer.node.fetch(pair.ticket(), wanted((0, 0)))
            await asyncio.sleep(1.0)
            assert await handoff(pair, 3) == "usm"

    run(test())


def memfds() -> list[str]:
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            links.append(os.readlink(entry))
    return links


def test_a_producer_that_never_comes_back_through_a_reset_is_lost() -> None:
    async def test() -> None:
        async with behind_proxy(only("zeromq")) as (pair, proxy):
            ticket = through(proxy, pair)
            pair.producer.node.open(ticket)
            fetch = asyncio.create_task(pair.consumer.node.fetch(ticket, wanted((0, 0))))
            await pair.both_know()
            assert proxy._server is not None
            proxy._server.close()
            proxy.reset()
            with pytest.raises(PeerLost):
                await asyncio.wait_for(fetch, 3)
            pair.producer.node.cancel(ticket.ticket)

    run(test())
