"""Runs a plan: inputs, model, tokens. Owns the model and the KV cache's tensor, decides nothing."""

from typing import cast

import torch
from torch import Tensor

from contracts.messages import TokenLogprobs
from engine.attention import PagedAttention
from engine.inputs import InputBuilder, StepInputs
from engine.kernels import AttentionBackend
from engine.kv_cache import KVCache
from engine.logprobs import token_logprobs
from engine.model import LoadedModel
from engine.roster import Limits
from engine.sampler import Sampler
from engine.scheduler import Plan, Sampled


class Runner:
    def __init__(self, model: LoadedModel, cache: KVCache, backend: AttentionBackend, limits: Limits) -> None:
        self._model = model
        self._backend = backend
        self._layers = cache.layers()
        self._inputs = InputBuilder(limits, cache.device)
        self._sampler = Sampler(cache.device)

    @torch.inference_mode()
    def run(self, plan: Plan) -> Sampled:
        if not plan.chunks:
            return Sampled([])
        inputs = self._inputs.build(plan)
        logits = self._forward(inputs)
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

    def _forward(self, inputs: StepInputs) -> Tensor:
        """Logits [num_logits, vocab_size]."""
        context = PagedAttention(self._backend, self._layers, self._model.specs, inputs.meta)
        output = self._model.module(
            input_ids=inputs.input_ids,
            position_ids=inputs.position_ids,
            logits_to_keep=inputs.logit_rows,
            use_cache=False,
            baton=context,
        )
        return cast(Tensor, output.logits)[0]


def _prompt_logprobs(plan: Plan, number: int, logits: Tensor) -> list[TokenLogprobs]:
    """Of the prompt's token after each row of the chunk; the prompt's last row has none."""
    chunk = plan.chunks[number]
    work = chunk.sequence.request.work
    following = work.token_ids[chunk.start + 1 : min(chunk.start + chunk.length + 1, work.num_prompt_tokens)]
    if not following:
        return []
    return token_logprobs(logits[: len(following)], following, work.sampling.prompt_logprobs or 0)
