"""Parts of prompts on one prefill instance, whose other parts another instance computes: in whatever order things
happen, nothing is computed from blocks that are not there, nothing that is handed on changes or goes, and nothing stays
behind."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from contracts.identity import BlockName, RequestId, TicketId
from contracts.messages import Cancel, Front, Prefill, Ticket
from kvtransfer import Translation
from kvtransfer.errors import PeerLost, TransferCancelled
from services.instance.engine_thread import Turn
from services.instance.serving import Serving
from services.prefill.following import Fronts
from services.prefill.handler import PrefillHandler
from tests.unit.engine.work import BLOCK_TOKENS, make_work
from tests.unit.instance.fakes import (
    IDENTITY,
    ROUTER,
    STATS,
    FakeEvents,
    FakeRouterPort,
    FakeTransfer,
    Fetched,
    InlineCalls,
    NoPulls,
    run,
    settle,
    ticket,
)
from tests.unit.instance.pure_engine import PureEngine

T = TypeVar("T")


@dataclass
class Fetching:
    wanted: list[tuple[BlockName, int]]
    on_blocks: Callable[[list[BlockName]], None]
    on_parts: Callable[[int, int], None]
    result: "asyncio.Future[Fetched]"
    num_arrived: int = 0
    reached: int = 0


@dataclass
class Handing:
    """A ticket that this instance serves."""

    released: "asyncio.Future[str]"
    blocks: dict[BlockName, int] = field(default_factory=dict)
    is_finished: bool = False


class Transfers(FakeTransfer):
    """Both ends of all tickets. Arrived blocks hold their content in `engine`."""

    def __init__(self, engine: PureEngine) -> None:
        super().__init__()
        self.engine = engine
        self.fetches: dict[TicketId, Fetching] = {}
        self.handed: dict[TicketId, Handing] = {}

    def open(self, ticket: Ticket) -> None:
        self.handed[ticket.ticket] = Handing(asyncio.get_running_loop().create_future())

    def publish(self, ticket_id: TicketId, blocks: Sequence[tuple[BlockName, int]]) -> None:
        handing = self.handed[ticket_id]
        if not handing.released.done():
            handing.blocks.update(blocks)

    def finish(self, ticket_id: TicketId, payload: bytes) -> None:
        self.handed[ticket_id].is_finished = True

    async def released(self, ticket_id: TicketId) -> str:
        return await asyncio.shield(self.handed[ticket_id].released)

    async def fetch(
        self,
        ticket: Ticket,
        wanted: Sequence[tuple[BlockName, int]],
        *,
        on_blocks: Callable[[list[BlockName]], None] | None = None,
        on_parts: Callable[[int, int], None] | None = None,
        on_end: Callable[[Fetched], None] | None = None,
        translation: Translation | None = None,
        partial: bool = False,
    ) -> Fetched:
        assert on_blocks is not None and on_parts is not None
        result: asyncio.Future[Fetched] = asyncio.get_running_loop().create_future()
        self.fetches[ticket.ticket] = Fetching(list(wanted), on_blocks, on_parts, result)
        try:
            return await result
        finally:
            del self.fetches[ticket.ticket]

    def arrive(self, fetching: Fetching, count: int, groups: int) -> None:
        """So many more blocks, of which one may come out of turn; then the first group of the rest, or all."""
        fresh = fetching.wanted[fetching.num_arrived :][:count]
        fetching.num_arrived += len(fresh)
        if fresh:
            self.engine.content.update((block, name) for name, block in fresh)
            fetching.on_blocks([name for name, _ in reversed(fresh)])
        reached = 2 if fetching.num_arrived == len(fetching.wanted) else min(groups, 1)
        if reached > fetching.reached:
            fetching.reached = reached
            fetching.on_parts(reached, 2)

    def check(self) -> None:
        for handing in self.handed.values():
            if not handing.released.done():
                held = {name: self.engine.content.get(block) for name, block in handing.blocks.items()}
                assert all(name == content for name, content in held.items()), "what is handed on is not there"


class Instance:
    """Computes every second part of each prompt."""

    def __init__(self, num_blocks: int, batched: int) -> None:
        self.engine = PureEngine(num_blocks, batched=batched)
        self.transfers = Transfers(self.engine)
        calls, transfers = InlineCalls(self.engine), self.transfers
        fronts = Fronts(calls, transfers, layout=self.engine.layout, counter=transfers)
        self.role = PrefillHandler(calls, transfers, NoPulls(), fronts, counter=transfers, clock=lambda: 1.0)
        self.serving = Serving(
            IDENTITY,
            role=self.role,
            engine=calls,
            stats=STATS,
            router=FakeRouterPort(),
            events=FakeEvents(),
            links=transfers,
        )

    def send(self, name: str, tokens: list[int], *, front: str | None, num_blocks: int, after: str) -> None:
        """Tickets have the names of their sources' parts."""
        follows: Front | None = None
        if front is not None:
            follows = Front(ticket=ticket_of(front), num_blocks=num_blocks, after=RequestId(after))
        work = make_work(name, tokens, max_tokens=1)
        self.serving.on_message(ROUTER, Prefill(work, ticket_of(name), None, follows))

    def step(self) -> None:
        self.serving.on_turn(Turn(self.engine.step(), 1.0))

    def check(self) -> None:
        self.engine.check_invariants()
        self.serving.table.check_invariants()
        self.transfers.check()


def ticket_of(name: str) -> Ticket:
    return msgspec.structs.replace(ticket(), ticket=TicketId(name))


@st.composite
def prompts(draw: st.DrawFn) -> list[tuple[list[int], bool]]:
    """Blocks by part, and whether this instance computes the first."""
    made = st.tuples(st.lists(st.integers(1, 3), min_size=2, max_size=7), st.booleans())
    return draw(st.lists(made, min_size=1, max_size=2))


@given(prompts(), st.integers(22, 60), st.sampled_from([8, 32]), st.data())
def test_in_any_order(made: list[tuple[list[int], bool]], num_blocks: int, batched: int, data: st.DataObject) -> None:
    run(live(made, num_blocks, batched, data))


class Life:
    """What happens to one instance, as `data` draws it."""

    def __init__(self, instance: Instance, made: list[tuple[list[int], bool]], data: st.DataObject) -> None:
        self.instance = instance
        self.made = made
        self.data = data
        self.unsent = [[part for part in range(len(blocks)) if part % 2 != first] for blocks, first in made]
        self.are_different = data.draw(st.booleans())
        """Or each has what the other computes."""
        self.sent: list[str] = []
        self.given_up: set[str] = set()

    def act(self) -> None:
        acts = [self.step, self.step]
        if any(self.unsent):
            acts += [self.send, self.send]
        if any(not fetching.result.done() for fetching in self.instance.transfers.fetches.values()):
            acts += [self.arrive, self.arrive, self.arrive, self.fail]
        if self.sent:
            acts += [self.release, self.cancel]
        self.data.draw(st.sampled_from(acts))()

    def step(self) -> None:
        self.instance.step()

    def send(self) -> None:
        prompt = self.draw([number for number, parts in enumerate(self.unsent) if parts])
        part, blocks = self.unsent[prompt].pop(0), self.made[prompt][0]
        tokens = [1 + prompt * self.are_different] * (
            sum(blocks[: part + 1]) * BLOCK_TOKENS + 2 * (part == len(blocks) - 1)
        )
        name, front = f"{prompt}.{part}", f"{prompt}.{part - 1}" if part else None
        self.instance.send(name, tokens, front=front, num_blocks=sum(blocks[:part]), after=f"{prompt}.{part - 2}")
        self.sent.append(name)

    def arrive(self) -> None:
        count, groups = self.data.draw(st.integers(0, 3)), self.data.draw(st.integers(0, 1))
        self.instance.transfers.arrive(self.fetching(), count, groups)

    def fail(self) -> None:
        self.fetching().result.set_exception(PeerLost("gone"))

    def cancel(self) -> None:
        name = self.draw(self.sent)
        self.given_up.add(name)
        self.instance.serving.on_message(ROUTER, Cancel(RequestId(name)))

    def release(self) -> None:
        name = self.draw(self.sent)
        handing = self.instance.transfers.handed.get(TicketId(name))
        if handing is not None and not handing.released.done():
            handing.released.set_result("received" if handing.is_finished else "lost")
            self.given_up |= set() if handing.is_finished else {name}

    def fetching(self) -> Fetching:
        fetches = self.instance.transfers.fetches
        return fetches[self.draw(sorted(one for one, fetching in fetches.items() if not fetching.result.done()))]

    def draw(self, values: Sequence[T]) -> T:
        return self.data.draw(st.sampled_from(values))


async def live(made: list[tuple[list[int], bool]], num_blocks: int, batched: int, data: st.DataObject) -> None:
    life = Life(Instance(num_blocks, batched), made, data)
    for _ in range(data.draw(st.integers(5, 40))):
        life.act()
        await settle()
        life.instance.check()
    await end(life.instance, life.given_up, life.sent)


async def end(instance: Instance, ended: set[str], sent: list[str]) -> None:
    """Once every fetch has ended and every computed part is fetched, all is read and nothing is left."""
    for _ in range(400):
        for fetching in list(instance.transfers.fetches.values()):
            if not fetching.result.done():
                fetching.result.set_exception(TransferCancelled("over"))
        instance.step()
        await settle()
        instance.check()
        for name, handing in instance.transfers.handed.items():
            if not handing.released.done() and (handing.is_finished or name in ended):
                handing.released.set_result("received" if handing.is_finished else "cancelled")
        await settle()
        if not len(instance.serving.table):
            break
    assert not len(instance.serving.table), "a part is never read"
    assert {name for name in sent if not instance.transfers.handed[TicketId(name)].is_finished} <= ended
    assert not instance.engine.roster.requests
    assert instance.engine.roster.pool.num_free == instance.engine.roster.pool.num_total
    assert not instance.engine.gates.gates
    assert not instance.role.leads
