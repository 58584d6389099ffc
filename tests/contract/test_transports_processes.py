"""Transports between two processes, and what happens when one of them dies, freezes or comes back."""

import asyncio
import os
import signal
from collections.abc import Coroutine
from typing import Any

import msgspec
import pytest

from baton_serve.bench.ports import free_port
from baton_serve.contracts.messages import Ticket
from baton_serve.kvtransfer import PeerLost, RemoteTransferError, TransferError, TransferSettings
from tests.contract import test_transports
from tests.contract.test_transports import only, wanted
from tests.contract.transports_pair import LAYOUT, LONG_SILENCE_S, Node, running
from tests.contract.transports_peer import Peer, peer

pytestmark = pytest.mark.slow
SILENT = {"heartbeat_interval_s": 60.0, "heartbeat_timeout_s": 120.0}
"""Heartbeats are so rare that no test detects a dead process by a missing one."""


@pytest.fixture(params=("usm", "zeromq", "oneccl", "auto"))
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def run(test: Coroutine[Any, Any, None]) -> None:
    """The bound ends what hangs. Most of it is for processes that load torch while others use the cores."""
    test_transports.run(test, bound_s=120.0)


def to_here(source: Peer, here: Node, number: int = 1, timeout_s: float = 10.0) -> Ticket:
    return msgspec.convert(
        {
            "ticket": f"ticket-{number}",
            "source": source.instance,
            "source_generation": source.generation,
            "source_address": source.address,
            "sink": here.instance,
            "sink_generation": here.generation,
            "timeout_s": timeout_s,
        },
        Ticket,
    )


def from_here(here: Node, sink: Peer, number: int = 1, timeout_s: float = 10.0) -> Ticket:
    return msgspec.convert(
        {
            "ticket": f"ticket-{number}",
            "source": here.instance,
            "source_generation": here.generation,
            "source_address": here.node.address,
            "sink": sink.instance,
            "sink_generation": sink.generation,
            "timeout_s": timeout_s,
        },
        Ticket,
    )


def text(ticket: Ticket) -> str:
    return msgspec.json.encode(ticket).decode()


def at_a_port(settings: TransferSettings) -> TransferSettings:
    """Return the settings with a port that no other process gets while nothing listens on it."""
    return msgspec.structs.replace(settings, bind=f"tcp://127.0.0.1:{free_port()}")


def test_bytes_arrive_from_another_process(transport: str) -> None:
    async def test() -> None:
        settings = only(transport)
        async with peer("prefill-0", settings, 7) as source, running("decode-0", settings) as here:
            await here.node.connect(source.address)
            ticket = to_here(source, here)
            await source.ask("open", full=text(ticket))
            blocks = [(i, 40 - i) for i in range(30)]
            places = wanted(*((i, i) for i, _ in blocks))
            fetch = asyncio.create_task(here.node.fetch(ticket, places))
            for block in blocks:
                await source.ask("publish", ticket=ticket.ticket, blocks=[block])
            await source.ask("finish", ticket=ticket.ticket)
            result = await fetch
            assert result.payload == b"payload"
            assert result.transport == ("usm" if transport == "auto" else transport)
            assert result.num_bytes == 30 * LAYOUT.block_bytes
            assert all(here.holds(i, seed=i) for i in range(30))
            assert await source.ask("released", ticket=ticket.ticket) == "received"
            assert await source.ask("sessions") == 0

    run(test())


def test_a_killed_producer_is_noticed_at_once(transport: str) -> None:
    async def test() -> None:
        settings = only(transport, **SILENT)
        async with peer("prefill-0", settings, 7) as source, running("decode-0", settings) as here:
            await here.node.connect(source.address)
            ticket = to_here(source, here, timeout_s=300.0)
            await source.ask("open", full=text(ticket))
            fetch = asyncio.create_task(here.node.fetch(ticket, wanted((0, 0), (1, 1))))
            await source.ask("publish", ticket=ticket.ticket, blocks=[(0, 0)])
            await asyncio.sleep(0.1)
            source.signal(signal.SIGKILL)
            with pytest.raises(PeerLost):
                await fetch
            assert here.node.num_sessions() == 0

    run(test())


def test_a_producer_killed_in_the_middle_of_a_tail_has_delivered_no_block(transport: str) -> None:
    async def test() -> None:
        settings = only(transport, parts=4)
        heard: list[bytes] = []
        async with peer("prefill-0", settings, 7) as source, running("decode-0", settings) as here:
            await here.node.connect(source.address)
            ticket = to_here(source, here)
            await source.ask("open", full=text(ticket))
            fetch = asyncio.create_task(here.node.fetch(ticket, wanted((0, 0), (1, 1), (2, 2)), on_blocks=heard.extend))
            await source.ask("publish", ticket=ticket.ticket, blocks=[(0, 0)])
            for part in range(3):
                await source.ask("publish", ticket=ticket.ticket, blocks=[(1, 1), (2, 2)], part=part)
            for _ in range(400):
                if heard:
                    break
                await asyncio.sleep(0.01)
            source.signal(signal.SIGKILL)
            with pytest.raises(PeerLost):
                await fetch
            assert heard == [wanted((0, 0))[0][0]]
            assert here.node.num_sessions() == 0

    run(test())


def test_a_producer_killed_while_a_transport_is_being_attached_is_lost(transport: str) -> None:
    async def test() -> None:
        settings = only(transport)
        async with peer("prefill-0", settings, 7) as source, running("decode-0", settings) as here:
            ticket = to_here(source, here)
            fetch = asyncio.create_task(here.node.fetch(ticket, wanted((0, 0))))
            await asyncio.sleep(0.01)
            source.signal(signal.SIGKILL)
            with pytest.raises(PeerLost):
                await fetch
            assert here.node.num_sessions() == 0

    run(test())


def test_a_killed_consumer_frees_the_producers_blocks_at_once(transport: str) -> None:
    async def test() -> None:
        settings = only(transport, lease_s=300.0, **SILENT)
        async with running("prefill-0", settings) as here, peer("decode-0", settings, 7) as sink:
            await sink.ask("connect", address=here.node.address)
            ticket = from_here(here, sink, timeout_s=300.0)
            here.node.open(ticket)
            here.node.publish(ticket.ticket, wanted((0, 0)))
            await sink.ask("fetch", full=text(ticket), blocks=[(0, 0), (1, 1)])
            await asyncio.sleep(0.2)
            sink.signal(signal.SIGKILL)
            assert await here.node.released(ticket.ticket) == "lost"
            assert here.node.num_sessions() == 0

    run(test())


def test_a_frozen_producer_is_noticed_by_its_silence(transport: str) -> None:
    async def test() -> None:
        settings = only(transport)
        async with peer("prefill-0", settings, 7) as source, running("decode-0", settings) as here:
            await here.node.connect(source.address)
            ticket = to_here(source, here, timeout_s=300.0)
            await source.ask("open", full=text(ticket))
            fetch = asyncio.create_task(here.node.fetch(ticket, wanted((0, 0))))
            await asyncio.sleep(0.1)
            source.signal(signal.SIGSTOP)
            try:
                with pytest.raises(RemoteTransferError):
                    await fetch
            finally:
                source.signal(signal.SIGCONT)

    run(test())


def test_a_frozen_consumer_never_uses_blocks_that_were_freed_meanwhile(transport: str) -> None:
    async def test() -> None:
        settings = only(transport, lease_s=0.5, checksum="off")
        async with running("prefill-0", settings) as here, peer("decode-0", settings, 7) as sink:
            await sink.ask("connect", address=here.node.address)
            ticket = from_here(here, sink)
            here.node.open(ticket)
            await sink.ask("fetch", full=text(ticket), blocks=[(0, 0), (1, 1)])
            await asyncio.sleep(0.2)
            sink.signal(signal.SIGSTOP)
            here.fill(0, seed=0)
            here.fill(1, seed=1)
            here.node.publish(ticket.ticket, wanted((0, 0), (1, 1)))
            here.node.finish(ticket.ticket, b"")
            assert await here.node.released(ticket.ticket) in ("lost", "expired")
            here.memory.block(0)[:] = here.memory.block(1)[:] = bytes(LAYOUT.block_bytes)
            sink.signal(signal.SIGCONT)
            outcome = await sink.ask("fetched", ticket=ticket.ticket)
            assert "WRONG" not in outcome
            assert "right" not in outcome or transport == "zeromq"  # what ZeroMQ was given is a copy, whenever it comes
            assert await sink.ask("sessions") == 0

    run(test())


def test_a_consumer_that_froze_briefly_finishes_its_fetch(transport: str) -> None:
    async def test() -> None:
        settings = only(transport, lease_s=8.0)
        async with running("prefill-0", settings) as here, peer("decode-0", settings, 7) as sink:
            await sink.ask("connect", address=here.node.address)
            ticket = from_here(here, sink)
            here.node.open(ticket)
            here.fill(0, seed=0)
            here.fill(1, seed=1)
            here.node.publish(ticket.ticket, wanted((0, 0)))
            await sink.ask("fetch", full=text(ticket), blocks=[(0, 0), (1, 1)])
            await asyncio.sleep(0.2)
            sink.signal(signal.SIGSTOP)
            await asyncio.sleep(LONG_SILENCE_S)
            here.node.publish(ticket.ticket, wanted((1, 1)))
            here.node.finish(ticket.ticket, b"")
            sink.signal(signal.SIGCONT)
            assert "right" in await sink.ask("fetched", ticket=ticket.ticket)
            assert await here.node.released(ticket.ticket) == "received"

    run(test())


def test_a_busy_peer_is_not_taken_for_a_dead_one(transport: str) -> None:
    async def test() -> None:
        settings = only(transport)
        async with peer("prefill-0", settings, 7) as source, running("decode-0", settings) as here:
            await here.node.connect(source.address)
            ticket = to_here(source, here)
            await source.ask("open", full=text(ticket))
            fetch = asyncio.create_task(here.node.fetch(ticket, wanted((0, 0))))
            await asyncio.sleep(0.1)
            await source.ask("block", seconds=LONG_SILENCE_S)
            assert not fetch.done() and here.tally.retries == []
            await source.ask("publish", ticket=ticket.ticket, blocks=[(0, 0)])
            await source.ask("finish", ticket=ticket.ticket)
            await fetch
            assert here.holds(0, seed=0)

    run(test())


def test_a_restarted_producer_under_the_same_address_is_not_taken_for_the_old_one(transport: str) -> None:
    async def test() -> None:
        settings = only(transport)
        fixed = at_a_port(settings)
        async with running("decode-0", settings) as here:
            async with peer("prefill-0", fixed, 7) as source:
                await here.node.connect(source.address)
                old = to_here(source, here, number=1)
            async with peer("prefill-0", fixed, 8) as source:
                assert source.address == old.source_address
                with pytest.raises(PeerLost):
                    await here.node.fetch(old, wanted((0, 0)))
                ticket = to_here(source, here, number=2)
                await source.ask("open", full=text(ticket))
                await source.ask("publish", ticket=ticket.ticket, blocks=[(0, 0)])
                await source.ask("finish", ticket=ticket.ticket)
                await here.node.fetch(ticket, wanted((0, 0)))
                assert here.holds(0, seed=0)

    run(test())


def test_a_producer_that_is_restarted_under_its_address_in_the_middle_of_a_fetch(transport: str) -> None:
    async def test() -> None:
        settings = only(transport)
        fixed = at_a_port(settings)
        async with running("decode-0", settings) as here:
            async with peer("prefill-0", fixed, 7) as source:
                await here.node.connect(source.address)
                old = to_here(source, here, number=1)
                await source.ask("open", full=text(old))
                await source.ask("publish", ticket=old.ticket, blocks=[(0, 0)])
                fetch = asyncio.create_task(here.node.fetch(old, wanted((0, 0), (1, 1))))
                await asyncio.sleep(0.1)
                source.signal(signal.SIGKILL)
            async with peer("prefill-0", fixed, 8) as source:
                with pytest.raises(PeerLost):
                    await fetch
                ticket = to_here(source, here, number=2)
                await source.ask("open", full=text(ticket))
                await source.ask("publish", ticket=ticket.ticket, blocks=[(5, 0)])
                await source.ask("finish", ticket=ticket.ticket)
                await here.node.fetch(ticket, wanted((5, 0)))
                assert here.holds(0, seed=5) and here.node.num_sessions() == 0

    run(test())


def test_a_consumer_that_is_restarted_under_its_name_gets_nothing_of_the_old_one(transport: str) -> None:
    async def test() -> None:
        settings = only(transport)
        async with running("prefill-0", settings) as here:
            here.fill(0, seed=0)
            async with peer("decode-0", settings, 7) as sink:
                await sink.ask("connect", address=here.node.address)
                old = from_here(here, sink, number=1)
                here.node.open(old)
                here.node.publish(old.ticket, wanted((0, 0)))
                await sink.ask("fetch", full=text(old), blocks=[(0, 0), (1, 1)])
                await asyncio.sleep(0.1)
                sink.signal(signal.SIGKILL)
            async with peer("decode-0", settings, 8) as sink:
                assert await here.node.released(old.ticket) == "lost"
                await sink.ask("fetch", full=text(old), blocks=[(0, 0)])
                assert (await sink.ask("fetched", ticket=old.ticket)).startswith("UnknownTicket")
                ticket = from_here(here, sink, number=2)
                here.node.open(ticket)
                here.node.publish(ticket.ticket, wanted((0, 0)))
                here.node.finish(ticket.ticket, b"")
                await sink.ask("fetch", full=text(ticket), blocks=[(0, 7)])
                assert "right" in await sink.ask("fetched", ticket=ticket.ticket)
                assert await here.node.released(ticket.ticket) == "received"

    run(test())


def test_killing_either_side_in_the_middle_of_many_transfers_leaves_nothing(transport: str) -> None:
    async def test() -> None:
        settings = only(transport)
        async with peer("prefill-0", settings, 7) as source, running("decode-0", settings) as here:
            fetches: list[asyncio.Task[object]] = []
            for number in range(12):
                ticket = to_here(source, here, number=number)
                await source.ask("open", full=text(ticket))
                await source.ask("publish", ticket=ticket.ticket, blocks=[(i, i) for i in range(20)])
                places = wanted(*((i, i) for i in range(21)))
                fetches.append(asyncio.create_task(here.node.fetch(ticket, places)))
            await asyncio.sleep(0)
            source.signal(signal.SIGKILL)
            results = await asyncio.gather(*fetches, return_exceptions=True)
            assert all(isinstance(result, TransferError) for result in results)
            assert here.node.num_sessions() == 0

    run(test())


def test_no_shared_memory_or_socket_is_left_behind_by_a_kill() -> None:
    async def test() -> None:
        before = set(os.listdir("/dev/shm"))
        async with peer("prefill-0", only("usm"), 7) as source, running("decode-0", only("usm")) as here:
            await here.node.connect(source.address)
            source.signal(signal.SIGKILL)
        while set(os.listdir("/dev/shm")) - before:  # noqa: ASYNC110 - other programs' files come and go; ours would stay
            await asyncio.sleep(0.1)

    run(test())
