"""Stand-ins at the ports of `services.instance`: an engine, a transfer node and a router that only remember."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from baton_serve.contracts.block_layout import KVLayout
from baton_serve.contracts.events import BlockEvent
from baton_serve.contracts.identity import BlockHash, Generation, InstanceId, RequestId, TicketId
from baton_serve.contracts.instance import LinkStatus
from baton_serve.contracts.messages import Batch, FinishReason, Pull, Ticket, ToRouter, Work
from baton_serve.contracts.sampling import SamplingSpec
from baton_serve.engine.core.outputs import BatchSize, EngineStats, NamedBlock, Reservation, SequenceOutput, StepResult
from baton_serve.engine.model.vision.image_types import NO_PIXELS, Pixels
from baton_serve.kvtransfer import Translation
from baton_serve.services.common.rpc.instance_link import RouterId
from baton_serve.services.instance.attempt_table import AttemptEntry
from baton_serve.services.instance.engine_thread import TimedStepResult
from baton_serve.services.instance.interfaces import EnginePort, Mode
from baton_serve.services.instance.request_server import Identity, RequestServer, RoleHandler

T = TypeVar("T")

LAYOUT = KVLayout(fingerprint="tiny", num_layers=2, num_kv_heads=1, block_tokens=4, head_dim=8, dtype="float32")
ROUTER = RouterId(b"router-a")
OTHER_ROUTER = RouterId(b"router-b")
IDENTITY = Identity(InstanceId("decode-0"), Generation(7))

STATS = EngineStats(
    free_blocks=10,
    total_blocks=16,
    cached_blocks=0,
    held_blocks=0,
    running=0,
    waiting=0,
    held=0,
    reserved=0,
    queued_tokens=0,
    prefill_tokens_per_s=1000.0,
    decode_step_s=0.01,
    preemptions=0,
    prompt_tokens=0,
    generated_tokens=0,
    prefix_query_tokens=0,
    prefix_hit_tokens=0,
    steps=0,
)


def work(
    request_id: str = "r",
    *,
    sequences: Sequence[int] = (0,),
    priority: int = 0,
    timeout_s: float = 60.0,
    grammar: str | None = None,
) -> Work:
    return Work(
        request_id=RequestId(request_id),
        token_ids=[1, 2, 3],
        num_prompt_tokens=3,
        sampling=SamplingSpec(seed=1, max_tokens=8, grammar=grammar),
        root=BlockHash(b"r" * 16),
        sequences=list(sequences),
        priority=priority,
        timeout_s=timeout_s,
    )


def ticket() -> Ticket:
    return Ticket(
        ticket=TicketId("t"),
        source=InstanceId("prefill-0"),
        source_generation=Generation(3),
        source_address="tcp://prefill",
        sink=InstanceId("decode-0"),
        sink_generation=Generation(7),
        timeout_s=30.0,
    )


def output(
    request_id: RequestId, token: int, *, sequence: int = 0, position: int = 0, finish: FinishReason | None = None
) -> SequenceOutput:
    return SequenceOutput(request_id, sequence, position, [token], finish_reason=finish)


def name(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "big"))


class FakeEngine:
    """Remembers what was asked of it, newest last, as `(verb, request id, …)`."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.free_blocks = 10
        self.blocks_per_request = 2
        self.error: Exception | None = None
        self.results: list[StepResult] = []
        self.num_steps = 0
        self.num_running = STATS.running
        self.is_closed = False
        self.num_pinned = 2
        self.num_imported = 2
        self.compiled: Future[object] = Future()

    layout = KVLayout(fingerprint="f", num_layers=1, num_kv_heads=1, block_tokens=16, head_dim=8, dtype="float32")
    max_model_len = 128
    last_batch = BatchSize(1, 3)

    def compile_grammar(self, grammar: str) -> "Future[object]":
        self._ask("compile_grammar", grammar)
        return self.compiled

    def add(
        self,
        work: Work,
        *,
        mode: Mode = "generate",
        pixels: Pixels = NO_PIXELS,
        sends_parts: bool = False,
        awaited: Collection[bytes] = (),
    ) -> None:
        self._ask("add", work.request_id, mode, *(["in parts"] if sends_parts else []))

    def supply_images(self, request_id: RequestId, pixels: Pixels) -> None:
        self._ask("supply_images", request_id, list(pixels))

    def mirror(self, request_id: RequestId) -> None:
        self._ask("mirror", request_id)

    def reserve(self, work: Work) -> Reservation | None:
        if self.free_blocks < self.blocks_per_request:
            return None
        self._ask("reserve", work.request_id)
        self.free_blocks -= self.blocks_per_request
        names = [name(n) for n in range(3)]
        return Reservation(work.request_id, names, 1, [NamedBlock(name(1), 4), NamedBlock(name(2), 5)])

    def mark_received(self, request_id: RequestId, names: Sequence[BlockHash], *, in_parts: bool = False) -> None:
        self._ask("mark_received", request_id, list(names), *(["in parts"] if in_parts else []))

    def admit(self, request_id: RequestId, first_tokens: dict[int, int]) -> None:
        self._ask("admit", request_id, first_tokens)

    def admit_locally(self, request_id: RequestId) -> None:
        self._ask("admit_locally", request_id)

    def cancel(self, request_id: RequestId, sequence: int | None = None) -> None:
        self._ask("cancel", request_id, sequence)

    def release(self, request_id: RequestId) -> None:
        self._ask("release", request_id)

    def step(self) -> StepResult:
        self.num_steps += 1
        if self.results:
            return self.results.pop(0)
        return StepResult()

    def has_work(self) -> bool:
        return bool(self.results)

    def pin(self, pin_id: RequestId, names: Sequence[BlockHash]) -> list[NamedBlock]:
        self._ask("pin", pin_id, list(names))
        return [NamedBlock(one, 2 + number) for number, one in enumerate(names[: self.num_pinned])]

    def unpin(self, pin_id: RequestId) -> None:
        self._ask("unpin", pin_id)

    def begin_import(self, import_id: RequestId, names: Sequence[BlockHash]) -> list[NamedBlock]:
        self._ask("begin_import", import_id, list(names))
        return [NamedBlock(one, 6 + number) for number, one in enumerate(names[: self.num_imported])]

    def end_import(self, import_id: RequestId, received: Sequence[BlockHash]) -> None:
        self._ask("end_import", import_id, list(received))

    def hot_block_hashes(self, limit: int) -> list[BlockHash]:
        return [name(1), name(2)][:limit]

    def host_block_hashes(self) -> list[BlockHash]:
        return [BlockHash(b"h" * 16)]

    def cached_block_hashes(self) -> list[BlockHash]:
        return [name(1)]

    def stats(self) -> EngineStats:
        return replace(STATS, free_blocks=self.free_blocks, running=self.num_running)

    def close(self) -> None:
        self.is_closed = True

    def verbs(self) -> list[str]:
        return [call[0] for call in self.asked]

    def _ask(self, *call: Any) -> None:
        self.asked.append(call)
        if self.error is not None:
            error, self.error = self.error, None
            raise error


class InlineCalls:
    """`EngineCalls` without a thread: commands run at once."""

    def __init__(self, engine: EnginePort) -> None:
        self.engine = engine

    def call(
        self, action: Callable[[EnginePort], T], *, then: Callable[[T], None] | None = None
    ) -> "asyncio.Future[T]":
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        try:
            value = action(self.engine)
        except Exception as exc:  # noqa: BLE001 - as the real one does
            future.set_exception(exc)
            return future
        future.set_result(value)
        if then is not None:
            then(value)
        return future

    def post(self, action: Callable[[EnginePort], object]) -> None:
        action(self.engine)


class FakeRouterPort:
    def __init__(self) -> None:
        self.sent: list[tuple[RouterId, ToRouter]] = []
        self.has_sent = asyncio.Event()

    def routers(self) -> list[RouterId]:
        return [ROUTER]

    def send(self, router: RouterId, message: ToRouter) -> None:
        self.sent.append((router, message))
        self.has_sent.set()

    def answers(self, router: RouterId = ROUTER) -> list[Any]:
        """Return the messages sent to a router, with batches unpacked."""
        found: list[Any] = []
        for receiver, message in self.sent:
            if receiver == router:
                found += message.messages if isinstance(message, Batch) else [message]
        return found


class FakeEvents:
    def __init__(self) -> None:
        self.sequence = 0
        self.published: list[BlockEvent] = []

    def publish(self, events: list[BlockEvent]) -> None:
        if events:
            self.sequence += 1
            self.published += events


@dataclass(frozen=True)
class Fetched:
    payload: bytes
    transport: str = "usm"
    seconds: float = 0.5
    exposed_s: float = 0.1
    num_bytes: int = 2048
    num_blocks: int = 2
    ended_at: float = 20.0


class NoPulls:
    """`PullPort` where nothing is to be had."""

    async def pull(self, request: AttemptEntry, pull: Pull | None) -> None:
        assert pull is None


class FakeTransfer:
    """A fake of both ends of a transfer. The test settles `release` (a reason) and `fetched` (a result or an error)."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.failures: list[str] = []
        self.release: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.fetched: asyncio.Future[Fetched] = asyncio.get_running_loop().create_future()
        self.on_blocks: Callable[[list[BlockHash]], None] | None = None
        self.translation: Translation | None = None
        self.stopping: asyncio.Future[None] | None = None
        self.ended: Callable[[], object] = lambda: None
        self.by_ranks = False
        self.mirror: Callable[[], Awaitable[None]] | None = None
        self.on_rank_blocks: Callable[[list[BlockHash]], None] | None = None

    def on_fetch(self, handler: Callable[[Ticket, list[BlockHash]], None]) -> None:
        self.ask = handler

    def open(self, ticket: Ticket) -> None:
        self.asked.append(("open", ticket.ticket))

    def open_handoff(self, ticket: Ticket, mirror: Callable[[], Awaitable[None]] | None) -> bool:
        self.open(ticket)
        self.mirror = mirror
        return self.by_ranks

    def publish(self, ticket_id: TicketId, blocks: Sequence[tuple[BlockHash, int]]) -> None:
        self.asked.append(("publish", list(blocks)))

    def publish_parts(self, ticket_id: TicketId, blocks: Sequence[tuple[BlockHash, int]], parts: range) -> None:
        self.asked.append(("publish_parts", list(blocks), parts))

    def finish(self, ticket_id: TicketId, payload: bytes) -> None:
        self.asked.append(("finish", payload))

    def fail(self, ticket_id: TicketId, reason: str) -> None:
        self.asked.append(("fail", reason))

    def cancel(self, ticket_id: TicketId) -> None:
        self.asked.append(("cancel", ticket_id))

    async def released(self, ticket_id: TicketId) -> str:
        return await asyncio.shield(self.release)

    async def fetch(
        self,
        ticket: Ticket,
        wanted: Sequence[tuple[BlockHash, int]],
        *,
        on_blocks: Callable[[list[BlockHash]], None] | None = None,
        on_rank_blocks: Callable[[list[BlockHash]], None] | None = None,
        on_end: Callable[[Fetched], None] | None = None,
        translation: Translation | None = None,
        partial: bool = False,
    ) -> Fetched:
        self.asked.append(("fetch", list(wanted)))
        self.translation = translation
        self.on_blocks, self.on_rank_blocks = on_blocks, on_rank_blocks
        try:
            fetched = await self.fetched
        except asyncio.CancelledError:
            if self.stopping is not None:
                await self.stopping
            raise
        if on_end is not None:
            on_end(fetched)
        self.ended()
        return fetched

    def links(self) -> list[LinkStatus]:
        return [LinkStatus(peer=InstanceId("prefill-0"), transport="usm", bytes_per_second=1e9)]

    def handoff_failed(self, reason: str) -> None:
        self.failures.append(reason)

    def verbs(self) -> list[str]:
        return [call[0] for call in self.asked]


@dataclass
class Bench:
    """A `RequestServer` on fakes."""

    make_role: Callable[["Bench"], RoleHandler]
    engine: FakeEngine = field(default_factory=FakeEngine)
    router: FakeRouterPort = field(default_factory=FakeRouterPort)
    events: FakeEvents = field(default_factory=FakeEvents)

    def __post_init__(self) -> None:
        self.transfer = FakeTransfer()
        self.calls = InlineCalls(self.engine)
        self.serving = RequestServer(
            IDENTITY,
            role=self.make_role(self),
            engine=self.calls,
            stats=STATS,
            router=self.router,
            events=self.events,
            links=self.transfer,
        )

    def inner(self, index: int = 0) -> RequestId:
        """The id of a request inside the process."""
        return self.serving.table.all()[index].work.request_id

    def turn(self, **parts: Any) -> None:
        self.serving.on_step_result(TimedStepResult(StepResult(**parts), at=1.0))
        self.serving.on_stats(self.engine.stats())

    def check(self) -> None:
        self.serving.table.check_invariants()
        assert len(self.serving.table) == 0, "a request was left behind"


async def settle() -> None:
    """Lets every task go as far as it can."""
    for _ in range(24):
        await asyncio.sleep(0)


def run(test: Coroutine[Any, Any, None], *, limit_s: float = 10) -> None:
    asyncio.run(asyncio.wait_for(test, limit_s))
