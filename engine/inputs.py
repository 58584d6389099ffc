"""Turns a plan into tensors with few operations."""

from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.block_tables import BlockTables
from engine.kernels import AttentionMetadata
from engine.scheduler import Chunk, Plan


@dataclass(frozen=True, slots=True)
class StepInputs:
    input_ids: Tensor  # int64 [num_tokens]
    position_ids: Tensor  # int64 [num_tokens]
    logit_rows: Tensor | None  # int64 [num_logits]: rows of which logits are wanted; None: all, in their order
    meta: AttentionMetadata
    sample_at: list[int]
    """For each row of the plan, which logits row."""
    prompt_at: dict[int, int]
    """For chunks that want all their logits: the first logits row."""


class InputBuilder:
    def __init__(self, tables: BlockTables, block_tokens: int, device: torch.device) -> None:
        self._tables = tables
        self._block_tokens = block_tokens
        self._device = device

    def build(self, plan: Plan, last_tokens: Tensor) -> StepInputs:
        """`last_tokens`: each slot's, on the device, where those are that the host does not know yet."""
        chunks = plan.chunks
        for chunk in chunks:
            self._tables.update(chunk.sequence)
        slots_of = np.array([c.sequence.slot for c in chunks])
        starts = np.array([c.start for c in chunks])
        lengths = np.array([c.length for c in chunks])
        query_starts = np.zeros(len(chunks) + 1, dtype=np.int32)
        np.cumsum(lengths, out=query_starts[1:])
        ends = starts + lengths
        if len(chunks) == query_starts[-1]:  # decodes only
            positions, rows = starts, slots_of
            tokens = np.array([_next_token(c) for c in chunks])
        else:
            positions = np.arange(query_starts[-1]) + np.repeat(starts - query_starts[:-1], lengths)
            rows = np.repeat(slots_of, lengths)
            parts = (_tokens(c) for c in chunks)
            tokens = np.fromiter(chain.from_iterable(parts), dtype=np.int64, count=int(query_starts[-1]))
        blocks = self._tables.host[rows, positions // self._block_tokens].astype(np.int64)
        longest = int(ends.max())
        meta = AttentionMetadata(
            query_starts=self._to_device(query_starts),
            context_lens=self._to_device(ends.astype(np.int32)),
            block_tables=self._to_device(self._tables.host[slots_of, : -(-longest // self._block_tokens)]),
            slots=self._to_device(blocks * self._block_tokens + positions % self._block_tokens),
            max_query_len=int(lengths.max()),
            max_context_len=longest,
        )
        logit_rows, sample_at, prompt_at = _logit_rows(plan, query_starts.tolist())
        return StepInputs(
            input_ids=self._filled(self._to_device(tokens), plan, query_starts, last_tokens),
            position_ids=self._to_device(positions),
            logit_rows=None if len(logit_rows) == query_starts[-1] else self._to_device(np.array(logit_rows)),
            meta=meta,
            sample_at=sample_at,
            prompt_at=prompt_at,
        )

    def _filled(self, tokens: Tensor, plan: Plan, query_starts: NDArray[np.int32], last_tokens: Tensor) -> Tensor:
        """With the tokens that only the device knows."""
        pending = [
            (int(start), c.sequence.slot)
            for c, start in zip(plan.chunks, query_starts, strict=False)
            if c.sequence.num_pending
        ]
        if pending:
            where, slots = self._to_device(np.array(pending).T.copy()).unbind(0)
            tokens.index_copy_(0, where, last_tokens[slots])
        return tokens

    def _to_device(self, array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)


def _next_token(chunk: Chunk) -> int:
    return 0 if chunk.sequence.num_pending else chunk.sequence.token_ids[chunk.start]


def _tokens(chunk: Chunk) -> list[int]:
    return [0] if chunk.sequence.num_pending else chunk.sequence.token_ids[chunk.start : chunk.start + chunk.length]


def _logit_rows(plan: Plan, query_starts: list[int]) -> tuple[list[int], list[int], dict[int, int]]:
    """Which rows of hidden states become logits, and where each is found among them."""
    rows: list[int] = []
    last_of: dict[int, int] = {}
    prompt_at: dict[int, int] = {}
    for number, chunk in enumerate(plan.chunks):
        end = query_starts[number + 1]
        if chunk.sequence.request.wants_prompt_logprobs:
            prompt_at[number] = len(rows)
            rows += range(query_starts[number], end)
            last_of[number] = len(rows) - 1
        elif chunk.is_last:
            last_of[number] = len(rows)
            rows.append(end - 1)
    return rows or [0], [last_of[row.chunk] for row in plan.rows], prompt_at
