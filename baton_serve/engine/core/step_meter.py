"""What the engine has done, and how fast it is, from its own steps. Reads no clock: durations are passed in."""

from baton_serve.engine.core.scheduler import Plan
from baton_serve.engine.core.step_time_model import Pace


class Meter:
    def __init__(self, pace: Pace | None = None) -> None:
        self.pace = pace or Pace()
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.steps = 0

    def record(self, plan: Plan, seconds: float, num_generated: int) -> None:
        """`num_generated`: tokens that came of it."""
        if not plan.chunks:
            return
        prompts = [chunk.length for chunk in plan.chunks if chunk.length > 1]
        num_writers, num_prompt_tokens = len(plan.chunks) - len(prompts), sum(prompts)
        self.steps += 1
        self.prompt_tokens += num_prompt_tokens
        self.generated_tokens += num_generated
        if not prompts:
            self.pace.decoded(seconds)
            return
        self.pace.computed(num_prompt_tokens, seconds)
        if num_writers:
            self.pace.mixed(num_prompt_tokens, num_writers, seconds)
