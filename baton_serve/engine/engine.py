"""The engine (vLLM: engine core): it takes token ids, and returns KV blocks and token ids; `core/scheduler.py` decides
what a step computes. Its owner calls it from one thread.

It has no network, transport or text. `step` does the work of all requests: schedule, run, apply. On accelerators the
next step is scheduled and launched while the device computes the current one.
"""

import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from itertools import takewhile
from pathlib import Path
from types import TracebackType

from baton_serve.contracts.identity import BlockHash, RequestId
from baton_serve.contracts.instance import KernelVerdict
from baton_serve.contracts.messages import Work
from baton_serve.contracts.model_path import model_folder
from baton_serve.engine import device
from baton_serve.engine.config import EngineConfig
from baton_serve.engine.core.block_pool import BlockPool
from baton_serve.engine.core.kv_import import KVImports
from baton_serve.engine.core.outputs import (
    BatchSize,
    CompletedBlocks,
    EngineStats,
    NamedBlock,
    Reservation,
    StepResult,
)
from baton_serve.engine.core.request_table import RequestTable
from baton_serve.engine.core.reservations import Reservations
from baton_serve.engine.core.sampling_rules import check_work
from baton_serve.engine.core.scheduler import Scheduler
from baton_serve.engine.core.sequence import LogitsProcessor, Mode, SequenceState
from baton_serve.engine.errors import UsageError
from baton_serve.engine.execution.engine_setup import EngineSetup
from baton_serve.engine.execution.executor import LocalExecutor
from baton_serve.engine.execution.runner import ModelRunner
from baton_serve.engine.loading.loader_choice import load
from baton_serve.engine.model.loaded_model import LoadProgress
from baton_serve.engine.model.lora.loaded_adapters import LoadedAdapters
from baton_serve.engine.model.vision.image_types import NO_PIXELS, Pixels
from baton_serve.engine.model.vision.placeholder_check import check_images, give_images
from baton_serve.engine.parallel.ranks import OnLost, Ranks, RemoteRanks
from baton_serve.engine.parallel.tp_executor import make_block_copier, make_executor
from baton_serve.engine.sample.constraints import ConstraintBuilder
from baton_serve.engine.sample.grammar import Grammars
from baton_serve.engine.sample.token_masks import TokenMasker
from baton_serve.engine.step.cache_copies import CacheMemory, make_state_copier
from baton_serve.engine.step.cache_sizing import KVCacheBuilder
from baton_serve.engine.step.engine_stats import StepMeter, engine_stats
from baton_serve.engine.step.layer_groups import LayerGroupReporter, OnLayerGroup, plan_layer_groups
from baton_serve.engine.step.mirror_refs import MirrorRefs
from baton_serve.engine.step.profiling import TorchProfiler
from baton_serve.engine.step.step_loop import StepLoop
from baton_serve.engine.step.warm_up import compile_kernels, measure_speed, run_warm_up_batch

logger = logging.getLogger(__name__)


class Engine:
    """A loaded model with its KV cache and the requests that it computes (in vLLM: the engine core). One thread makes
    all calls, and must call `close` at the end.

    `kv` is the memory of the KV cache; `layout` describes one of its blocks.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        progress: LoadProgress | None = None,
        on_lost: OnLost | None = None,
        remote: RemoteRanks | None = None,
        rank_program: str | None = None,
    ) -> None:
        """Load the model, allocate the KV cache and warm up; this takes seconds to minutes.

        `progress` is called with the name of the current phase and its finished fraction, from 0 to 1. `on_lost` is
        called from another thread when the process of another rank has exited; then the engine can only be closed.
        `remote` connects the ranks on other hosts, if `nnodes` is more than 1. `rank_program` is the module that the
        other ranks run, if they move their parts of blocks between instances (`part_links`). Raises `ConfigError`,
        `ModelError`, `CapacityError`, `AdapterError`, or `ChannelError` if a host is missing.
        """
        config.check()
        self._profiler = TorchProfiler()
        # The other ranks load at the same time as this one, so they are started first.
        self._ranks = Ranks(config, on_lost, remote, program=rank_program)
        try:
            self._load(config, progress or (lambda what, fraction: None))
            self.part_links = self._ranks.connect_parts(self.kv)
            """The connections to the transfers of the other ranks, which the caller owns; empty if only whole blocks
            are moved."""
        except BaseException:
            self._ranks.close()
            raise

    def _load(self, config: EngineConfig, report: LoadProgress) -> None:
        """Load this rank's part of the model, and build all other parts of the engine. `report` gets the progress."""
        self._device = device.select_device(config.device)
        model = load(config, self._device, report, self._ranks.place.shard, self._ranks.place.stage)
        # Forming the group waits for all ranks, which load at the same time.
        model = self._ranks.join_group(self._device, model)
        self._max_logprobs, self._caching = config.max_logprobs, config.enable_prefix_caching
        self._is_async = config.runs_ahead(is_host=device.is_host(self._device))
        self.vocab_size = model.vocab_size
        self.eos_token_ids = model.eos_token_ids
        self.max_model_len = model.max_model_len
        report("packing weights", 0.0)
        setup = EngineSetup(config, model, self._device, self._ranks.group, self._ranks.links)
        if setup.adapters is not None:
            # From now on: each rank has loaded those of the settings itself.
            setup.adapters.listener = self._ranks
        self.layout, self.limits, self._kernels = setup.layout, setup.limits, setup.kernels
        self._store, self._images, self.image_reader = setup.adapters, setup.images, setup.image_reader
        self._start(config, setup, report)

    def _start(self, config: EngineConfig, setup: EngineSetup, report: LoadProgress) -> None:
        """Allocate the KV cache, warm the kernels up, measure their speed and build the scheduler: the last part of
        loading. `setup` has the model; `report` gets the progress."""
        report("reading the vocabulary", 0.0)
        grammars = Grammars(model_folder(config.model), vocab_size=self.vocab_size, eos_token_ids=self.eos_token_ids)
        # Read the vocabulary now: at the first request with a grammar it would stop all requests for about a second.
        grammars.read()
        self._masking = TokenMasker(ConstraintBuilder(grammars, vocab_size=self.vocab_size), self._device)
        report("sizing the KV cache", 0.0)
        maker = KVCacheBuilder(config, setup, self._device, self._ranks, vocab_size=self.vocab_size)
        usable = maker.count_blocks(self._masking)
        maker.check_fit(usable, self.max_model_len)
        self.kv = maker.make(num_blocks := usable + 1)  # block 0 is for padding
        states = maker.make_states(self.kv)
        self._host = maker.make_host_tier(self.kv)
        own = LocalExecutor(setup.forward, self.kv, self.limits, states.views, setup.kernels.argmax, setup.no_images)
        self._executor = make_executor(own, setup.forward, self._ranks, self.vocab_size)
        self._runner = ModelRunner(
            self._executor,
            self.limits,
            self._device,
            self._masking,
            keeps_last_tokens=self._is_async and self.limits.num_stages == 1,
            images=self._images,
            sources=setup.sources,
        )
        report("warming up", 0.0)
        run_warm_up_batch(self._runner, num_blocks, self.limits, 16)
        # Triton compiles a kernel at its first use, which would otherwise delay requests by seconds.
        if not device.is_host(self._device):
            report("building kernels", 0.0)
            compile_kernels(self._runner, num_blocks, self.limits)
        if setup.uses_graphs:
            report("capturing graphs", 0.0)
            self._executor.capture_graphs(lambda: device.Capturing(self._device))
        # The router needs a prefill rate before the first request. Requests replace this estimate by measured steps.
        measured = measure_speed(self._runner, num_blocks, self.limits, may_be_short=device.is_host(self._device))
        measured.step_time_model.max_stretch, measured.step_time_model.is_warm_up_estimate = (
            config.max_step_stretch,
            True,
        )
        self._meter = StepMeter(measured.step_time_model)
        self._pool = BlockPool(num_blocks, caching=self._caching, host=self._host.tier, versions=self.kv.versions)
        self._table = RequestTable(self._pool, self.limits, self.eos_token_ids)
        self.adapters = LoadedAdapters(self._store, self._table.requests)
        self._scheduler = Scheduler(self._table, self._meter.step_time_model, self.adapters)
        self._reservations = Reservations(self._table)
        self._imports = KVImports(self._table)
        self._pins: dict[RequestId, list[BlockHash]] = {}
        copier = make_block_copier(self.kv, self._ranks)
        self._mirror_refs = MirrorRefs(copier)
        self._memory = CacheMemory(
            self.kv,
            self._host,
            copier,
            self._mirror_refs,
            make_state_copier(states, copier, self._ranks, self._mirror_refs),
        )
        self._layer_group_plan = plan_layer_groups(
            config.tail_parts,
            self.layout,
            self._device,
            is_divided=self.kv.is_mirrored or self.limits.num_stages > 1,
        )
        self.tail_parts = self._layer_group_plan.parts
        self._steps = StepLoop(
            self._scheduler, self._table, self._runner, self._memory, self._meter, is_async=self._is_async
        )
        report("ready", 1.0)

    def on_layer_groups(self, on_group: OnLayerGroup) -> None:
        """Register `on_group`, which is called during the last chunk of a `prefill` request's prompt, each time that a
        group of layers is computed: the KV of these layers can be sent while later layers are computed. Call this
        before the first step.

        `on_group` is called from the engine's thread or from another one. `step` reports the same blocks again when
        they are complete. With `tail_parts` 1 `on_group` is never called.
        """
        if self.tail_parts > 1:
            self._steps.layer_groups = LayerGroupReporter(self.layout, self._layer_group_plan, self._device, on_group)

    def compile_grammar(self, grammar: str) -> "Future[object]":
        """Start compiling a grammar for structured output. The future ends when it is compiled; add requests with the
        grammar then.

        A request whose grammar is not compiled yet delays the first step that it is part of. The caller keeps the
        future's result until its request has ended: otherwise the grammar may be dropped before that step. The future
        raises `RequestError` for an invalid grammar.
        """
        return self._masking.prepare(grammar)

    def add(
        self,
        work: Work,
        *,
        mode: Mode = "generate",
        pixels: Pixels = NO_PIXELS,
        logits_processors: tuple[LogitsProcessor, ...] = (),
        sends_parts: bool = False,
        awaited: Collection[bytes] = (),
    ) -> None:
        """Queue a request. `pixels` are the preprocessed images of the prompt, as `image_reader` returns them. Those in
        `awaited`, by digest, come later through `supply_images`; the tokens before them are computed meanwhile.
        `logits_processors` are called in the engine's thread, for each token.

        With mode `generate`, the whole answer is generated here. With `prefill`, the prompt is computed and the first
        token of each sequence is sampled; the KV blocks are kept for another instance until `release` or, if the
        request fails, `cancel`. With `sends_parts` each rank sends its part of them, so that they are whole in the
        memory that `kv` shows only after `mirror`. Raises `RequestError` if the request can never be served.
        """
        self._check(work)
        check_images(work, self._images, pixels, awaited)
        parent = self._table.add(work, mode, time.monotonic())
        give_images(parent.request, self._images, pixels, awaited)
        parent.request.logits_processors = logits_processors
        if sends_parts:
            self._mirror_refs.leave_to_ranks(work.request_id)
        self._table.enqueue(parent)

    @property
    def can_await_images(self) -> bool:
        """Return whether `add` accepts `awaited` images."""
        return self._images is not None and self._images.can_follow and not self.limits.has_bidirectional_prompts

    def supply_images(self, request_id: RequestId, pixels: Pixels) -> None:
        """Add images, by digest, that a request has awaited. An unknown id is ignored. Raises `RequestError` for an
        image that is not that of the prompt; the caller then ends the request.
        """
        request = self._table.requests.get(request_id)
        if request is not None and self._images is not None:
            self._images.supply(request, pixels)

    def mirror(self, request_id: RequestId) -> None:
        """Make the computed blocks of a request that was added with `sends_parts` whole in the memory that `kv` shows,
        and later ones as they are computed. An unknown id is ignored."""
        self._mirror_refs.copy_waiting(request_id)

    def reserve(self, work: Work) -> Reservation | None:
        """Allocate KV blocks for the prompt of a request that a prefill worker computes. Return the hashes and indexes
        of the blocks to receive, or None if too few blocks are free; then call it again later.

        `cancel` frees the blocks; after `admit` they belong to the running request. Raises `RequestError` if the
        request can never be served.
        """
        self._check(work)
        if self._scheduler.admission.is_short_of_blocks:
            return None
        reservation = self._reservations.reserve(work, time.monotonic())
        self._host.move()
        if reservation is not None:
            self.kv.mark(block for _, block in reservation.missing)
        return reservation

    def mark_received(self, request_id: RequestId, names: Iterable[BlockHash], *, in_parts: bool = False) -> None:
        """Record that the KV of these blocks of a reservation has arrived and was verified: in the memory that `kv`
        shows to transports or, with `in_parts`, in the memory of each rank."""
        blocks = self._reservations.mark_received(request_id, names)
        if not in_parts:
            self._mirror_refs.copy_to_device(blocks)

    def admit(self, request_id: RequestId, first_tokens: Mapping[int, int]) -> None:
        """Start to decode a reserved request. `first_tokens` are the tokens that the prefill worker sampled, by
        sequence index; `step` does not report them again.

        Call it when all blocks of the reservation have been received; otherwise it raises `UsageError`.
        """
        self._reservations.admit(request_id, first_tokens)
        self._memory.copy_forked_blocks(self._table)

    def admit_locally(self, request_id: RequestId) -> None:
        """Compute the prompt of a reserved request on this instance, because its handoff failed. Blocks that have
        arrived are not computed again."""
        self._mirror_refs.free_mirror(self._reservations.missing_blocks(request_id))
        self._reservations.admit_locally(request_id)

    def cancel(self, request_id: RequestId, sequence: int | None = None) -> None:
        """End a request, or only its sequence with index `sequence`, in any state, and free its blocks immediately. An
        unknown id is ignored.

        The caller ensures that no transport reads or writes these blocks any more.
        """
        missing = self._reservations.missing_blocks(request_id)
        self._table.cancel(request_id, sequence)
        if request_id not in self._table.requests:
            self._mirror_refs.free_mirror(missing)
            self._mirror_refs.end(request_id)

    def release(self, request_id: RequestId) -> None:
        """Free the blocks of a computed `prefill` request, after the decode worker has fetched them or if no one will.
        An unknown id is ignored.

        Raises `UsageError` if its prompt is not computed yet.
        """
        request = self._table.requests.get(request_id)
        if request is None:
            return
        if request.sequences[0].state is not SequenceState.AWAITING_FETCH:
            raise UsageError(f"request {request_id} cannot be released: its prompt is not computed yet")
        self._table.finish_request(request)
        self._mirror_refs.end(request_id)

    def pin(self, pin_id: RequestId, names: Iterable[BlockHash]) -> list[NamedBlock]:
        """Keep the cached blocks of `names`, up to the first hash that is not cached, from eviction until
        `unpin(pin_id)`. Return these blocks, which transports may read."""
        pinned = self._reservations.pin(names)
        # Transports read at once, but the later stages of a pipeline may not have computed their layers yet.
        unfinished = self._steps.unfinished_blocks()
        complete = list(takewhile(lambda named: named.block not in unfinished, pinned))
        self._reservations.unpin([name for name, _ in pinned[len(complete) :]])
        pinned = complete
        self._pins[pin_id] = [name for name, _ in pinned]
        self._host.move()
        self.kv.mark(block for _, block in pinned)
        later = self._steps.num_in_stages if self.limits.num_stages > 1 else None
        self._mirror_refs.publish([CompletedBlocks(pin_id, pinned)], steps_after=later)
        return pinned

    def unpin(self, pin_id: RequestId) -> None:
        """Allow the eviction of the blocks that `pin` returned for this id."""
        self._reservations.unpin(self._pins.pop(pin_id, []))
        self._mirror_refs.end(pin_id)

    def begin_import(self, import_id: RequestId, names: Sequence[BlockHash]) -> list[NamedBlock]:
        """Allocate blocks for cached KV that another instance is about to send: one for each hash of `names` after the
        leading ones that are cached here.

        Return these hashes with their blocks, in order, as many as there is room for. The blocks stay allocated until
        `end_import`. If the list is empty, nothing was allocated and `end_import` is not needed.
        """
        if self._scheduler.admission.is_short_of_blocks:
            return []
        missing = self._imports.begin(import_id, names)
        self._host.move()
        self.kv.mark(block for _, block in missing)
        return missing

    def end_import(self, import_id: RequestId, received: Iterable[BlockHash]) -> None:
        """End an import. Blocks of the hashes in `received` hold verified KV and stay cached; its other blocks are
        freed.

        The caller ensures that no transport writes to the blocks any more.
        """
        self._mirror_refs.copy_to_device(self._imports.receive(import_id, received))
        self._mirror_refs.free_mirror(self._imports.end(import_id))

    @property
    def kernel_verdicts(self) -> list[KernelVerdict]:
        """Return the results of the comparison of kernels with their twins: which kernels were right on this device,
        which are used, and which captured graphs were wrong."""
        return [*self._kernels.verdicts, *self._executor.wrong_graphs]

    @property
    def last_batch(self) -> BatchSize:
        """Return how many sequences and tokens the step that was launched last computes. Any thread may read it."""
        return self._steps.last_batch

    def has_work(self) -> bool:
        """Return whether `step` has something to compute, or changes of the prefix cache to report."""
        return self._steps.has_work()

    def step(self) -> StepResult:
        """Compute one step for all requests, and return its tokens, completed blocks, failures and changes of the
        prefix cache.

        With `async_scheduling`, the next step is launched before this step's tokens are known. Failed requests are
        listed in the result; any exception means that the engine cannot be used any more.
        """
        return self._steps.step()

    def cached_block_hashes(self) -> list[BlockHash]:
        """Return the hashes of all blocks in the prefix cache, on the device only."""
        return self._pool.cached_block_hashes()

    def hot_block_hashes(self, limit: int) -> list[BlockHash]:
        """Return the hashes of at most `limit` cached blocks on the device, the blocks that most requests have shared
        first."""
        return self._pool.hot_block_hashes(limit)

    def host_block_hashes(self) -> list[BlockHash]:
        """Return the hashes of all blocks that are cached in host memory (the host tier)."""
        return self._host.tier.names() if self._host.tier is not None else []

    def stats(self) -> EngineStats:
        """Return the current load of the engine, such as free blocks and running sequences, and its counters since the
        start."""
        return engine_stats(self._table, self._scheduler, self._meter)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks that no request uses, on the device and in host memory. Return True if no cached
        block is left."""
        return self._pool.forget_cached()

    def start_profile(self, folder: Path) -> None:
        """Start a recording with torch's profiler; `stop_profile` writes it to `folder`, which is created. Raises
        `UsageError` if a recording runs already, and `ConfigError` if the folder cannot be made."""
        self._profiler.start(folder, self._device)

    def stop_profile(self) -> Path:
        """End the recording of `start_profile`, and return the path of the written trace. Raises `UsageError` if none
        runs."""
        return self._profiler.stop()

    def check_invariants(self) -> None:
        """Assert that the records of requests, KV blocks and transfers agree. Only tests call it."""
        self._table.check_invariants()
        self._mirror_refs.check_invariants()

    def close(self) -> None:
        """End the engine's threads and the processes of the other ranks, and free the memory of weights and KV
        cache."""
        self._profiler.close()
        self._steps.close()
        self._masking.close()
        self.adapters.close()
        self._executor.close()
        self._ranks.close()
        self._host.close()
        self.kv.close()

    def kill_ranks(self) -> None:
        """Kill the processes of all other ranks immediately, because this process is about to end after a hang. Any
        thread may call it."""
        self._ranks.kill()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _check(self, work: Work) -> None:
        """Raise `RequestError` if a request can never be served with this model and these limits. If it has a grammar,
        start to compile it."""
        check_work(work, self.limits, self.vocab_size, max_logprobs=self._max_logprobs)
        self.adapters.check(work)
        if work.sampling.grammar is not None:
            self._masking.prepare(work.sampling.grammar)
