"""Decode steps as captured graphs: one launch instead of hundreds, for every batch size in a few buckets.

All of a graph's inputs lie in one small array that the host fills and the device copies, and in the device's copy of
the block tables. A bucket's rows beyond the batch are padding: context 0, slot -1. The largest token of each row is
part of the graph; whoever samples otherwise reads the logits.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine import device as devices
from engine.block_tables import BlockTables
from engine.forward import Forward
from engine.inputs import StepInputs
from engine.kernels import AttentionMetadata
from engine.roster import Limits
from engine.scheduler import Plan

TOKENS, POSITIONS, SLOTS, TABLE_ROWS, CONTEXTS = range(5)
"""Rows of the staging array."""


class Graph(Protocol):
    def replay(self) -> None: ...


Capture = Callable[[Callable[[], None]], Graph]


@dataclass(frozen=True, slots=True)
class DecodeResult:
    """Overwritten by the next step."""

    logits: Tensor  # [batch, vocab_size]
    greedy: Tensor  # int64 [batch]


def buckets(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture: fine where padding would cost most, `max_num_seqs` the last."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, max(65, max_num_seqs), 16)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


class DecodeGraphs:
    def __init__(self, forward: Forward, layers: list[Tensor], tables: BlockTables, limits: Limits) -> None:
        device = layers[0].device
        self._forward = forward
        self._layers = layers
        self._tables = tables
        self._limits = limits
        self._staging = devices.staging(device, (5, limits.max_num_seqs), torch.int64)
        self._host = self._staging.numpy()
        self._inputs = torch.zeros_like(self._staging, device=device)
        self._starts = torch.arange(limits.max_num_seqs + 1, dtype=torch.int32, device=device)
        self._greedy = torch.zeros(limits.max_num_seqs, dtype=torch.int64, device=device)
        self._logits: Tensor | None = None
        self._graphs: dict[int, Graph] = {}
        self._bucket_of: list[int] = []

    @torch.inference_mode()
    def capture(self, capture: Capture) -> None:
        """Each bucket, the largest first: it sizes the scratch memory that all share. Raises RuntimeError."""
        sizes = buckets(self._limits.max_num_seqs)
        self._fill_padding(0, self._limits.max_num_seqs)
        self._inputs.copy_(self._staging)
        self._tables.on_device()
        graphs: dict[int, Graph] = {}
        for size in reversed(sizes):
            self._compute(size)  # compiles kernels and allocates what libraries keep
            graphs[size] = capture(partial(self._compute, size))
        self._graphs = graphs
        self._bucket_of = [next(s for s in sizes if s >= n) for n in range(self._limits.max_num_seqs + 1)]

    def fits(self, plan: Plan) -> bool:
        """One token for each sequence, one choice after each, and nobody asks for logits of the prompt."""
        return (
            bool(self._graphs)
            and 0 < len(plan.chunks) == len(plan.rows)
            and all(c.length == 1 and not c.sequence.request.wants_prompt_logprobs for c in plan.chunks)
        )

    def replay(self, plan: Plan) -> DecodeResult:
        """Starts the step; does not wait for it."""
        chunks, block_tokens, host = plan.chunks, self._limits.block_tokens, self._host
        count = len(chunks)
        bucket = self._bucket_of[count]
        for chunk in chunks:
            self._tables.update(chunk.sequence)
        rows = np.array([c.sequence.slot for c in chunks])
        positions = np.array([c.start for c in chunks])
        host[TOKENS, :count] = [c.sequence.token_ids[c.start] for c in chunks]
        host[POSITIONS, :count] = positions
        blocks = self._tables.host[rows, positions // block_tokens].astype(np.int64)
        host[SLOTS, :count] = blocks * block_tokens + positions % block_tokens
        host[TABLE_ROWS, :count] = rows
        host[CONTEXTS].view(np.int32)[:count] = positions + 1
        self._fill_padding(count, bucket)
        self._tables.on_device()
        self._inputs.copy_(self._staging, non_blocking=True)
        self._graphs[bucket].replay()
        assert self._logits is not None
        return DecodeResult(self._logits[:count], self._greedy[:count])

    def _fill_padding(self, start: int, end: int) -> None:
        host = self._host
        host[TOKENS, start:end] = host[POSITIONS, start:end] = host[TABLE_ROWS, start:end] = 0
        host[SLOTS, start:end] = -1
        host[CONTEXTS].view(np.int32)[start:end] = 0

    def _compute(self, size: int) -> None:
        """What a graph does. Every tensor here keeps its memory, or is scratch."""
        inputs = self._inputs[:, :size]
        meta = AttentionMetadata(
            query_starts=self._starts[: size + 1],
            context_lens=self._inputs[CONTEXTS].view(torch.int32)[:size],
            block_tables=self._tables.on_device().index_select(0, inputs[TABLE_ROWS]),
            slots=inputs[SLOTS],
            max_query_len=1,
            max_context_len=self._limits.max_model_len,
        )
        step = StepInputs(inputs[TOKENS], inputs[POSITIONS], None, meta, sample_at=[], prompt_at={})
        logits = self._forward(step, self._layers)
        if self._logits is None:
            self._logits = logits.new_empty((self._limits.max_num_seqs, logits.shape[1]))
        self._logits[:size] = logits
        self._greedy[:size] = logits.argmax(dim=-1)
