"""Executes the forward pass of a step on one device, eagerly or as a captured graph; `parallel/tp_executor.py` does it
on several ranks.

With tensor parallelism each rank has an executor, and only rank 0 plans.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton_serve.contracts.instance import KernelVerdict
from baton_serve.engine import device as devices
from baton_serve.engine.core.request_table import SchedulerConfig
from baton_serve.engine.execution.decode_graphs import CaptureGraph, DecodeArrays, DecodeGraphs, DecodeResult
from baton_serve.engine.execution.graph_proof import ProofBlocks, prove_graphs, random_blocks
from baton_serve.engine.execution.prompt_graphs import PromptGraphs, token_buckets
from baton_serve.engine.kernels import SlotRows
from baton_serve.engine.kernels.mixers import InnerCheckpoints
from baton_serve.engine.kernels.operations import Argmax
from baton_serve.engine.kv.cache_groups import layers_of_groups
from baton_serve.engine.kv.kv_cache import KVCache
from baton_serve.engine.kv.state_memory import StateViews
from baton_serve.engine.model.batch_inputs import StepArrays, StepStates
from baton_serve.engine.model.forward import Forward
from baton_serve.engine.model.lora.slots import sorted_rows
from baton_serve.engine.model.pipeline_stage import CapturedStage, StagedForward

logger = logging.getLogger(__name__)


AfterLayer = Callable[[int], None]
"""Called with a layer's number once all work that writes the layer's KV is queued on the device."""


class Executor(Protocol):
    """Computes the model's steps on one device, or on all ranks. Its methods queue work on the device and return
    without waiting for it.
    """

    @property
    def has_graphs(self) -> bool: ...

    @property
    def has_adapter_graphs(self) -> bool:
        """Return whether decode graphs for sequences with LoRA adapters were captured, so that `replay` supports
        them.
        """
        ...

    @property
    def wrong_graphs(self) -> Sequence[KernelVerdict]:
        """Return the verdicts on captured graphs whose results differ from the same step without a graph. No graph of
        their kind is used.
        """
        ...

    def compute(self, arrays: StepArrays, after_layer: AfterLayer | None = None) -> Tensor:
        """Compute a step, by a captured graph if one fits. Return what `collect` needs; its last dimension is
        vocab_size.

        `after_layer` is called after each layer (see `StepInputs`), but not if a captured graph is used, which only
        short steps do.
        """
        ...

    def collect(self, computed: Tensor, num_rows: int) -> Tensor:
        """Return the logits [num_rows, vocab_size] of a step. `computed` is what `compute` has returned for it. Call it
        once for each step, in the order of steps. With a pipeline, the later stages compute the step meanwhile.
        """
        ...

    def discard(self, num_rows: int) -> None:
        """Finish a step that `compute` has started and of which no logits are needed, in the place of `collect`. With a
        pipeline this saves the product with the output head.
        """
        ...

    def replay(self, arrays: DecodeArrays) -> DecodeResult:
        """Compute a decode step by the captured graph for its batch size. Call it only if `has_graphs`."""
        ...

    def logits(self, count: int) -> Tensor:
        """Return the logits [count, vocab_size] of the sequences of the last step that `replay` computed.

        The next replay overwrites them.
        """
        ...

    def set_sampled_tokens(self, tokens: Tensor) -> None:
        """Store `tokens` [batch] as the last tokens of the sequences of the last replayed decode step, on the device,
        where the next step reads them. Call it if they are not the greedy tokens, which the graph has stored itself.
        """
        ...

    def store_last_tokens(self, tokens: Tensor, slots: NDArray[np.int64]) -> None:
        """Store `tokens` on the device: the last token of the sequence in each of the batch slots (rows of running
        sequences) `slots`. A step that is launched before the host knows these tokens reads them there.
        """
        ...

    def capture_graphs(self, capturing: Callable[[], CaptureGraph]) -> None:
        """Capture graphs for decode steps and for small steps with prompts, and compare their results with eager work.
        `capturing` returns the function that captures.

        If this fails, steps are computed without graphs.
        """
        ...

    def close(self) -> None:
        """Free the captured graphs. A collective library does not shut down as long as a graph holds its calls."""
        ...


class LocalExecutor:
    """Implements `Executor` for the device of this process, without other ranks."""

    def __init__(
        self,
        forward: Forward,
        cache: KVCache,
        limits: SchedulerConfig,
        states: StateViews | None = None,
        argmax: Argmax | None = None,
        no_images: Tensor | None = None,
    ) -> None:
        """Allocate the memory of the graphs' inputs. `states` are the recurrent states of all batch slots (rows of
        running sequences); None for models without them. `argmax` finds the largest logit of each row; None uses the
        device's default kernel. `no_images` [0, width] is like the image embeddings that graphs accept; None: they
        accept none.
        """
        self._forward = forward
        self._states = states or {}
        self._device = cache.device
        self._order = cache.order
        self._layers = layers_of_groups(cache.layers(), limits.layer_groups)
        self._limits = limits
        self._blocks = ProofBlocks(cache.num_blocks, limits.block_tokens)
        self.wrong_graphs: list[KernelVerdict] = []
        self._stage: CapturedStage | None = None
        if isinstance(forward, StagedForward):
            self._stage = CapturedStage(forward, max(limits.max_num_seqs, token_buckets(limits.max_step_tokens)[-1]))
        captured = self._stage or forward
        self._graphs = DecodeGraphs(captured, self._layers, limits, argmax, self._states, self._device)
        self._prompts = PromptGraphs(captured, self._layers, limits, self._graphs.last_tokens, no_images, self._states)

    @property
    def has_graphs(self) -> bool:
        return self._graphs.are_captured

    @property
    def has_adapter_graphs(self) -> bool:
        return self._graphs.are_captured_with_adapters

    @torch.inference_mode()
    def compute(self, arrays: StepArrays, after_layer: AfterLayer | None = None) -> Tensor:
        computed = self._compute(arrays, after_layer)
        self._order.end_step()
        return computed

    def _compute(self, arrays: StepArrays, after_layer: AfterLayer | None) -> Tensor:
        variant = self._prompts.variant_for(arrays)
        if variant is None:
            inputs = arrays.upload(self._device, self._graphs.last_tokens)
            inputs = replace(
                inputs, after_layer=after_layer, states=self._step_states(arrays), slot_rows=self._slot_rows(arrays)
            )
            return self._forward(inputs, self._layers)
        if self._stage is None:
            return self._prompts.replay(arrays, variant)
        self._stage.receive(len(arrays.tokens))
        hidden = self._prompts.replay(arrays, variant)
        self._stage.send(hidden)
        return hidden

    def collect(self, computed: Tensor, num_rows: int) -> Tensor:
        return computed

    def discard(self, num_rows: int) -> None:
        """Do nothing: `compute` has computed the logits already."""

    def _slot_rows(self, arrays: StepArrays) -> SlotRows | None:
        """Return the adapter slot of each token of a step, for kernels that add all LoRA adapters at once. Return None
        if torch adds them one by one: without captured adapter graphs, and if one adapter has all tokens.

        One by one means thousands of launches for several adapters, but large products are fast for a single one.
        """
        slots = self._forward.adapter_slots
        if slots is None or not self.has_adapter_graphs or not arrays.adapters or arrays.adapters[0][1] is None:
            return None
        count = len(arrays.tokens)
        array = sorted_rows(slots.slots_of(arrays.adapters, count), slots.num_slots)
        return slots.view(devices.send(torch.from_numpy(array), self._device), count)

    @torch.inference_mode()
    def replay(self, arrays: DecodeArrays) -> DecodeResult:
        count = arrays.inputs.shape[1]
        if self._stage is not None:
            self._stage.receive(count)
        result = self._graphs.replay(arrays)
        if self._stage is not None:
            self._stage.send(self._graphs.logits(count))
            result = replace(result, greedy=None)
        self._order.end_step()
        return result

    @torch.inference_mode()
    def logits(self, count: int) -> Tensor:
        return self._graphs.logits(count)

    # int64 [batch]
    @torch.inference_mode()
    def set_sampled_tokens(self, tokens: Tensor) -> None:
        self._graphs.set_sampled_tokens(tokens)

    @torch.inference_mode()
    def store_last_tokens(self, tokens: Tensor, slots: NDArray[np.int64]) -> None:
        where = devices.send(torch.from_numpy(slots), self._device)
        self._graphs.last_tokens.index_copy_(0, where, tokens)

    def capture_graphs(self, capturing: Callable[[], CaptureGraph]) -> None:
        if not self._forward.is_capturable:  # a stage of a pipeline, unlike others of it
            return
        capture = capturing()
        try:
            self._graphs.capture(capture)
        except RuntimeError as error:
            logger.warning("cannot capture graphs for decode steps, small batches will be slower: %s", error)
            return
        try:
            self._graphs.capture_with_adapters(capture)
        except RuntimeError as error:
            logger.warning("cannot capture graphs for LoRA adapters, steps with one will be slower: %s", error)
        try:
            self._prompts.capture(capture)
        except RuntimeError as error:
            logger.warning("cannot capture graphs for prompts, short prompts will be slower: %s", error)
        self._prove_graphs()

    def _prove_graphs(self) -> None:
        """Compare the captured graphs with eager work, and free those of a kind with wrong results. If decode graphs
        are wrong, no graphs at all are used.
        """
        with torch.inference_mode(), random_blocks(self._layers, self._limits.max_num_seqs):
            wrong = prove_graphs(self._graphs.proof_cases(self._blocks))
            if wrong:
                self._graphs.release()
            else:
                wrong = prove_graphs(self._prompts.proof_cases(self._blocks))
        # Without graphs of decode steps those of prompts are not used either: both come from the same capture.
        if wrong:
            self._prompts.release()
        self.wrong_graphs = wrong

    def _step_states(self, arrays: StepArrays) -> StepStates | None:
        if not self._states:
            return None
        slots = devices.send(torch.from_numpy(arrays.batch_slots), self._device)
        step = StepStates(slots, np.diff(arrays.query_starts).tolist(), self._states)
        if arrays.inner is None:
            return step
        rows, tokens = devices.send(torch.from_numpy(arrays.inner), self._device)
        return replace(step, checkpoints=InnerCheckpoints(rows, tokens.int()), inner_lengths=arrays.inner[1].tolist())

    def close(self) -> None:
        self._graphs.release()
        self._prompts.release()
