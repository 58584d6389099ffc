"""A step that the device is computing, and whether the next may be launched before it has ended."""

from dataclasses import dataclass

from baton_serve.engine.core.outputs import FailedRequest, StepResult
from baton_serve.engine.core.request_table import RequestTable, SchedulerConfig
from baton_serve.engine.core.scheduler import RowFailure, ScheduledBatch, Scheduler
from baton_serve.engine.core.sequence import Request
from baton_serve.engine.device import DeviceEvent
from baton_serve.engine.execution.prompt_graphs import MAX_GRAPH_TOKENS
from baton_serve.engine.execution.runner import LaunchedForward, SampledTokens
from baton_serve.engine.kv.host_blocks import HostTierMemory
from baton_serve.engine.step.mirror_refs import MirrorRefs

IMAGES_MISSING = RowFailure(
    "blocks of its images are not here any more, and images are read by other instances: there was too little memory",
    "overloaded",
)


class RequestFailures:
    def __init__(self, table: RequestTable, scheduler: Scheduler, mirror_refs: MirrorRefs) -> None:
        self._table = table
        self._scheduler = scheduler
        self._mirror_refs = mirror_refs

    def fail(self, request: Request, why: RowFailure, result: StepResult) -> None:
        """What the step says of it is void."""
        request_id = request.work.request_id
        if all(failed.request_id != request_id for failed in result.failed):
            result.failed.append(FailedRequest(request_id, why.message, why.code))
        result.tokens = [output for output in result.tokens if output.request_id != request_id]
        result.held = [held for held in result.held if held != request_id]
        result.completed = [done for done in result.completed if done.request_id != request_id]
        self.end(request)

    def fail_requests_missing_images(self, result: StepResult) -> None:
        """Whoever the scheduler found to lack images. Tokens that the step brought for it stay: they are right."""
        while self._scheduler.requests_missing_images:
            request = self._scheduler.requests_missing_images.pop()
            result.failed.append(FailedRequest(request.work.request_id, IMAGES_MISSING.message, IMAGES_MISSING.code))
            self.end(request)

    def end(self, request: Request) -> None:
        if self._table.fail_request(request):
            self._mirror_refs.end(request.work.request_id)


class StepPlanner:
    def __init__(self, scheduler: Scheduler, table: RequestTable, host: HostTierMemory) -> None:
        self._scheduler = scheduler
        self._table = table
        self._host = host

    def plan(self, now: float) -> ScheduledBatch:
        """As soon as there is something to compute."""
        self._join_loaded()
        plan = self._scheduler.schedule(now)
        self._host.move()
        if not plan.chunks and self._table.loading:
            self._host.wait(self._table.loading[0].blocks)
            self._join_loaded()
            plan = self._scheduler.schedule(now)
            self._host.move()
        self._host.before(plan.blocks(self._table.limits.block_tokens))
        return plan

    def plan_ahead(self, now: float) -> ScheduledBatch | None:
        """As `Scheduler.schedule_ahead`."""
        plan = self._scheduler.schedule_ahead(now)
        self._host.move()
        if plan is not None:
            self._host.before(plan.blocks(self._table.limits.block_tokens))
        return plan

    def _join_loaded(self) -> None:
        for sequence in list(self._table.loading):
            if self._host.are_copied(sequence.blocks):
                self._table.finish_loading(sequence)


@dataclass(slots=True)
class InFlightStep:
    """`started_at`: when, unless it followed another one at once."""

    plan: ScheduledBatch
    started: LaunchedForward
    started_at: float | None
    ended_event: DeviceEvent | None = None
    """For the host tier."""
    computed: DeviceEvent | None = None
    """For whoever reads the blocks of `prefill` requests: without what was launched after it."""
    advanced: StepResult | None = None
    chosen: SampledTokens | None = None


def has_prefill_requests(plan: ScheduledBatch) -> bool:
    """Blocks of this step are for another instance."""
    return any(chunk.sequence.request.mode == "prefill" for chunk in plan.chunks)


def runs_longer_than_launch(plan: ScheduledBatch, limits: SchedulerConfig) -> bool:
    """The next step, whatever it is, is launched before this one ends: from a graph, or kernel by kernel during a long
    one. Otherwise this step's tokens, and blocks for another instance, would wait for the launch."""
    return (
        limits.max_num_batched_tokens <= MAX_GRAPH_TOKENS
        or sum(chunk.length for chunk in plan.chunks) > MAX_GRAPH_TOKENS
    )
