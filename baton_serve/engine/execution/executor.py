"""What a device does of a step, told in arrays: whoever plans steps may live in another process."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton_serve.engine.core.request_table import SchedulerConfig
from baton_serve.engine.execution.decode_graphs import CaptureGraph, DecodeArrays, DecodeGraphs, DecodeResult
from baton_serve.engine.execution.prompt_graphs import PromptGraphs
from baton_serve.engine.kv.kv_cache import KVCache
from baton_serve.engine.model.batch_inputs import StepArrays
from baton_serve.engine.model.forward import Forward

logger = logging.getLogger(__name__)


AfterLayer = Callable[[int], None]


class Executor(Protocol):
    """Calls give the device work and do not wait for it."""

    @property
    def has_graphs(self) -> bool: ...

    def compute(self, arrays: StepArrays, after_layer: AfterLayer | None = None) -> Tensor:
        """Logits [num_logits, vocab_size], from a captured graph where one fits. `after_layer`: as in `StepInputs`; not
        called for a graph, which is a short step."""
        ...

    def replay(self, arrays: DecodeArrays) -> DecodeResult:
        """A decode step from a captured graph."""
        ...

    def logits(self, count: int) -> Tensor:
        """[count, vocab_size] of the step that was replayed last, overwritten by the next one."""
        ...

    def set_sampled_tokens(self, tokens: Tensor) -> None:
        """What was chosen after the step that was replayed last, [batch], where it is not the largest."""
        ...

    def store_last_tokens(self, tokens: Tensor, slots: NDArray[np.int64]) -> None:
        """These are the last tokens of these slots."""
        ...

    def capture_graphs(self, capturing: Callable[[], CaptureGraph]) -> None:
        """From now on decode steps and small steps with prompts are replayed. If that cannot be, they are computed as
        before."""
        ...

    def close(self) -> None:
        """Gives up the graphs: a collective library does not end as long as one holds its calls."""
        ...


class LocalExecutor:
    """On this process's device."""

    def __init__(self, forward: Forward, cache: KVCache, limits: SchedulerConfig) -> None:
        self._forward = forward
        self._device = cache.device
        self._layers = cache.layers()
        self._graphs = DecodeGraphs(forward, self._layers, limits)
        self._prompts = PromptGraphs(forward, self._layers, limits, self._graphs.last_tokens)

    @property
    def has_graphs(self) -> bool:
        return self._graphs.are_captured

    @torch.inference_mode()
    def compute(self, arrays: StepArrays, after_layer: AfterLayer | None = None) -> Tensor:
        logits = self._prompts.replay(arrays)
        if logits is None:
            inputs = arrays.upload(self._device, self._graphs.last_tokens)
            logits = self._forward(replace(inputs, after_layer=after_layer), self._layers)
        return logits

    @torch.inference_mode()
    def replay(self, arrays: DecodeArrays) -> DecodeResult:
        return self._graphs.replay(arrays)

    @torch.inference_mode()
    def logits(self, count: int) -> Tensor:
        return self._graphs.logits(count)

    @torch.inference_mode()
    def set_sampled_tokens(self, tokens: Tensor) -> None:
        self._graphs.set_sampled_tokens(tokens)

    @torch.inference_mode()
    def store_last_tokens(self, tokens: Tensor, slots: NDArray[np.int64]) -> None:
        where = torch.from_numpy(slots).to(self._device, non_blocking=True)
        self._graphs.last_tokens.index_copy_(0, where, tokens)

    def capture_graphs(self, capturing: Callable[[], CaptureGraph]) -> None:
        capture = capturing()
        try:
            self._graphs.capture(capture)
        except RuntimeError as error:
            logger.warning("decode steps run without captured graphs, slower at small batches: %s", error)
            return
        try:
            self._prompts.capture(capture)
        except RuntimeError as error:
            logger.warning("prompts are computed without captured graphs, short ones slower: %s", error)

    def close(self) -> None:
        self._graphs.release()
        self._prompts.release()
