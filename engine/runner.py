"""Runs a plan: inputs, model, tokens. Decides nothing."""

import torch
from torch import Tensor

from contracts.messages import TokenLogprobs
from engine.forward import Forward
from engine.inputs import InputBuilder
from engine.kv_cache import KVCache
from engine.logprobs import token_logprobs
from engine.roster import Limits
from engine.sampler import Sampler
from engine.scheduler import Plan, Sampled


class Runner:
    def __init__(self, forward: Forward, cache: KVCache, limits: Limits) -> None:
        self._forward = forward
        self._layers = cache.layers()
        self._inputs = InputBuilder(limits, cache.device)
        self._sampler = Sampler(cache.device)

    @torch.inference_mode()
    def run(self, plan: Plan) -> Sampled:
        if not plan.chunks:
            return Sampled([])
        inputs = self._inputs.build(plan)
        logits = self._forward(inputs, self._layers)
        sampled = Sampled([])
        if plan.rows:
            chosen = logits if len(inputs.sample_at) == len(logits) else logits[inputs.sample_at]
            sampled = self._sampler.sample(chosen, plan.rows)
        for chunk, first in inputs.prompt_at.items():
            sampled.prompt_logprobs[chunk] = _prompt_logprobs(plan, chunk, logits[first:])
        return sampled

    def forget(self) -> None:
        """The next plans come from another roster."""
        self._inputs.forget()


def _prompt_logprobs(plan: Plan, number: int, logits: Tensor) -> list[TokenLogprobs]:
    """Of the prompt's token after each row of the chunk; the prompt's last row has none."""
    chunk = plan.chunks[number]
    work = chunk.sequence.request.work
    following = work.token_ids[chunk.start + 1 : min(chunk.start + chunk.length + 1, work.num_prompt_tokens)]
    if not following:
        return []
    return token_logprobs(logits[: len(following)], following, work.sampling.prompt_logprobs or 0)
