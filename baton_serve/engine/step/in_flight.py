"""A step that the device is computing, and whether the next may be launched before it has ended."""

from dataclasses import dataclass

from baton_serve.engine.core.outputs import StepResult
from baton_serve.engine.core.request_table import SchedulerConfig
from baton_serve.engine.core.scheduler import ScheduledBatch
from baton_serve.engine.device import DeviceEvent
from baton_serve.engine.execution.prompt_graphs import MAX_GRAPH_TOKENS
from baton_serve.engine.execution.runner import LaunchedForward, SampledTokens


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
