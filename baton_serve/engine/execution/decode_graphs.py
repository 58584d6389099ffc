"""Decode steps as captured graphs: one launch instead of hundreds, for every batch size in a few buckets.

All of a graph's inputs lie in one small array that the host fills and the device copies, in the device's copy of the
block tables, and in each slot's last token, which stays on the device: a step can be launched before the host knows
what the one before it chose. A bucket's rows beyond the batch are padding: context 0, slot -1. The largest token of
each row is part of the graph; whoever samples otherwise asks for the logits and calls `set_sampled_tokens`. Each of
several ranks keeps its own columns of the logits, which are put together for who asks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton_serve.engine import device as devices
from baton_serve.engine.core.request_table import SchedulerConfig
from baton_serve.engine.core.scheduler import ScheduledBatch
from baton_serve.engine.kernels import AttentionMetadata, argmax_kernel
from baton_serve.engine.model.batch_inputs import StepInputs
from baton_serve.engine.model.block_tables import BlockTables, DeviceTables
from baton_serve.engine.model.forward import Forward

LAST, TOKENS, TOKEN_AT, POSITIONS, SLOTS, TABLE_ROWS, CONTEXTS = range(7)
"""Rows of the input array. LAST, the last token of each batch slot, is the device's own; the others are staged.
TOKEN_AT says where in the first two rows, taken as one, a sequence's token lies."""


class Graph(Protocol):
    def replay(self) -> None: ...


CaptureGraph = Callable[[Callable[[], None]], Graph]


@dataclass(frozen=True, slots=True)
class DecodeResult:
    """Overwritten by the next step."""

    greedy: Tensor  # int64 [batch]; of a row with NaN vocab_size
    vocab_size: int


def batch_size_buckets(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture: fine where padding would cost most, `max_num_seqs` the last."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, max(65, max_num_seqs), 16)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


@dataclass(frozen=True, slots=True)
class DecodeArrays:
    """All that a device is told of a decode step."""

    inputs: NDArray[np.int64]  # [6, batch], rows TOKENS to CONTEXTS, the last one int32
    changes: NDArray[np.int64] | None
    """Of the block tables."""


def fits_decode_graph(plan: ScheduledBatch) -> bool:
    """One token for each sequence, one choice after each; nobody asks for logits of the prompt or has an adapter."""
    return 0 < len(plan.chunks) == len(plan.rows) and all(
        c.length == 1 and not (c.sequence.request.wants_prompt_logprobs or c.sequence.request.work.lora)
        for c in plan.chunks
    )


def build_inputs(plan: ScheduledBatch, tables: BlockTables, limits: SchedulerConfig) -> DecodeArrays:
    """A token that the host does not know yet is its slot's last."""
    chunks, block_tokens = plan.chunks, limits.block_tokens
    count, width = len(chunks), limits.max_num_seqs + 1
    for chunk in chunks:
        tables.update(chunk.sequence)
    host = np.zeros((CONTEXTS + 1, count), dtype=np.int64)
    rows = np.array([c.sequence.slot for c in chunks])
    positions = np.array([c.start for c in chunks])
    tokens = np.array([-1 if c.sequence.num_output_placeholders else c.sequence.token_ids[c.start] for c in chunks])
    host[TOKENS] = tokens
    host[TOKEN_AT] = np.where(tokens < 0, rows, width + np.arange(count))
    host[POSITIONS] = positions
    host[SLOTS] = tables.host[rows, positions // block_tokens].astype(np.int64) * block_tokens
    host[SLOTS] += positions % block_tokens
    host[TABLE_ROWS] = rows
    host[CONTEXTS].view(np.int32)[:count] = positions + 1
    return DecodeArrays(host[TOKENS:], tables.take_changes())


class DecodeGraphs:
    def __init__(self, forward: Forward, layers: list[Tensor], limits: SchedulerConfig) -> None:
        device = layers[0].device
        self._forward = forward
        self._layers = layers
        self._tables = DeviceTables(limits, device)
        self._limits = limits
        self._width = limits.max_num_seqs + 1  # one more than there are slots: padding has a column of its own
        # Two, for the device may still be copying from the one before.
        self._staging = [devices.staging(device, (7, self._width), torch.int64) for _ in range(2)]
        self._inputs = torch.zeros_like(self._staging[0], device=device)
        self.last_tokens = self._inputs[LAST]
        self._starts = torch.arange(limits.max_num_seqs + 1, dtype=torch.int32, device=device)
        self._greedy = torch.zeros(limits.max_num_seqs, dtype=torch.int64, device=device)
        parts = forward.parts
        self._parts = parts if parts is not None and limits.max_num_seqs <= parts.max_rows else None
        self._logits: Tensor | None = None
        self._argmax = argmax_kernel(device)
        self._graphs: dict[int, Graph] = {}
        self._bucket_of: list[int] = []

    @torch.inference_mode()
    def capture(self, capture: CaptureGraph) -> None:
        """Each bucket, the largest first: it sizes the scratch memory that all share. Raises RuntimeError."""
        sizes = batch_size_buckets(self._limits.max_num_seqs)
        self._fill_padding(self._staging[0].numpy(), 0, self._limits.max_num_seqs)
        self._inputs[1:] = self._staging[0][1:]
        graphs: dict[int, Graph] = {}
        for size in reversed(sizes):
            self._compute(size)  # compiles kernels and allocates what libraries keep
            graphs[size] = capture(partial(self._compute, size))
        self._graphs = graphs
        self._bucket_of = [next(s for s in sizes if s >= n) for n in range(self._limits.max_num_seqs + 1)]

    def release(self) -> None:
        """There are none any more."""
        self._graphs = {}

    @property
    def are_captured(self) -> bool:
        return bool(self._graphs)

    def replay(self, arrays: DecodeArrays) -> DecodeResult:
        """Starts the step; does not wait for it."""
        self._staging.reverse()
        host = self._staging[0].numpy()
        count = arrays.inputs.shape[1]
        bucket = self._bucket_of[count]
        host[TOKENS:, :count] = arrays.inputs
        self._fill_padding(host, count, bucket)
        self._tables.apply(arrays.changes)
        self._inputs[1:].copy_(self._staging[0][1:], non_blocking=True)
        self._graphs[bucket].replay()
        assert self._logits is not None
        return DecodeResult(self._greedy[:count], self._vocab_size(self._logits))

    def logits(self, count: int) -> Tensor:
        """[count, vocab_size] of the step that was replayed last, overwritten by the next one. All ranks call it."""
        assert self._logits is not None
        logits = self._logits[:count]
        return logits if self._parts is None else self._parts.whole(logits)

    def set_sampled_tokens(self, tokens: Tensor) -> None:
        """What was chosen after the step that was replayed last, [batch], where it is not the largest."""
        self.last_tokens.index_copy_(0, self._inputs[TABLE_ROWS, : len(tokens)], tokens)

    def _fill_padding(self, host: NDArray[np.int64], start: int, end: int) -> None:
        host[TOKENS, start:end] = host[POSITIONS, start:end] = 0
        host[TOKEN_AT, start:end] = self._width + start
        host[TABLE_ROWS, start:end] = self._width - 1
        host[SLOTS, start:end] = -1
        host[CONTEXTS].view(np.int32)[start:end] = 0

    def _compute(self, size: int) -> None:
        """What a graph does. Every tensor here keeps its memory, or is scratch."""
        inputs = self._inputs[:, :size]
        meta = AttentionMetadata(
            query_starts=self._starts[: size + 1],
            context_lens=self._inputs[CONTEXTS].view(torch.int32)[:size],
            block_tables=self._tables.tensor.index_select(0, inputs[TABLE_ROWS]),
            slots=inputs[SLOTS],
            max_query_len=1,
            max_context_len=self._limits.max_model_len,
        )
        tokens = self._inputs[: TOKENS + 1].view(-1).index_select(0, inputs[TOKEN_AT])
        step = StepInputs(tokens, inputs[POSITIONS], None, meta)
        greedy = self._greedy[:size]
        if self._parts is not None:
            logits = self._parts.compute(step, self._layers)
            self._parts.largest(logits, greedy)
        else:
            logits = self._forward(step, self._layers)
            self._argmax(logits, greedy)
        if self._logits is None:
            self._logits = logits.new_empty((self._limits.max_num_seqs, logits.shape[1]))
        self._logits[:size] = logits
        # The next step may run before a row is found broken.
        self.last_tokens.index_copy_(0, inputs[TABLE_ROWS], greedy.clamp(max=self._vocab_size(logits) - 1))

    def _vocab_size(self, logits: Tensor) -> int:
        return logits.shape[1] if self._parts is None else self._parts.vocab_size
