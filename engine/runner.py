"""Runs a plan: inputs, model, tokens; from a captured graph where one fits. Decides nothing else."""

import logging
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor

from contracts.messages import TokenLogprobs
from engine.block_tables import BlockTables
from engine.constraints import Constraints
from engine.forward import Forward
from engine.graphs import Capture, DecodeGraphs
from engine.inputs import InputBuilder, StepInputs
from engine.kv_cache import KVCache
from engine.logprobs import token_logprobs
from engine.masks import Masking
from engine.roster import Limits
from engine.sampler import Sampler
from engine.scheduler import Plan, Sampled

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Started:
    """A step that the device is computing. `greedy`: the largest logits' tokens, where a graph found them.
    `constraints`: what its tokens must obey, being built meanwhile."""

    plan: Plan
    logits: Tensor | None
    greedy: Tensor | None
    inputs: StepInputs | None
    constraints: "Future[Constraints] | None" = None


class Runner:
    """Its thread and memory are free after `close`."""

    def __init__(self, forward: Forward, cache: KVCache, limits: Limits, masking: Masking) -> None:
        self._forward = forward
        self._layers = cache.layers()
        self._tables = BlockTables(limits, cache.device)
        self._inputs = InputBuilder(self._tables, limits.block_tokens, cache.device)
        self._graphs = DecodeGraphs(forward, self._layers, self._tables, limits)
        self._sampler = Sampler(cache.device)
        self._masking = masking

    def capture_graphs(self, capture: Capture) -> None:
        """From now on decode steps are replayed. If that cannot be, they are computed as before."""
        try:
            self._graphs.capture(capture)
        except RuntimeError as error:
            logger.warning("decode steps run without captured graphs, slower at small batches: %s", error)

    def run(self, plan: Plan) -> Sampled:
        return self.finish(self.start(plan))

    @torch.inference_mode()
    def start(self, plan: Plan) -> Started:
        """Gives the device its work. What the host does before `finish` costs no time."""
        if not plan.chunks:
            return Started(plan, None, None, None)
        constraints = self._masking.begin(plan.rows)
        if self._graphs.fits(plan):
            result = self._graphs.replay(plan)
            return Started(plan, result.logits, result.greedy, None, constraints)
        inputs = self._inputs.build(plan)
        return Started(plan, self._forward(inputs, self._layers), None, inputs, constraints)

    @torch.inference_mode()
    def finish(self, started: Started) -> Sampled:
        """Chooses the tokens: the one place where the host waits for the device."""
        plan, logits, inputs = started.plan, started.logits, started.inputs
        sampled = Sampled([])
        if logits is None:
            return sampled
        if plan.rows:
            is_whole = inputs is None or len(inputs.sample_at) == len(logits)
            chosen = logits if inputs is None or is_whole else logits[inputs.sample_at]
            found = started.constraints.result() if started.constraints is not None else None
            masks = self._masking.send(found) if found is not None else None
            sampled = self._sampler.sample(chosen, plan.rows, largest=started.greedy, masks=masks)
            sampled.failed = found.failed if found is not None else {}
        for chunk, first in inputs.prompt_at.items() if inputs is not None else ():
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
