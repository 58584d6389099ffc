"""Two instances of two ranks each: every rank sends its part of the blocks to the same rank of the other instance.

The memory of each rank is a tensor that the host must not touch, and a mirror in host memory holds whole blocks.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import msgspec
import pytest

from baton_serve.contracts.identity import BlockHash, TicketId
from baton_serve.contracts.messages import Ticket
from baton_serve.kvtransfer import (
    LocalRank,
    RankedTransferNode,
    ReleaseReason,
    SourceFailed,
    TransferCancelled,
    TransferTimeout,
    part_layout,
)
from baton_serve.kvtransfer.ranks import ranked_node as ranked
from baton_serve.kvtransfer.ranks.rank_decisions import RankRoutes
from tests.contract.test_transports import only, run
from tests.contract.transports_pair import LAYOUT, NUM_BLOCKS, SETTINGS, Node, TensorMemory, content, name, running

RANKS = 2
PART_BYTES = LAYOUT.block_bytes // RANKS
BLOCKS = list(range(1, 7))

pytest.importorskip("torch", reason="memory of devices is a tensor")


def bounded(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test on an event loop, for a limited time."""

    @wraps(test)
    def in_loop(*arguments: Any, **settings: Any) -> None:
        run(test(*arguments, **settings))

    return in_loop


@dataclass
class Instance:
    """One instance: its node, the memory of each rank, and the mirror with whole blocks."""

    node: RankedTransferNode
    whole: Node
    parts: list[Node]
    marked: list[list[int]] = field(default_factory=list)
    """The blocks that were marked before they were read or written."""
    mirrored: asyncio.Event = field(default_factory=asyncio.Event)

    def fill(self, block: int, seed: int) -> None:
        """Write content to the parts of a block, on all ranks."""
        whole = content(seed)
        for rank, part in enumerate(self.parts):
            part.memory.block(block)[:] = whole[rank * PART_BYTES : (rank + 1) * PART_BYTES]

    def block(self, block: int) -> bytes:
        return b"".join(bytes(part.memory.block(block)) for part in self.parts)

    async def mirror(self) -> None:
        """Copy all parts to the mirror, as the engine does."""
        await asyncio.sleep(0.01)
        for block in range(NUM_BLOCKS):
            self.whole.memory.block(block)[:] = self.block(block)
        self.mirrored.set()


@contextlib.asynccontextmanager
async def instance(
    stack: contextlib.AsyncExitStack, kind: str, transport: str, *, division: str = "halves", **settings: Any
) -> AsyncIterator[Instance]:
    own = msgspec.structs.replace(only(transport), **settings)
    generation = 11 if kind == "prefill" else 22
    whole = await stack.enter_async_context(
        running(f"{kind}-0", msgspec.structs.replace(SETTINGS, transports=("zeromq",)), generation=generation)
    )
    marked: list[list[int]] = []
    parts: list[Node] = []
    for rank in range(RANKS):
        parts.append(
            await stack.enter_async_context(
                running(
                    f"{kind}-0",
                    own,
                    generation=generation,
                    layout=part_layout(f"{division} {rank}", PART_BYTES),
                    memory=TensorMemory(NUM_BLOCKS, PART_BYTES),
                )
            )
        )
    ranks = [LocalRank(part.node, lambda blocks: marked.append(list(blocks))) for part in parts]
    made = Instance(RankedTransferNode(whole.node, ranks), whole, parts, marked)
    yield made
    await made.node.close()


@dataclass
class Two:
    source: Instance
    sink: Instance
    number: int = 0
    by_ranks: list[BlockHash] = field(default_factory=list)
    by_mirror: list[BlockHash] = field(default_factory=list)
    first: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a block has arrived on all ranks."""
    ended: list[bytes] = field(default_factory=list)

    def ticket(self, timeout_s: float = 5.0) -> Ticket:
        self.number += 1
        return Ticket(
            ticket=TicketId(f"ticket-{self.number}"),
            source=self.source.whole.instance,
            source_generation=self.source.whole.generation,
            source_address=self.source.node.address,
            sink=self.sink.whole.instance,
            sink_generation=self.sink.whole.generation,
            timeout_s=timeout_s,
            source_ranks=self.source.node.rank_addresses,
        )

    def fetch(self, ticket: Ticket, blocks: list[int] = BLOCKS, **options: Any) -> "asyncio.Task[Any]":
        wanted = [(name(block), block + 20) for block in blocks]
        settings: dict[str, Any] = {
            "on_blocks": self.by_mirror.extend,
            "on_rank_blocks": self.arrived_by_ranks,
            "on_end": lambda result: self.ended.append(result.payload),
        }
        return asyncio.create_task(self.sink.node.fetch(ticket, wanted, **settings | options))

    def arrived_by_ranks(self, names: list[BlockHash]) -> None:
        self.by_ranks += names
        self.first.set()

    def publish(self, ticket: Ticket, blocks: list[int] = BLOCKS) -> None:
        for block in blocks:
            self.source.fill(block, seed=block)
        self.source.node.publish(ticket.ticket, [(name(block), block) for block in blocks])

    def arrived(self, block: int) -> bytes:
        """Return the bytes of a received block, from where it has arrived."""
        place = block + 20
        return self.sink.block(place) if name(block) in self.by_ranks else bytes(self.sink.whole.memory.block(place))

    def is_equal(self, blocks: list[int] = BLOCKS) -> bool:
        return all(self.arrived(block) == content(block) for block in blocks)

    async def becomes_clean(self) -> None:
        nodes = [node.node for one in (self.source, self.sink) for node in (one.whole, *one.parts)]
        for _ in range(600):
            if not sum(node.num_sessions() for node in nodes):
                break
            await asyncio.sleep(0.005)
        else:
            raise AssertionError("a session is left")
        for node in nodes:
            node.check_invariants()


@contextlib.asynccontextmanager
async def two(
    transport: str = "usm",
    divisions: tuple[str, str] = ("halves", "halves"),
    *,
    is_reached: bool = True,
    **settings: Any,
) -> AsyncIterator[Two]:
    async with (
        contextlib.AsyncExitStack() as stack,
        instance(stack, "prefill", transport, division=divisions[0], **settings) as source,
        instance(stack, "decode", transport, division=divisions[1], **settings) as sink,
    ):
        both = Two(source, sink)
        assert await sink.node.connect_ranks(both.ticket()) == is_reached
        yield both
        await both.becomes_clean()


@pytest.mark.parametrize("transport", ["usm", "zeromq", "oneccl"])
@bounded
async def test_parts_arrive_byte_for_byte_and_the_mirror_stays_empty(transport: str) -> None:
    async with two(transport) as both:
        ticket = both.ticket(20.0)
        fetch = both.fetch(ticket)
        assert both.source.node.open_handoff(ticket, both.source.mirror)
        both.publish(ticket, BLOCKS[:2])
        await asyncio.sleep(0.05)
        both.publish(ticket, BLOCKS[2:])
        both.source.node.finish(ticket.ticket, b"tokens")
        result = await fetch
        assert (result.payload, result.transport, result.num_blocks) == (b"tokens", transport, len(BLOCKS))
        assert result.num_bytes == len(BLOCKS) * LAYOUT.block_bytes
        assert both.ended == [b"tokens"]
        assert sorted(both.by_ranks) == [name(block) for block in BLOCKS] and not both.by_mirror
        assert both.is_equal()
        assert await both.source.node.released(ticket.ticket) == "received"
        assert not both.source.mirrored.is_set()
        assert not any(any(both.sink.whole.memory.block(block + 20)) for block in BLOCKS)
        # Transports wait for the engine's work on all blocks, on each rank at both ends.
        assert both.source.marked == RANKS * [BLOCKS[:2]] + RANKS * [BLOCKS[2:]]
        assert both.sink.marked == RANKS * [[block + 20 for block in BLOCKS]]


@bounded
async def test_a_ticket_that_names_no_ranks_is_served_whole() -> None:
    """Peers of a version before ranks sent anything themselves make such tickets."""
    async with two() as both:
        ticket = msgspec.structs.replace(both.ticket(), source_ranks=[])
        fetch = both.fetch(ticket)
        assert not both.source.node.open_handoff(ticket, both.source.mirror)
        for block in BLOCKS:
            both.source.whole.memory.block(block)[:] = content(block)
        both.publish(ticket)
        both.source.node.finish(ticket.ticket, b"")
        await fetch
        assert sorted(both.by_mirror) == [name(block) for block in BLOCKS] and both.is_equal()
        assert await both.source.node.released(ticket.ticket) == "received"


@bounded
async def test_a_consumer_that_fetches_whole_blocks_gets_them_from_the_mirror() -> None:
    """It may know nothing of ranks, although the ticket names some."""
    async with two() as both:
        ticket = both.ticket()
        both.source.node.open_handoff(ticket, both.source.mirror)
        both.publish(ticket, BLOCKS[:3])
        fetch = both.fetch(ticket, on_rank_blocks=None)
        await both.source.mirrored.wait()
        for block in BLOCKS[3:]:
            both.source.whole.memory.block(block)[:] = content(block)
        both.publish(ticket, BLOCKS[3:])
        both.source.node.finish(ticket.ticket, b"tokens")
        assert (await fetch).payload == b"tokens"
        assert both.is_equal() and not both.by_ranks
        assert await both.source.node.released(ticket.ticket) == "received"


def corrupt(both: Two) -> None:
    """Let no checksum of the second rank be right."""
    attachment: Any = next(iter(both.sink.parts[1].node._consuming.connections))._attachment
    attachment.receiver.receive_all = lambda placements: [False for _ in placements]


def refusing(both: Two) -> None:
    """Let the second rank of the source open no ticket."""

    def refuse(ticket: Ticket) -> "asyncio.Future[ReleaseReason]":
        refused: asyncio.Future[ReleaseReason] = asyncio.get_running_loop().create_future()
        refused.set_result("failed")
        return refused

    rank: Any = both.source.node._ranks[1]
    rank.open = refuse


@pytest.mark.parametrize("broken", [corrupt, refusing])
@pytest.mark.parametrize("is_computed", [True, False])
@bounded
async def test_one_failing_rank_demotes_the_ticket_to_the_mirror(
    broken: Callable[[Two], None], is_computed: bool
) -> None:
    async with two(answer_timeout_s=0.5) as both:
        broken(both)
        ticket = both.ticket(10.0)
        assert both.source.node.open_handoff(ticket, both.source.mirror)
        both.publish(ticket, BLOCKS if is_computed else BLOCKS[:3])
        if is_computed:
            both.source.node.finish(ticket.ticket, b"tokens")
        fetch = both.fetch(ticket)
        await both.source.mirrored.wait()
        if not is_computed:
            await asyncio.sleep(0.02)
            for block in BLOCKS[3:]:
                both.source.whole.memory.block(block)[:] = content(block)
            both.publish(ticket, BLOCKS[3:])
            both.source.node.finish(ticket.ticket, b"tokens")
        assert (await fetch).payload == b"tokens"
        assert both.is_equal()
        assert set(both.by_ranks).isdisjoint(both.by_mirror)
        assert set(both.by_ranks) | set(both.by_mirror) == {name(block) for block in BLOCKS}
        assert await both.source.node.released(ticket.ticket) == "received"
        await goes_through_the_mirror(both)


async def goes_through_the_mirror(both: Two) -> None:
    """Hand blocks over, and assert that the consumer does not try its ranks."""
    both.source.mirrored.clear()
    ticket = both.ticket(10.0)
    assert both.source.node.open_handoff(ticket, both.source.mirror)
    both.publish(ticket)
    both.source.node.finish(ticket.ticket, b"more")
    before = list(both.by_ranks)
    assert (await both.fetch(ticket)).payload == b"more"
    assert both.source.mirrored.is_set() and both.by_ranks == before and both.is_equal()
    assert await both.source.node.released(ticket.ticket) == "received"


@bounded
async def test_instances_that_divide_blocks_differently_go_on_through_the_mirror() -> None:
    async with two(divisions=("halves", "thirds"), is_reached=False) as both:
        await goes_through_the_mirror(both)
        assert not both.sink.node.links()[0].reason.startswith("by")


@bounded
async def test_no_fetch_waits_for_ranks_that_are_not_reached() -> None:
    async with two(connect_timeout_s=0.3) as both:
        nowhere = ["tcp://127.0.0.1:9", "tcp://127.0.0.1:9"]
        both.sink.node._routes = RankRoutes(30.0)
        for _ in range(2):
            ticket = msgspec.structs.replace(both.ticket(), source_ranks=nowhere)
            assert both.source.node.open_handoff(ticket, both.source.mirror)
            both.publish(ticket)
            both.source.node.finish(ticket.ticket, b"")
            await both.fetch(ticket)
            assert both.is_equal() and not both.by_ranks
            assert await both.source.node.released(ticket.ticket) == "received"


@bounded
async def test_the_first_fetch_is_of_whole_blocks_and_later_ones_are_of_parts() -> None:
    async with two() as both:
        both.sink.node._routes = RankRoutes(30.0)
        await goes_through_the_mirror(both)
        async with asyncio.timeout(5.0):
            while not both.sink.node._routes.open_sources():  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0.005)
        ticket = both.ticket()
        both.source.node.open_handoff(ticket, both.source.mirror)
        both.publish(ticket)
        both.source.node.finish(ticket.ticket, b"")
        await both.fetch(ticket)
        assert len(both.by_ranks) == len(BLOCKS) and both.is_equal()
        (link,) = both.sink.node.links()
        assert link.transport == "usm" and link.reason.startswith("by 2 ranks")


@bounded
async def test_a_cancelled_fetch_ends_on_all_ranks_and_frees_the_blocks_of_the_source() -> None:
    async with two() as both:
        ticket = both.ticket(20.0)
        both.source.node.open_handoff(ticket, both.source.mirror)
        fetch = both.fetch(ticket)
        both.publish(ticket, BLOCKS[:1])
        await both.first.wait()
        fetch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetch
        async with asyncio.timeout(3.0):
            assert await both.source.node.released(ticket.ticket) == "cancelled"
        assert not both.source.mirrored.is_set()


@bounded
async def test_a_ticket_that_the_consumer_cancels_by_name_ends_too() -> None:
    async with two() as both:
        ticket = both.ticket(20.0)
        both.source.node.open_handoff(ticket, both.source.mirror)
        fetch = both.fetch(ticket)
        both.publish(ticket, BLOCKS[:1])
        await both.first.wait()
        both.sink.node.cancel(ticket.ticket)
        with pytest.raises(TransferCancelled):
            await fetch
        async with asyncio.timeout(3.0):
            assert await both.source.node.released(ticket.ticket) == "cancelled"
        late = both.ticket()
        both.sink.node.cancel(late.ticket)
        with pytest.raises(TransferCancelled):
            await both.fetch(late)


@bounded
async def test_a_failure_that_the_source_reports_reaches_the_consumer_with_its_reason() -> None:
    async with two() as both:
        ticket = both.ticket(20.0)
        both.source.node.open_handoff(ticket, both.source.mirror)
        fetch = both.fetch(ticket)
        both.publish(ticket, BLOCKS[:1])
        await both.first.wait()
        both.source.node.fail(ticket.ticket, "the prompt is too long")
        with pytest.raises(SourceFailed, match="the prompt is too long"):
            await fetch
        async with asyncio.timeout(3.0):
            assert await both.source.node.released(ticket.ticket) == "failed"
        assert not both.source.mirrored.is_set()
        # A failed request says nothing about the ranks.
        second = both.ticket()
        both.source.node.open_handoff(second, both.source.mirror)
        both.publish(second)
        both.source.node.finish(second.ticket, b"")
        await both.fetch(second)
        assert len(both.by_ranks) == 1 + len(BLOCKS)


@bounded
async def test_the_time_of_a_ticket_bounds_both_ends() -> None:
    async with two() as both:
        ticket = both.ticket(0.4)
        both.source.node.open_handoff(ticket, both.source.mirror)
        fetch = both.fetch(ticket)
        both.publish(ticket, BLOCKS[:1])
        with pytest.raises(TransferTimeout):
            await fetch
        async with asyncio.timeout(3.0):
            assert await both.source.node.released(ticket.ticket) in ("expired", "failed")


@bounded
async def test_a_consumer_that_reports_a_failure_and_vanishes_is_not_waited_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ranked, "FETCH_WAIT_S", 0.2)
    async with two() as both:
        ticket = both.ticket(20.0)
        both.source.node.open_handoff(ticket, both.source.mirror)
        both.publish(ticket)
        for part in both.source.parts:
            part.node.fail(ticket.ticket, "as if the consumer had released it")
        async with asyncio.timeout(3.0):
            assert await both.source.node.released(ticket.ticket) == "failed"


@bounded
async def test_a_mirror_that_fails_fails_the_ticket() -> None:
    async def broken() -> None:
        raise RuntimeError("no host memory")

    async with two(divisions=("halves", "thirds"), is_reached=False) as both:
        ticket = both.ticket()
        both.source.node.open_handoff(ticket, broken)
        both.publish(ticket)
        with pytest.raises(SourceFailed, match="no host memory"):
            await both.fetch(ticket)
        assert await both.source.node.released(ticket.ticket) == "failed"


@bounded
async def test_closing_ends_transfers_at_both_ends() -> None:
    async with two() as both:
        ticket = both.ticket(20.0)
        both.source.node.open_handoff(ticket, both.source.mirror)
        fetch = both.fetch(ticket)
        both.publish(ticket, BLOCKS[:1])
        await both.first.wait()
        async with asyncio.timeout(8.0):
            await both.source.node.close()
            assert await both.source.node.released(ticket.ticket) in ("closed", "cancelled", "failed")
            with pytest.raises(Exception, match=r"."):
                await fetch


def test_the_nodes_of_ranks_take_only_equal_parts() -> None:
    assert part_layout("a", 4096).block_bytes == 4096
    assert part_layout("a", 4096) != part_layout("b", 4096)
