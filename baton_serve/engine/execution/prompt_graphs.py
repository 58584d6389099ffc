"""Decides which small steps with prompt tokens replay a captured graph (CUDA graph), for which numbers of tokens, and
captures them. Launching hundreds of kernels for few tokens takes the host longer than their work takes the device, and
it holds Python's lock.

There is one kind of graph for prompts alone, and two for prompts together with few or many decoding sequences. The
inputs of a graph are one array and one block table, which the host fills and the device copies. Padding tokens belong
to no sequence and are stored nowhere; padding sequences have no token, no context and no recurrent state. Kernels find
the chunks of sequences on the device, and programs beyond the last chunk end at once. Steps that fit no graph are
computed without one.

A stage of a pipeline captures its layers, with activations in the place of logits; of every token, if other layers
follow.

If an instance reads images, all its prompt graphs accept them: embeddings are copied into memory of the graphs, and
selected by token. A step of 125 tokens of text took 6.56 ms with this selection and 6.50 without it (H200, Qwen2.5-VL
7B). Graphs of their own for images would double the time of capturing.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton_serve.engine import device as devices
from baton_serve.engine.core.request_table import SchedulerConfig
from baton_serve.engine.core.step_time_model import GRAPH_SIZES_TOKENS
from baton_serve.engine.execution.decode_graphs import CaptureGraph, Graph
from baton_serve.engine.execution.graph_proof import GraphCase, ProofBlocks, ProofStates
from baton_serve.engine.kernels import AttentionMetadata
from baton_serve.engine.kernels.mixers import InnerCheckpoints
from baton_serve.engine.kv.state_memory import StateViews
from baton_serve.engine.model.batch_inputs import (
    ImageRows,
    StaticImages,
    StepArrays,
    StepInputs,
    StepStates,
    group_metas,
)
from baton_serve.engine.model.block_tables import table_width
from baton_serve.engine.model.forward import Forward
from baton_serve.engine.model.pipeline_stage import CapturedStage

MAX_GRAPH_TOKENS = GRAPH_SIZES_TOKENS[-1]
"""Largest step that is captured, in tokens. For larger ones the device takes longer than the host's launches."""
TOKENS, LAST_OF, SLOTS, STARTS, CONTEXTS, LOGIT_ROWS, STATES, INNER_ROWS, INNER_TOKENS, POSITIONS = range(10)
"""Rows of the input array. STARTS, CONTEXTS and INNER_TOKENS are int32. STATES are batch slots of sequences, negative
for padding, and the rows after it are their inner checkpoints. Models with M-RoPE have three rows of positions."""
PENDING, IMAGE = -1, -2
"""Tokens that stand for others: the last token of slot LAST_OF, and an image's embedding."""

TOKENS_BEHIND_CHECKPOINT = 5
"""Tokens of a prompt of the proof behind its inner checkpoint."""


@dataclass(frozen=True, slots=True)
class GraphShape:
    """The limits of one kind of captured prompt graph: how many sequences a step may have, and whether some may be
    decoding.
    """

    num_seqs: int
    """Largest number of sequences."""
    has_singles: bool
    """Sequences may have one new token, that is, they may be decoding."""
    beyond: int = 0
    """The shape is used only for more sequences than this, and so for more tokens."""


GRAPH_SHAPES = (
    GraphShape(16, has_singles=False),
    GraphShape(64, has_singles=True),
    GraphShape(128, has_singles=True, beyond=64),
)
"""Shapes of graphs. A step takes the first that fits."""


GraphVariant = tuple[GraphShape, int]
"""The shape of a graph, and its step size in tokens."""


def token_buckets(max_step_tokens: int) -> list[int]:
    """Return the step sizes in tokens, ascending, for which prompt graphs are captured. `max_step_tokens` is the size
    of the largest step.
    """
    largest = min(max_step_tokens, MAX_GRAPH_TOKENS)
    return [size for size in GRAPH_SIZES_TOKENS if size < largest] + [largest]


def graph_variants(limits: SchedulerConfig) -> list[GraphVariant]:
    """Return each pair of a graph shape and a step size in tokens for which a prompt graph is captured, the largest
    first.
    """
    kinds = [kind for kind in reversed(GRAPH_SHAPES) if limits.max_num_seqs > kind.beyond]
    sizes = reversed(token_buckets(limits.max_step_tokens))
    return [(kind, size) for size, kind in product(sizes, kinds) if size > kind.beyond]


def graph_shape_for(arrays: StepArrays) -> GraphShape | None:
    """Return the first of `GRAPH_SHAPES` whose graphs can compute this step, or None. None fits a step in which all
    sequences have one token (decode graphs compute it), or with adapters, images that are seen in both directions,
    cross-attention, or too many sequences or logits.
    """
    lengths = np.diff(arrays.query_starts)
    has_others = arrays.adapters or arrays.seen_ends is not None or arrays.source_tokens
    if has_others or arrays.logit_rows is None or lengths.max() == 1:
        return None
    count, has_singles = max(len(lengths), len(arrays.logit_rows)), bool((lengths == 1).any())
    return next((kind for kind in GRAPH_SHAPES if count <= kind.num_seqs and kind.has_singles >= has_singles), None)


class PromptGraphs:
    """The captured graphs of one engine for small steps with prompt tokens, and the memory of their inputs and
    outputs.
    """

    def __init__(
        self,
        forward: Forward,
        layers: list[Tensor],
        limits: SchedulerConfig,
        last_tokens: Tensor,
        no_images: Tensor | None = None,
        states: StateViews | None = None,
    ) -> None:
        """Allocate the memory of the graphs' inputs on the device of `last_tokens`. `layers` are the layers' views of
        the KV cache.

        `last_tokens` [slots] is the last token of each batch slot (row of a running sequence).
        `no_images` [0, width] is like the image embeddings that the graphs accept; None: they accept none. `states` are
        the recurrent states of all batch slots; None for models without them.
        """
        device = last_tokens.device
        self._forward = forward
        self._has_all_rows = isinstance(forward, CapturedStage) and not forward.is_last
        self._layers = layers
        self._limits = limits
        self._last_tokens = last_tokens
        self._states = states or {}
        self._device = device
        self._sizes = token_buckets(limits.max_step_tokens)
        most_seqs = max(kind.num_seqs for kind in GRAPH_SHAPES)
        # Without images the three rows of positions are always equal, and one is enough.
        num_rows = POSITIONS + (3 if limits.has_position_rows and no_images is not None else 1)
        shape = (num_rows, max(self._sizes[-1], most_seqs + 1))
        # Two, because the device may still be copying the previous step's inputs while the host fills the next ones.
        tables = (1 + limits.num_window_groups, most_seqs, table_width(limits))
        self._staging = [_Staging(device, shape, tables) for _ in range(2)]
        self._inputs = torch.zeros_like(self._staging[0].inputs, device=device)
        self._tables = torch.zeros_like(self._staging[0].tables, device=device)
        """The block tables of all cache groups."""
        self._features = None if no_images is None else no_images.new_zeros((self._sizes[-1], no_images.shape[1]))
        """Image embeddings, by row of the step."""
        self._output: Tensor | None = None
        """Logits, or the activations of a stage."""
        self._graphs: dict[GraphVariant, Graph] = {}

    @torch.inference_mode()
    def capture(self, capture: CaptureGraph) -> None:
        """Capture all graphs with the function `capture`; none for models with cross-attention. The largest comes
        first, since it determines the size of the scratch memory that all share.

        Raises `RuntimeError` if something cannot be captured.
        """
        if self._limits.source_tokens:
            return  # these graphs have no blocks of sources
        self._fill_nothing()
        graphs: dict[GraphVariant, Graph] = {}
        for kind, size in graph_variants(self._limits):
            self._compute(kind, size)  # compiles kernels and allocates what libraries keep
            graphs[kind, size] = capture(partial(self._compute, kind, size))
        self._graphs = graphs

    @torch.inference_mode()
    def proof_cases(self, blocks: ProofBlocks) -> Iterator[GraphCase]:
        """Iterate over all captured graphs, each with the inputs of an artificial step, for `prove_graphs`. The KV of
        these steps is in `blocks`. Use one case before you take the next: they share the memory of the inputs.
        """
        states = ProofStates(self._states)
        for (kind, size), graph in self._graphs.items():
            arrays = _proof_arrays(kind, size, blocks, self._limits)
            if arrays is None:
                continue  # the KV cache is too small for a prompt of this size
            if self._features is not None:
                arrays = self._with_image(arrays, self._features)
            self._fill_inputs(arrays, kind, size)
            yield GraphCase(
                "prompt graph",
                f"step of {size} tokens and up to {kind.num_seqs} sequences",
                states.reset_before(partial(self._compute, kind, size)),
                states.reset_before(graph.replay),
                partial(self._last_output, self._num_rows(arrays)),
                states.compared(self._limits),
            )
        states.clear()

    def _with_image(self, arrays: StepArrays, like: Tensor) -> StepArrays:
        """Return the inputs of a proof's step in which random embeddings, like those in `like`, replace the second and
        third token of the first prompt, with rows of positions that differ.
        """
        image = ImageRows(1, torch.randn((2, like.shape[1]), device=like.device).to(like.dtype))
        rows = np.arange(len(self._inputs) - POSITIONS)[:, None]
        positions = arrays.positions + rows * (arrays.positions < 3)
        return replace(arrays, images=[image], positions=positions)

    def _num_rows(self, arrays: StepArrays) -> int:
        """Return the number of rows of the result of a step."""
        assert arrays.logit_rows is not None
        return len(arrays.tokens if self._has_all_rows else arrays.logit_rows)

    def _last_output(self, count: int) -> Tensor:
        assert self._output is not None
        return self._output[:count]

    def release(self) -> None:
        """Free all captured graphs; later steps with prompt tokens are computed without graphs."""
        self._graphs = {}

    def variant_for(self, arrays: StepArrays) -> GraphVariant | None:
        """Return the captured graph that can compute a step, for `replay`. Return None if no graph fits it; then the
        caller computes it without a graph.
        """
        count = len(arrays.tokens)
        if not self._graphs or count > self._sizes[-1] or not self._accepts(arrays):
            return None
        if (kind := graph_shape_for(arrays)) is None:
            return None
        return kind, next(size for size in self._sizes if size >= count)

    def replay(self, arrays: StepArrays, variant: GraphVariant) -> Tensor:
        """Launch a step by the captured graph `variant`, which `variant_for` has returned for it. Return its logits
        [num_logits, vocab_size], which the next step overwrites. On a stage of a pipeline they are activations, as
        `StagePart.run_stage` returns them.
        """
        self._fill_inputs(arrays, *variant)
        self._graphs[variant].replay()
        return self._last_output(self._num_rows(arrays))

    def _accepts(self, arrays: StepArrays) -> bool:
        """Return whether the graphs accept the images of a step, if there are any."""
        width = 0 if self._features is None else self._features.shape[1]
        return all(image.features.shape[1] == width for image in arrays.images)

    def _fill_inputs(self, arrays: StepArrays, kind: GraphShape, size: int) -> None:
        """Start copying the inputs of a step to the input memory of the graphs, padded to `size` tokens and to the
        number of sequences of `kind`.
        """
        self._staging.reverse()
        staging, num_seqs = self._staging[0], len(arrays.context_lens)
        staging.wait()
        _fill(staging.inputs.numpy(), arrays, size, kind.num_seqs)
        width, tables = arrays.block_tables.shape[1], staging.tables.numpy()
        tables[0, :num_seqs, :width] = arrays.block_tables
        if len(tables) > 1:
            tables[1:, :num_seqs, :width] = arrays.block_tables if arrays.windows is None else arrays.windows.tables
        self._inputs.copy_(staging.inputs, non_blocking=True)
        self._tables[:, :num_seqs].copy_(staging.tables[:, :num_seqs], non_blocking=True)
        staging.is_being_copied(self._device)
        for image in arrays.images:
            assert self._features is not None  # `replay` accepts no others
            self._features[image.where] = image.features.to(self._features.dtype)
            if image.rows is not None:
                self._inputs[TOKENS, image.rows] = IMAGE

    def _fill_nothing(self) -> None:
        """Fill the input memory of the graphs with padding only, so that capturing changes no KV."""
        inputs = self._staging[0].inputs
        inputs.zero_()
        inputs[SLOTS] = inputs[STATES] = inputs[INNER_ROWS] = -1
        self._inputs.copy_(inputs)

    def _compute(self, kind: GraphShape, size: int) -> None:
        """Compute a step of `size` tokens and the sequences of `kind` from the input memory: the work that a graph
        captures. Every tensor here keeps its memory between replays, or is scratch.
        """
        inputs, num_seqs = self._inputs[:, :size], kind.num_seqs
        host_tokens = inputs[TOKENS]
        # The token of an image is never read, but it must be one of the vocabulary.
        tokens = torch.where(host_tokens < 0, self._last_tokens.index_select(0, inputs[LAST_OF]), host_tokens)
        positions = inputs[POSITIONS:] if len(inputs) > POSITIONS + 1 else inputs[POSITIONS]
        images = None
        if self._features is not None:
            images = StaticImages(self._features[:size], (host_tokens == IMAGE)[:, None])
        meta = AttentionMetadata(
            query_starts=self._inputs[STARTS].view(torch.int32)[: num_seqs + 1],
            context_lens=self._inputs[CONTEXTS].view(torch.int32)[:num_seqs],
            block_tables=self._tables[0, :num_seqs],
            slots=inputs[SLOTS],
            max_query_len=size,
            max_context_len=self._limits.max_model_len,
            has_singles=kind.has_singles,
        )
        metas = self._layer_metas(meta, inputs[POSITIONS]) if len(self._tables) > 1 else None
        rows = self._inputs[LOGIT_ROWS, :num_seqs]
        states: StepStates | None = None
        if self._states:
            inner_tokens = self._inputs[INNER_TOKENS].view(torch.int32)[:num_seqs]
            inner = InnerCheckpoints(self._inputs[INNER_ROWS, :num_seqs], inner_tokens)
            states = StepStates(self._inputs[STATES, :num_seqs], [], self._states, inner)
        step = StepInputs(tokens, positions, rows, meta, static_images=images, states=states, layer_metas=metas)
        output = self._forward(step, self._layers)
        # The result must lie outside the scratch memory, which the next graph overwrites.
        if self._output is None:
            most_seqs = max(kind.num_seqs for kind in GRAPH_SHAPES)
            self._output = output.new_empty((max(most_seqs, len(output)), output.shape[1]))
        self._output[: len(output)] = output

    def _layer_metas(self, meta: AttentionMetadata, indexes: Tensor) -> list[AttentionMetadata]:
        """Return the batch of each layer, for models with cache groups. A token's slot follows from its index in its
        sequence and the sequence's block table.
        """
        tables, size = self._tables[1:, : len(meta.context_lens)], self._limits.block_tokens
        tokens = torch.arange(len(indexes), dtype=torch.int32, device=indexes.device)
        rows = torch.bucketize(tokens, meta.query_starts[1:], right=True).clamp(max=len(meta.context_lens) - 1)
        slots = tables[:, rows, indexes // size].long() * size + indexes % size
        return group_metas(meta, tables, slots.where(meta.slots >= 0, -1), self._limits.layer_groups)


def _proof_arrays(kind: GraphShape, size: int, blocks: ProofBlocks, limits: SchedulerConfig) -> StepArrays | None:
    """Return the inputs of an artificial step that compares a graph with eager work: prompts of different lengths, one
    of them with an inner checkpoint, and a decoding sequence if `kind` allows it. Return None if the KV cache has too
    few blocks.
    """
    lengths, inner = _proof_lengths(kind, size, limits)
    starts = np.cumsum([0, *lengths]).astype(np.int32)
    counts = [-(-length // blocks.block_tokens) for length in lengths]
    ends = np.cumsum(counts)
    if ends[-1] >= blocks.num_blocks:
        return None
    tables = np.zeros((len(lengths), max(counts)), dtype=np.int32)
    for row, (end, count) in enumerate(zip(ends, counts, strict=True)):
        tables[row, :count] = np.arange(end - count, end) + 1
    positions = np.concatenate([np.arange(length) for length in lengths])
    rows = np.repeat(np.arange(len(lengths)), lengths)
    slots = tables[rows, positions // blocks.block_tokens].astype(np.int64) * blocks.block_tokens
    return StepArrays(
        tokens=positions % 7,
        positions=positions,
        slots=slots + positions % blocks.block_tokens,
        query_starts=starts,
        context_lens=np.array(lengths, dtype=np.int32),
        block_tables=tables,
        logit_rows=starts[1:].astype(np.int64) - 1,
        pending=None,
        batch_slots=np.arange(len(lengths)),
        inner=inner,
    )


def _proof_lengths(kind: GraphShape, size: int, limits: SchedulerConfig) -> tuple[list[int], NDArray[np.int64] | None]:
    """Return the length in tokens of each prompt of a proof, and the inner checkpoint of one of them in the first spare
    row, as `StepArrays` has it, if the step has tokens for it.
    """
    # There are as many recurrent states as sequences may run.
    most = min(kind.num_seqs, limits.max_num_seqs)
    lengths = [3, 1][:most] if kind.has_singles else [3]
    step, checked = limits.checkpoint_step_tokens, -1
    longer = step + TOKENS_BEHIND_CHECKPOINT
    if step and limits.num_spare_rows and longer <= limits.max_model_len and sum(lengths) + longer <= size:
        checked = len(lengths) if len(lengths) < most else 0
        lengths[checked : checked + 1] = [longer]
    while sum(lengths) < size and len(lengths) < most:
        lengths.append(min(size - sum(lengths), limits.max_model_len, 5 + 2 * len(lengths)))
    if checked < 0:
        return lengths, None
    inner = np.array([[-1], [0]], dtype=np.int64).repeat(len(lengths), axis=1)
    inner[:, checked] = limits.max_num_seqs, step
    return lengths, inner


class _Staging:
    """Pinned host memory for the inputs of a step, from which the device copies while the host goes on."""

    def __init__(self, device: torch.device, inputs: tuple[int, int], tables: tuple[int, int, int]) -> None:
        self.inputs = devices.staging(device, inputs, torch.int64)
        self.tables = devices.staging(device, tables, torch.int32)
        self._copied: devices.DeviceEvent | None = None

    def is_being_copied(self, device: torch.device) -> None:
        """Record that the copy of this memory to `device` has been queued, so that `wait` can wait for it."""
        if not devices.is_host(device):
            self._copied = devices.record(device)

    def wait(self) -> None:
        # Chunks before a prompt's last are not waited for, so the host may be several steps ahead of the device.
        """Wait until the device has copied this memory, so that it can be filled again."""
        if self._copied is not None:
            self._copied.synchronize()


def _fill(host: NDArray[np.int64], arrays: StepArrays, size: int, num_seqs: int) -> None:
    """Write the inputs of a step into `host`, the input array [rows, columns], with padding up to `size` tokens and
    `num_seqs` sequences.
    """
    count, own = len(arrays.tokens), len(arrays.context_lens)
    host[TOKENS, :count], host[SLOTS, :count] = arrays.tokens, arrays.slots
    host[POSITIONS:, :count] = arrays.positions  # the same in three rows, if the step has one
    for image in arrays.images:
        # The places of others are known on the device only.
        if image.rows is None:
            host[TOKENS, image.first : image.first + len(image.features)] = IMAGE
    host[TOKENS, count:size] = 0
    host[POSITIONS:, count:size] = 0
    host[SLOTS, count:size] = -1
    host[LAST_OF, :size] = 0
    if arrays.pending is not None:
        where, slots = arrays.pending
        host[TOKENS, where] = PENDING
        host[LAST_OF, where] = slots
    starts, contexts = host[STARTS].view(np.int32), host[CONTEXTS].view(np.int32)
    # Padding sequences begin and end at the last token, so they have no tokens.
    starts[: own + 1], starts[own + 1 : num_seqs + 1] = arrays.query_starts, count
    contexts[:own], contexts[own:num_seqs] = arrays.context_lens, 0
    host[STATES, :num_seqs] = -1
    host[STATES, : len(arrays.batch_slots)] = arrays.batch_slots
    host[INNER_ROWS, :num_seqs] = -1
    if arrays.inner is not None:
        host[INNER_ROWS, :own], host[INNER_TOKENS].view(np.int32)[:own] = arrays.inner
    assert arrays.logit_rows is not None
    host[LOGIT_ROWS, : len(arrays.logit_rows)] = arrays.logit_rows
    host[LOGIT_ROWS, len(arrays.logit_rows) : num_seqs] = 0
