"""Turns a plan into arrays, and arrays into tensors, with few operations. Who makes the arrays need not compute."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton_serve.engine.core.scheduler import ScheduledBatch, ScheduledChunk
from baton_serve.engine.kernels import AttentionMetadata
from baton_serve.engine.model.block_tables import BlockTables


class ImageRows(NamedTuple):
    """The step's rows from `first` on are these embeddings, not those of their tokens."""

    first: int
    features: Tensor  # [count, hidden]


@dataclass(frozen=True, slots=True)
class StepInputs:
    input_ids: Tensor  # int64 [num_tokens]
    position_ids: Tensor  # int64 [num_tokens]
    logit_rows: Tensor | None  # int64 [num_logits]: rows of which logits are wanted; None: all, in their order
    meta: AttentionMetadata
    adapters: Sequence[tuple[str, Tensor | None]] = ()
    """By fingerprint: rows that an adapter changes, int64 [count]; None: all of them."""
    images: Sequence[ImageRows] = ()
    after_layer: Callable[[int], None] | None = None
    """Called once the device has been given all that writes a layer's KV; not by all models."""


def embedded(embed: Callable[[Tensor], Tensor], inputs: StepInputs) -> Tensor:
    """[num_tokens, hidden]: of the tokens, and of images where tokens stand for them."""
    hidden = embed(inputs.input_ids)
    for first, features in inputs.images:
        hidden[first : first + len(features)] = features.to(hidden.dtype)
    return hidden


@dataclass(frozen=True, slots=True)
class StepArrays:
    """All that a device is told of a step."""

    tokens: NDArray[np.int64]  # [num_tokens]; what stands at `pending` has no meaning
    positions: NDArray[np.int64]  # [num_tokens]
    slots: NDArray[np.int64]  # [num_tokens], as in AttentionMetadata
    query_starts: NDArray[np.int32]  # [num_seqs + 1]
    context_lens: NDArray[np.int32]  # [num_seqs]
    block_tables: NDArray[np.int32]  # [num_seqs, blocks of the longest]
    logit_rows: NDArray[np.int64] | None  # None: all
    pending: NDArray[np.int64] | None  # [2, count]: which tokens only the device knows, and whose slot's last they are
    adapters: Sequence[tuple[str, NDArray[np.int64] | None]] = ()
    """By fingerprint: rows that an adapter changes; None: all of them."""
    images: Sequence[ImageRows] = ()
    """On the device already, and only of an engine of one rank."""

    def upload(self, device: torch.device, last_tokens: Tensor) -> StepInputs:
        """`last_tokens`: each slot's, on the device."""
        tokens = _sent(self.tokens, device)
        if self.pending is not None:
            where, slots = _sent(self.pending, device).unbind(0)
            tokens.index_copy_(0, where, last_tokens[slots])
        meta = AttentionMetadata(
            query_starts=_sent(self.query_starts, device),
            context_lens=_sent(self.context_lens, device),
            block_tables=_sent(self.block_tables, device),
            slots=_sent(self.slots, device),
            max_query_len=int(np.diff(self.query_starts).max()),
            max_context_len=int(self.context_lens.max()),
        )
        rows = None if self.logit_rows is None else _sent(self.logit_rows, device)
        adapters = [(one, None if where is None else _sent(where, device)) for one, where in self.adapters]
        return StepInputs(tokens, _sent(self.positions, device), rows, meta, adapters, self.images)


@dataclass(frozen=True, slots=True)
class BatchInputs:
    arrays: StepArrays
    sample_at: list[int]
    """For each row of the plan, which logits row."""
    prompt_at: dict[int, int]
    """For chunks that want all their logits: the first logits row."""


class InputBuilder:
    def __init__(self, tables: BlockTables, block_tokens: int) -> None:
        self._tables = tables
        self._block_tokens = block_tokens

    def build_inputs(self, plan: ScheduledBatch, images: Sequence[ImageRows] = ()) -> BatchInputs:
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
        logit_rows, sample_at, prompt_at = _logit_rows(plan, query_starts.tolist())
        arrays = StepArrays(
            tokens=tokens,
            positions=positions,
            slots=blocks * self._block_tokens + positions % self._block_tokens,
            query_starts=query_starts,
            context_lens=ends.astype(np.int32),
            block_tables=self._tables.host[slots_of, : -(-longest // self._block_tokens)],
            logit_rows=None if len(logit_rows) == query_starts[-1] else np.array(logit_rows),
            pending=_pending(plan, query_starts),
            adapters=_adapter_rows(plan, query_starts),
            images=images,
        )
        return BatchInputs(arrays, sample_at, prompt_at)


def _pending(plan: ScheduledBatch, query_starts: NDArray[np.int32]) -> NDArray[np.int64] | None:
    found = [
        (int(start), c.sequence.slot)
        for c, start in zip(plan.chunks, query_starts, strict=False)
        if c.sequence.num_output_placeholders
    ]
    return np.array(found).T.copy() if found else None


def _adapter_rows(
    plan: ScheduledBatch, query_starts: NDArray[np.int32]
) -> Sequence[tuple[str, NDArray[np.int64] | None]]:
    names = [chunk.sequence.request.work.lora for chunk in plan.chunks]
    if not any(names):
        return ()
    if len(set(names)) == 1:
        return [(names[0], None)]
    rows = np.repeat(np.arange(len(names)), np.diff(query_starts))
    return [
        (one, np.flatnonzero(np.isin(rows, [i for i, name in enumerate(names) if name == one])))
        for one in dict.fromkeys(names)
        if one
    ]


def _sent(array: NDArray[np.generic], device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)


def _next_token(chunk: ScheduledChunk) -> int:
    return 0 if chunk.sequence.num_output_placeholders else chunk.sequence.token_ids[chunk.start]


def _tokens(chunk: ScheduledChunk) -> list[int]:
    return (
        [0]
        if chunk.sequence.num_output_placeholders
        else chunk.sequence.token_ids[chunk.start : chunk.start + chunk.length]
    )


def _logit_rows(plan: ScheduledBatch, query_starts: list[int]) -> tuple[list[int], list[int], dict[int, int]]:
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
