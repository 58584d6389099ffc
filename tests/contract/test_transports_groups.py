"""What a fetch tells of groups of layers (`on_parts`): they are here, of all wanted blocks, and stay as they are."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from contracts.messages import Ticket
from kvtransfer import Corrupt, LocalTransferError, PeerLost, RemoteTransferError, SourceFailed
from kvtransfer.fetching import FetchResult
from kvtransfer.session.steps import Placement
from tests.contract.test_transport_faults import behind_proxy, through
from tests.contract.test_transports import only, run, wanted
from tests.contract.test_transports_parts import PARTS, SIZE, TRANSPORTS, compute, has_part, memories, one, until
from tests.contract.transports_pair import LAYOUT, Meddler, Pair, pair_of

POISON = bytes([0xEE]) * LAYOUT.block_bytes

ENDS = [*((t, "host") for t in TRANSPORTS), *((t, "device") for t in TRANSPORTS[1:])]


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Prompt:
    """Blocks 0 to `count` - 1 of a producer; the consumer wants those from `first` on, block i in place 40 - i."""

    def __init__(self, pair: Pair, *, count: int = 6, first: int = 0, ticket: Ticket | None = None) -> None:
        self.pair, self.count, self.first = pair, count, first
        self.ticket = ticket or pair.ticket()
        self.told: list[tuple[int, int]] = []
        self.wrong: list[tuple[int, int]] = []
        """Told of and not here: (group, block)."""
        pair.producer.node.open(self.ticket)
        for block in range(first, count):
            pair.consumer.memory.block(40 - block)[:] = POISON

    @property
    def reached(self) -> int:
        return self.told[-1][0] if self.told else 0

    def on_parts(self, reached: int, parts: int) -> None:
        self.told.append((reached, parts))
        self.look()

    def look(self) -> None:
        """Is all that was told of here?"""
        for part in range(self.reached if self.told and self.told[-1][1] == PARTS else 0):
            for block in range(self.first, self.count):
                if not has_part(self.pair.consumer, 40 - block, block, part):
                    self.wrong.append((part, block))

    def fetch(self, **options: Any) -> "asyncio.Task[FetchResult]":
        places = wanted(*((block, 40 - block) for block in range(self.first, self.count)))
        options = {"on_parts": self.on_parts} | options
        return asyncio.create_task(self.pair.consumer.node.fetch(self.ticket, places, **options))

    def names(self, first: int = 0) -> list[Any]:
        return wanted(*((block, block) for block in range(first, self.count)))

    def publish_whole(self, blocks: range) -> None:
        for part in range(PARTS):
            compute(self.pair.producer, blocks, part)
        self.pair.producer.node.publish(self.ticket.ticket, wanted(*((block, block) for block in blocks)))

    def publish_group(self, parts: range, first: int = 0) -> None:
        for part in parts:
            compute(self.pair.producer, range(first, self.count), part)
        self.pair.producer.node.publish_parts(self.ticket.ticket, self.names(first), parts)

    def finish(self, first: int = 0) -> None:
        self.pair.producer.node.publish(self.ticket.ticket, self.names(first))
        self.pair.producer.node.finish(self.ticket.ticket, b"")

    def poison_source(self) -> None:
        for block in range(self.count):
            self.pair.producer.memory.block(block)[:] = POISON

    async def until_told(self, reached: int) -> None:
        await until(lambda: self.reached >= reached)


ONE_BY_ONE = [(part + 1, PARTS) for part in range(PARTS)]


@pytest.mark.parametrize("first_wanted", [0, 3, 5])
@pytest.mark.parametrize(("transport", "kind"), ENDS)
def test_each_group_is_told_of_when_all_wanted_blocks_have_it(transport: str, kind: str, first_wanted: int) -> None:
    """A first chunk of whole blocks, of which some may be here already, then a last one in parts."""

    async def test() -> None:
        async with pair_of(only(transport, parts=PARTS), memories=memories(kind)) as pair:
            prompt, ended = Prompt(pair, first=first_wanted), list[int]()
            fetch = prompt.fetch(on_end=lambda _: ended.append(prompt.reached))
            await pair.both_know()
            prompt.publish_whole(range(2))
            for part in range(PARTS):
                await asyncio.sleep(0.02)
                assert prompt.told == ONE_BY_ONE[:part]
                prompt.publish_group(one(part), first=2)
                await prompt.until_told(part + 1)
            prompt.finish(first=2)
            await fetch
            assert prompt.told == ONE_BY_ONE and ended == [PARTS]
            prompt.look()
            assert not prompt.wrong

    run(test())


@pytest.mark.parametrize(("transport", "kind"), ENDS)
def test_groups_that_leave_together_or_at_once_are_told_of_in_order(transport: str, kind: str) -> None:
    async def test() -> None:
        async with pair_of(only(transport, parts=PARTS), memories=memories(kind)) as pair:
            prompt = Prompt(pair, count=24)
            fetch = prompt.fetch()
            await pair.both_know()
            prompt.publish_group(range(3))
            await prompt.until_told(3)
            prompt.publish_group(range(3, PARTS))
            prompt.finish()
            await fetch
            assert prompt.told == sorted(set(prompt.told)) and prompt.told[-1] == (PARTS, PARTS)
            hasty = Prompt(pair, count=24)
            fetch = hasty.fetch()
            for part in range(PARTS):
                hasty.publish_group(one(part))
            hasty.finish()
            await fetch
            assert hasty.told == sorted(set(hasty.told)) and hasty.told[-1] == (PARTS, PARTS)
            assert not prompt.wrong and not hasty.wrong

    run(test())


@pytest.mark.parametrize("parts", [1, PARTS])
def test_blocks_that_come_whole_are_told_of_once(transport: str, parts: int) -> None:
    async def test() -> None:
        async with pair_of(only(transport, parts=parts)) as pair:
            for prompt in (Prompt(pair), Prompt(pair, first=6)):  # of the second nothing is wanted
                ended = list[int]()
                fetch = prompt.fetch(on_end=lambda _, prompt=prompt, ended=ended: ended.append(prompt.reached))
                await pair.both_know()
                prompt.publish_whole(range(3))
                await asyncio.sleep(0.02)
                assert not prompt.told
                prompt.publish_whole(range(3, 6))
                pair.producer.node.finish(prompt.ticket.ticket, b"")
                await fetch
                assert prompt.told == [(parts, parts)] and ended == [parts] and not prompt.wrong
                assert await pair.producer.node.released(prompt.ticket.ticket) == "received"

    run(test())


@contextlib.asynccontextmanager
async def in_the_middle(transport: str, told: int) -> AsyncIterator[tuple[Prompt, Any, Any]]:
    """A fetch behind a proxy that was told of so many groups, and has the next one of some blocks."""
    async with behind_proxy(only(transport, parts=PARTS, lease_s=1.0)) as (pair, proxy):
        prompt = Prompt(pair, ticket=through(proxy, pair))
        fetch = prompt.fetch()
        await pair.both_know()
        for part in range(told):
            prompt.publish_group(one(part))
            await prompt.until_told(part + 1)
        prompt.publish_group(one(told), first=3)
        await until(lambda: all(has_part(pair.consumer, 40 - block, block, told) for block in range(3, 6)))
        yield prompt, fetch, proxy


@pytest.mark.parametrize("told", [1, 3])
def test_a_link_lost_after_a_group_was_told_of_ends_the_fetch(transport: str, told: int) -> None:
    """The producer still has the blocks, and other bytes in them: nothing of these comes to where the caller reads."""

    async def test() -> None:
        async with in_the_middle(transport, told) as (prompt, fetch, proxy):
            prompt.poison_source()
            proxy.reset()
            with pytest.raises(PeerLost, match="cannot be fetched again"):
                await fetch
            prompt.finish()
            assert await prompt.pair.producer.node.released(prompt.ticket.ticket) == "lost"
            assert prompt.told == ONE_BY_ONE[:told] and not prompt.pair.consumer.tally.retries
            prompt.look()
            assert not prompt.wrong
            again = Prompt(prompt.pair)
            fetch = again.fetch()
            again.publish_whole(range(6))
            again.finish()
            await fetch
            assert again.told == [(PARTS, PARTS)] and not again.wrong

    run(test())


def test_a_link_lost_before_a_group_was_told_of_is_made_again(transport: str) -> None:
    async def test() -> None:
        async with in_the_middle(transport, 0) as (prompt, fetch, proxy):
            proxy.reset()
            for part in range(PARTS):
                await asyncio.sleep(0.02)
                prompt.publish_group(one(part))
            prompt.finish()
            await fetch
            assert prompt.told == sorted(set(prompt.told)) and prompt.told[-1] == (PARTS, PARTS) and not prompt.wrong
            assert len(prompt.pair.consumer.tally.retries) == 1

    run(test())


def test_a_link_lost_once_all_was_told_of_costs_no_byte(transport: str) -> None:
    """Only the payload is asked for again."""

    async def test() -> None:
        async with in_the_middle(transport, 1) as (prompt, fetch, proxy):
            prompt.publish_group(range(1, PARTS))
            await prompt.until_told(PARTS)
            prompt.poison_source()
            proxy.reset()
            prompt.finish()
            await fetch
            prompt.look()
            assert prompt.told[-1] == (PARTS, PARTS) and not prompt.wrong
            assert len(prompt.pair.consumer.tally.retries) == 1
            assert sum(prompt.pair.consumer.tally.bytes.values()) == 6 * LAYOUT.block_bytes

    run(test())


@pytest.mark.parametrize("end", ["fail", "cancel", "close"])
def test_what_was_told_of_outlives_a_fetch_that_ends_early(transport: str, end: str) -> None:
    async def test() -> None:
        async with pair_of(only(transport, parts=PARTS)) as pair:
            prompt = Prompt(pair)
            fetch, source = prompt.fetch(), pair.producer.node
            await pair.both_know()
            prompt.publish_group(range(2))
            await prompt.until_told(2)
            match end:
                case "fail":
                    source.fail(prompt.ticket.ticket, "out of memory")
                case "cancel":
                    source.cancel(prompt.ticket.ticket)
                case "close":
                    await source.close()
            prompt.poison_source()
            with pytest.raises(RemoteTransferError if end == "close" else SourceFailed):
                await fetch
            prompt.look()
            assert prompt.reached == 2 and not prompt.wrong

    run(test())


def watched(prompt_of: list[Prompt], rewritten: list[int]) -> Meddler:
    """Notes placements into what was told of."""
    meddler = Meddler()

    def look(placement: Placement) -> None:
        part = placement.index % PARTS
        if prompt_of and part < prompt_of[0].reached:
            rewritten.append(placement.index)

    meddler.before = look
    return meddler


async def tail(pair: Pair, prompts: list[Prompt]) -> Prompt:
    prompt = Prompt(pair)
    prompts[:] = [prompt]
    fetch = prompt.fetch()
    await pair.both_know()
    for part in range(PARTS):
        prompt.publish_group(one(part))
        await asyncio.sleep(0.02)
    prompt.finish()
    await fetch
    return prompt


def test_a_part_that_was_damaged_is_fetched_again_alone(transport: str) -> None:
    prompts, rewritten, damaged = list[Prompt](), list[int](), list[int]()
    meddler = watched(prompts, rewritten)

    def damage(transport: str, placement: Placement) -> object:
        if damaged or placement.index % PARTS != 2:
            return None
        damaged.append(placement.index)
        spoilt = prompts[0].pair.consumer.memory.block(placement.destination // PARTS)
        spoilt[2 * SIZE : 3 * SIZE] = POISON[:SIZE]
        return "damaged"

    meddler.after = damage  # type: ignore[assignment]

    async def test() -> None:
        async with pair_of(only(transport, parts=PARTS), meddler=meddler) as pair:
            prompt = await tail(pair, prompts)
            assert prompt.told == sorted(set(prompt.told)) and prompt.told[-1] == (PARTS, PARTS)
            assert len(damaged) == pair.consumer.tally.mismatches == 1
            assert not prompt.wrong and not rewritten

    run(test())


def test_a_transport_that_damages_after_a_group_was_told_of_ends_the_fetch_and_is_demoted(transport: str) -> None:
    prompts, rewritten = list[Prompt](), list[int]()
    meddler = watched(prompts, rewritten)
    meddler.after = lambda name, placement: "bad" if placement.index % PARTS == 2 and name == transport else None  # type: ignore[assignment]
    ladder = (transport, "usm" if transport == "zeromq" else "zeromq")

    async def test() -> None:
        settings = msgspec.structs.replace(only(transport, parts=PARTS, probe=False), transports=ladder)
        async with pair_of(settings, meddler=meddler) as pair:
            with pytest.raises(Corrupt, match="cannot be fetched again"):
                await tail(pair, prompts)
            assert prompts[0].reached == 2
            prompts[0].poison_source()
            await asyncio.sleep(0.02)
            prompts[0].look()
            assert not prompts[0].wrong and not rewritten
            pair.producer.node.cancel(prompts[0].ticket.ticket)
            assert (transport, "demoted") in pair.consumer.tally.changes
            assert (await tail(pair, prompts)).told[-1] == (PARTS, PARTS)
            assert [link.transport for link in pair.consumer.node.links()] == [ladder[1]]

    run(test())


@pytest.mark.parametrize("at", [1, PARTS])
def test_a_callback_that_fails_ends_its_fetch_alone(transport: str, at: int) -> None:
    calls: list[int] = []

    def broken(reached: int, parts: int) -> None:
        calls.append(reached)
        if reached == at:
            raise RuntimeError("bug of the caller")

    async def test() -> None:
        async with pair_of(only(transport, parts=PARTS)) as pair:
            prompt = Prompt(pair)
            fetch = prompt.fetch(on_parts=broken)
            await pair.both_know()
            for part in range(PARTS):
                prompt.publish_group(one(part))
                await asyncio.sleep(0.02)
            prompt.finish()
            with pytest.raises(LocalTransferError, match="on_parts"):
                await fetch
            assert calls[-1] == at
            assert await pair.producer.node.released(prompt.ticket.ticket) == "cancelled"

    run(test())
