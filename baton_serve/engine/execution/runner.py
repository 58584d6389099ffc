"""Runs a plan: inputs, model, tokens; from a captured graph where one fits. Decides nothing else."""

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from baton_serve.contracts.messages import TokenLogprobs
from baton_serve.engine import device as devices
from baton_serve.engine.core.request_table import SchedulerConfig
from baton_serve.engine.core.scheduler import ModelRunnerOutput, RowFailure, ScheduledBatch
from baton_serve.engine.core.sequence import Sequence
from baton_serve.engine.execution.decode_graphs import build_inputs, fits_decode_graph
from baton_serve.engine.execution.executor import AfterLayer, Executor
from baton_serve.engine.model.batch_inputs import BatchInputs, ImageRows, InputBuilder
from baton_serve.engine.model.block_tables import BlockTables
from baton_serve.engine.sample.constraints import Constraints
from baton_serve.engine.sample.sampler import Sampler, SamplerOutput, all_plain_greedy, token_logprobs
from baton_serve.engine.sample.token_masks import TokenMasker

NAN_LOGITS = RowFailure(
    "the model's logits are not numbers (NaN): its weights are broken, or its dtype too small for its activations",
    "internal",
)


@dataclass(frozen=True, slots=True)
class LaunchedForward:
    """A step that the device is computing: its logits, or the tokens of the largest ones, which a graph finds; then its
    logits are to be asked for. `constraints`: what its tokens must obey, being built meanwhile."""

    plan: ScheduledBatch
    logits: Tensor | None
    greedy: Tensor | None
    inputs: BatchInputs | None
    constraints: "Future[Constraints] | None" = None
    vocab_size: int = 0


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """A step whose tokens are on their way to the host."""

    host_copy: devices.HostCopy | None
    sampled: ModelRunnerOutput
    """All of the answer that was waited for already."""
    vocab_size: int = 0


class ImageRowsSource(Protocol):
    """`engine.model.vision.prompt.PromptImages`."""

    def rows(self, plan: ScheduledBatch) -> list[ImageRows]: ...


class ModelRunner:
    """A step is `start`, `choose`, `wait`. The next step may start before this one was waited for, but not before its
    tokens were chosen; it must not be chosen for before what this one brought is in the sequences.

    Its thread and memory are free after `close`."""

    def __init__(
        self,
        executor: Executor,
        limits: SchedulerConfig,
        device: torch.device,
        masking: TokenMasker,
        *,
        keeps_last_tokens: bool = True,
        images: ImageRowsSource | None = None,
    ) -> None:
        """`keeps_last_tokens`: steps may start before the host knows the tokens of the one before. `images`: of the
        prompts that are read, where there is a vision tower."""
        self._images = images
        self._executor = executor
        self._keeps_tokens = keeps_last_tokens
        self._limits = limits
        self._tables = BlockTables(limits)
        self._inputs = InputBuilder(self._tables, limits.block_tokens)
        self._sampler = Sampler(device)
        self._masking = masking
        self._host_copies = devices.HostCopyBuffers(device)
        self._no_tokens = torch.zeros(0, dtype=torch.int64, device=device)
        self._device = device

    def run(self, plan: ScheduledBatch) -> ModelRunnerOutput:
        return self.wait(self.choose(self.start(plan)))

    @torch.inference_mode()
    def start(
        self, plan: ScheduledBatch, *, ahead: bool = False, after_layer: AfterLayer | None = None
    ) -> LaunchedForward:
        """Gives the device its work up to the logits. `ahead`: the step before it has not been waited for."""
        if not plan.chunks:
            return LaunchedForward(plan, None, None, None)
        # What tokens may follow depends on those before them.
        constraints = None if ahead else self._masking.begin(plan.rows)
        images = [] if self._images is None else self._images.rows(plan)
        if self._executor.has_graphs and not images and fits_decode_graph(plan):
            result = self._executor.replay(build_inputs(plan, self._tables, self._limits))
            return LaunchedForward(plan, None, result.greedy, None, constraints, result.vocab_size)
        inputs = self._inputs.build_inputs(plan, images)
        logits = self._executor.compute(inputs.arrays, after_layer)
        return LaunchedForward(plan, logits, None, inputs, constraints, logits.shape[1])

    @torch.inference_mode()
    def choose(self, started: LaunchedForward) -> SampledTokens:
        """Has the device choose the tokens."""
        plan, logits, inputs = started.plan, started.logits, started.inputs
        sampled = ModelRunnerOutput([])
        if logits is None and started.greedy is None:
            return SampledTokens(None, sampled)
        if not plan.rows:  # waited for all the same: prompts that come meanwhile may be computed before the next chunk
            host_copy = self._host_copies.start(self._no_tokens)
        else:
            constraints = started.constraints or self._masking.begin(plan.rows)
            found = constraints.result() if constraints is not None else None
            masks = self._masking.send(found) if found is not None else None
            if started.greedy is not None and masks is None and all_plain_greedy(plan.rows):
                choice = SamplerOutput(started.greedy)
            else:
                choice = self._sampler.choose(self._rows(started), plan.rows, masks=masks)
            sampled.logprobs = choice.logprobs
            if found is not None:
                sampled.failed = {row: RowFailure(message, "invalid") for row, message in found.failed.items()}
            host_copy = self._host_copies.start(choice.tokens)
            self._keep(plan, choice.tokens, started)
        for chunk, first in inputs.prompt_at.items() if inputs is not None else ():
            assert logits is not None
            sampled.prompt_logprobs[chunk] = _prompt_logprobs(plan, chunk, logits[first:])
        return SampledTokens(host_copy, sampled, started.vocab_size)

    def wait(self, chosen: SampledTokens) -> ModelRunnerOutput:
        """The one place where the host waits for the device."""
        if chosen.host_copy is not None:
            chosen.sampled.token_ids = token_ids = chosen.host_copy.wait()
            if token_ids and max(token_ids) >= chosen.vocab_size:
                broken = [row for row, token in enumerate(token_ids) if token >= chosen.vocab_size]
                chosen.sampled.failed |= dict.fromkeys(broken, NAN_LOGITS)
        return chosen.sampled

    def forget(self) -> None:
        """The next plans come from another roster."""
        self._tables.forget()

    def _rows(self, started: LaunchedForward) -> Tensor:
        """The logits after which tokens are chosen, in the order of the plan's rows."""
        logits, inputs = started.logits, started.inputs
        if logits is None or inputs is None:
            return self._executor.logits(len(started.plan.rows))
        return logits if len(inputs.sample_at) == len(logits) else logits[inputs.sample_at]

    def _keep(self, plan: ScheduledBatch, tokens: Tensor, started: LaunchedForward) -> None:
        """Each slot's last token stays on the device, for a step that starts before the host knows it."""
        if tokens is started.greedy or not self._keeps_tokens:
            return  # the graph has done it
        tokens = tokens.clamp(max=started.vocab_size - 1)  # the next step may run before a row is found broken
        if started.inputs is None:
            self._executor.set_sampled_tokens(tokens)
            return
        going = [(i, row.sequence.slot) for i, row in enumerate(plan.rows) if _is_still_decoding(row.sequence)]
        if going:
            which, slots = np.array(going).T.copy()
            picked = torch.from_numpy(which).to(self._device, non_blocking=True)
            self._executor.store_last_tokens(tokens[picked], slots)


def _is_still_decoding(sequence: Sequence) -> bool:
    """Here, and has a place in the batch."""
    return sequence.slot >= 0 and sequence.request.mode != "prefill"


def _prompt_logprobs(plan: ScheduledBatch, number: int, logits: Tensor) -> list[TokenLogprobs]:
    """Of the prompt's token after each row of the chunk; the prompt's last row has none."""
    chunk = plan.chunks[number]
    work = chunk.sequence.request.work
    following = work.token_ids[chunk.start + 1 : min(chunk.start + chunk.length + 1, work.num_prompt_tokens)]
    if not following:
        return []
    return token_logprobs(logits[: len(following)], following, work.sampling.prompt_logprobs or 0)
