"""Runs a scheduled batch (vLLM: model runner): inputs, eager forward pass or captured graph, sampling, prompt logprobs,
NaN logits.
"""

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
from baton_serve.engine.model.batch_inputs import BatchInputs, ImageRows, InputBuilder, SourceRows
from baton_serve.engine.model.block_tables import BlockTables
from baton_serve.engine.sample.constraints import Constraints
from baton_serve.engine.sample.sampler import Sampler, SamplerOutput, all_plain_greedy, token_logprobs
from baton_serve.engine.sample.token_masks import TokenMasker

NAN_LOGITS = RowFailure(
    "the model computed NaN logits: its weights are broken, or its dtype is too small for its activations",
    "internal",
)


@dataclass(frozen=True, slots=True)
class LaunchedForward:
    """A step whose logits the device is computing; no token was sampled yet.

    `computed` is what the executor's `collect` turns into logits. `greedy`, int64 [batch], are the tokens with the
    largest logits if a captured graph computes the whole step; then `computed` is None, and `Executor.logits` returns
    the logits.

    `constraints`, such as grammar masks, are being built meanwhile by another thread; None: they are not begun, or not
    needed.
    """

    plan: ScheduledBatch
    computed: Tensor | None
    greedy: Tensor | None
    inputs: BatchInputs | None
    constraints: "Future[Constraints] | None" = None
    vocab_size: int = 0


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """A step whose sampled tokens are being copied from the device to the host; `ModelRunner.wait` waits for the
    copy.
    """

    host_copy: devices.HostCopy | None
    sampled: ModelRunnerOutput
    """The output of the step without token ids; `wait` adds them."""
    vocab_size: int = 0


class ImageRowsSource(Protocol):
    """Provides the image embeddings of a step. It is the part of
    `engine.model.vision.prompt_images.VisionPromptImages` that the runner uses.
    """

    def rows(self, plan: ScheduledBatch) -> list[ImageRows]: ...


class SourceRowsSource(Protocol):
    """Provides the audio encoder's outputs for a step. It is the part of
    `engine.model.speech.prompt_audio.PromptAudio` that the runner uses.
    """

    def encoded(self, plan: ScheduledBatch) -> list[SourceRows]: ...


class ModelRunner:
    """Runs steps: it builds their inputs, computes logits by an executor and samples. Engine thread only. A step has
    three phases: `start` computes logits, `choose` samples tokens, `wait` returns them. The next step may start after
    `choose` of this one, but its `choose` must come after this step's tokens were added to the sequences: penalties and
    grammars need them.
    """

    def __init__(
        self,
        executor: Executor,
        limits: SchedulerConfig,
        device: torch.device,
        masking: TokenMasker,
        *,
        keeps_last_tokens: bool = True,
        images: ImageRowsSource | None = None,
        sources: SourceRowsSource | None = None,
    ) -> None:
        """Set up the runner. `images` provides the embeddings of images; None without a vision tower. `sources`
        provides the outputs of an audio encoder; None without one.

        `keeps_last_tokens`: sampled tokens stay on the device too, so that a step can start before the host knows them.
        """
        self._images = images
        self._sources = sources
        self._executor = executor
        self._keeps_tokens = keeps_last_tokens
        self._limits = limits
        self._tables = BlockTables(limits)
        self._inputs = InputBuilder(self._tables, limits)
        self._sampler = Sampler(device)
        self._masking = masking
        self._host_copies = devices.HostCopyBuffers(device)
        self._no_tokens = torch.zeros(0, dtype=torch.int64, device=device)
        self._device = device

    def run(self, plan: ScheduledBatch) -> ModelRunnerOutput:
        """Run all three phases of a step, wait for the device and return the step's output."""
        return self.wait(self.choose(self.start(plan)))

    @torch.inference_mode()
    def start(
        self, plan: ScheduledBatch, *, ahead: bool = False, after_layer: AfterLayer | None = None
    ) -> LaunchedForward:
        """Launch the computation of a step's logits, without waiting for it. `ahead` says that the host does not know
        the tokens of the previous step yet. `after_layer` is called after each layer with its number.
        """
        if not plan.chunks:
            return LaunchedForward(plan, None, None, None)
        # Grammars and min_tokens depend on the previous tokens. If these are not known yet, `choose` builds the
        # constraints.
        constraints = None if ahead else self._masking.begin(plan.rows)
        images = [] if self._images is None else self._images.rows(plan)
        sources = [] if self._sources is None else self._sources.encoded(plan)
        with_adapters = self._executor.has_adapter_graphs
        if (
            self._executor.has_graphs
            and not images
            and not sources
            and fits_decode_graph(plan, with_adapters=with_adapters)
        ):
            result = self._executor.replay(build_inputs(plan, self._tables, self._limits))
            return LaunchedForward(plan, result.computed, result.greedy, None, constraints, result.vocab_size)
        inputs = self._inputs.build_inputs(plan, images, sources)
        computed = self._executor.compute(inputs.arrays, after_layer)
        return LaunchedForward(plan, computed, None, inputs, constraints, computed.shape[1])

    @torch.inference_mode()
    def choose(self, started: LaunchedForward) -> SampledTokens:
        """Launch the sampling of the tokens of a started step, and their copy to the host."""
        plan, inputs = started.plan, started.inputs
        sampled = ModelRunnerOutput([])
        logits: Tensor | None = None
        if started.computed is not None:
            # A captured decode step computes the logits of each row.
            num_logits = len(plan.rows) if inputs is None else inputs.num_logits
            if plan.rows or (inputs is not None and inputs.prompt_at):
                logits = self._executor.collect(started.computed, num_logits)
            else:
                self._executor.discard(num_logits)
        elif started.greedy is None:
            return SampledTokens(None, sampled)
        # No row is sampled, but the step is waited for all the same: a prompt that arrives meanwhile may then be
        # scheduled before the next chunk of this one.
        if not plan.rows:
            host_copy = self._host_copies.start(self._no_tokens)
        else:
            constraints = started.constraints or self._masking.begin(plan.rows)
            found = constraints.result() if constraints is not None else None
            masks = self._masking.send(found) if found is not None else None
            # Graphs have found the largest logits already. Sampling reads all logits, so it is left out if nothing
            # needs it.
            if started.greedy is not None and masks is None and all_plain_greedy(plan.rows):
                choice = SamplerOutput(started.greedy)
            else:
                choice = self._sampler.choose(self._rows(started, logits), plan.rows, masks=masks)
            sampled.logprobs, sampled.failed = choice.logprobs, choice.failed
            if found is not None:
                sampled.failed |= {row: RowFailure(message, "invalid") for row, message in found.failed.items()}
            host_copy = self._host_copies.start(choice.tokens)
            self._keep(plan, choice.tokens, started)
        for chunk, first in inputs.prompt_at.items() if inputs is not None else ():
            assert logits is not None
            sampled.prompt_logprobs[chunk] = _prompt_logprobs(plan, chunk, logits[first:])
        return SampledTokens(host_copy, sampled, started.vocab_size)

    def wait(self, chosen: SampledTokens) -> ModelRunnerOutput:
        """Wait until a step's sampled tokens are in host memory, and return the step's output. Rows whose logits have
        NaN are marked as failed. If logprobs are asked for, `choose` has waited already.
        """
        if chosen.host_copy is not None:
            chosen.sampled.token_ids = token_ids = chosen.host_copy.wait()
            # Samplers return vocab_size for a row with NaN, which is not a valid token id.
            if token_ids and max(token_ids) >= chosen.vocab_size:
                broken = [row for row, token in enumerate(token_ids) if token >= chosen.vocab_size]
                chosen.sampled.failed |= dict.fromkeys(broken, NAN_LOGITS)
        return chosen.sampled

    def forget(self) -> None:
        """Forget the block tables of all sequences. It is called after warm-up, whose sequences use the same rows as
        later ones.
        """
        self._tables.forget()

    def _rows(self, started: LaunchedForward, logits: Tensor | None) -> Tensor:
        """Return the logits of the rows that are sampled, in the order of `plan.rows`. `logits` is None for a replayed
        decode graph whose logits the executor returns.
        """
        if logits is None:
            return self._executor.logits(len(started.plan.rows))
        if started.inputs is None or len(started.inputs.sample_at) == len(logits):
            return logits
        return logits[started.inputs.sample_at]

    def _keep(self, plan: ScheduledBatch, tokens: Tensor, started: LaunchedForward) -> None:
        """Store the sampled tokens on the device, by batch slot (row of a running sequence), for a next step that
        starts before the host knows them. Do nothing if the graph of the step has stored them already.
        """
        if tokens is started.greedy or not self._keeps_tokens:
            return  # the graph has stored its tokens itself
        # NaN rows have vocab_size, and the next step may run before they are failed
        tokens = tokens.clamp(max=started.vocab_size - 1)
        if started.inputs is None:
            self._executor.set_sampled_tokens(tokens)
            return
        going = [(i, row.sequence.slot) for i, row in enumerate(plan.rows) if _is_still_decoding(row.sequence)]
        if going:
            which, slots = np.array(going).T.copy()
            picked = devices.send(torch.from_numpy(which), self._device)
            self._executor.store_last_tokens(tokens[picked], slots)


def _is_still_decoding(sequence: Sequence) -> bool:
    """Return whether a sequence will decode further on this instance: it has a batch slot, and its request is not
    prefill-only.
    """
    return sequence.slot >= 0 and sequence.request.mode != "prefill"


def _prompt_logprobs(plan: ScheduledBatch, number: int, logits: Tensor) -> list[TokenLogprobs]:
    """Return the prompt logprobs that one chunk yields: for each of its tokens, those of the prompt token that follows.
    `number` is the chunk's index in the plan; `logits` are those of its tokens.

    The prompt's last token has no following prompt token.
    """
    chunk = plan.chunks[number]
    work = chunk.sequence.request.work
    following = work.token_ids[chunk.start + 1 : min(chunk.start + chunk.length + 1, work.num_prompt_tokens)]
    if not following:
        return []
    return token_logprobs(logits[: len(following)], following, work.sampling.prompt_logprobs or 0)
