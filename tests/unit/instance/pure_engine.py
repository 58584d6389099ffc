"""`EnginePort` made of the engine's pure parts: it owns blocks and plans steps as the engine does, and instead of bytes
it remembers which content each block holds. What would be computed from blocks without their content is an error."""

from collections.abc import Sequence

from contracts.events import BlockEvent
from contracts.identity import BlockName, RequestId
from contracts.layout import KVLayout
from contracts.messages import Work
from contracts.naming import block_names
from engine.followers import Followers
from engine.front import Gate
from engine.outputs import EngineStats, NamedBlock, Place, Reservation, StepResult
from engine.reservations import Reservations
from engine.scheduler import Plan, Scheduler
from engine.vision.given import NO_PIXELS, Pixels
from services.instance.ports import Mode
from tests.unit.engine.gates import Gates
from tests.unit.engine.work import BLOCK_TOKENS, ROOT, made_up_tokens, make_roster
from tests.unit.instance.fakes import STATS


class PureEngine:
    layout = KVLayout(fingerprint="f", num_layers=2, num_kv_heads=1, block_tokens=BLOCK_TOKENS, head_dim=8, dtype="f")
    max_model_len = 1 << 20

    def __init__(self, num_blocks: int, *, batched: int) -> None:
        self.roster = make_roster(num_blocks, seqs=8, batched=batched)
        self.scheduler = Scheduler(self.roster)
        self.content: dict[int, BlockName] = {}
        self.gates = Gates()
        self._reservations = Reservations(self.roster)
        self._followers = Followers(self.roster, self._reservations, self.gates)

    def add(
        self, work: Work, *, mode: Mode = "generate", place: Place | None = None, pixels: Pixels = NO_PIXELS
    ) -> Place:
        self.roster.enqueue(trunk := self.roster.enrol(work, mode, 0.0, place))
        return trunk.request.place

    def reserve(
        self, work: Work, *, mode: Mode = "generate", after: RequestId | None = None, place: Place | None = None
    ) -> Reservation | None:
        if self.scheduler.is_short_of_blocks:
            return None
        return self._reservations.reserve(work, 0.0, mode, after, place)

    def mark_received(self, request_id: RequestId, names: Sequence[BlockName]) -> None:
        self._reservations.mark_received(request_id, names)

    def follow(self, request_id: RequestId, num_tokens: int, gate: Gate) -> bool:
        return self._followers.follow(request_id, num_tokens, gate, 0.0)

    def read_alone(self, request_id: RequestId) -> bool:
        return self._followers.read_alone(request_id, 0.0)

    def cancel(self, request_id: RequestId, sequence: int | None = None) -> None:
        self.roster.cancel(request_id, sequence)
        if request_id not in self.roster.requests:
            self._followers.forget(request_id)

    def release(self, request_id: RequestId) -> None:
        if (request := self.roster.requests.get(request_id)) is not None:
            self.roster.end_request(request)

    def has_work(self) -> bool:
        return self.scheduler.has_work()

    def step(self) -> StepResult:
        """Nothing while a gate is closed that it would wait for."""
        self._followers.drop_lost(0.0)
        plan = self.scheduler.schedule(0.0)
        gated = [chunk.sequence.request.work.request_id for chunk in plan.chunks]
        if any(not self.gates.gates[one].is_open for one in gated if one in self.gates.gates):
            return StepResult()
        for request_id in gated:
            self.gates.forget(request_id)
        self._compute(plan)
        advanced = self.scheduler.advance(plan)
        advanced.completed += self._followers.share(0.0)
        return self.scheduler.apply(plan, made_up_tokens(plan), 0.0, advanced=advanced)

    def check_invariants(self) -> None:
        self.roster.check_invariants()

    def _compute(self, plan: Plan) -> None:
        for chunk in plan.chunks:
            sequence, first = chunk.sequence, chunk.start // BLOCK_TOKENS
            names = block_names(ROOT, sequence.token_ids[: chunk.start + chunk.length], BLOCK_TOKENS)
            held = [self.content.get(block) for block in sequence.blocks[:first]]
            assert held == names[:first], "computed from blocks that do not hold what they should"
            self.content.update(zip(sequence.blocks[first : len(names)], names[first:], strict=True))

    # What a prefill instance does not ask for.

    def admit(self, request_id: RequestId, first_tokens: dict[int, int]) -> None:
        raise NotImplementedError

    def admit_locally(self, request_id: RequestId) -> None:
        raise NotImplementedError

    def pin(self, pin_id: RequestId, names: Sequence[BlockName]) -> list[NamedBlock]:
        raise NotImplementedError

    def unpin(self, pin_id: RequestId) -> None:
        raise NotImplementedError

    def begin_import(self, import_id: RequestId, names: Sequence[BlockName]) -> list[NamedBlock]:
        raise NotImplementedError

    def end_import(self, import_id: RequestId, received: Sequence[BlockName]) -> None:
        raise NotImplementedError

    def cached_names(self) -> list[BlockName]:
        return self.roster.pool.cached_names()

    def hot_names(self, limit: int) -> list[BlockName]:
        return []

    def host_names(self) -> list[BlockName]:
        return []

    def events(self) -> list[BlockEvent]:
        return self.roster.pool.take_events()

    def stats(self) -> EngineStats:
        return STATS

    def close(self) -> None: ...
