"""Every transport through the same transfers, both nodes in one process. For two: `test_transports_processes.py`."""

import asyncio
import os
import re
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton_serve.contracts.identity import BlockHash, Generation
from baton_serve.contracts.messages import Ticket
from baton_serve.kvtransfer import (
    Corrupt,
    Incomplete,
    LocalTransferError,
    NodeClosed,
    PeerLost,
    Refused,
    SourceFailed,
    TransferCancelled,
    TransferTimeout,
    UnknownTicket,
)
from baton_serve.kvtransfer.consumer.fetching import FetchResult
from baton_serve.kvtransfer.session.steps import BlockPlacement
from tests.contract.transports_pair import LAYOUT, SETTINGS, THREE, Meddler, Pair, by_three, name, pair_of, running

TRANSPORTS = ("memory", "usm", "zeromq", "oneccl")


@pytest.fixture(params=(*TRANSPORTS, THREE))
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    return transport_of(request, monkeypatch)


def transport_of(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """For fixtures: the transport of this run, and `THREE` its connections to `only`."""
    if request.param != THREE:
        return str(request.param)
    monkeypatch.setattr("tests.contract.test_transports.SETTINGS", by_three(SETTINGS))
    return "zeromq"


def run(test: Coroutine[Any, Any, None], *, bound_s: float = 20.0) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(bound_s):
            await test

    asyncio.run(bounded())


def only(transport: str, **changes: object) -> Any:
    return msgspec.structs.replace(SETTINGS, transports=(transport,), **changes)


def wanted(*pairs: tuple[int, int]) -> list[tuple[BlockHash, int]]:
    return [(name(index), place) for index, place in pairs]


def test_bytes_and_payload_arrive_and_the_blocks_are_released(transport: str) -> None:
    async def test() -> None:
        async with pair_of(only(transport)) as pair:
            ticket = pair.ticket()
            for block in range(40):
                pair.producer.fill(block, seed=block)
            pair.producer.node.open(ticket)
            fetch = asyncio.create_task(pair.consumer.node.fetch(ticket, wanted(*((i, 47 - i) for i in range(40)))))
            pair.producer.node.publish(ticket.ticket, wanted(*((i, i) for i in range(40))))
            pair.producer.node.finish(ticket.ticket, b"first tokens")
            result = await fetch
            assert result.payload == b"first tokens"
            assert (result.transport, result.num_blocks) == (transport, 40)
            assert result.num_bytes == 40 * LAYOUT.block_bytes
            assert 0 <= result.exposed_s <= result.seconds
            assert all(pair.consumer.holds(47 - i, seed=i) for i in range(40))
            assert await pair.producer.node.released(ticket.ticket) == "received"
            assert pair.consumer.tally.bytes == {(transport, "received"): 40 * LAYOUT.block_bytes}
            (link,) = pair.consumer.node.links()
            assert link.transport == transport
            assert link.reason.startswith(f"{transport}: in use")

    run(test())


def test_the_end_of_a_fetch_is_reported_before_its_task_runs_again(transport: str) -> None:
    async def test() -> None:
        async with pair_of(only(transport)) as pair:
            ticket, seen = pair.ticket(), list[object]()
            pair.producer.fill(0, seed=1)
            pair.producer.node.open(ticket)

            async def fetch() -> None:
                result = await pair.consumer.node.fetch(ticket, wanted((0, 5)), on_blocks=seen.append, on_end=end)
                seen.append(result)

            def end(result: FetchResult) -> None:
                assert pair.consumer.holds(5, seed=1)
                asyncio.get_running_loop().call_soon(seen.append, "turn")
                seen.append(result.payload)

            fetching = asyncio.create_task(fetch())
            pair.producer.node.publish(ticket.ticket, wanted((0, 0)))
            pair.producer.node.finish(ticket.ticket, b"first")
            await fetching
            assert seen[:3] == [[name(0)], b"first", "turn"]
            assert await pair.producer.node.released(ticket.ticket) == "received"

    run(test())


def test_an_error_in_the_callback_at_the_end_fails_the_fetch(transport: str) -> None:
    async def test() -> None:
        async with pair_of(only(transport)) as pair:
            ticket = pair.ticket()
            pair.producer.fill(0, seed=1)
            pair.producer.node.open(ticket)
            pair.producer.node.publish(ticket.ticket, wanted((0, 0)))
            pair.producer.node.finish(ticket.ticket, b"")

            def broken(result: FetchResult) -> None:
                raise RuntimeError("a bug")

            with pytest.raises(LocalTransferError, match="on_end"):
                await pair.consumer.node.fetch(ticket, wanted((0, 5)), on_end=broken)
            assert await pair.producer.node.released(ticket.ticket) == "received"

    run(test())


def test_a_chunk_travels_while_the_next_one_is_computed(transport: str) -> None:
    async def test() -> None:
        async with pair_of(only(transport)) as pair:
            ticket, arrived = pair.ticket(), asyncio.Queue[list[BlockHash]]()
            pair.producer.node.open(ticket)
            fetch = asyncio.create_task(
                pair.consumer.node.fetch(ticket, wanted((0, 5), (1, 6), (2, 7)), on_blocks=arrived.put_nowait)
            )
            for block in range(3):
                pair.producer.fill(block, seed=block)
                pair.producer.node.publish(ticket.ticket, wanted((block, block)))
                assert await arrived.get() == [name(block)]
                assert pair.consumer.holds(5 + block, seed=block)
                assert not fetch.done()
            pair.producer.node.finish(ticket.ticket, b"")
            await fetch

    run(test())


def test_fetches_that_come_while_their_connection_is_being_opened_wait_for_it(transport: str) -> None:
    async def test() -> None:
        async with pair_of(only(transport)) as pair:
            tickets = [pair.ticket() for _ in range(8)]
            pair.producer.fill(0, seed=3)
            for ticket in tickets:
                pair.producer.node.open(ticket)
                pair.producer.node.publish(ticket.ticket, wanted((0, 0)))
                pair.producer.node.finish(ticket.ticket, b"")
            fetches = []
            for place, ticket in enumerate(tickets):
                fetches.append(asyncio.create_task(pair.consumer.node.fetch(ticket, wanted((0, place)))))
                await asyncio.sleep(0)  # each finds the opening one step further
            await asyncio.gather(*fetches)
            assert all(pair.consumer.holds(place, seed=3) for place in range(8))

    run(test())


def test_only_wanted_blocks_travel(transport: str) -> None:
    async def test() -> None:
        async with pair_of(only(transport)) as pair:
            ticket = pair.ticket()
            for block in range(6):
                pair.producer.fill(block, seed=block)
            pair.producer.node.open(ticket)
            pair.producer.node.publish(ticket.ticket, wanted(*((i, i) for i in range(6))))
            pair.producer.node.finish(ticket.ticket, b"")
            result = await pair.consumer.node.fetch(ticket, wanted((4, 0), (1, 1)))
            assert result.num_blocks == 2
            assert pair.consumer.holds(0, seed=4) and pair.consumer.holds(1, seed=1)
            assert bytes(pair.consumer.memory.block(2)) == bytes(LAYOUT.block_bytes)

    run(test())


def test_a_fetch_of_nothing_still_waits_for_the_payload(transport: str) -> None:
    async def test() -> None:
        async with pair_of(only(transport)) as pair:
            await pair.consumer.node.connect(pair.producer.node.address)
            ticket = pair.ticket()
            fetch = asyncio.create_task(pair.consumer.node.fetch(ticket, []))
            await asyncio.sleep(0.05)
            pair.producer.node.open(ticket)
            pair.producer.node.publish(ticket.ticket, wanted((0, 0)))
            pair.producer.node.finish(ticket.ticket, b"payload")
            assert (await fetch).payload == b"payload"
            assert await pair.producer.node.released(ticket.ticket) == "received"

    run(test())


def test_cancelling_the_fetch_releases_the_producer_and_writes_nothing_more(transport: str) -> None:
    async def test() -> None:
        async with pair_of(only(transport)) as pair:
            await pair.consumer.node.connect(pair.producer.node.address)
            ticket = pair.ticket()
            pair.producer.node.open(ticket)
            fetch = asyncio.create_task(pair.consumer.node.fetch(ticket, wanted((0, 0), (1, 1))))
            await asyncio.sleep(0.05)
            fetch.cancel()
            with pytest.raises(asyncio.CancelledError):
                await fetch
            pair.producer.fill(0, seed=0)
            pair.producer.node.publish(ticket.ticket, wanted((0, 0)))
            pair.producer.node.finish(ticket.ticket, b"late")
            assert await pair.producer.node.released(ticket.ticket) == "cancelled"
            assert bytes(pair.consumer.memory.block(0)) == bytes(LAYOUT.block_bytes)

    run(test())


def test_a_cancelled_fetch_returns_only_when_its_copy_has_stopped(transport: str) -> None:
    async def test() -> None:
        meddler, entered, go_on = Meddler(), threading.Event(), threading.Event()

        def hold(placement: BlockPlacement) -> None:
            entered.set()
            assert go_on.wait(5)

        meddler.before = hold
        async with pair_of(only(transport, inline_bytes=0), meddler=meddler) as pair:
            await pair.consumer.node.connect(pair.producer.node.address)
            ticket = pair.ticket()
            pair.producer.node.open(ticket)
            pair.producer.node.publish(ticket.ticket, wanted((0, 0)))
            fetch = asyncio.create_task(pair.consumer.node.fetch(ticket, wanted((0, 0))))
            released = asyncio.create_task(pair.producer.node.released(ticket.ticket))
            await asyncio.to_thread(entered.wait, 5)
            fetch.cancel()
            await asyncio.sleep(0.05)
            fetch.cancel()
            await asyncio.sleep(0.05)
            assert not fetch.done() and not released.done()
            go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await fetch
            assert await released == "cancelled"

    run(test())


def test_cancel_on_the_consumer_raises_there(transport: str) -> None:
    async def test() -> None:
        async with pair_of(only(transport)) as pair:
            await pair.consumer.node.connect(pair.producer.node.address)
            ticket = pair.ticket()
            pair.producer.node.open(ticket)
            fetch = asyncio.create_task(pair.consumer.node.fetch(ticket, wanted((0, 0))))
            await asyncio.sleep(0.05)
            pair.consumer.node.cancel(ticket.ticket)
            with pytest.raises(TransferCancelled):
                await fetch
            assert await pair.producer.node.released(ticket.ticket) == "cancelled"
            with pytest.raises(TransferCancelled):
                await pair.consumer.node.fetch(ticket, [])

    run(test())


def test_cancel_or_failure_of_the_producer_reaches_the_consumer(transport: str) -> None:
    async def test() -> None:
        async with pair_of(only(transport)) as pair:
            await pair.consumer.node.connect(pair.producer.node.address)
            for reason in ("cancelled", "failed"):
                ticket = pair.ticket()
                pair.producer.node.open(ticket)
                pair.producer.node.publish(ticket.ticket, wanted((0, 0)))
                fetch = asyncio.create_task(pair.consumer.node.fetch(ticket, wanted((0, 0), (1, 1))))
                await asyncio.sleep(0.05)
                if reason == "cancelled":
                    pair.producer.node.cancel(ticket.ticket)
                else:
                    pair.producer.node.fail(ticket.ticket, "out of luck")
                with pytest.raises(SourceFailed, match=r"cancelled|out of luck"):
                    await fetch
                assert await pair.producer.node.released(ticket.ticket) == reason

    run(test())


def test_a_cancel_before_anything_else_leaves_a_tombstone_on_either_side(transport: str) -> None:
    async def test() -> None:
        async with pair_of(only(transport)) as pair:
            ticket = pair.ticket()
            pair.producer.node.cancel(ticket.ticket)
            with pytest.raises(SourceFailed):
                await pair.consumer.node.fetch(ticket, wanted((0, 0)))
            pair.producer.node.open(ticket)
            assert await pair.producer.node.released(ticket.ticket) == "cancelled"

    run(test())


def test_a_ticket_that_nobody_opens_times_out_and_leaves_nothing(transport: str) -> None:
    async def test() -> None:
        async with pair_of(only(transport)) as pair:
            ticket = pair.ticket(timeout_s=0.2)
            with pytest.raises(TransferTimeout):
                await pair.consumer.node.fetch(ticket, wanted((0, 0)))

    run(test())


def test_a_ticket_that_nobody_fetches_is_released(transport: str) -> None:
    async def test() -> None:
        async with pair_of(only(transport)) as pair:
            ticket = pair.ticket(timeout_s=0.1)
            pair.producer.node.open(ticket)
            assert await pair.producer.node.released(ticket.ticket) == "expired"
            with pytest.raises(TransferTimeout):
                await pair.consumer.node.fetch(ticket, [])

    run(test())


def test_finishing_without_a_wanted_block_is_an_error_not_a_short_success(transport: str) -> None:
    async def test() -> None:
        async with pair_of(only(transport)) as pair:
            ticket = pair.ticket()
            pair.producer.node.open(ticket)
            pair.producer.node.publish(ticket.ticket, wanted((0, 0)))
            pair.producer.node.finish(ticket.ticket, b"")
            with pytest.raises(Incomplete, match="1 wanted"):
                await pair.consumer.node.fetch(ticket, wanted((0, 0), (1, 1)))
            assert await pair.producer.node.released(ticket.ticket) == "failed"

    run(test())


def test_a_damaged_block_is_fetched_again(transport: str) -> None:
    async def test() -> None:
        meddler, damaged = Meddler(), list[int]()
        async with pair_of(only(transport), meddler=meddler) as pair:

            def damage_once(transport: str, placement: BlockPlacement) -> object:
                if placement.index == 1 and not damaged:
                    damaged.append(1)
                    pair.consumer.memory.block(placement.destination)[7] ^= 1
                    return "damaged"
                return None

            meddler.after = damage_once  # type: ignore[assignment]
            await handoff(pair, 3)
            assert pair.consumer.tally.mismatches == 1
            assert pair.consumer.tally.retries == []

    run(test())


def test_bytes_that_change_after_their_checksum_are_noticed(transport: str) -> None:
    async def test() -> None:
        meddler, changed = Meddler(), list[int]()
        async with pair_of(only(transport), meddler=meddler) as pair:

            def change(placement: BlockPlacement) -> None:
                if not changed:
                    changed.append(1)
                    pair.producer.memory.block(placement.source)[0] ^= 255

            meddler.before = change
            ticket = pair.ticket()
            pair.producer.fill(3, seed=3)
            pair.producer.node.open(ticket)
            pair.producer.node.publish(ticket.ticket, wanted((0, 3)))
            pair.producer.node.finish(ticket.ticket, b"")
            await pair.consumer.node.fetch(ticket, wanted((0, 9)))
            assert pair.consumer.tally.mismatches == (0 if transport in ("zeromq", "oneccl") else 1)

    run(test())


def test_a_transport_that_keeps_damaging_blocks_is_demoted_and_the_next_one_used() -> None:
    async def test() -> None:
        meddler = Meddler()
        settings = msgspec.structs.replace(SETTINGS, transports=("usm", "zeromq"))
        async with pair_of(settings, meddler=meddler) as pair:
            meddler.after = lambda transport, _: "bad" if transport == "usm" else None  # type: ignore[assignment]
            assert await handoff(pair, 3) == "zeromq"
            assert pair.consumer.tally.mismatches >= SETTINGS.max_mismatches
            assert await handoff(pair, 2) == "zeromq"
            (link,) = pair.consumer.node.links()
            assert re.fullmatch(r"usm: demoted, .*; zeromq: in use", link.reason)
            assert link.choice == "fallback" and pair.consumer.tally.changes == [("usm", "demoted")]

    run(test())


def test_damage_on_the_last_transport_is_an_error(transport: str) -> None:
    async def test() -> None:
        meddler = Meddler()
        meddler.after = lambda transport, _: "bad"  # type: ignore[assignment]
        async with pair_of(only(transport), meddler=meddler) as pair:
            with pytest.raises(Corrupt):
                await handoff(pair, 2)

    run(test())


def test_another_layout_is_refused_with_both_printed(transport: str) -> None:
    async def test() -> None:
        other = msgspec.structs.replace(LAYOUT, fingerprint="other-weights")
        async with pair_of(only(transport), consumer_layout=other) as pair:
            with pytest.raises(Refused, match=r"producer.*tiny.*consumer.*other-weights"):
                await pair.consumer.node.fetch(pair.ticket(), wanted((0, 0)))

    run(test())


def test_tickets_of_other_generations_or_instances_are_refused(transport: str) -> None:
    async def test() -> None:
        async with pair_of(only(transport)) as pair:
            ticket = pair.ticket()
            old = msgspec.structs.replace(ticket, source_generation=Generation(10))
            with pytest.raises(PeerLost, match="another generation"):
                await pair.consumer.node.fetch(old, [])
            with pytest.raises(UnknownTicket):
                pair.producer.node.open(old)
            with pytest.raises(UnknownTicket):
                await pair.consumer.node.fetch(msgspec.structs.replace(ticket, sink_generation=Generation(21)), [])
            with pytest.raises(UnknownTicket):
                pair.producer.node.publish(ticket.ticket, [])

    run(test())


def test_a_flood_of_fetches_is_refused_with_a_reason(transport: str) -> None:
    async def test() -> None:
        async with pair_of(only(transport, max_fetches_per_peer=3)) as pair:
            tickets = [pair.ticket() for _ in range(5)]
            fetches = [asyncio.create_task(pair.consumer.node.fetch(t, wanted((0, 0)))) for t in tickets]
            while sum(fetch.done() for fetch in fetches) < 2:
                await asyncio.wait(
                    [fetch for fetch in fetches if not fetch.done()], return_when=asyncio.FIRST_COMPLETED
                )
            for fetch in fetches:
                fetch.cancel()
            results = await asyncio.gather(*fetches, return_exceptions=True)
            refused = [str(result) for result in results if isinstance(result, Refused)]
            assert len(refused) == 2 and all("too many" in reason for reason in refused)
            assert sum(isinstance(result, asyncio.CancelledError) for result in results) == 3

    run(test())


def test_more_bytes_than_the_window_still_arrive(transport: str) -> None:
    async def test() -> None:
        settings = only(
            transport,
            window_bytes=6 * LAYOUT.block_bytes,
            batch_bytes=3 * LAYOUT.block_bytes,
            frame_bytes=5000,
            inline_bytes=0,
        )
        async with pair_of(settings) as pair:
            tickets = await asyncio.gather(*(handoff(pair, 8, first=8 * i) for i in range(5)))
            assert tickets == [transport] * 5

    run(test())


def test_a_slow_consumer_slows_only_its_own_connection(transport: str) -> None:
    async def test() -> None:
        meddler, go_on = Meddler(), threading.Event()
        settings = only(transport, inline_bytes=0, window_bytes=LAYOUT.block_bytes, copy_threads=1)
        async with pair_of(settings, meddler=meddler) as pair, running("decode-1", settings, generation=33) as other:
            meddler.before = lambda placement: _wait(go_on)
            slow_ticket, quick_ticket = (
                pair.ticket(),
                msgspec.structs.replace(pair.ticket(), sink=other.instance, sink_generation=other.generation),
            )
            blocks = wanted(*((i, i) for i in range(8)))
            for block in range(8):
                pair.producer.fill(block, seed=block)
            for ticket in (slow_ticket, quick_ticket):
                pair.producer.node.open(ticket)
                pair.producer.node.publish(ticket.ticket, blocks)
                pair.producer.node.finish(ticket.ticket, b"")
            slow = asyncio.create_task(pair.consumer.node.fetch(slow_ticket, blocks))
            if transport != "memory":
                await other.node.fetch(quick_ticket, blocks)
                assert all(other.holds(i, seed=i) for i in range(8))
            else:
                pair.producer.node.cancel(quick_ticket.ticket)
            assert not slow.done()
            go_on.set()
            await slow

    run(test())


def test_fetches_beside_one_that_demotes_their_transport_go_on() -> None:
    async def test() -> None:
        meddler = Meddler()
        settings = msgspec.structs.replace(SETTINGS, transports=("usm", "zeromq"), inline_bytes=0)
        async with pair_of(settings, meddler=meddler) as pair:
            beside = pair.ticket()
            blocks = wanted(*((i, i) for i in range(40, 46)))
            pair.producer.node.open(beside)
            fetch = asyncio.create_task(pair.consumer.node.fetch(beside, blocks))
            await asyncio.sleep(0.05)
            meddler.after = lambda transport, _: "bad" if transport == "usm" else None  # type: ignore[assignment]
            assert await handoff(pair, 3) == "zeromq"
            for block in range(40, 46):
                pair.producer.fill(block, seed=block)
            pair.producer.node.publish(beside.ticket, blocks)
            pair.producer.node.finish(beside.ticket, b"")
            assert (await fetch).transport == "zeromq"
            assert all(pair.consumer.holds(i, seed=i) for i in range(40, 46))

    run(test())


def test_shared_memory_may_be_handed_out_in_a_folder(tmp_path: Path) -> None:
    async def test() -> None:
        async with pair_of(only("usm", run_dir=str(tmp_path))) as pair:
            assert len(os.listdir(tmp_path)) == 2
            assert await handoff(pair, 3) == "usm"
        assert os.listdir(tmp_path) == []

    run(test())


def test_without_a_place_for_its_socket_a_node_falls_back_to_zeromq(tmp_path: Path) -> None:
    async def test() -> None:
        settings = msgspec.structs.replace(SETTINGS, transports=("usm", "zeromq"), run_dir=str(tmp_path / "missing"))
        async with pair_of(settings) as pair:
            assert await handoff(pair, 3) == "zeromq"
            (link,) = pair.consumer.node.links()
            assert link.peer == pair.producer.instance and "not offered" in link.reason

    run(test())


def test_an_address_in_use_is_one_clear_error() -> None:
    async def test() -> None:
        async with running("prefill-0", SETTINGS) as first:
            taken = msgspec.structs.replace(SETTINGS, bind=first.node.address)
            with pytest.raises(LocalTransferError, match="cannot bind"):
                async with running("prefill-1", taken):
                    pass

    run(test())


def test_a_partial_fetch_takes_what_the_producer_has(transport: str) -> None:
    async def test() -> None:
        async with pair_of(only(transport)) as pair:

            def serve(ticket: Ticket, names: list[BlockHash]) -> None:
                pair.producer.node.open(ticket)
                pair.producer.node.publish(ticket.ticket, [(names[0], 2)])
                pair.producer.node.finish(ticket.ticket, b"")

            pair.producer.node.on_fetch(serve)
            pair.producer.fill(2, seed=2)
            ticket = pair.ticket()
            result = await pair.consumer.node.fetch(ticket, wanted((5, 0), (6, 1)), partial=True)
            assert list(result.names) == [name(5)]
            assert pair.consumer.holds(0, seed=2)
            assert await pair.producer.node.released(ticket.ticket) == "received"

    run(test())


def test_closing_either_node_ends_what_runs(transport: str) -> None:
    async def test() -> None:
        async with pair_of(only(transport)) as pair:
            await pair.consumer.node.connect(pair.producer.node.address)
            ticket = pair.ticket()
            pair.producer.node.open(ticket)
            fetch = asyncio.create_task(pair.consumer.node.fetch(ticket, wanted((0, 0))))
            await pair.both_know()
            await pair.producer.node.close()
            with pytest.raises((SourceFailed, PeerLost)):
                await fetch
            assert await pair.producer.node.released(ticket.ticket) == "closed"
        async with pair_of(only(transport)) as pair:
            ticket = pair.ticket()
            pair.producer.node.open(ticket)
            fetch = asyncio.create_task(pair.consumer.node.fetch(ticket, wanted((0, 0))))
            await pair.both_know()
            await pair.consumer.node.close()
            with pytest.raises(NodeClosed):
                await fetch
            assert await pair.producer.node.released(ticket.ticket) == "failed"

    run(test())


def test_a_callback_that_fails_ends_its_fetch_alone(transport: str) -> None:
    def broken(names: list[BlockHash]) -> None:
        raise RuntimeError("bug of the caller")

    async def test() -> None:
        async with pair_of(only(transport)) as pair:
            ticket = pair.ticket()
            pair.producer.node.open(ticket)
            pair.producer.node.publish(ticket.ticket, wanted((0, 0)))
            with pytest.raises(LocalTransferError, match="on_blocks"):
                await pair.consumer.node.fetch(ticket, wanted((0, 0), (1, 1)), on_blocks=broken)
            assert await pair.producer.node.released(ticket.ticket) == "cancelled"
            await handoff(pair, 2)

    run(test())


def test_misuse_is_a_local_error(transport: str) -> None:
    async def test() -> None:
        async with pair_of(only(transport)) as pair:
            ticket = pair.ticket(timeout_s=0.3)
            pair.producer.node.open(ticket)
            with pytest.raises(LocalTransferError, match="before"):
                pair.producer.node.open(ticket)
            with pytest.raises(LocalTransferError, match="payload"):
                pair.producer.node.finish(ticket.ticket, bytes(300 * 1024))
            with pytest.raises(LocalTransferError, match="is not one of"):
                await pair.consumer.node.fetch(ticket, wanted((0, 48)))
            await pair.producer.node.released(ticket.ticket)

    run(test())


def _wait(event: threading.Event) -> None:
    assert event.wait(5)


async def handoff(pair: Pair, num_blocks: int, first: int = 0) -> str:
    """Moves blocks `first`…, checks their bytes and says by which transport."""
    ticket = pair.ticket()
    places = range(first, first + num_blocks)
    for block in places:
        pair.producer.fill(block, seed=block)
    pair.producer.node.open(ticket)
    pair.producer.node.publish(ticket.ticket, wanted(*((i, i) for i in places)))
    pair.producer.node.finish(ticket.ticket, b"")
    result = await pair.consumer.node.fetch(ticket, wanted(*((i, i) for i in places)))
    assert all(pair.consumer.holds(i, seed=i) for i in places)
    assert await pair.producer.node.released(ticket.ticket) == "received"
    return result.transport
