"""The engine: token ids in, KV and token ids out. Single-threaded; its owner calls it from one thread.

Knows nothing of networks, transports or text. `step` is the whole life of it: schedule, run, apply. On
accelerators the next step is scheduled and launched while the device computes this one.
"""

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType

import torch

from baton_serve.contracts.identity import BlockHash, RequestId
from baton_serve.contracts.messages import Work
from baton_serve.contracts.model_path import model_folder
from baton_serve.engine import device
from baton_serve.engine.config import EngineConfig
from baton_serve.engine.core.block_pool import BlockPool
from baton_serve.engine.core.kv_import import KVImports
from baton_serve.engine.core.outputs import (
    CompletedBlocks,
    EngineStats,
    FailedRequest,
    NamedBlock,
    Reservation,
    StepResult,
)
from baton_serve.engine.core.request_table import RequestTable
from baton_serve.engine.core.reservations import Reservations
from baton_serve.engine.core.sampling_rules import check_work
from baton_serve.engine.core.scheduler import ScheduledBatch, Scheduler
from baton_serve.engine.core.sequence import Mode, SequenceState
from baton_serve.engine.errors import UsageError
from baton_serve.engine.execution.executor import AfterLayer, LocalExecutor
from baton_serve.engine.execution.runner import ModelRunner
from baton_serve.engine.execution.setup import EngineSetup
from baton_serve.engine.kv import capacity
from baton_serve.engine.loading.choice import load
from baton_serve.engine.model.loaded_model import LoadProgress
from baton_serve.engine.model.lora.loaded import LoadedAdapters
from baton_serve.engine.model.vision.placeholders import NO_PIXELS, Pixels, check_images, give_images
from baton_serve.engine.parallel.ranks import OnLost, Ranks
from baton_serve.engine.parallel.tp_leader import make_block_copier, make_executor
from baton_serve.engine.sample.constraints import ConstraintBuilder
from baton_serve.engine.sample.grammar import Grammars
from baton_serve.engine.sample.token_masks import TokenMasker
from baton_serve.engine.step.cache_sizing import KVCacheBuilder
from baton_serve.engine.step.engine_stats import StepMeter, engine_stats
from baton_serve.engine.step.in_flight import (
    InFlightStep,
    RequestFailures,
    StepPlanner,
    has_prefill_requests,
    runs_longer_than_launch,
)
from baton_serve.engine.step.layer_groups import LayerGroupReporter, OnLayerGroup, plan_layer_groups
from baton_serve.engine.step.mirror_refs import MirrorRefs
from baton_serve.engine.step.warm_up import compile_kernels, measure_speed, run_warm_up_batch

logger = logging.getLogger(__name__)


class Engine:
    """`kv` is the KV cache's memory; `layout` the shape of a block of it."""

    def __init__(
        self, config: EngineConfig, *, progress: LoadProgress | None = None, on_lost: OnLost | None = None
    ) -> None:
        """Loads the model, sizes the KV cache and warms up. Raises `engine.errors`.

        `on_lost`: called from another thread when one of several ranks has ended; the engine can only be closed then.
        """
        config.check()
        self._ranks = Ranks(config, on_lost or _ignore_lost_rank)
        try:
            self._load(config, progress or (lambda what, fraction: None))
        except BaseException:
            self._ranks.close()
            raise

    def _load(self, config: EngineConfig, report: LoadProgress) -> None:
        self._device = device.select_device(config.device)
        model = load(config, self._device, report, self._ranks.shard)
        self._ranks.join_group(self._device)
        self._max_logprobs, self._caching = config.max_logprobs, config.enable_prefix_caching
        self._is_async = config.runs_ahead(is_host=device.is_host(self._device))
        self.vocab_size = model.vocab_size
        self.eos_token_ids = model.eos_token_ids
        self.max_model_len = model.max_model_len
        report("packing weights", 0.0)
        setup = EngineSetup(config, model, self._device, self._ranks.group)
        self.layout, self.limits = setup.layout, setup.limits
        self._store, self._images, self.image_reader = setup.adapters, setup.images, setup.image_reader
        self._start(config, setup, report)

    def _start(self, config: EngineConfig, setup: EngineSetup, report: LoadProgress) -> None:
        report("reading the vocabulary", 0.0)
        grammars = Grammars(model_folder(config.model), vocab_size=self.vocab_size, eos_token_ids=self.eos_token_ids)
        grammars.read()
        self._masking = TokenMasker(ConstraintBuilder(grammars, vocab_size=self.vocab_size), self._device)
        report("sizing the KV cache", 0.0)
        maker = KVCacheBuilder(config, setup, self._device, self._ranks, vocab_size=self.vocab_size)
        usable = maker.count_blocks(self._masking)
        capacity.check_fit(self.layout, usable, self.max_model_len)
        self.kv = maker.make(num_blocks := usable + 1)
        self._host = maker.make_host_tier(self.kv)
        self._executor = make_executor(LocalExecutor(setup.forward, self.kv, self.limits), self._ranks)
        self._blocks = make_block_copier(self.kv, self._ranks)
        self._runner = ModelRunner(
            self._executor,
            self.limits,
            self._device,
            self._masking,
            keeps_last_tokens=self._is_async,
            images=self._images,
        )
        report("warming up", 0.0)
        run_warm_up_batch(self._runner, num_blocks, self.limits, 16)
        if not device.is_host(self._device):
            compile_kernels(self._runner, num_blocks, self.limits)
        if maker.uses_graphs:
            report("capturing graphs", 0.0)
            self._executor.capture_graphs(lambda: device.Capturing(self._device))
        measured = measure_speed(self._runner, num_blocks, self.limits, may_be_short=device.is_host(self._device))
        measured.step_time_model.max_stretch, measured.step_time_model.is_warm_up_estimate = (
            config.max_step_stretch,
            True,
        )
        self._meter = StepMeter(measured.step_time_model)
        self._pool = BlockPool(num_blocks, caching=self._caching, host=self._host.tier, versions=self.kv.versions)
        self._table = RequestTable(self._pool, self.limits, self.eos_token_ids)
        self._scheduler = Scheduler(self._table, self._meter.step_time_model)
        self._planner = StepPlanner(self._scheduler, self._table, self._host)
        self.adapters = LoadedAdapters(self._store, self._table.requests)
        self._reservations = Reservations(self._table)
        self._imports = KVImports(self._table)
        self._pins: dict[RequestId, list[BlockHash]] = {}
        self._mirror_refs = MirrorRefs(self._blocks)
        self._tail_plan = plan_layer_groups(
            config.tail_parts, self.layout, self._device, is_mirrored=self.kv.is_mirrored
        )
        self.tail_parts = self._tail_plan.parts
        self._tail: LayerGroupReporter | None = None
        self._failures = RequestFailures(self._table, self._scheduler, self._mirror_refs)
        self._ahead: InFlightStep | None = None
        self._last_finish = 0.0
        report("ready", 1.0)

    def on_layer_groups(self, tell: OnLayerGroup) -> None:
        """`tell` hears of the last blocks of `prefill` requests in `tail_parts`, from another thread too; that they are
        whole is told by `step`. Before the first step."""
        if self.tail_parts > 1:
            self._tail = LayerGroupReporter(self.layout, self._tail_plan, self._device, tell)

    def add(self, work: Work, *, mode: Mode = "generate", pixels: Pixels = NO_PIXELS) -> None:
        """`generate` writes the whole answer here. `prefill` computes the prompt, samples each sequence's first token,
        and keeps the blocks until `release` or, if it fails, `cancel`. `pixels`: of the prompt's images, as
        `image_reader` reads them. Raises `RequestError`."""
        self._check(work)
        check_images(work, self._images, pixels)
        parent = self._table.add(work, mode, time.monotonic())
        give_images(parent.request, self._images, pixels)
        self._table.enqueue(parent)

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

    def mark_received(self, request_id: RequestId, names: Iterable[BlockHash]) -> None:
        """These missing blocks hold their verified content now, where `kv` shows them to transports."""
        self._mirror_refs.copy_to_device(self._reservations.mark_received(request_id, names))

    def admit(self, request_id: RequestId, first_tokens: Mapping[int, int]) -> None:
        """All blocks are there: each sequence goes on after its first token, which is not reported again."""
        self._reservations.admit(request_id, first_tokens)
        self._copy_blocks()

    def admit_locally(self, request_id: RequestId) -> None:
        """The handoff failed: compute the prompt here, from the blocks that have arrived."""
        self._mirror_refs.free_mirror(self._reservations.missing_blocks(request_id))
        self._reservations.admit_locally(request_id)

    def cancel(self, request_id: RequestId, sequence: int | None = None) -> None:
        """Frees at once, in any state. No copy may touch the request's blocks any more."""
        missing = self._reservations.missing_blocks(request_id)
        self._table.cancel(request_id, sequence)
        if request_id not in self._table.requests:
            self._mirror_refs.free_mirror(missing)
            self._mirror_refs.end(request_id)

    def release(self, request_id: RequestId) -> None:
        """The blocks of a held request have been fetched, or never will be."""
        request = self._table.requests.get(request_id)
        if request is None:
            return
        if request.sequences[0].state is not SequenceState.AWAITING_FETCH:
            raise UsageError(f"request {request_id} is not held")
        self._table.finish_request(request)
        self._mirror_refs.end(request_id)

    def pin(self, pin_id: RequestId, names: Iterable[BlockHash]) -> list[NamedBlock]:
        """The longest cached prefix of `names`, where transports read it, kept in place until `unpin`."""
        pinned = self._reservations.pin(names)
        self._pins[pin_id] = [name for name, _ in pinned]
        self._host.move()
        self.kv.mark(block for _, block in pinned)
        self._mirror_refs.publish([CompletedBlocks(pin_id, pinned)])
        return pinned

    def unpin(self, pin_id: RequestId) -> None:
        self._reservations.unpin(self._pins.pop(pin_id, []))
        self._mirror_refs.end(pin_id)

    def begin_import(self, import_id: RequestId, names: Sequence[BlockHash]) -> list[NamedBlock]:
        """Memory for those of `names` that are not cached here, in their order and as far as there is room; another
        instance has them. Kept until `end_import`; empty: there is nothing to bring or no room, and nothing to end."""
        if self._scheduler.is_short_of_blocks:
            return []
        missing = self._imports.begin(import_id, names)
        self._host.move()
        self.kv.mark(block for _, block in missing)
        return missing

    def end_import(self, import_id: RequestId, received: Iterable[BlockHash]) -> None:
        """What was received holds its verified content and is cached from now on; nothing writes to the rest."""
        self._mirror_refs.copy_to_device(self._imports.receive(import_id, received))
        self._mirror_refs.free_mirror(self._imports.end(import_id))

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
        self._failures.fail_requests_missing_images(result)
        result.events = self._pool.take_events()
        return result

    def _begin(self, result: StepResult) -> InFlightStep | None:
        """Schedules a step and gives the device all of it. None: it failed, as `result` says."""
        now = time.monotonic()
        plan = self._planner.plan(now)
        try:
            launched = InFlightStep(plan, self._runner.start(plan, after_layer=self._tail_of(plan)), now)
        except torch.OutOfMemoryError:
            self._give_up(plan, result)
            return None
        launched.advanced = self._scheduler.advance(plan)
        return self._choose(launched, result)

    def _begin_ahead(self, plan: ScheduledBatch) -> InFlightStep | None:
        """Launches what follows `plan` up to its logits, where that can be known."""
        if not self._is_async:
            return None
        # A mirror of several ranks' blocks is filled by the device in between.
        if has_prefill_requests(plan) and (self.kv.is_mirrored or not runs_longer_than_launch(plan, self.limits)):
            return None
        following = self._planner.plan_ahead(time.monotonic())
        if following is None:
            return None
        try:
            started = self._runner.start(following, ahead=True, after_layer=self._tail_of(following))
            launched = InFlightStep(following, started, None)
        except torch.OutOfMemoryError:
            return None  # it is scheduled again, alone
        launched.advanced = self._scheduler.advance(following)
        return launched

    def _tail_of(self, plan: ScheduledBatch) -> AfterLayer | None:
        return self._tail.follow(self._scheduler.last_chunk_blocks(plan)) if self._tail is not None else None

    def _choose(self, launched: InFlightStep, result: StepResult) -> InFlightStep | None:
        try:
            launched.chosen = self._runner.choose(launched.started)
            launched.ended_event = self._host.record_step_end()
            launched.computed = self.kv.reached() if has_prefill_requests(launched.plan) else None
        except torch.OutOfMemoryError:
            self._give_up(launched.plan, result)
            self._scheduler.abandon(launched.plan)
            return None
        return launched

    def _finish(self, launched: InFlightStep, result: StepResult) -> None:
        """Waits for the step's tokens and takes them into the state."""
        assert launched.chosen is not None
        sampled = self._runner.wait(launched.chosen)
        self._host.on_step_end(launched.ended_event)
        now = time.monotonic()
        started = self._last_finish if launched.started_at is None else launched.started_at
        self._last_finish = now
        rows = launched.plan.rows  # some may have ended since the step was launched
        failed = [
            (rows[row], why)
            for row, why in sampled.failed.items()
            if rows[row].sequence.state is not SequenceState.FINISHED
        ]
        applied = self._scheduler.apply(launched.plan, sampled, now, advanced=launched.advanced)
        result.tokens, result.first = applied.tokens, applied.first
        result.completed, result.held = applied.completed, applied.held
        for row, why in failed:
            self._failures.fail(row.sequence.request, why, result)
        self._copy_blocks()
        done = (block for completed in result.completed for _, block in completed.blocks)
        self.kv.mark(done, after=launched.computed)
        self._mirror_refs.publish(result.completed)
        self._meter.record(launched.plan, now - started, len(result.tokens))

    def cached_block_hashes(self) -> list[BlockHash]:
        return self._pool.cached_block_hashes()

    def hot_block_hashes(self, limit: int) -> list[BlockHash]:
        """Of the device tier, the most wanted first."""
        return self._pool.hot_block_hashes(limit)

    def host_block_hashes(self) -> list[BlockHash]:
        """What the host tier keeps."""
        return self._host.tier.names() if self._host.tier is not None else []

    def stats(self) -> EngineStats:
        return engine_stats(self._table, self._scheduler, self._meter)

    def check_invariants(self) -> None:
        self._table.check_invariants()
        self._mirror_refs.check_invariants()

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

    def _give_up(self, plan: ScheduledBatch, result: StepResult) -> None:
        """The step's requests fail; all others live on. Handed-on blocks of `prefill` requests stay until `cancel`.
        Part of the step may be running, in blocks that are free now: steps come after it in the device's order,
        transfers by the marks of `reserve` and `begin_import`, the host tier by its own."""
        logger.exception("a step of %d sequences ran out of device memory", len(plan.chunks))
        self._host.on_step_end(self._host.record_step_end())
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
        copies = self._table.take_copies()
        self._host.move()
        if copies:
            self._host.before(block for copy in copies for block in copy)
            self._blocks.copy_blocks([c.source for c in copies], [c.target for c in copies])


def _ignore_lost_rank(why: str) -> None:
    """The log has it."""
