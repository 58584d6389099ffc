"""Transports between memories that the host cannot address: tensors of the CPU stand in for those of a device."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from baton_serve.kvtransfer import Corrupt
from tests.contract.test_transports import handoff, only, run, wanted
from tests.contract.transports_pair import LAYOUT, NUM_BLOCKS, Blocks, TensorMemory, pair_of

TRANSPORTS = ("usm", "zeromq", "oneccl")


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def device() -> TensorMemory:
    return TensorMemory(NUM_BLOCKS, LAYOUT.block_bytes)


@pytest.mark.parametrize("checksum", ["full", "sampled", "off"])
def test_blocks_travel_from_device_to_device(transport: str, checksum: str) -> None:
    async def test() -> None:
        async with pair_of(only(transport, checksum=checksum), memories=(device(), device())) as pair:
            for first in (0, 5):
                assert await handoff(pair, 40, first) == transport
            assert pair.consumer.tally.mismatches == 0

    run(test())


@pytest.mark.parametrize("checksum", ["full", "sampled"])
def test_blocks_that_are_nowhere_neighbours(transport: str, checksum: str) -> None:
    async def test() -> None:
        settings = only(transport, checksum=checksum, device_batch_bytes=24 * LAYOUT.block_bytes)
        async with pair_of(settings, memories=(device(), device())) as pair:
            ticket, places = pair.ticket(), [(i, 7 * i % NUM_BLOCKS) for i in range(40)]
            for index, place in places:
                pair.producer.fill(place, seed=index)
            pair.producer.node.open(ticket)
            pair.producer.node.publish(ticket.ticket, wanted(*places))
            pair.producer.node.finish(ticket.ticket, b"")
            result = await pair.consumer.node.fetch(ticket, wanted(*((i, 11 * i % NUM_BLOCKS) for i, _ in places[3:])))
            assert result.num_blocks == 37 and pair.consumer.tally.mismatches == 0
            assert all(pair.consumer.holds(11 * i % NUM_BLOCKS, seed=i) for i, _ in places[3:])

    run(test())


@pytest.mark.parametrize("transport", ["usm", "zeromq"])
@pytest.mark.parametrize("memories", [(device(), None), (None, device())], ids=["to a host", "from a host"])
def test_the_two_ends_may_be_of_different_kinds(transport: str, memories: tuple[Blocks | None, Blocks | None]) -> None:
    async def test() -> None:
        async with pair_of(only(transport), memories=memories) as pair:
            assert await handoff(pair, 40) == transport

    run(test())


def test_a_device_and_a_host_share_no_collective_library() -> None:
    async def test() -> None:
        settings = only("oneccl")
        async with pair_of(settings, memories=(device(), None)) as pair:
            with pytest.raises(Exception, match="no common backend"):
                await pair.consumer.node.connect(pair.producer.node.address)

    run(test())


def test_a_ring_smaller_than_the_prompt_is_used_again_and_again() -> None:
    async def test() -> None:
        small = only("usm", ring_bytes=4 * LAYOUT.block_bytes, device_batch_bytes=2 * LAYOUT.block_bytes)
        async with pair_of(small, memories=(device(), device())) as pair:
            assert await asyncio.gather(*(handoff(pair, 16, 16 * i) for i in range(3))) == ["usm"] * 3

    run(test())


def test_blocks_that_nobody_wants_any_more_leave_the_ring() -> None:
    async def test() -> None:
        small = only("usm", ring_bytes=4 * LAYOUT.block_bytes, device_batch_bytes=2 * LAYOUT.block_bytes)
        async with pair_of(small, memories=(device(), device())) as pair:
            await pair.consumer.node.connect(pair.producer.node.address)
            for _ in range(4):
                ticket = pair.ticket()
                pair.producer.node.open(ticket)
                fetch = asyncio.create_task(pair.consumer.node.fetch(ticket, wanted((0, 0), (1, 1), (2, 2), (3, 3))))
                await asyncio.sleep(0.02)
                pair.producer.node.publish(ticket.ticket, wanted((0, 0), (1, 1), (2, 2), (3, 3)))
                pair.consumer.node.cancel(ticket.ticket)
                with pytest.raises(Exception, match="cancelled"):
                    await fetch
            assert await handoff(pair, 20) == "usm"

    run(test())


def test_a_message_takes_no_more_than_a_small_share_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four blocks of this one; over a library that must stage, a quarter of that."""
    from baton_serve.kvtransfer.transports.devicecopy import DeviceBlocks
    from baton_serve.kvtransfer.transports.oneccl import device_ends as ends
    from baton_serve.kvtransfer.transports.oneccl.device_pair import DevicePair

    monkeypatch.setattr(DeviceBlocks, "total_bytes", lambda self: 4 * LAYOUT.block_bytes * ends.DEVICE_SHARE)
    sizes: list[int] = []
    post = DevicePair.post

    def counted(self: DevicePair, parts: Sequence[Any], *, is_send: bool, stream: object) -> Any:
        sizes.append(parts[0].numel())
        return post(self, parts, is_send=is_send, stream=stream)

    async def test() -> None:
        async with pair_of(only("oneccl"), memories=(device(), device())) as pair:
            await pair.consumer.node.connect(pair.producer.node.address)
            monkeypatch.setattr(DevicePair, "post", counted)
            await handoff(pair, 6)
        assert sizes == [LAYOUT.block_bytes] * 12  # sent and received

    run(test())


def spoil(parts: Sequence[Any], what: str) -> None:
    """Spoil received parts: zero all bytes, as if the peer's memory cannot really be read, or flip a bit of a block or
    a checksum."""
    for part in parts if what == "all zero" else ():
        part.zero_()
    if what == "a bit of a block":
        parts[0][5] ^= 1
    if what == "a bit of a sum":
        parts[1][3] ^= 1


@pytest.mark.parametrize("checksum", ["full", "sampled"])
@pytest.mark.parametrize("what", ["all zero", "a bit of a block", "a bit of a sum"])
def test_damage_on_the_way_is_noticed_where_the_blocks_land(
    monkeypatch: pytest.MonkeyPatch, checksum: str, what: str
) -> None:
    from baton_serve.kvtransfer.transports.oneccl.device_pair import DevicePair, Wait

    post = DevicePair.post

    def damage(self: DevicePair, parts: Sequence[Any], *, is_send: bool, stream: object) -> Wait:
        wait = post(self, parts, is_send=is_send, stream=stream)
        if not is_send:
            wait()
            spoil(parts, what)
        return wait

    async def test() -> None:
        async with pair_of(only("oneccl", checksum=checksum), memories=(device(), device())) as pair:
            await pair.consumer.node.connect(pair.producer.node.address)
            monkeypatch.setattr(DevicePair, "post", damage)
            with pytest.raises(Corrupt):
                await handoff(pair, 3)

    run(test())
