"""Asks the scheduler for a step, starts the copies that it needs, and ends requests that failed in it; `step_loop.py`
decides when.
"""

from dataclasses import dataclass

from baton_serve.engine.core.outputs import FailedRequest, StepResult
from baton_serve.engine.core.request_table import RequestTable, SchedulerConfig
from baton_serve.engine.core.scheduler import RowFailure, ScheduledBatch, Scheduler
from baton_serve.engine.core.sequence import Request, Sequence, SequenceState
from baton_serve.engine.device import DeviceEvent
from baton_serve.engine.execution.prompt_graphs import MAX_GRAPH_TOKENS
from baton_serve.engine.execution.runner import LaunchedForward, SampledTokens
from baton_serve.engine.kv.host_blocks import HostTierMemory
from baton_serve.engine.step.mirror_refs import MirrorRefs

IMAGES_MISSING = RowFailure(
    "KV blocks of the prompt's images or audio were evicted, and this instance cannot compute them again without their"
    " encoder; retry, or give it more KV cache memory",
    "overloaded",
)


class RequestFailures:
    """Ends requests that failed in a step, and removes from the step's result what it has reported about them."""

    def __init__(self, table: RequestTable, scheduler: Scheduler, mirror_refs: MirrorRefs) -> None:
        self._table = table
        self._scheduler = scheduler
        self._mirror_refs = mirror_refs

    def fail(self, request: Request, why: RowFailure, result: StepResult) -> None:
        """End a request because of `why`, and add it to `result.failed` once. Its tokens and blocks of this step are
        removed from `result`."""
        request_id = request.work.request_id
        if all(failed.request_id != request_id for failed in result.failed):
            result.failed.append(FailedRequest(request_id, why.message, why.code))
        result.tokens = [output for output in result.tokens if output.request_id != request_id]
        result.held = [held for held in result.held if held != request_id]
        result.completed = [done for done in result.completed if done.request_id != request_id]
        self.end(request)

    def fail_requests_missing_images(self, result: StepResult) -> None:
        """End the requests whose images the scheduler needed and did not have, and add them to `result.failed`.

        Tokens that this step returned for them stay in `result`: they were computed correctly.
        """
        while self._scheduler.admission.requests_missing_images:
            request = self._scheduler.admission.requests_missing_images.pop()
            result.failed.append(FailedRequest(request.work.request_id, IMAGES_MISSING.message, IMAGES_MISSING.code))
            self.end(request)

    def fail_requests_without_adapter(self, result: StepResult) -> None:
        """End the requests whose LoRA adapter could not be read from its files again, and add them to
        `result.failed`."""
        adapters = self._scheduler.adapters
        for fingerprint, why in (adapters.take_failures() if adapters is not None else {}).items():
            for request in [one for one in self._table.requests.values() if one.work.lora == fingerprint]:
                # A transport writes into blocks that await KV. Such a request tries again, and fails, when it runs.
                if all(sequence.state is not SequenceState.AWAITING_KV for sequence in request.sequences):
                    result.failed.append(FailedRequest(request.work.request_id, why, "invalid"))
                    self.end(request)

    def end(self, request: Request) -> None:
        """End a request that has failed, and free its blocks.

        A `prefill` request keeps its blocks, on the devices and in shared host memory, because a transport may be
        reading them.
        """
        if self._table.fail_request(request):
            self._mirror_refs.end(request.work.request_id)


class StepPlanner:
    """Asks the scheduler for the next step, and starts the copies between device and host memory that the step
    needs."""

    def __init__(self, scheduler: Scheduler, table: RequestTable, host: HostTierMemory) -> None:
        self._scheduler = scheduler
        self._table = table
        self._host = host

    def plan(self, now: float) -> ScheduledBatch:
        """Schedule a step and start its copies. If it would be empty while blocks are being copied from the host tier,
        or while the weights of a LoRA adapter are read, wait for that and schedule again."""
        self._join_loaded()
        plan = self._scheduler.schedule(now)
        self._host.move()
        if not plan.chunks and self._table.loading:
            self._host.wait(_awaited(self._table.loading[0]))
            self._join_loaded()
            plan = self._scheduler.schedule(now)
            self._host.move()
        adapters = self._scheduler.adapters
        if not plan.chunks and adapters is not None and adapters.wait():
            plan = self._scheduler.schedule(now)
            self._host.move()
        # The order matters: `move` starts copies into blocks of this step, and `before` makes the step wait for them.
        self._host.before(plan.blocks(self._table.limits.block_tokens))
        return plan

    def plan_ahead(self, now: float) -> ScheduledBatch | None:
        """Schedule a step after one whose tokens are not known yet, and start its copies. Return None if
        `Scheduler.schedule_ahead` finds nothing."""
        plan = self._scheduler.schedule_ahead(now)
        self._host.move()
        if plan is not None:
            self._host.before(plan.blocks(self._table.limits.block_tokens))
        return plan

    def _join_loaded(self) -> None:
        """Put those sequences into the batch whose blocks have been copied from the host tier to the device."""
        for sequence in list(self._table.loading):
            if self._host.are_copied(_awaited(sequence)):
                self._table.finish_loading(sequence)


def _awaited(sequence: Sequence) -> list[int]:
    """Return all blocks of a sequence that must be on the device before it can run."""
    return sequence.kv_blocks + sequence.checkpoint_blocks + sequence.source_blocks


@dataclass(slots=True)
class InFlightStep:
    """A step that was launched and whose tokens the engine has not processed yet.

    `started_at` is when the device began it, in seconds of the monotonic clock; None if it followed another step
    immediately.
    """

    plan: ScheduledBatch
    started: LaunchedForward
    started_at: float | None
    source_blocks: frozenset[int] = frozenset()
    """Blocks that this step fills with cross-attention KV."""
    computed: DeviceEvent | None = None
    """Records the computation of this step's KV blocks, for transports, without what was launched after it."""
    advanced: StepResult | None = None
    chosen: SampledTokens | None = None


def has_prefill_requests(plan: ScheduledBatch) -> bool:
    """Return whether the step computes prompts for decode workers (requests of mode `prefill`)."""
    return any(chunk.sequence.request.mode == "prefill" for chunk in plan.chunks)


def runs_longer_than_launch(plan: ScheduledBatch, limits: SchedulerConfig) -> bool:
    """Return whether the device needs longer for this step than the host needs to launch the next one. That is so if
    this step is large, or if all steps of this engine are small enough to be replayed as graphs, which are launched
    fast. Otherwise this step's tokens and blocks would wait for the launch."""
    return (
        limits.max_num_batched_tokens <= MAX_GRAPH_TOKENS
        or sum(chunk.length for chunk in plan.chunks) > MAX_GRAPH_TOKENS
    )
