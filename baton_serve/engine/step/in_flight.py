"""A step that the device is computing, and whether the next may be launched before it has ended."""

from dataclasses import dataclass

from baton_serve.engine.core.outputs import StepResult
from baton_serve.engine.core.request_table import Limits
from baton_serve.engine.core.scheduler import Plan
from baton_serve.engine.device import DeviceEvent
from baton_serve.engine.execution.prompt_graphs import LARGEST
from baton_serve.engine.execution.runner import Chosen, Started


@dataclass(slots=True)
class Launched:
    """`begun`: when, unless it followed another one at once."""

    plan: Plan
    started: Started
    begun: float | None
    over: DeviceEvent | None = None
    """For the host tier."""
    computed: DeviceEvent | None = None
    """For whoever reads the blocks of `prefill` requests: without what was launched after it."""
    advanced: StepResult | None = None
    chosen: Chosen | None = None


def hands_on(plan: Plan) -> bool:
    """Blocks of this step are for another instance."""
    return any(chunk.sequence.request.mode == "prefill" for chunk in plan.chunks)


def outlasts_a_launch(plan: Plan, limits: Limits) -> bool:
    """The next step, whatever it is, is launched before this one ends: from a graph, or kernel by kernel during a long
    one. Otherwise this step's tokens, and blocks for another instance, would wait for the launch."""
    return limits.max_num_batched_tokens <= LARGEST or sum(chunk.length for chunk in plan.chunks) > LARGEST
