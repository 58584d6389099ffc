"""Decides which decode steps replay a captured graph (CUDA graph), padded to which batch size, and captures and replays
them.

The inputs of a graph are one small array that the host fills and the device copies, the block tables on the device, and
the last token of each slot, which stays on the device: a step can be launched before the host knows what the previous
step sampled. Rows beyond the batch are padding, with context 0 and slot -1. Each graph also finds the largest logit of
each row. If the model has slots for LoRA adapters, each batch size has a second graph for batches with adapters in any
mixture: the slot of each row is an input too. A caller that samples differently reads the logits and calls
`set_sampled_tokens`. With several ranks each keeps its columns of the logits, and they are gathered only for callers
that read them. A stage of a pipeline captures its layers, with activations in the place of logits.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton_serve.engine import device as devices
from baton_serve.engine.core.request_table import SchedulerConfig
from baton_serve.engine.core.scheduler import ScheduledBatch
from baton_serve.engine.execution.graph_proof import GraphCase, ProofBlocks, ProofStates
from baton_serve.engine.kernels import AttentionMetadata, argmax_kernel
from baton_serve.engine.kernels.operations import Argmax
from baton_serve.engine.kv.state_memory import StateViews
from baton_serve.engine.model.batch_inputs import StepInputs, StepStates, cross_metadata, group_metas, source_tables
from baton_serve.engine.model.block_tables import BlockTables, DeviceTables
from baton_serve.engine.model.forward import Forward
from baton_serve.engine.model.lora.slots import NUM_ROW_ARRAYS, AdapterSlots, sorted_rows
from baton_serve.engine.model.mrope_positions import first_shifts
from baton_serve.engine.model.pipeline_stage import CapturedStage

LAST, TOKENS, TOKEN_AT, POSITIONS, SLOTS, TABLE_ROWS, STATES, CONTEXTS, ADAPTERS = range(9)
"""Rows of the input array.

LAST, the last token of each batch slot, is written by the device only; the other rows are copied from the host.
TOKEN_AT is the index of a sequence's token in the first two rows, read as one. STATES are the sequences' rows in the
memory of recurrent states, negative for padding. The rows from ADAPTERS on are those of `sorted_rows`.
"""


class Graph(Protocol):
    """The interface of a captured device graph, such as a CUDA graph; `replay` launches it."""

    def replay(self) -> None: ...


CaptureGraph = Callable[[Callable[[], None]], Graph]
"""Captures the device's work of a function that has run once before."""


@dataclass(frozen=True, slots=True)
class DecodeResult:
    """The result of a decode step, in device memory: the greedy token of each sequence. The next step overwrites it."""

    greedy: Tensor | None
    """int64 [batch]; of a row with NaN vocab_size. None with a pipeline."""
    vocab_size: int
    computed: Tensor | None = None
    """The argument for `Executor.collect`, which returns the logits of a pipeline later; None without one."""


def batch_size_buckets(max_num_seqs: int) -> list[int]:
    """Return the batch sizes, ascending, for which decode graphs are captured. The last one is `max_num_seqs`.

    Small sizes are close together, because padding to the next size costs most there.
    """
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, max(65, max_num_seqs), 16)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


@dataclass(frozen=True, slots=True)
class DecodeArrays:
    """The inputs of a decode step that replays a captured graph, in host memory."""

    inputs: NDArray[np.int64]  # [7, batch], rows TOKENS to CONTEXTS, the last one int32
    changes: NDArray[np.int64] | None
    """Changes of the block tables, as `BlockTables.take_changes` returns them; None: no change."""
    adapters: Sequence[str] = ()
    """The LoRA adapter of each sequence, by fingerprint; "" is none. Empty: no sequence has one."""
    sources: NDArray[np.int32] | None = None
    """[batch, blocks]: the blocks of each sequence's source; None for models without cross-attention."""


def fits_decode_graph(plan: ScheduledBatch, *, with_adapters: bool) -> bool:
    """Return whether a captured decode graph can compute this step: each sequence has one new token and samples one,
    and no request wants prompt logprobs or, unless `with_adapters` is True, has a LoRA adapter.

    `with_adapters` says that graphs were captured for steps with LoRA adapters too.
    """
    return 0 < len(plan.chunks) == len(plan.rows) and all(
        c.length == 1
        and not c.sequence.request.wants_prompt_logprobs
        and (with_adapters or not c.sequence.request.work.lora)
        for c in plan.chunks
    )


def build_inputs(plan: ScheduledBatch, tables: BlockTables, limits: SchedulerConfig) -> DecodeArrays:
    """Return the input arrays of the decode step `plan`, and bring `tables` up to date for its sequences.

    A token that was sampled but has not been copied to the host yet is read on the device, from the sequence's batch
    slot (its row among the running sequences).
    """
    chunks, block_tokens = plan.chunks, limits.block_tokens
    count, width = len(chunks), limits.max_num_seqs + 1
    for chunk in chunks:
        tables.update(chunk.sequence)
    adapters = [c.sequence.request.work.lora for c in chunks]
    host = np.zeros((CONTEXTS + 1, count), dtype=np.int64)
    rows = np.array([c.sequence.slot for c in chunks])
    indexes = np.array([c.start for c in chunks])
    tokens = np.array([-1 if c.sequence.num_output_placeholders else c.sequence.token_ids[c.start] for c in chunks])
    host[TOKENS] = tokens
    host[TOKEN_AT] = np.where(tokens < 0, rows, width + np.arange(count))
    host[POSITIONS] = indexes + first_shifts(plan) if limits.has_position_rows else indexes
    host[SLOTS] = tables.host[rows, indexes // block_tokens].astype(np.int64) * block_tokens
    host[SLOTS] += indexes % block_tokens
    host[TABLE_ROWS] = host[STATES] = rows  # a sequence's states have the number of its block table
    host[CONTEXTS].view(np.int32)[:count] = indexes + 1
    named = adapters if any(adapters) else ()
    return DecodeArrays(host[TOKENS:], tables.take_changes(), named, source_tables(plan, limits))


class SourceTables:
    """The block tables of the encoder outputs (sources) of a batch, for cross-attention in captured graphs. They stay
    in the same device memory.
    """

    def __init__(self, limits: SchedulerConfig, device: torch.device) -> None:
        shape = (limits.max_num_seqs, limits.source_blocks)
        # Two, because the device may still be copying the previous step's tables.
        self._staging = [devices.staging(device, shape, torch.int32) for _ in range(2)]
        # Padding reads block 0, which belongs to no source.
        self._all = cross_metadata(torch.zeros(shape, dtype=torch.int32, device=device), limits.source_tokens)

    def fill(self, rows: NDArray[np.int32]) -> None:
        """Start copying to the device the blocks of the source of each sequence of a step, `rows` [num_seqs,
        blocks].
        """
        self._staging.reverse()
        staged = self._staging[0][: len(rows)]
        staged.numpy()[:] = rows
        self._all.block_tables[: len(rows)].copy_(staged, non_blocking=True)

    def first(self, size: int) -> AttentionMetadata:
        """Return the metadata for cross-attention of the first `size` sequences of a batch, as views of the same device
        memory.
        """
        return replace(
            self._all,
            query_starts=self._all.query_starts[: size + 1],
            context_lens=self._all.context_lens[:size],
            block_tables=self._all.block_tables[:size],
            slots=self._all.slots[:size],
        )


class DecodeGraphs:
    """The captured graphs of decode steps of one engine, one for each batch size, with the memory of their inputs and
    outputs.
    """

    def __init__(
        self,
        forward: Forward,
        layers: list[Tensor],
        limits: SchedulerConfig,
        argmax: Argmax | None = None,
        states: StateViews | None = None,
        device: torch.device | None = None,
    ) -> None:
        """`device` is that of `layers`; None: there is at least one layer, which shows it."""
        device = device or layers[0].device
        self._forward = forward
        self._has_logits = not isinstance(forward, CapturedStage)
        self._layers = layers
        self._states = states or {}
        self._tables = DeviceTables(limits, device)
        self._limits = limits
        self._width = limits.max_num_seqs + 1  # one column more than slots, for padding
        # Several, because the device may still be copying the inputs of steps in flight while the host fills the next
        # ones. With a pipeline there are as many such steps as stages.
        shape = (ADAPTERS + NUM_ROW_ARRAYS, self._width)
        self._staging = deque(devices.staging(device, shape, torch.int64) for _ in range(limits.num_stages + 1))
        self._inputs = torch.zeros_like(self._staging[0], device=device)
        self.last_tokens = self._inputs[LAST]
        self._sources = SourceTables(limits, device) if limits.source_tokens else None
        self._starts = torch.arange(limits.max_num_seqs + 1, dtype=torch.int32, device=device)
        self._greedy = torch.zeros(limits.max_num_seqs, dtype=torch.int64, device=device)
        parts = forward.parts
        # With several ranks each finds its largest logit, and only these are exchanged; larger batches gather the
        # logits.
        self._parts = parts if parts is not None and limits.max_num_seqs <= parts.max_rows else None
        self._logits: Tensor | None = None
        self._argmax = argmax or argmax_kernel(device)
        self._graphs: dict[int, Graph] = {}
        self._adapter_graphs: dict[int, Graph] = {}
        self._slots = forward.adapter_slots
        self._bucket_of: list[int] = []

    @torch.inference_mode()
    def capture(self, capture: CaptureGraph) -> None:
        """Capture a graph for each batch size with the function `capture`. The largest size comes first, since it
        determines the size of the scratch memory that all graphs share. Raises `RuntimeError` if something cannot be
        captured.
        """
        sizes = batch_size_buckets(self._limits.max_num_seqs)
        self._fill_padding(self._staging[0].numpy(), 0, self._limits.max_num_seqs)
        # Not the first row: it holds the last tokens of the slots, which only the device writes.
        self._inputs[1:] = self._staging[0][1:]
        self._graphs = self._capture_sizes(capture, sizes, None)
        self._bucket_of = [next(s for s in sizes if s >= n) for n in range(self._limits.max_num_seqs + 1)]

    @torch.inference_mode()
    def capture_with_adapters(self, capture: CaptureGraph) -> None:
        """Capture a second graph for each batch size, for batches with LoRA adapters. Do nothing if the model's forward
        does not support adapters in graphs.

        Call it after `capture`. Raises `RuntimeError` if something cannot be captured, or if the kernel that adds the
        adapters' products gives wrong results on this device.
        """
        if self._slots is None:
            return
        self._slots.check()
        self._inputs[ADAPTERS:] = -1
        sizes = list(self._graphs)[::-1]
        try:
            self._adapter_graphs = self._capture_sizes(capture, sizes, self._slots)
        except RuntimeError:
            if not self._slots.uses_two_streams:
                raise
            self._slots.use_one_stream()
            self._adapter_graphs = self._capture_sizes(capture, sizes, self._slots)

    @torch.inference_mode()
    def proof_cases(self, blocks: ProofBlocks) -> Iterator[GraphCase]:
        """Iterate over all captured graphs, each with random inputs, for `prove_graphs`. The KV of these inputs is in
        `blocks`. Use one case before you take the next: they share the memory of the inputs.
        """
        states = ProofStates(self._states)
        for size, graph in self._graphs.items():
            host = self._staging[0].numpy()
            self._fill_padding(host, 0, size)
            self._fill_proof(host, size, blocks)
            self._inputs[1:].copy_(self._staging[0][1:])
            yield GraphCase(
                "decode graph",
                f"batch of {size}",
                states.reset_before(partial(self._compute, size, None)),
                states.reset_before(graph.replay),
                partial(self._last_logits, size),
                states.compared(self._limits),
            )
        self.last_tokens.zero_()
        states.clear()

    def _last_logits(self, count: int) -> Tensor:
        assert self._logits is not None
        return self._logits[:count]

    def _fill_proof(self, host: NDArray[np.int64], size: int, blocks: ProofBlocks) -> None:
        """Fill the first `size` columns of `host`, the input array, with sequences of different lengths for a
        comparison of a graph with eager work. Each sequence writes its KV into a block of its own.
        """
        for number in range(size):
            context = blocks.context(number, size, self._limits.max_model_len)
            table = blocks.table(number, size, context)
            if table is None:
                continue  # this row stays padding
            # Groups may share blocks here: each layer attends before the next one with the same place stores.
            self._tables.fill(number, table)
            host[TOKENS, number], host[POSITIONS, number] = number % 7, context - 1
            host[TOKEN_AT, number] = self._width + number
            host[TABLE_ROWS, number] = host[STATES, number] = number
            host[SLOTS, number] = table[-1] * blocks.block_tokens + (context - 1) % blocks.block_tokens
            host[CONTEXTS].view(np.int32)[number] = context

    def release(self) -> None:
        """Free all captured graphs; later decode steps are computed without graphs."""
        self._graphs, self._adapter_graphs = {}, {}

    @property
    def are_captured(self) -> bool:
        return bool(self._graphs)

    @property
    def are_captured_with_adapters(self) -> bool:
        return bool(self._adapter_graphs)

    def replay(self, arrays: DecodeArrays) -> DecodeResult:
        """Launch a decode step by the captured graph of the next larger batch size, without waiting for the device.
        Return where its result will be.
        """
        self._staging.rotate()
        host = self._staging[0].numpy()
        count = arrays.inputs.shape[1]
        bucket = self._bucket_of[count]
        host[TOKENS:ADAPTERS, :count] = arrays.inputs
        self._fill_padding(host, count, bucket)
        self._tables.apply(arrays.changes)
        if self._sources is not None and arrays.sources is not None:
            self._sources.fill(arrays.sources)
        end, graphs = ADAPTERS, self._graphs
        if arrays.adapters:
            assert self._slots is not None
            slots = self._slots.assign(arrays.adapters) + [-1] * (bucket - count)
            host[ADAPTERS:, :bucket] = sorted_rows(slots, self._slots.num_slots)
            end, graphs = len(host), self._adapter_graphs
        self._inputs[1:end].copy_(self._staging[0][1:end], non_blocking=True)
        graphs[bucket].replay()
        assert self._logits is not None
        return DecodeResult(self._greedy[:count], self._vocab_size(self._logits))

    def logits(self, count: int) -> Tensor:
        """Return the logits [count, vocab_size] of the sequences of the last replayed step. The next replay overwrites
        them.

        With several ranks this gathers the ranks' columns, so all ranks must call it.
        """
        assert self._logits is not None
        logits = self._logits[:count]
        return logits if self._parts is None else self._parts.whole(logits)

    def set_sampled_tokens(self, tokens: Tensor) -> None:
        """Store `tokens`, int64 [batch], as the last tokens of the sequences of the last replayed step, in device
        memory, from which the next step reads them. Call it if the sampled tokens are not the greedy ones, which the
        graph has stored itself.
        """
        self.last_tokens.index_copy_(0, self._inputs[TABLE_ROWS, : len(tokens)], tokens)

    def _fill_padding(self, host: NDArray[np.int64], start: int, end: int) -> None:
        """Fill the columns `start` to `end` of `host`, the input array, with padding sequences, which change no KV."""
        host[TOKENS, start:end] = host[POSITIONS, start:end] = 0
        # Padding writes its token to the extra column, so it changes no sequence's last token.
        host[TOKEN_AT, start:end] = self._width + start
        host[TABLE_ROWS, start:end] = self._width - 1
        host[SLOTS, start:end] = host[STATES, start:end] = -1
        host[CONTEXTS].view(np.int32)[start:end] = 0

    def _capture_sizes(self, capture: CaptureGraph, sizes: list[int], slots: AdapterSlots | None) -> dict[int, Graph]:
        """Return a captured graph for each of these ascending batch sizes; with `slots`, graphs that also add LoRA
        adapters.
        """
        graphs: dict[int, Graph] = {}
        for size in reversed(sizes):
            self._compute(size, slots)  # compiles kernels and allocates what libraries keep
            graphs[size] = capture(partial(self._compute, size, slots))
        return graphs

    def _compute(self, size: int, slots: AdapterSlots | None) -> None:
        """Compute a decode step of `size` sequences from the input memory: the work that a graph captures. With `slots`
        it also adds LoRA adapters. Every tensor here keeps its memory between replays, or is scratch.
        """
        inputs = self._inputs[:, :size]
        meta = AttentionMetadata(
            query_starts=self._starts[: size + 1],
            context_lens=self._inputs[CONTEXTS].view(torch.int32)[:size],
            block_tables=self._tables.tensor.index_select(0, inputs[TABLE_ROWS]),
            slots=inputs[SLOTS],
            max_query_len=1,
            max_context_len=self._limits.max_model_len,
        )
        metas = self._layer_metas(meta, inputs) if len(self._tables.windows) else None
        tokens = self._inputs[: TOKENS + 1].view(-1).index_select(0, inputs[TOKEN_AT])
        rows = None if slots is None else slots.view(self._inputs[ADAPTERS:], size)
        cross = None if self._sources is None else self._sources.first(size)
        states = self._step_states(inputs)
        step = StepInputs(
            tokens, inputs[POSITIONS], None, meta, slot_rows=rows, states=states, cross=cross, layer_metas=metas
        )
        greedy = self._greedy[:size]
        if self._parts is not None:
            logits = self._parts.compute(step, self._layers)
            self._parts.largest(logits, greedy)
        else:
            logits = self._forward(step, self._layers)
            if self._has_logits:
                self._argmax(logits, greedy)
        if self._logits is None:
            self._logits = logits.new_empty((self._limits.max_num_seqs, logits.shape[1]))
        self._logits[:size] = logits
        if not self._has_logits:  # a stage of a pipeline, whose activations these are
            return
        # A row with NaN gets the token vocab_size. The next step may read it before the host finds the row broken, so
        # keep it inside the embedding table.
        self.last_tokens.index_copy_(0, inputs[TABLE_ROWS], greedy.clamp(max=self._vocab_size(logits) - 1))

    def _layer_metas(self, meta: AttentionMetadata, inputs: Tensor) -> list[AttentionMetadata]:
        """Return the batch of each layer, for models with cache groups. A token's slot follows from its block table."""
        tables, size = self._tables.windows.index_select(1, inputs[TABLE_ROWS]), self._limits.block_tokens
        index = (meta.context_lens.long() - 1).clamp(min=0)
        where = (index // size).expand(len(tables), -1)[:, :, None]
        slots = tables.gather(2, where)[:, :, 0].long() * size + index % size
        slots = slots.where(meta.context_lens > 0, -1)
        return group_metas(meta, tables, slots, self._limits.layer_groups)

    def _step_states(self, inputs: Tensor) -> StepStates | None:
        return StepStates(inputs[STATES], [1] * inputs.shape[1], self._states) if self._states else None

    def _vocab_size(self, logits: Tensor) -> int:
        return logits.shape[1] if self._parts is None else self._parts.vocab_size
