"""The memory of recurrent states: what a layer of linear attention or a state space keeps of a sequence.

Unlike KV, a state has a fixed size: the last inputs of a convolution and a matrix that every token changes. Each batch
slot has one row with the states of all layers, which steps read and write. A *checkpoint* is a copy of a row in blocks
of the KV cache: it has block hashes, so that it is cached, checksummed, evicted and transferred like KV.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

import torch
from torch import Tensor

from baton_serve.engine.core.checkpoints import StateCopy

StateKind = Literal["conv", "recurrent"]
"""Which of transformers' two kinds of states: the history of a convolution, or the state matrix."""

ALIGNMENT = 256
"""Alignment of each state in a row, in bytes, so that kernels can load whole vectors."""


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

    @property
    def num_bytes(self) -> int:
        """Return the size of this state for one sequence in bytes, rounded up to the alignment."""
        return -(-prod(self.shape) * self.dtype.itemsize // ALIGNMENT) * ALIGNMENT


StateViews = Mapping[int, Mapping[tuple[StateKind, int], Tensor]]
"""By layer, then by kind and index: the states of all batch slots, [num_slots, *shape]."""


def row_bytes(parts: Sequence[StatePart]) -> int:
    """Return how many bytes all these recurrent states need for one sequence."""
    return sum(part.num_bytes for part in parts)


class StateMemory:
    """The memory of the recurrent states of all batch slots. It also copies them to and from checkpoints in KV blocks.
    Only the engine's thread may call it.

    For a model without recurrent states it does nothing. All copies run on the device in the order of the calls.
    """

    def __init__(self, parts: Sequence[StatePart], num_slots: int, blocks: Tensor) -> None:
        """Allocate the states of `num_slots` batch slots, filled with zeros. `blocks` is the KV cache as bytes, uint8
        [num_blocks, block_bytes], for checkpoints."""
        self._blocks = blocks
        block_bytes = blocks.shape[1]
        self.num_blocks = -(-row_bytes(parts) // block_bytes) if parts else 0
        """Blocks of one checkpoint. The end of the last one is unused."""
        # A row has whole blocks, so that a checkpoint is one copy.
        self._rows = torch.zeros(num_slots, self.num_blocks * block_bytes, dtype=torch.uint8, device=blocks.device)
        self.views: StateViews = self._make_views(parts)

    def execute(self, copies: Iterable[StateCopy]) -> None:
        """Execute the operations that `StateCheckpoints` has planned, in their order."""
        for copy in copies:
            match copy.kind:
                case "clear":
                    self.clear(copy.slot)
                case "save":
                    self.save(copy.slot, copy.blocks)
                case "restore":
                    self.restore(copy.slot, copy.blocks)
                case "copy":
                    self.copy(copy.source, copy.slot)

    def clear(self, slot: int) -> None:
        """Set the recurrent states in a batch slot to zeros, for a sequence that starts at its first token."""
        self._rows[slot].zero_()

    def save(self, slot: int, blocks: Sequence[int]) -> None:
        """Copy the recurrent states in a batch slot to these KV blocks, as a checkpoint."""
        self._blocks[self._index(blocks)] = self._rows[slot].view(self.num_blocks, -1)

    def restore(self, slot: int, blocks: Sequence[int]) -> None:
        """Copy a checkpoint, which these KV blocks hold, to the recurrent states in a batch slot."""
        self._rows[slot].view(self.num_blocks, -1).copy_(self._blocks[self._index(blocks)])

    def copy(self, source: int, target: int) -> None:
        """Copy the recurrent states in batch slot `source` to slot `target`, for another sequence of the same request
        that has the same tokens so far."""
        self._rows[target].copy_(self._rows[source])

    def _index(self, blocks: Sequence[int]) -> Tensor:
        assert len(blocks) == self.num_blocks, "a checkpoint needs all of its blocks"
        return torch.tensor(blocks, device=self._blocks.device)

    def _make_views(self, parts: Sequence[StatePart]) -> StateViews:
        views: dict[int, dict[tuple[StateKind, int], Tensor]] = {}
        offset = 0
        for part in parts:
            size = prod(part.shape) * part.dtype.itemsize
            flat = self._rows[:, offset : offset + size].view(part.dtype)
            views.setdefault(part.layer, {})[part.kind, part.index] = flat.view(len(flat), *part.shape)
            offset += part.num_bytes
        return views
