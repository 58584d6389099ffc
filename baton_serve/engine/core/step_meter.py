"""What the engine has done, and how fast it is, from its own steps. Reads no clock: durations are passed in."""

from baton_serve.engine.core.scheduler import ScheduledBatch
from baton_serve.engine.core.step_time_model import StepTimeModel


class StepMeter:
    def __init__(self, step_time_model: StepTimeModel | None = None) -> None:
        self.step_time_model = step_time_model or StepTimeModel()
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.steps = 0

    def record(self, plan: ScheduledBatch, seconds: float, num_generated: int) -> None:
        """`num_generated`: tokens that came of it."""
        if not plan.chunks:
            return
        prompts = [chunk.length for chunk in plan.chunks if chunk.length > 1]
        num_decoding, num_prompt_tokens = len(plan.chunks) - len(prompts), sum(prompts)
        self.steps += 1
        self.prompt_tokens += num_prompt_tokens
        self.generated_tokens += num_generated
        if not prompts:
            self.step_time_model.decoded(seconds)
            return
        self.step_time_model.computed(num_prompt_tokens, seconds)
        if num_decoding:
            self.step_time_model.mixed(num_prompt_tokens, num_decoding, seconds)
