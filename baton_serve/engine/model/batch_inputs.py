"""Builds the input arrays of a step: token ids, positions, KV slots, block tables, spans of images that see each other,
adapters' rows.

Rank 0 builds the arrays; every rank uploads them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton_serve.engine.core.request_table import SchedulerConfig
from baton_serve.engine.core.scheduler import ScheduledBatch, ScheduledChunk, whole_parts
from baton_serve.engine.kernels import AttentionMetadata, PackedSequences, SlotRows
from baton_serve.engine.kernels.mixers import InnerCheckpoints
from baton_serve.engine.kv.state_memory import StateViews
from baton_serve.engine.model.block_tables import BlockTables
from baton_serve.engine.model.mrope_positions import step_positions


class ImageRows(NamedTuple):
    """The embeddings of an image in one step, and which of the step's tokens they replace."""

    first: int
    features: Tensor  # [count, hidden], or [count, n * hidden]: those beyond the first are added behind layers 0, 1...
    rows: Tensor | None = None
    """int64 [count]: the rows of the tokens; None: the ones from `first` on."""

    @property
    def where(self) -> slice | Tensor:
        """Return the index of the replaced tokens among the step's tokens: a slice if they are consecutive, which is
        faster.
        """
        return slice(self.first, self.first + len(self.features)) if self.rows is None else self.rows


class StaticImages(NamedTuple):
    """The embeddings of all images of a step in a captured graph, which does the same work for any number of them."""

    features: Tensor  # [num_tokens, width], as in `ImageRows`; rows of other tokens have no meaning
    is_image: Tensor  # bool [num_tokens, 1]: which tokens they replace


class SourceRows(NamedTuple):
    """The outputs of an encoder for some sources, one after another, and the KV cache positions `slots` of their
    cross-attention keys and values. The step computes and stores these in each layer before it attends to them.
    """

    slots: Tensor  # int64 [positions], as in AttentionMetadata
    states: Tensor  # [positions, hidden]


@dataclass(frozen=True, slots=True)
class StepStates:
    """The recurrent states of a step's sequences (Mamba states). Layers read a sequence's states from its row of
    `views`, and store the new ones there.
    """

    slots: Tensor
    """int64 [num_seqs]: each sequence's row in `views`. The states of a new sequence are zeros."""
    lengths: list[int]
    """How many tokens of the step each sequence has. The tokens of the sequences lie one after another. Empty in
    captured graphs with prompts, whose layers read the lengths on the device."""
    views: StateViews
    checkpoints: InnerCheckpoints | None = None
    """Other rows in `views` for states before the last token; None: none."""
    inner_lengths: Sequence[int] = ()
    """After how many tokens of each sequence these lie, 0: it has none; empty without them, and in captured graphs."""

    def sequences(self, meta: AttentionMetadata) -> PackedSequences:
        """Return the step's sequences for kernels. `meta` describes the same step."""
        return PackedSequences(meta.query_starts, self.slots, meta.max_query_len, self.checkpoints)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The inputs of a model's forward pass for one step, on the device."""

    input_ids: Tensor  # int64 [num_tokens]
    position_ids: Tensor  # int64 [num_tokens], or [3, num_tokens] if tokens stand for images of a model with M-RoPE
    logit_rows: Tensor | None  # int64 [num_logits]: rows of which logits are wanted; None: all, in their order
    meta: AttentionMetadata
    adapters: Sequence[tuple[str, Tensor | None]] = ()
    """By fingerprint: the rows that an adapter changes, int64 [count]; None: all rows."""
    images: Sequence[ImageRows] = ()
    static_images: StaticImages | None = None
    """The images of a step in a captured graph, instead of `images`; None for models without images."""
    after_layer: Callable[[int], None] | None = None
    """Called with a layer's number once all work that writes the layer's KV is queued on the device.

    Not all models call it.
    """
    states: StepStates | None = None
    """It is None for models without recurrent states."""
    slot_rows: SlotRows | None = None
    """The adapters of the step in slots, instead of `adapters`."""
    lengths: tuple[NDArray[np.int32], NDArray[np.int32]] | None = None
    """`meta.query_starts` and `meta.context_lens` in host memory, if they are known there."""
    cross: AttentionMetadata | None = None
    """The blocks of each token's source, for cross-attention; None for models without it."""
    sources: Sequence[SourceRows] = ()
    """Sources that were encoded for this step."""
    layer_metas: Sequence[AttentionMetadata] | None = None
    """With cache groups: the batch of each layer with KV, which is `meta` but for the blocks and slots of its group."""

    def meta_of(self, layer: int) -> AttentionMetadata:
        """Return the batch for a layer, by its number among the layers with KV."""
        return self.meta if self.layer_metas is None else self.layer_metas[layer]


def group_metas(
    meta: AttentionMetadata, tables: Tensor, slots: Tensor, layer_groups: Sequence[int]
) -> list[AttentionMetadata]:
    """Return the batch of each layer with KV, for models with cache groups. `meta` is that of full attention; `tables`
    [groups, num_seqs, blocks] and `slots` [groups, num_tokens] are those of the groups with a sliding window.
    """
    own = zip(tables, slots, strict=True)
    metas = [meta, *(replace(meta, block_tables=table, slots=slot) for table, slot in own)]
    return [metas[group] for group in layer_groups]


def cross_metadata(tables: Tensor, num_positions: int) -> AttentionMetadata:
    """Return the metadata for cross-attention of a step's tokens. `tables`, int32 [num_tokens, blocks], are the blocks
    of each token's source, which has `num_positions` positions.

    Each token counts as a sequence of its own at the source's last position, so that kernels for causal attention let
    it see the whole source.
    """
    count, device = len(tables), tables.device
    return AttentionMetadata(
        query_starts=torch.arange(count + 1, dtype=torch.int32, device=device),
        context_lens=torch.full((count,), num_positions, dtype=torch.int32, device=device),
        block_tables=tables,
        # Nothing is stored: the step that encodes a source stores its KV.
        slots=torch.full((count,), -1, dtype=torch.int64, device=device),
        max_query_len=1,
        max_context_len=num_positions,
    )


def embedded(embed: Callable[[Tensor], Tensor], inputs: StepInputs) -> Tensor:
    """Return the input of the first layer, [num_tokens, hidden]: the embeddings of tokens by `embed`, in which those of
    images replace their placeholder tokens.
    """
    hidden = embed(inputs.input_ids)
    for image in inputs.images:
        hidden[image.where] = image.features[:, : hidden.shape[1]].to(hidden.dtype)
    if inputs.static_images is not None:
        features, is_image = inputs.static_images
        hidden = features[:, : hidden.shape[1]].where(is_image, hidden)
    return hidden


def add_image_features(hidden: Tensor, inputs: StepInputs, layer: int) -> bool:
    """Add the image features for layer `layer` (DeepStack) to `hidden`, the layer's output [num_tokens, hidden], in
    place. Return False if the step's images have none for this layer.
    """
    begin = (layer + 1) * hidden.shape[1]
    has_any = False
    for image in inputs.images:
        if image.features.shape[1] > begin:
            hidden[image.where] += image.features[:, begin : begin + hidden.shape[1]].to(hidden.dtype)
            has_any = True
    if inputs.static_images is not None and inputs.static_images.features.shape[1] > begin:
        features, is_image = inputs.static_images
        hidden += features[:, begin : begin + hidden.shape[1]].where(is_image, 0)
        has_any = True
    return has_any


def added_rows(inputs: StepInputs, hidden: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return what `add_image_features` adds in all layers of a step: the rows of the tokens, int64 [count], and the
    features [num_layers, count, hidden] in the dtype of `hidden`. Return None if no image has features for layers.
    """
    width = hidden.shape[1]
    wide = [image for image in inputs.images if image.features.shape[1] > width]
    if not wide:
        return None
    every = torch.arange(len(hidden), device=hidden.device)
    rows = torch.cat([every[image.where] for image in wide])
    added = torch.cat([image.features[:, width:] for image in wide]).to(hidden.dtype)
    return rows, added.view(len(added), -1, width).transpose(0, 1)


@dataclass(frozen=True, slots=True)
class WindowArrays:
    """The blocks of a step in cache groups with a sliding window."""

    tables: NDArray[np.int32]  # [groups, num_seqs, blocks of the longest]
    slots: NDArray[np.int64]  # [groups, num_tokens]
    layer_groups: Sequence[int]
    """The group of each layer with KV; 0 is full attention."""


@dataclass(frozen=True, slots=True)
class StepArrays:
    """The inputs of a model's forward pass for one step, in host memory; `upload` copies them to the device."""

    tokens: NDArray[np.int64]  # [num_tokens]; what stands at `pending` has no meaning
    positions: NDArray[np.int64]  # as `StepInputs.position_ids`
    slots: NDArray[np.int64]  # [num_tokens], as in AttentionMetadata
    query_starts: NDArray[np.int32]  # [num_seqs + 1]
    context_lens: NDArray[np.int32]  # [num_seqs]
    block_tables: NDArray[np.int32]  # [num_seqs, blocks of the longest]
    logit_rows: NDArray[np.int64] | None  # None: all
    pending: NDArray[np.int64] | None  # [2, count]: which tokens only the device knows, and whose slot's last they are
    adapters: Sequence[tuple[str, NDArray[np.int64] | None]] = ()
    """By fingerprint: the rows that an adapter changes; None: all rows."""
    images: Sequence[ImageRows] = ()
    """Embeddings of images; they are on the device already. Rank 0 sends them to the others."""
    seen_ends: NDArray[np.int32] | None = None  # [num_tokens], as in AttentionMetadata
    unwindowed: NDArray[np.bool_] | None = None  # [num_tokens], as in AttentionMetadata
    batch_slots: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """[num_seqs]: the batch slot of each sequence, for recurrent states."""
    inner: NDArray[np.int64] | None = None
    """[2, num_seqs]: the spare row for each sequence's inner checkpoint, -1: it has none, and after how many tokens of
    the step it lies; None: no sequence has one."""
    source_tables: NDArray[np.int32] | None = None
    """[num_tokens, blocks of a source]; None for models without cross-attention."""
    source_tokens: int = 0
    """Positions of a source."""
    sources: Sequence[SourceRows] = ()
    """Encoded sources; they are on the device already. Rank 0 sends them to the others."""
    windows: WindowArrays | None = None
    """The blocks of cache groups with a sliding window; None for models without such groups."""

    def upload(self, device: torch.device, last_tokens: Tensor) -> StepInputs:
        """Copy the arrays to the device, and return them there. `last_tokens` [slots], on the device, is the last
        sampled token of each batch slot (row of a running sequence); tokens that the host does not know yet are read
        from it.
        """
        tokens = _sent(self.tokens, device)
        if self.pending is not None:  # tokens that the previous step has sampled and the host does not know yet
            where, slots = _sent(self.pending, device).unbind(0)
            tokens.index_copy_(0, where, last_tokens[slots])
        meta = AttentionMetadata(
            query_starts=_sent(self.query_starts, device),
            context_lens=_sent(self.context_lens, device),
            block_tables=_sent(self.block_tables, device),
            slots=_sent(self.slots, device),
            max_query_len=int(np.diff(self.query_starts).max()),
            max_context_len=int(self.context_lens.max()),
            seen_ends=None if self.seen_ends is None else _sent(self.seen_ends, device),
            unwindowed=None if self.unwindowed is None else _sent(self.unwindowed, device),
        )
        rows = None if self.logit_rows is None else _sent(self.logit_rows, device)
        adapters = [(one, None if where is None else _sent(where, device)) for one, where in self.adapters]
        tables = self.source_tables
        cross = None if tables is None else cross_metadata(_sent(tables, device), self.source_tokens)
        positions = _sent(self.positions, device)
        metas = None
        if self.windows is not None:
            sent = _sent(self.windows.tables, device), _sent(self.windows.slots, device)
            metas = group_metas(meta, *sent, self.windows.layer_groups)
        return StepInputs(
            tokens,
            positions,
            rows,
            meta,
            adapters,
            self.images,
            cross=cross,
            sources=self.sources,
            lengths=(self.query_starts, self.context_lens),
            layer_metas=metas,
        )


@dataclass(frozen=True, slots=True)
class BatchInputs:
    """The input arrays of a step, and where its logits for sampling and for prompt logprobs are among all its
    logits.
    """

    arrays: StepArrays
    sample_at: list[int]
    """By row of the batch: the row of its logits."""
    prompt_at: dict[int, int]
    """By chunk that needs all its logits (prompt logprobs): the first row of them."""

    @property
    def num_logits(self) -> int:
        """Return the number of tokens of the step for which logits are computed."""
        rows = self.arrays.logit_rows
        return len(self.arrays.tokens if rows is None else rows)


class InputBuilder:
    """Builds the input arrays of steps from scheduled batches. Owned by the `ModelRunner`."""

    def __init__(self, tables: BlockTables, limits: SchedulerConfig) -> None:
        self._tables = tables
        self._block_tokens = limits.block_tokens
        self._limits = limits

    def build_inputs(
        self, plan: ScheduledBatch, images: Sequence[ImageRows] = (), sources: Sequence[SourceRows] = ()
    ) -> BatchInputs:
        """Return the inputs of the scheduled step `plan`, and bring the block tables of its sequences up to date.
        `images` and `sources` are the embeddings of images and the encoder outputs that the step needs.
        """
        chunks = plan.chunks
        for chunk in chunks:
            self._tables.update(chunk.sequence)
        slots_of = np.array([c.sequence.slot for c in chunks])
        starts = np.array([c.start for c in chunks])
        lengths = np.array([c.length for c in chunks])
        query_starts = np.zeros(len(chunks) + 1, dtype=np.int32)
        np.cumsum(lengths, out=query_starts[1:])
        ends = starts + lengths
        if len(chunks) == query_starts[-1]:  # all chunks have one token: no ranges are needed
            indexes, rows = starts, slots_of
            tokens = np.array([_next_token(c) for c in chunks])
        else:
            # Each token's index in its sequence is that in the step, moved by its chunk's first one.
            indexes = np.arange(query_starts[-1]) + np.repeat(starts - query_starts[:-1], lengths)
            rows = np.repeat(slots_of, lengths)
            parts = (_tokens(c) for c in chunks)
            tokens = np.fromiter(chain.from_iterable(parts), dtype=np.int64, count=int(query_starts[-1]))
        # A token's slot in the KV cache follows from its block and its offset in the block.
        blocks = self._tables.host[rows, indexes // self._block_tokens].astype(np.int64)
        longest = int(ends.max())
        logit_rows, sample_at, prompt_at = _logit_rows(plan, query_starts.tolist())
        arrays = StepArrays(
            tokens=tokens,
            positions=step_positions(plan, indexes, query_starts) if self._limits.has_position_rows else indexes,
            slots=blocks * self._block_tokens + indexes % self._block_tokens,
            query_starts=query_starts,
            context_lens=ends.astype(np.int32),
            block_tables=self._tables.host[slots_of, : -(-longest // self._block_tokens)],
            logit_rows=None if len(logit_rows) == query_starts[-1] else np.array(logit_rows),
            pending=_pending(plan, query_starts),
            adapters=_adapter_rows(plan, query_starts),
            images=images,
            seen_ends=_seen_ends(plan, query_starts, indexes, self._limits),
            unwindowed=_unwindowed(plan, query_starts, indexes, self._limits),
            batch_slots=slots_of,
            inner=_inner(plan),
            source_tables=source_tables(plan, self._limits, lengths),
            source_tokens=self._limits.source_tokens,
            sources=sources,
            windows=self._windows(slots_of, rows, indexes, longest),
        )
        return BatchInputs(arrays, sample_at, prompt_at)

    def _windows(
        self, slots_of: NDArray[np.int64], rows: NDArray[np.int64], indexes: NDArray[np.int64], longest: int
    ) -> WindowArrays | None:
        """Return the blocks of groups with a window. Sequences have the batch slots `slots_of`, and tokens those of
        `rows`.
        """
        if not self._limits.layer_groups:
            return None
        size, tables = self._block_tokens, self._tables.windows
        blocks = tables[:, rows, indexes // size].astype(np.int64)
        return WindowArrays(
            np.ascontiguousarray(tables[:, slots_of, : -(-longest // size)]),
            np.ascontiguousarray(blocks * size + indexes % size),
            self._limits.layer_groups,
        )


def _inner(plan: ScheduledBatch) -> NDArray[np.int64] | None:
    """Return the inner checkpoints of a step, as `StepArrays` has them."""
    if not any(chunk.inner for chunk in plan.chunks):
        return None
    return np.array([(c.inner_row if c.inner else -1, c.inner) for c in plan.chunks], dtype=np.int64).T.copy()


def _seen_ends(
    plan: ScheduledBatch, query_starts: NDArray[np.int32], indexes: NDArray[np.int64], limits: SchedulerConfig
) -> NDArray[np.int32] | None:
    """Return, int32 [num_tokens], the position behind the last token that each token may attend to: behind itself, or
    behind the end of its image or prompt, if its tokens attend to each other in both directions. Return None if no
    token sees a later one. `indexes` are the tokens' indexes in their sequences.
    """
    if not limits.keeps_images_whole and not limits.has_bidirectional_prompts:
        return None
    ends: NDArray[np.int32] | None = None
    for chunk, first in zip(plan.chunks, query_starts.tolist(), strict=False):
        start, end = chunk.start, chunk.start + chunk.length
        for low, high in whole_parts(chunk.sequence.request.work, start, end, limits):
            if ends is None:
                ends = (indexes + 1).astype(np.int32)
            ends[first + max(low, start) - start : first + min(high, end) - start] = high
    return ends


def _unwindowed(
    plan: ScheduledBatch, query_starts: NDArray[np.int32], indexes: NDArray[np.int64], limits: SchedulerConfig
) -> NDArray[np.bool_] | None:
    """Return, bool [num_tokens], which tokens attend to all of their prompt, whatever the window of a layer is. Return
    None if all prompts fit into the shortest window.
    """
    if not limits.has_bidirectional_prompts or not limits.shortest_window_tokens:
        return None
    ends = np.array([chunk.sequence.request.work.bidirectional_tokens for chunk in plan.chunks])
    pairs = zip(plan.chunks, ends.tolist(), strict=True)
    if not any(chunk.start < end and end > limits.shortest_window_tokens for chunk, end in pairs):
        return None
    return indexes < np.repeat(ends, np.diff(query_starts))


def source_tables(
    plan: ScheduledBatch, limits: SchedulerConfig, lengths: NDArray[np.int64] | int = 1
) -> NDArray[np.int32] | None:
    """Return the blocks of the cross-attention KV that each token of a step reads, int32 [num_tokens, blocks]; None for
    models without cross-attention.

    `lengths` are the numbers of tokens of the chunks. Warm-up batches have no source: they read block 0.
    """
    if not limits.source_blocks:
        return None
    rows = np.zeros((len(plan.chunks), limits.source_blocks), dtype=np.int32)
    for number, chunk in enumerate(plan.chunks):
        if chunk.sequence.source_blocks:
            rows[number] = chunk.sequence.source_blocks
    return np.repeat(rows, lengths, axis=0)


def _pending(plan: ScheduledBatch, query_starts: NDArray[np.int32]) -> NDArray[np.int64] | None:
    """Return which tokens of a step were sampled but have not been copied to the host yet: int64 [2, count], their rows
    in the step and the batch slots whose last token they are. Return None if the host knows all tokens.
    """
    found = [
        (int(start), c.sequence.slot)
        for c, start in zip(plan.chunks, query_starts, strict=False)
        if c.sequence.num_output_placeholders
    ]
    return np.array(found).T.copy() if found else None


def _adapter_rows(
    plan: ScheduledBatch, query_starts: NDArray[np.int32]
) -> Sequence[tuple[str, NDArray[np.int64] | None]]:
    """Return each LoRA adapter of a step, by fingerprint, with the step's rows that use it (None: all rows); empty if
    no sequence has an adapter. `query_starts` are the first rows of the chunks.
    """
    names = [chunk.sequence.request.work.lora for chunk in plan.chunks]
    if not any(names):
        return ()
    # All rows need no index, which is faster.
    if len(set(names)) == 1:
        return [(names[0], None)]
    rows = np.repeat(np.arange(len(names)), np.diff(query_starts))
    return [
        (one, np.flatnonzero(np.isin(rows, [i for i, name in enumerate(names) if name == one])))
        for one in dict.fromkeys(names)
        if one
    ]


def _sent(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """Start copying an array from host memory to the device, without waiting for the device, and return the copy."""
    return torch.from_numpy(array).to(device, non_blocking=True)


def _next_token(chunk: ScheduledChunk) -> int:
    """Return the input token of a chunk of length 1; 0 if it was sampled but has not been copied to the host yet."""
    return 0 if chunk.sequence.num_output_placeholders else chunk.sequence.token_ids[chunk.start]


def _tokens(chunk: ScheduledChunk) -> list[int]:
    """Return the input tokens of a chunk; [0] if its only token was sampled but has not been copied to the host yet."""
    return (
        [0]
        if chunk.sequence.num_output_placeholders
        else chunk.sequence.token_ids[chunk.start : chunk.start + chunk.length]
    )


def _logit_rows(plan: ScheduledBatch, query_starts: list[int]) -> tuple[list[int], list[int], dict[int, int]]:
    """Return (the rows of the step that need logits, for each sampled sequence its place in that list, and by chunk
    that wants prompt logprobs its first place in that list). `query_starts` are the first rows of the chunks.
    """
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
    # One row at least: models cannot compute an empty list of logits.
    return rows or [0], [last_of[row.chunk] for row in plan.rows], prompt_at
