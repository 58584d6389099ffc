"""Allocates the memory of recurrent states (Mamba, linear attention), a row for each batch slot, and copies checkpoints
of them.

Unlike KV, a state has a fixed size: the last inputs of a convolution and a matrix that every token changes. Each batch
slot has one row with the states of all layers, which steps read and write. Spare rows behind these receive states that
a step stores before a sequence's last token. A *checkpoint* is a copy of a row in blocks
of the KV cache: it has block hashes, so that it is cached, checksummed, evicted and transferred like KV.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from baton_serve.contracts.block_layout import KVShape
from baton_serve.engine import device as devices
from baton_serve.engine.core.checkpoints import StateCopy
from baton_serve.engine.kv.kv_cache import KVCache

StateKind = Literal["conv", "recurrent"]
"""Which of transformers' two kinds of states: the history of a convolution, or the state matrix."""

ALIGNMENT = 256
"""Alignment of each state in a row, in bytes, so that kernels can load whole vectors."""
UNUSED_KV = KVShape(num_kv_heads=2, head_dim=64)
"""The shape of one layer's part of a block, for models without attention."""
UNUSED_KV_BYTES = UNUSED_KV.num_heads * UNUSED_KV.head_dim * 64 * 2
"""Its size in bytes, for blocks of 64 tokens in 16 bits."""
MAX_CHECKPOINT_BLOCKS = 64
"""Number of such blocks of a checkpoint, at most."""


@dataclass(frozen=True, slots=True)
class StatePart:
    """One of the recurrent states of one layer, such as the convolution's inputs. `index` distinguishes states of the
    same kind in one layer."""

    layer: int
    kind: StateKind
    index: int
    shape: tuple[int, ...]
    """The state's shape for one sequence."""
    dtype: torch.dtype
    ranges: tuple[slice, ...] = ()
    """The indexes of the first dimension that this rank holds, of those of all ranks; (): each rank holds all."""
    total: int = 0
    """The size of the first dimension over all ranks, if it is divided."""

    @property
    def num_bytes(self) -> int:
        """Return the size of this state for one sequence in bytes, rounded up to the alignment."""
        return _aligned(prod(self.shape) * self.dtype.itemsize)

    @property
    def whole_bytes(self) -> int:
        """Return the size of this state over all ranks, rounded up to the alignment."""
        first = self.total if self.ranges else self.shape[0]
        return _aligned(first * prod(self.shape[1:]) * self.dtype.itemsize)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class StatePiece(NamedTuple):
    """Some bytes of a rank's row of states, and their place in a checkpoint."""

    start: int
    size: int
    block: int
    """Number of the block among those of the checkpoint."""
    offset: int


class CheckpointPart:
    """One rank's part of checkpoints, in the memory in which blocks are whole."""

    def __init__(self, pieces: Sequence[StatePiece], blocks: Tensor) -> None:
        """`blocks` is that memory, uint8 [num_blocks, block_bytes]."""
        self._pieces, self._blocks = pieces, blocks
        self._size = max((piece.start + piece.size for piece in pieces), default=0)

    def read(self, blocks: Sequence[int]) -> Tensor:
        """Return a copy of the rank's part of the checkpoint that these blocks hold, as its row of states: uint8
        [bytes], without what follows the last state."""
        row = torch.zeros(self._size, dtype=torch.uint8, device=self._blocks.device)
        for start, size, block, offset in self._pieces:
            row[start : start + size] = self._blocks[blocks[block], offset : offset + size]
        return row

    def write(self, blocks: Sequence[int], row: Tensor) -> None:
        """Overwrite the rank's part of the checkpoint in these blocks by its row of states, uint8 [bytes]."""
        for start, size, block, offset in self._pieces:
            self._blocks[blocks[block], offset : offset + size] = row[start : start + size]


def pieces_of(parts: Sequence[StatePart], block_bytes: int, first: int) -> list[StatePiece]:
    """Return which bytes of a rank's row belong to which bytes of a checkpoint, in which the states of all ranks lie as
    in the row of a single rank. The states of the rank's pipeline stage begin there at byte `first`."""
    found: list[StatePiece] = []
    own, whole = 0, first
    for part in parts:
        size, start = prod(part.shape[1:]) * part.dtype.itemsize, own
        for chosen in part.ranges or (slice(0, part.shape[0]),):
            at, end = whole + chosen.start * size, whole + chosen.stop * size
            while at < end:
                # A range may go on in the next block.
                block, offset = divmod(at, block_bytes)
                count = min(end - at, block_bytes - offset)
                found.append(StatePiece(start, count, block, offset))
                start, at = start + count, at + count
        own, whole = own + part.num_bytes, whole + part.whole_bytes
    return found


StateViews = Mapping[int, Mapping[tuple[StateKind, int], Tensor]]
"""By layer, then by kind and index: the states in all rows, [num_rows, *shape]."""


def row_bytes(parts: Sequence[StatePart]) -> int:
    """Return how many bytes all these recurrent states need for one sequence, with the parts of all tensor-parallel
    ranks."""
    return sum(part.whole_bytes for part in parts)


def unused_kv_shapes(state_bytes: int) -> tuple[KVShape, ...]:
    """Return the shapes of KV that no layer reads, for models whose layers keep recurrent states only, of `state_bytes`
    bytes.

    Their blocks have hashes too, by which checkpoints are found. They are large enough that a checkpoint has few of
    them.
    """
    return (UNUSED_KV,) * -(-state_bytes // (MAX_CHECKPOINT_BLOCKS * UNUSED_KV_BYTES))


class StateMemory:
    """The memory of the recurrent states of all batch slots. It also copies them to and from checkpoints in KV blocks.
    Only the engine's thread may call it.

    For a model without recurrent states it does nothing. All copies run on the device in the order of the calls.
    """

    def __init__(
        self,
        parts: Sequence[StatePart],
        num_slots: int,
        blocks: Tensor,
        device: torch.device,
        *,
        num_blocks: int | None = None,
        pieces: Sequence[StatePiece] | None = None,
    ) -> None:
        """Allocate the states of `num_slots` batch slots on `device`, filled with zeros. `blocks` is the KV cache as
        bytes, uint8 [num_blocks, block_bytes], for checkpoints; with several ranks it is the memory with whole blocks.

        `num_blocks` is the number of blocks of a checkpoint; None: as many as these states fill. `pieces` says which
        part of a checkpoint this rank holds; None: it is the only rank.
        """
        self._blocks = blocks
        block_bytes = blocks.shape[1]
        # Copies by index take as long for a byte as for a wide element.
        self._wide_blocks = blocks.view(torch.int64) if block_bytes % 8 == 0 else blocks
        self.num_blocks = -(-row_bytes(parts) // block_bytes) if num_blocks is None else num_blocks
        """Blocks of one checkpoint. The end of the last one is unused."""
        self._part = None if pieces is None else CheckpointPart(pieces, blocks)
        # A row has whole blocks, so that a checkpoint is one copy.
        size = self.num_blocks * block_bytes if pieces is None else sum(part.num_bytes for part in parts)
        self._rows = torch.zeros(num_slots, size, dtype=torch.uint8, device=device)
        self.views: StateViews = self._make_views(parts)

    @property
    def num_bytes(self) -> int:
        """Return the size of the states of all batch slots on this rank, in bytes."""
        return self._rows.nbytes

    def execute(self, copies: Iterable[StateCopy]) -> None:
        """Execute the operations that `StateCheckpoints` has planned, in their order."""
        for copy in copies:
            self.change(copy.kind, copy.slot, copy.blocks, copy.source)

    def change(
        self, kind: Literal["clear", "save", "restore", "copy"], slot: int, blocks: Sequence[int], source: int
    ) -> None:
        """Execute one operation; the arguments are the fields of `StateCopy`."""
        match kind:
            case "clear":
                self.clear(slot)
            case "save":
                self.save(slot, blocks)
            case "restore":
                self.restore(slot, blocks)
            case "copy":
                self.copy(source, slot)

    def clear(self, slot: int) -> None:
        """Set the recurrent states in a batch slot to zeros, for a sequence that starts at its first token."""
        self._rows[slot].zero_()

    def save(self, slot: int, blocks: Sequence[int]) -> None:
        """Copy the recurrent states in a batch slot to these KV blocks, as a checkpoint. A rank with a part of the
        states writes that part alone."""
        self._check(blocks)
        row = self._rows[slot].to(self._blocks.device)
        if self._part is None:
            self._wide_blocks[self._index(blocks)] = self._wide(row)
        else:
            self._part.write(blocks, row)

    def restore(self, slot: int, blocks: Sequence[int]) -> None:
        """Copy a checkpoint, or this rank's part of it, which these KV blocks hold, to the recurrent states in a batch
        slot."""
        self._check(blocks)
        if self._part is None:
            self._wide(self._rows[slot]).copy_(self._wide_blocks[self._index(blocks)])
        else:
            # One copy to the device, not one for each piece.
            self._write_row(slot, self._part.read(blocks))

    def read(self, slot: int) -> memoryview:
        """Return a copy of the recurrent states in a batch slot, for a checkpoint in the memory of another host."""
        return self._rows[slot].cpu().numpy().data.cast("B") if self._rows.shape[1] else memoryview(b"")

    def write(self, slot: int, data: memoryview) -> None:
        """Overwrite the recurrent states in a batch slot with bytes in the form of `read`."""
        if data:
            self._write_row(slot, torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def copy(self, source: int, target: int) -> None:
        """Copy the recurrent states in batch slot `source` to slot `target`, for another sequence of the same request
        that has the same tokens so far."""
        self._rows[target].copy_(self._rows[source])

    def _write_row(self, slot: int, row: Tensor) -> None:
        self._rows[slot, : len(row)].copy_(row)

    def _check(self, blocks: Sequence[int]) -> None:
        assert len(blocks) == self.num_blocks, "a checkpoint needs all of its blocks"

    def _index(self, blocks: Sequence[int]) -> Tensor:
        # The host must not wait for the step before, so that it can launch the next one.
        return devices.send(torch.tensor(blocks), self._blocks.device)

    def _wide(self, row: Tensor) -> Tensor:
        """Return a row of states as one row for each block of a checkpoint, in the elements of `_wide_blocks`."""
        return row.view(self._wide_blocks.dtype).view(self.num_blocks, -1)

    def _make_views(self, parts: Sequence[StatePart]) -> StateViews:
        views: dict[int, dict[tuple[StateKind, int], Tensor]] = {}
        offset = 0
        for part in parts:
            size = prod(part.shape) * part.dtype.itemsize
            flat = self._rows[:, offset : offset + size].view(part.dtype)
            views.setdefault(part.layer, {})[part.kind, part.index] = flat.view(len(flat), *part.shape)
            offset += part.num_bytes
        return views


NO_BLOCKS = torch.empty((0, 1), dtype=torch.uint8)
"""Stands for the memory with whole blocks where there is none, or no checkpoints."""


def make_states(parts: Sequence[StatePart], num_slots: int, cache: KVCache, first: int | None) -> StateMemory:
    """Allocate the recurrent states of `num_slots` batch slots on the device of `cache`, which holds their checkpoints:
    with several ranks in the host memory where blocks are whole. `first` is the byte of a checkpoint at which the
    states of this rank's pipeline stage begin; None: this is the only rank."""
    layout = cache.layout
    if first is None:
        # In the memory of KV: with a mirror, blocks are in that only while transports use them.
        own = cache.device_tensor if layout.state_bytes else NO_BLOCKS
        return StateMemory(parts, num_slots, own, cache.device, num_blocks=layout.state_blocks)
    # The part of a block that one of several ranks has is not contiguous, and other models do not need it as bytes.
    blocks = cache.whole_blocks if layout.state_bytes and cache.has_whole_blocks else NO_BLOCKS
    pieces = pieces_of(parts, layout.block_bytes, first)
    return StateMemory(parts, num_slots, blocks, cache.device, num_blocks=layout.state_blocks, pieces=pieces)
