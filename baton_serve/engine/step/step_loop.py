"""Decides whether the next step is launched before the last one ends (async scheduling), applies results, and ends
steps without memory (OOM).

On accelerators the next step is launched before the tokens of the current one are known.
"""

import logging
import time
from collections import deque

import torch

from baton_serve.engine.core.outputs import BatchSize, FailedRequest, StepResult
from baton_serve.engine.core.request_table import RequestTable
from baton_serve.engine.core.scheduler import ScheduledBatch, Scheduler
from baton_serve.engine.core.sequence import SequenceState
from baton_serve.engine.execution.executor import AfterLayer
from baton_serve.engine.execution.runner import ModelRunner
from baton_serve.engine.step.cache_copies import CacheMemory
from baton_serve.engine.step.engine_stats import StepMeter
from baton_serve.engine.step.in_flight import (
    InFlightStep,
    RequestFailures,
    StepPlanner,
    has_prefill_requests,
    runs_longer_than_launch,
)
from baton_serve.engine.step.layer_groups import LayerGroupReporter

logger = logging.getLogger(__name__)


class StepLoop:
    """Launches the steps of one engine and collects their results. The engine owns it, and calls it in its own
    thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        table: RequestTable,
        runner: ModelRunner,
        memory: CacheMemory,
        meter: StepMeter,
        *,
        is_async: bool,
    ) -> None:
        """With `is_async`, a step is launched before the tokens of the previous step are known. With pipeline
        parallelism this argument makes no difference: the stages always compute several steps at once."""
        self._scheduler = scheduler
        self._table = table
        self._runner = runner
        self._memory = memory
        self._meter = meter
        self._is_async = is_async
        self._planner = StepPlanner(scheduler, table, memory.host)
        self._failures = RequestFailures(table, scheduler, memory.mirror_refs)
        self.last_batch = BatchSize()
        """Size of the last batch that was launched."""
        self.ahead: InFlightStep | None = None
        """The step that was launched before the tokens of the previous one were known."""
        self._in_stages: deque[InFlightStep] = deque()
        """The steps that the stages of a pipeline compute, the oldest first."""
        self.layer_groups: LayerGroupReporter | None = None
        """Reports the last blocks of `prefill` requests by layer groups, after `on_layer_groups`. Closed by `close`."""
        self._last_finish = 0.0

    def close(self) -> None:
        """End the thread that reports computed layer groups, if there is one."""
        if self.layer_groups is not None:
            self.layer_groups.close()

    def has_work(self) -> bool:
        """Return whether `step` has something to compute, or changes of the prefix cache to report."""
        return (
            self.ahead is not None or bool(self._in_stages) or self._table.pool.has_events or self._scheduler.has_work()
        )

    def step(self) -> StepResult:
        """Finish one step for all requests and return its results, as `Engine.step` describes it."""
        result = StepResult()
        if self._table.limits.num_stages > 1:
            self._step_in_stages(result)
        elif (current := self.ahead or self._begin(result)) is not None:
            self.ahead = None
            # Launch the next step first: the device must have work while the host processes the tokens of this one.
            following = self._begin_ahead(current.plan)
            self._finish(current, result, steps_after=0 if following is None else 1)
            if following is not None:
                # Its tokens are chosen only now, since penalties and grammars depend on the tokens that `_finish` has
                # added.
                self.ahead = self._choose(following, result)
        self._failures.fail_requests_missing_images(result)
        self._failures.fail_requests_without_adapter(result)
        result.events = self._table.pool.take_events()
        return result

    def unfinished_blocks(self) -> set[int]:
        """Return the KV blocks that stages of a pipeline may still be writing although the prefix cache has their
        hashes already."""
        size = self._table.limits.block_tokens
        blocks = {
            block
            for step in self._in_stages
            for chunk in step.plan.chunks
            for block in chunk.sequence.blocks[chunk.start // size : -(-(chunk.start + chunk.length) // size)]
        }
        return blocks.union(*(step.source_blocks for step in self._in_stages))

    @property
    def num_in_stages(self) -> int:
        """Return the number of steps that the stages of a pipeline compute."""
        return len(self._in_stages)

    def _step_in_stages(self, result: StepResult) -> None:
        """With pipeline parallelism: launch steps until each stage has one or nothing is left to compute. Then wait for
        the oldest step, and add its results to `result`."""
        while len(self._in_stages) < self._num_before_waiting() and self._begin_in_stages():
            pass
        if self._in_stages:
            count = self._num_before_waiting()
            current = self._choose(self._in_stages[0], result)
            # The first stage must have work while the host processes the tokens of this step. Launched before `_choose`
            # it would delay them, since the device computes it first.
            if len(self._in_stages) <= count:
                self._begin_in_stages()
            self._in_stages.popleft()
            if current is not None:
                self._finish(current, result, steps_after=len(self._in_stages))

    def _num_before_waiting(self) -> int:
        """Return how many steps the stages of a pipeline have before the first stage waits for the oldest one: one for
        each stage, and one more if no token is delayed by it.

        With that one more, a stage whose step is short goes on with the next, although that of another stage is long.
        Chunks of one prompt take longer the more tokens are before them.
        """
        stages = self._table.limits.num_stages
        if not self._in_stages or self._in_stages[0].plan.rows:
            return stages
        is_decoding = any(sequence.num_generated for sequence in self._table.running)
        return stages if is_decoding else stages + 1

    def _begin_in_stages(self) -> bool:
        """With pipeline parallelism: schedule one more step and launch it on the first stage. Return False if there is
        nothing to compute now."""
        now, is_first = time.monotonic(), not self._in_stages
        plan = self._planner.plan(now) if is_first else self._planner.plan_ahead(now)
        self._memory.copy_states(self._table)
        if plan is None or not plan.chunks:
            return False
        self.last_batch = plan.size()
        # The tokens of the steps before are not known, on which grammars depend: `choose` comes after them.
        launched = InFlightStep(plan, self._runner.start(plan, ahead=True), now if is_first else None)
        # Before `advance`, after which sources count as encoded.
        encoded = [chunk.sequence.source_blocks for chunk in plan.chunks if chunk.sequence.must_encode]
        launched.source_blocks = frozenset().union(*encoded)
        launched.advanced = self._scheduler.advance(plan)
        # Before the next step: it may compute the next chunk of the same prompt, which changes the states.
        self._memory.copy_states(self._table)
        self._in_stages.append(launched)
        return True

    def _begin(self, result: StepResult) -> InFlightStep | None:
        """Schedule a step, launch its forward pass and sample its tokens on the device, without waiting.

        If the device ran out of memory, add the failed requests to `result` and return None.
        """
        now = time.monotonic()
        plan = self._planner.plan(now)
        self.last_batch = plan.size()
        self._memory.copy_states(self._table)
        try:
            launched = InFlightStep(plan, self._runner.start(plan, after_layer=self._layer_group_callback(plan)), now)
        except torch.OutOfMemoryError:
            self._give_up(plan, result)
            return None
        launched.advanced = self._scheduler.advance(plan)
        self._memory.copy_states(self._table)
        return self._choose(launched, result)

    def _begin_ahead(self, plan: ScheduledBatch) -> InFlightStep | None:
        """Launch the forward pass of the step after `plan`, before the tokens of `plan` are known; they are sampled
        later.

        Return None if this is not possible now, or if it would delay blocks that another instance waits for.
        """
        if not self._is_async:
            return None
        kv = self._memory.kv
        # Without a stream of their own, copies of finished blocks to the mirror would wait for a step launched ahead.
        if has_prefill_requests(plan) and (
            (kv.is_mirrored and not kv.order.has_stream) or not runs_longer_than_launch(plan, self._table.limits)
        ):
            return None
        following = self._planner.plan_ahead(time.monotonic())
        if following is None:
            return None
        self.last_batch = following.size()
        self._memory.copy_states(self._table)
        try:
            started = self._runner.start(following, ahead=True, after_layer=self._layer_group_callback(following))
            launched = InFlightStep(following, started, None)
        except torch.OutOfMemoryError:
            # Part of it may be running, in blocks that the step before frees. It is scheduled again when no other step
            # uses memory.
            kv.order.end_step()
            return None
        launched.advanced = self._scheduler.advance(following)
        self._memory.copy_states(self._table)
        return launched

    def _layer_group_callback(self, plan: ScheduledBatch) -> AfterLayer | None:
        """Return the function that the forward pass of this step calls after each layer, to report computed layer
        groups; None if there is nothing to report."""
        return (
            self.layer_groups.follow(self._scheduler.last_chunk_blocks(plan)) if self.layer_groups is not None else None
        )

    def _choose(self, launched: InFlightStep, result: StepResult) -> InFlightStep | None:
        """Sample the tokens of the step `launched` on the device, without waiting for them. Return the same step.

        If the device ran out of memory, add the failed requests to `result` and return None.
        """
        try:
            launched.chosen = self._runner.choose(launched.started)
            launched.computed = self._memory.kv.reached() if has_prefill_requests(launched.plan) else None
        except torch.OutOfMemoryError:
            self._give_up(launched.plan, result)
            self._scheduler.abandon(launched.plan)
            return None
        return launched

    def _finish(self, launched: InFlightStep, result: StepResult, *, steps_after: int) -> None:
        """Wait for the sampled tokens of the step `launched`, append them to their sequences, and add tokens, completed
        blocks and failures to `result`. `steps_after` is how many steps have been launched after it."""
        assert launched.chosen is not None
        sampled = self._runner.wait(launched.chosen)
        self._memory.host.on_step_end(steps_after=steps_after)
        now = time.monotonic()
        started = self._last_finish if launched.started_at is None else launched.started_at
        self._last_finish = now
        rows = launched.plan.rows  # sequences may have ended since the step was launched
        failed = [
            (rows[row], why)
            for row, why in sampled.failed.items()
            if rows[row].sequence.state is not SequenceState.FINISHED
        ]
        # Find the failed rows before `apply`, which removes finished sequences from the table.
        applied = self._scheduler.apply(launched.plan, sampled, now, advanced=launched.advanced)
        result.tokens, result.first = applied.tokens, applied.first
        result.completed, result.held = applied.completed, applied.held
        for row, why in failed:
            self._failures.fail(row.sequence.request, why, result)
        self._memory.copy_forked_blocks(self._table)
        # Transports wait for the event of this step, not for that of the step that was launched after it.
        done = (block for completed in result.completed for _, block in completed.blocks)
        self._memory.kv.mark(done, after=launched.computed)
        self._memory.mirror_refs.publish(result.completed, steps_after=steps_after)
        self._meter.record(launched.plan, now - started, len(result.tokens))

    def _give_up(self, plan: ScheduledBatch, result: StepResult) -> None:
        """End all requests of a step for which the device had too little memory, and add them to `result` as failed;
        other requests go on.

        Blocks of `prefill` requests that were reported already stay until `cancel`.
        """
        # Part of the step may still be running, in blocks that are free from now on. Later steps come after it in the
        # device's order. Transports wait for the marks of `reserve` and `begin_import`, and the host tier for the end
        # of what was queued.
        logger.exception("a step of %d sequences ran out of device memory", len(plan.chunks))
        self._memory.kv.order.end_step()
        self._memory.host.on_step_end(steps_after=0)
        for request in {id(c.sequence.request): c.sequence.request for c in plan.chunks}.values():
            self._failures.end(request)
            message = "the device ran out of memory in a step; lower gpu_memory_utilization or max_num_batched_tokens"
            result.failed.append(FailedRequest(request.work.request_id, message))
