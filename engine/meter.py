"""How fast the engine is, from its own steps. Reads no clock: durations are passed in."""

from engine.scheduler import Plan

WEIGHT = 0.1
"""Of the newest step in the moving averages."""


class Meter:
    def __init__(self) -> None:
        self.prefill_tokens_per_s = 0.0
        self.decode_step_s = 0.0
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.steps = 0

    def record(self, plan: Plan, seconds: float, num_generated: int) -> None:
        """`num_generated`: tokens that came of it."""
        if not plan.chunks:
            return
        prompt = sum(chunk.length for chunk in plan.chunks if chunk.length > 1)
        self.steps += 1
        self.prompt_tokens += prompt
        self.generated_tokens += num_generated
        if prompt == 0:
            self.decode_step_s = _blend(self.decode_step_s, seconds)
        elif prompt >= 32:
            self.prefill_tokens_per_s = _blend(self.prefill_tokens_per_s, prompt / max(seconds, 1e-9))


def _blend(old: float, new: float) -> float:
    return new if old == 0.0 else (1 - WEIGHT) * old + WEIGHT * new
