"""Runs a plan: inputs, model, tokens; from a captured graph where one fits. Decides nothing else."""

import logging

import torch
from torch import Tensor

from contracts.messages import TokenLogprobs
from engine.block_tables import BlockTables
from engine.forward import Forward
from engine.graphs import Capture, DecodeGraphs
from engine.inputs import InputBuilder
from engine.kv_cache import KVCache
from engine.logprobs import token_logprobs
from engine.roster import Limits
from engine.sampler import Sampler
from engine.scheduler import Plan, Sampled

logger = logging.getLogger(__name__)


class Runner:
    def __init__(self, forward: Forward, cache: KVCache, limits: Limits) -> None:
        self._forward = forward
        self._layers = cache.layers()
        self._tables = BlockTables(limits, cache.device)
        self._inputs = InputBuilder(self._tables, limits.block_tokens, cache.device)
        self._graphs = DecodeGraphs(forward, self._layers, self._tables, limits)
        self._sampler = Sampler(cache.device)

    def capture_graphs(self, capture: Capture) -> None:
        """From now on decode steps are replayed. If that cannot be, they are computed as before."""
        try:
            self._graphs.capture(capture)
        except RuntimeError as error:
            logger.warning("decode steps run without captured graphs, slower at small batches: %s", error)

    @torch.inference_mode()
    def run(self, plan: Plan) -> Sampled:
        if not plan.chunks:
            return Sampled([])
        if self._graphs.fits(plan):
            result = self._graphs.replay(plan)
            return self._sampler.sample(result.logits, plan.rows, largest=result.greedy)
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
        self._tables.forget()


def _prompt_logprobs(plan: Plan, number: int, logits: Tensor) -> list[TokenLogprobs]:
    """Of the prompt's token after each row of the chunk; the prompt's last row has none."""
    chunk = plan.chunks[number]
    work = chunk.sequence.request.work
    following = work.token_ids[chunk.start + 1 : min(chunk.start + chunk.length + 1, work.num_prompt_tokens)]
    if not following:
        return []
    return token_logprobs(logits[: len(following)], following, work.sampling.prompt_logprobs or 0)
