"""The engine: token ids in, KV and token ids out. Single-threaded; its owner calls it from one thread.

Knows nothing of networks, transports or text. `step` is the whole life of it: schedule, run, apply. On
accelerators the next step is scheduled and launched while the device computes this one.
"""

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType

import torch

from baton_serve.contracts.identity import BlockName, RequestId
from baton_serve.contracts.messages import Work
from baton_serve.contracts.model_path import model_folder
from baton_serve.engine import device
from baton_serve.engine.config import EngineConfig
from baton_serve.engine.core.block_pool import BlockPool
from baton_serve.engine.core.kv_import import Imports
from baton_serve.engine.core.outputs import (
    CompletedBlocks,
    EngineStats,
    FailedRequest,
    NamedBlock,
    Reservation,
    StepResult,
)
from baton_serve.engine.core.request_table import Roster
from baton_serve.engine.core.reservations import Reservations
from baton_serve.engine.core.sampling_rules import check_work
from baton_serve.engine.core.scheduler import Plan, Scheduler
from baton_serve.engine.core.sequence import Mode, State
from baton_serve.engine.core.step_meter import Meter
from baton_serve.engine.errors import UsageError
from baton_serve.engine.execution.executor import AfterLayer, LocalExecutor
from baton_serve.engine.execution.runner import Runner
from baton_serve.engine.execution.setup import Setup
from baton_serve.engine.kv import capacity
from baton_serve.engine.loading.choice import load
from baton_serve.engine.model.loaded_model import Progress
from baton_serve.engine.model.lora.loaded import Adapters
from baton_serve.engine.model.vision.placeholders import NO_PIXELS, Pixels, check_images, give_images
from baton_serve.engine.parallel.ranks import OnLost, Ranks
from baton_serve.engine.parallel.tp_leader import lead, lead_copies
from baton_serve.engine.sample.constraints import ConstraintBuilder
from baton_serve.engine.sample.grammar import Grammars
from baton_serve.engine.sample.token_masks import Masking
from baton_serve.engine.step.cache_sizing import CacheMaker
from baton_serve.engine.step.engine_stats import stats_of
from baton_serve.engine.step.failures import Failures
from baton_serve.engine.step.in_flight import Launched, hands_on, outlasts_a_launch
from baton_serve.engine.step.layer_groups import Tail, Tell, plan_tail
from baton_serve.engine.step.mirror_refs import Travel
from baton_serve.engine.step.planner import Planner
from baton_serve.engine.step.warm_up import compile_kernels, exercise, measure

logger = logging.getLogger(__name__)


class Engine:
    """`kv` is the KV cache's memory; `layout` the shape of a block of it."""

    def __init__(
        self, config: EngineConfig, *, progress: Progress | None = None, on_lost: OnLost | None = None
    ) -> None:
        """Loads the model, sizes the KV cache and warms up. Raises `engine.errors`.

        `on_lost`: called from another thread when one of several ranks has ended; the engine can only be closed then.
        """
        config.check()
        self._ranks = Ranks(config, on_lost or _say_no_more)
        try:
            self._load(config, progress or (lambda what, fraction: None))
        except BaseException:
            self._ranks.close()
            raise

    def _load(self, config: EngineConfig, report: Progress) -> None:
        self._device = device.select_device(config.device)
        model = load(config, self._device, report, self._ranks.shard)
        self._ranks.meet(self._device)
        self._max_logprobs, self._caching = config.max_logprobs, config.enable_prefix_caching
        self._is_async = config.runs_ahead(is_host=device.is_host(self._device))
        self.vocab_size = model.vocab_size
        self.eos_ids = model.eos_ids
        self.max_model_len = model.max_model_len
        report("packing weights", 0.0)
        setup = Setup(config, model, self._device, self._ranks.group)
        self.layout, self.limits = setup.layout, setup.limits
        self._store, self._images, self.image_reader = setup.adapters, setup.images, setup.image_reader
        self._start(config, setup, report)

    def _start(self, config: EngineConfig, setup: Setup, report: Progress) -> None:
        report("reading the vocabulary", 0.0)
        grammars = Grammars(model_folder(config.model), vocab_size=self.vocab_size, eos_ids=self.eos_ids)
        grammars.read()
        self._masking = Masking(ConstraintBuilder(grammars, vocab_size=self.vocab_size), self._device)
        report("sizing the KV cache", 0.0)
        maker = CacheMaker(config, setup, self._device, self._ranks, vocab_size=self.vocab_size)
        usable = maker.count_blocks(self._masking)
        capacity.check_fit(self.layout, usable, self.max_model_len)
        self.kv = maker.make(num_blocks := usable + 1)
        self._host = maker.make_host_tier(self.kv)
        self._executor = lead(LocalExecutor(setup.forward, self.kv, self.limits), self._ranks)
        self._blocks = lead_copies(self.kv, self._ranks)
        self._runner = Runner(
            self._executor, self.limits, self._device, self._masking, keeps_tokens=self._is_async, images=self._images
        )
        report("warming up", 0.0)
        exercise(self._runner, num_blocks, self.limits, 16)
        if not device.is_host(self._device):
            compile_kernels(self._runner, num_blocks, self.limits)
        if maker.captures_graphs:
            report("capturing graphs", 0.0)
            self._executor.capture_graphs(lambda: device.Capturing(self._device))
        measured = measure(self._runner, num_blocks, self.limits, may_be_short=device.is_host(self._device))
        measured.pace.stretch, measured.pace.is_guess = config.max_step_stretch, True
        self._meter = Meter(measured.pace)
        self._pool = BlockPool(num_blocks, caching=self._caching, host=self._host.tier, versions=self.kv.versions)
        self._roster = Roster(self._pool, self.limits, self.eos_ids)
        self._scheduler = Scheduler(self._roster, self._meter.pace)
        self._planner = Planner(self._scheduler, self._roster, self._host)
        self.adapters = Adapters(self._store, self._roster.requests)
        self._reservations = Reservations(self._roster)
        self._imports = Imports(self._roster)
        self._pins: dict[RequestId, list[BlockName]] = {}
        self._travel = Travel(self._blocks)
        self._tail_plan = plan_tail(config.tail_parts, self.layout, self._device, is_mirrored=self.kv.is_mirrored)
        self.tail_parts = self._tail_plan.parts
        self._tail: Tail | None = None
        self._failures = Failures(self._roster, self._scheduler, self._travel)
        self._ahead: Launched | None = None
        self._last_finish = 0.0
        report("ready", 1.0)

    def on_tail(self, tell: Tell) -> None:
        """`tell` hears of the last blocks of `prefill` requests in `tail_parts`, from another thread too; that they are
        whole is told by `step`. Before the first step."""
        if self.tail_parts > 1:
            self._tail = Tail(self.layout, self._tail_plan, self._device, tell)

    def add(self, work: Work, *, mode: Mode = "generate", pixels: Pixels = NO_PIXELS) -> None:
        """`generate` writes the whole answer here. `prefill` computes the prompt, samples each sequence's first token,
        and keeps the blocks until `release` or, if it fails, `cancel`. `pixels`: of the prompt's images, as
        `image_reader` reads them. Raises `RequestError`."""
        self._check(work)
        check_images(work, self._images, pixels)
        trunk = self._roster.enrol(work, mode, time.monotonic())
        give_images(trunk.request, self._images, pixels)
        self._roster.enqueue(trunk)

    def reserve(self, work: Work) -> Reservation | None:
        """Memory for a prompt that another instance computes; None: no room now, ask again later.

        The reserved blocks are freed by `cancel`, or belong to the request after `admit`. Raises `RequestError`.
        """
        self._check(work)
        if self._scheduler.is_short_of_blocks:
            return None
        reservation = self._reservations.reserve(work, time.monotonic())
        self._host.move()
        if reservation is not None:
            self.kv.mark(block for _, block in reservation.missing)
        return reservation

    def mark_received(self, request_id: RequestId, names: Iterable[BlockName]) -> None:
        """These missing blocks hold their verified content now, where `kv` shows them to transports."""
        self._travel.arrived(self._reservations.mark_received(request_id, names))

    def admit(self, request_id: RequestId, first_tokens: Mapping[int, int]) -> None:
        """All blocks are there: each sequence goes on after its first token, which is not reported again."""
        self._reservations.admit(request_id, first_tokens)
        self._copy_blocks()

    def admit_locally(self, request_id: RequestId) -> None:
        """The handoff failed: compute the prompt here, from the blocks that have arrived."""
        self._travel.give_back(self._reservations.missing_blocks(request_id))
        self._reservations.admit_locally(request_id)

    def cancel(self, request_id: RequestId, sequence: int | None = None) -> None:
        """Frees at once, in any state. No copy may touch the request's blocks any more."""
        missing = self._reservations.missing_blocks(request_id)
        self._roster.cancel(request_id, sequence)
        if request_id not in self._roster.requests:
            self._travel.give_back(missing)
            self._travel.end(request_id)

    def release(self, request_id: RequestId) -> None:
        """The blocks of a held request have been fetched, or never will be."""
        request = self._roster.requests.get(request_id)
        if request is None:
            return
        if request.sequences[0].state is not State.HELD:
            raise UsageError(f"request {request_id} is not held")
        self._roster.end_request(request)
        self._travel.end(request_id)

    def pin(self, pin_id: RequestId, names: Iterable[BlockName]) -> list[NamedBlock]:
        """The longest cached prefix of `names`, where transports read it, kept in place until `unpin`."""
        pinned = self._reservations.pin(names)
        self._pins[pin_id] = [name for name, _ in pinned]
        self._host.move()
        self.kv.mark(block for _, block in pinned)
        self._travel.publish([CompletedBlocks(pin_id, pinned)])
        return pinned

    def unpin(self, pin_id: RequestId) -> None:
        self._reservations.unpin(self._pins.pop(pin_id, []))
        self._travel.end(pin_id)

    def begin_import(self, import_id: RequestId, names: Sequence[BlockName]) -> list[NamedBlock]:
        """Memory for those of `names` that are not cached here, in their order and as far as there is room; another
        instance has them. Kept until `end_import`; empty: there is nothing to bring or no room, and nothing to end."""
        if self._scheduler.is_short_of_blocks:
            return []
        missing = self._imports.begin(import_id, names)
        self._host.move()
        self.kv.mark(block for _, block in missing)
        return missing

    def end_import(self, import_id: RequestId, received: Iterable[BlockName]) -> None:
        """What was received holds its verified content and is cached from now on; nothing writes to the rest."""
        self._travel.arrived(self._imports.receive(import_id, received))
        self._travel.give_back(self._imports.end(import_id))

    def has_work(self) -> bool:
        """Whether `step` could advance anything now."""
        return self._ahead is not None or self._pool.has_events or self._scheduler.has_work()

    def step(self) -> StepResult:
        """One step's results. With `async_scheduling` the next step is launched before this one's tokens are known."""
        result = StepResult()
        current, self._ahead = self._ahead or self._begin(result), None
        if current is not None:
            following = self._begin_ahead(current.plan)
            self._finish(current, result)
            if following is not None:
                self._ahead = self._choose(following, result)
        self._failures.fail_unreadable(result)
        result.events = self._pool.take_events()
        return result

    def _begin(self, result: StepResult) -> Launched | None:
        """Schedules a step and gives the device all of it. None: it failed, as `result` says."""
        now = time.monotonic()
        plan = self._planner.plan(now)
        try:
            launched = Launched(plan, self._runner.start(plan, after_layer=self._tail_of(plan)), now)
        except torch.OutOfMemoryError:
            self._give_up(plan, result)
            return None
        launched.advanced = self._scheduler.advance(plan)
        return self._choose(launched, result)

    def _begin_ahead(self, plan: Plan) -> Launched | None:
        """Launches what follows `plan` up to its logits, where that can be known."""
        if not self._is_async:
            return None
        # A mirror of several ranks' blocks is filled by the device in between.
        if hands_on(plan) and (self.kv.is_mirrored or not outlasts_a_launch(plan, self.limits)):
            return None
        following = self._planner.plan_ahead(time.monotonic())
        if following is None:
            return None
        try:
            started = self._runner.start(following, ahead=True, after_layer=self._tail_of(following))
            launched = Launched(following, started, None)
        except torch.OutOfMemoryError:
            return None  # it is scheduled again, alone
        launched.advanced = self._scheduler.advance(following)
        return launched

    def _tail_of(self, plan: Plan) -> AfterLayer | None:
        return self._tail.follow(self._scheduler.tails(plan)) if self._tail is not None else None

    def _choose(self, launched: Launched, result: StepResult) -> Launched | None:
        try:
            launched.chosen = self._runner.choose(launched.started)
            launched.over = self._host.end_of_step()
            launched.computed = self.kv.reached() if hands_on(launched.plan) else None
        except torch.OutOfMemoryError:
            self._give_up(launched.plan, result)
            self._scheduler.abandon(launched.plan)
            return None
        return launched

    def _finish(self, launched: Launched, result: StepResult) -> None:
        """Waits for the step's tokens and takes them into the state."""
        assert launched.chosen is not None
        sampled = self._runner.wait(launched.chosen)
        self._host.step_is_over(launched.over)
        now = time.monotonic()
        started = self._last_finish if launched.begun is None else launched.begun
        self._last_finish = now
        rows = launched.plan.rows  # some may have ended since the step was launched
        failed = [
            (rows[row], why) for row, why in sampled.failed.items() if rows[row].sequence.state is not State.ENDED
        ]
        applied = self._scheduler.apply(launched.plan, sampled, now, advanced=launched.advanced)
        result.tokens, result.first = applied.tokens, applied.first
        result.completed, result.held = applied.completed, applied.held
        for row, why in failed:
            self._failures.fail(row.sequence.request, why, result)
        self._copy_blocks()
        done = (block for completed in result.completed for _, block in completed.blocks)
        self.kv.mark(done, after=launched.computed)
        self._travel.publish(result.completed)
        self._meter.record(launched.plan, now - started, len(result.tokens))

    def cached_names(self) -> list[BlockName]:
        return self._pool.cached_names()

    def hot_names(self, limit: int) -> list[BlockName]:
        """Of the device tier, the most wanted first."""
        return self._pool.hot_names(limit)

    def host_names(self) -> list[BlockName]:
        """What the host tier keeps."""
        return self._host.tier.names() if self._host.tier is not None else []

    def stats(self) -> EngineStats:
        return stats_of(self._roster, self._scheduler, self._meter)

    def check_invariants(self) -> None:
        self._roster.check_invariants()
        self._travel.check_invariants()

    def close(self) -> None:
        if self._tail is not None:
            self._tail.close()
        self._masking.close()
        self._executor.close()
        self._ranks.close()
        self._host.close()
        self.kv.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _give_up(self, plan: Plan, result: StepResult) -> None:
        """The step's requests fail; all others live on. Handed-on blocks of `prefill` requests stay until `cancel`.
        Part of the step may be running, in blocks that are free now: steps come after it in the device's order,
        transfers by the marks of `reserve` and `begin_import`, the host tier by its own."""
        logger.exception("a step of %d sequences ran out of device memory", len(plan.chunks))
        self._host.step_is_over(self._host.end_of_step())
        for request in {id(c.sequence.request): c.sequence.request for c in plan.chunks}.values():
            self._failures.end(request)
            message = "the device ran out of memory; lower gpu_memory_utilization or max_num_batched_tokens"
            result.failed.append(FailedRequest(request.work.request_id, message))

    def _check(self, work: Work) -> None:
        check_work(work, self.limits, self.vocab_size, max_logprobs=self._max_logprobs)
        self.adapters.check(work)
        if work.sampling.grammar is not None:
            self._masking.prepare(work.sampling.grammar)

    def _copy_blocks(self) -> None:
        """At once: a block that is freed before its copy was made could be filled by another request."""
        copies = self._roster.take_copies()
        self._host.move()
        if copies:
            self._host.before(block for copy in copies for block in copy)
            self._blocks.copy_blocks([c.source for c in copies], [c.target for c in copies])


def _say_no_more(why: str) -> None:
    """The log has it."""
