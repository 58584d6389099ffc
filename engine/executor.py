"""What a device does of a step, told in arrays: whoever plans steps may live in another process."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.forward import Forward
from engine.graphs import Capture, DecodeArrays, DecodeGraphs, DecodeResult
from engine.inputs import StepArrays
from engine.kv_cache import KVCache
from engine.roster import Limits

logger = logging.getLogger(__name__)


AfterLayer = Callable[[int], None]


class Executor(Protocol):
    """Calls give the device work and do not wait for it."""

    @property
    def has_graphs(self) -> bool: ...

    def compute(self, arrays: StepArrays, after_layer: AfterLayer | None = None) -> Tensor:
        """Logits [num_logits, vocab_size]. `after_layer`: as in `StepInputs`."""
        ...

    def replay(self, arrays: DecodeArrays) -> DecodeResult:
        """A decode step from a captured graph."""
        ...

    def put(self, tokens: Tensor) -> None:
        """What was chosen after the step that was replayed last, [batch], where it is not the largest."""
        ...

    def keep(self, tokens: Tensor, slots: NDArray[np.int64]) -> None:
        """These are the last tokens of these slots."""
        ...

    def capture_graphs(self, capturing: Callable[[], Capture]) -> None:
        """From now on decode steps are replayed. If that cannot be, they are computed as before."""
        ...

    def close(self) -> None:
        """Gives up the graphs: a collective library does not end as long as one holds its calls."""
        ...


class LocalExecutor:
    """On this process's device."""

    def __init__(self, forward: Forward, cache: KVCache, limits: Limits) -> None:
        self._forward = forward
        self._device = cache.device
        self._layers = cache.layers()
        self._graphs = DecodeGraphs(forward, self._layers, limits)

    @property
    def has_graphs(self) -> bool:
        return self._graphs.are_captured

    @torch.inference_mode()
    def compute(self, arrays: StepArrays, after_layer: AfterLayer | None = None) -> Tensor:
        inputs = arrays.upload(self._device, self._graphs.last_tokens)
        return self._forward(replace(inputs, after_layer=after_layer), self._layers)

    @torch.inference_mode()
    def replay(self, arrays: DecodeArrays) -> DecodeResult:
        return self._graphs.replay(arrays)

    @torch.inference_mode()
    def put(self, tokens: Tensor) -> None:
        self._graphs.put(tokens)

    @torch.inference_mode()
    def keep(self, tokens: Tensor, slots: NDArray[np.int64]) -> None:
        where = torch.from_numpy(slots).to(self._device, non_blocking=True)
        self._graphs.last_tokens.index_copy_(0, where, tokens)

    def capture_graphs(self, capturing: Callable[[], Capture]) -> None:
        try:
            self._graphs.capture(capturing())
        except RuntimeError as error:
            logger.warning("decode steps run without captured graphs, slower at small batches: %s", error)

    def close(self) -> None:
        self._graphs.release()
