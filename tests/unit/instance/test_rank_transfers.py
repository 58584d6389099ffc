"""Rank 0 and the transfers of another rank, at the two ends of a connection: orders, ends, deadlines and failures."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import msgspec
import pytest
import torch

from baton_serve.contracts.block_layout import KVLayout
from baton_serve.contracts.identity import BlockHash, Generation, InstanceId, TicketId
from baton_serve.contracts.messages import Ticket
from baton_serve.engine.kv.kv_cache import BlockPart, KVCache
from baton_serve.engine.parallel.part_links import ExecutedCommands, OwnPart, PartLink
from baton_serve.kvtransfer import LocalTransferError, NodeClosed, PeerLost, SilentObserver, TransferTimeout
from baton_serve.services.instance.rank_transfers import part_client
from baton_serve.services.instance.rank_transfers.part_client import RankStartError, RemoteRank
from baton_serve.services.instance.rank_transfers.part_messages import (
    CancelPart,
    ConnectNode,
    FetchPart,
    NodeConnected,
    OpenPart,
    PartArrived,
    PartCounted,
    PartFailed,
    PartFetched,
    PartRefused,
    PartReleased,
    PartStarted,
    StartPart,
    ToRank,
    rank_decoder,
    receive,
    send,
)
from baton_serve.services.instance.rank_transfers.part_server import serve_part
from tests.contract.transports_pair import SETTINGS, Tally

LAYOUT = KVLayout(fingerprint="f", num_layers=2, num_kv_heads=2, block_tokens=16, head_dim=8, dtype="float32")
START = StartPart(InstanceId("decode-0"), Generation(2), SETTINGS, rank=1, num_ranks=2, layout=repr(LAYOUT))


STARTED = PartStarted("tcp://127.0.0.1:1", "d")


def name(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "big"))


def ticket(timeout_s: float = 5.0, *, source: str = "decode-0", sink: str = "decode-0") -> Ticket:
    return Ticket(
        ticket=TicketId("t"),
        source=InstanceId(source),
        source_generation=Generation(2),
        source_address="tcp://127.0.0.1:9",
        sink=InstanceId(sink),
        sink_generation=Generation(2),
        timeout_s=timeout_s,
    )


def bounded(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def in_loop(*arguments: Any, **settings: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*arguments, **settings), 20))

    return in_loop


@dataclass
class Puppet:
    """The rank's end of the connection, which says what the test wants."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def order(self) -> ToRank:
        return rank_decoder.decode(await receive(self.reader))

    def say(self, message: Any) -> None:
        send(self.writer, message)


@dataclass
class Ends:
    rank: RemoteRank
    puppet: Puppet
    tally: Tally
    broken: list[str] = field(default_factory=list)


@contextlib.asynccontextmanager
async def ends(answer: Any = STARTED) -> AsyncIterator[Ends]:
    ours, its = socket.socketpair()
    tally, broken = Tally(), list[str]()
    rank = RemoteRank(PartLink(1, ours, lambda: 7), tally, broken.append)
    puppet = Puppet(*await asyncio.open_unix_connection(sock=its))
    starting = asyncio.create_task(rank.start(START))
    assert await puppet.order() == START
    puppet.say(answer)
    try:
        await starting
        yield Ends(rank, puppet, tally, broken)
    finally:
        closing = asyncio.create_task(rank.close())
        await asyncio.sleep(0.01)
        puppet.writer.close()
        await closing


FETCHED = PartFetched(
    TicketId("t"),
    payload=b"p",
    transport="usm",
    seconds=0.5,
    exposed_s=0.1,
    num_bytes=64,
    num_blocks=1,
    ended_at=9.0,
)


@bounded
async def test_a_fetch_reports_arrived_blocks_and_its_end() -> None:
    async with ends() as both:
        assert (both.rank.address, both.rank.division) == ("tcp://127.0.0.1:1", "d")
        arrived: list[BlockHash] = []
        fetch = asyncio.create_task(both.rank.fetch(ticket(), [(name(1), 4)], arrived.extend))
        # After all commands of the engine that were sent before.
        assert await both.puppet.order() == FetchPart(ticket(), [(name(1), 4)], 7)
        both.puppet.say(PartArrived(TicketId("t"), [name(1)]))
        both.puppet.say(
            PartCounted("moved", {"peer": "a", "transport": "usm", "direction": "received", "num_bytes": 64})
        )
        both.puppet.say(FETCHED)
        result = await fetch
        assert (result.payload, result.transport, result.num_bytes, arrived) == (b"p", "usm", 64, [name(1)])
        assert both.tally.bytes == {("usm", "received"): 64}


@pytest.mark.parametrize(
    ("error", "raised"),
    [("TransferTimeout", TransferTimeout), ("no such error", LocalTransferError), ("NodeClosed", NodeClosed)],
)
@bounded
async def test_a_failed_fetch_raises_the_error_of_the_rank(error: str, raised: type[Exception]) -> None:
    async with ends() as both:
        fetch = asyncio.create_task(both.rank.fetch(ticket(), [], lambda names: None))
        await both.puppet.order()
        both.puppet.say(PartFailed(TicketId("t"), error, "why"))
        with pytest.raises(raised, match="rank 1: why"):
            await fetch


@bounded
async def test_a_cancelled_fetch_ends_when_the_rank_says_that_it_has() -> None:
    async with ends() as both:
        fetch = asyncio.create_task(both.rank.fetch(ticket(), [], lambda names: None))
        await both.puppet.order()
        fetch.cancel()
        assert await both.puppet.order() == CancelPart(TicketId("t"))
        fetch.cancel()
        await asyncio.sleep(0.02)
        assert not fetch.done(), "its blocks may still be written"
        both.puppet.say(PartFailed(TicketId("t"), "TransferCancelled", ""))
        with pytest.raises(asyncio.CancelledError):
            await fetch
        assert not both.broken


@pytest.mark.parametrize("is_cancelled", [True, False])
@bounded
async def test_a_rank_that_never_ends_a_fetch_ends_the_instance(
    is_cancelled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part_client, "END_MARGIN_S", 0.1)
    async with ends() as both:
        fetch = asyncio.create_task(both.rank.fetch(ticket(0.1), [], lambda names: None))
        await both.puppet.order()
        if is_cancelled:
            fetch.cancel()
        with pytest.raises((asyncio.CancelledError, NodeClosed)):
            await fetch
        assert len(both.broken) == 1 and "rank 1" in both.broken[0]


@bounded
async def test_a_rank_that_never_releases_a_ticket_ends_the_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_client, "END_MARGIN_S", 0.05)
    async with ends() as both:
        assert await both.rank.open(ticket(0.05)) == "closed"
        assert "released" in both.broken[0]


@bounded
async def test_a_released_ticket_resolves_once() -> None:
    async with ends() as both:
        released = both.rank.open(ticket())
        assert await both.puppet.order() == OpenPart(ticket())
        both.puppet.say(PartReleased(TicketId("t"), "received"))
        both.puppet.say(PartReleased(TicketId("t"), "failed"))
        assert await released == "received"
        await asyncio.sleep(0.01)
        assert not both.broken


@bounded
async def test_the_end_of_a_ranks_transfers_ends_all_that_waits_and_the_instance() -> None:
    async with ends() as both:
        released = both.rank.open(ticket())
        fetch = asyncio.create_task(both.rank.fetch(ticket(), [], lambda names: None))
        await both.puppet.order()
        both.puppet.writer.close()
        with pytest.raises(NodeClosed):
            await fetch
        assert await released == "closed"
        assert len(both.broken) == 1
        # Nothing can be ordered any more.
        both.rank.publish(TicketId("t"), [])
        with pytest.raises(NodeClosed):
            await both.rank.fetch(ticket(), [], lambda names: None)
        assert await both.rank.open(ticket()) == "closed"


@bounded
async def test_a_rank_reports_whether_it_is_connected() -> None:
    async with ends() as both:
        for failure in ("", "PeerLost: nobody is there"):
            connecting = asyncio.create_task(both.rank.connect("tcp://127.0.0.1:5"))
            assert await both.puppet.order() == ConnectNode("tcp://127.0.0.1:5")
            both.puppet.say(NodeConnected("tcp://127.0.0.1:5", failure))
            with pytest.raises(PeerLost, match="nobody") if failure else contextlib.nullcontext():
                await connecting
        waiting = asyncio.create_task(both.rank.connect("tcp://127.0.0.1:5"))
        await both.puppet.order()
        both.puppet.writer.close()
        with pytest.raises(PeerLost):
            await waiting


@bounded
async def test_a_rank_that_cannot_start_its_node_says_why() -> None:
    with pytest.raises(RankStartError, match="no port"):
        async with ends(PartRefused("no port")):
            raise AssertionError("it has started")


@bounded
async def test_a_connection_that_was_never_used_is_closed() -> None:
    ours, its = socket.socketpair()
    await RemoteRank(PartLink(1, ours, lambda: 0), SilentObserver(), lambda why: None).close()
    with its:
        assert its.recv(1) == b""


@contextlib.asynccontextmanager
async def real_rank(commands: ExecutedCommands, num_commands: int) -> AsyncIterator[tuple[RemoteRank, KVCache]]:
    """A rank whose transfers run in a thread, as in its own process."""
    part = BlockPart(None, (slice(1, 2), slice(1, 2)))
    cache = KVCache(LAYOUT, 8, torch.device("cpu"), part=part, place="mirrored")
    ours, its = socket.socketpair()
    serve_part(its, OwnPart(cache, commands))
    broken: list[str] = []
    rank = RemoteRank(PartLink(1, ours, lambda: num_commands), SilentObserver(), broken.append)
    await rank.start(START)
    try:
        yield rank, cache
    finally:
        await rank.close()
        cache.close()
        assert not broken


@bounded
async def test_a_rank_waits_for_the_commands_of_the_engine_before_it_fetches_or_publishes() -> None:
    commands = ExecutedCommands()
    async with real_rank(commands, num_commands=3) as (rank, _):
        assert rank.address.startswith("tcp://") and rank.division
        commands.reach(2)
        # Block 99 does not exist: the fetch fails as soon as it begins.
        fetch = asyncio.create_task(rank.fetch(ticket(), [(name(1), 99)], lambda names: None))
        await asyncio.sleep(0)
        with pytest.raises(LocalTransferError, match="already"):
            await rank.fetch(ticket(), [], lambda names: None)
        other = msgspec.structs.replace(ticket(), ticket=TicketId("u"))
        released = rank.open(other)
        rank.publish(TicketId("u"), [(name(1), 4)])
        # Ordered after the blocks, which wait.
        rank.fail(TicketId("u"), "as the test wants")
        await asyncio.sleep(0.1)
        assert not fetch.done() and not released.done()
        commands.reach(3)
        with pytest.raises(LocalTransferError, match="rank 1: block 99"):
            await fetch
        assert await released == "failed"


@bounded
async def test_a_fetch_that_waits_for_the_engine_can_be_cancelled_and_has_a_deadline() -> None:
    async with real_rank(ExecutedCommands(), num_commands=1) as (rank, _):
        with pytest.raises(TransferTimeout, match="busy"):
            await rank.fetch(ticket(0.1), [], lambda names: None)
        fetch = asyncio.create_task(rank.fetch(ticket(30.0), [], lambda names: None))
        await asyncio.sleep(0.05)
        fetch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(fetch, 3.0)


def test_a_function_waits_for_its_command_however_the_two_threads_meet() -> None:
    commands, called = ExecutedCommands(), list[int]()
    commands.when(0, lambda: called.append(0))
    commands.when(2, lambda: called.append(2))
    commands.when(1, lambda: called.append(1))
    assert called == [0]
    commands.reach(1)
    assert called == [0, 1]
    commands.reach(5)
    commands.reach(6)
    assert called == [0, 1, 2]
