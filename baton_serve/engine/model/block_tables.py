"""The block table of each batch slot: a row on the host that only grows at its end, and its copy on the device.

A row is rewritten when its version changes. Changes are sent to the device in one upload, and only by steps that read
the copy.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton_serve.engine.core.request_table import SchedulerConfig
from baton_serve.engine.core.sequence import Sequence


class BlockTables:
    """The block tables of all running sequences in host memory: int32 [slots + 1, width]. A sequence's row is its batch
    slot, which it keeps as long as it runs.

    Padding uses the last row, which belongs to no slot.
    """

    def __init__(self, limits: SchedulerConfig) -> None:
        self.width = table_width(limits)
        self.host: NDArray[np.int32] = np.zeros((limits.max_num_seqs + 1, self.width), dtype=np.int32)
        self._filled = [0] * limits.max_num_seqs
        self._versions = [-1] * limits.max_num_seqs
        self._stale: dict[int, int] = {}  # by slot: the first column that the device does not have

    def update(self, sequence: Sequence) -> None:
        """Write the blocks that a sequence has now into the row of its batch slot, and remember which entries have
        changed.
        """
        slot, blocks = sequence.slot, sequence.blocks
        # A new version means that the slot has another sequence, or that its blocks were replaced.
        if self._versions[slot] != sequence.block_table_version:
            self._versions[slot] = sequence.block_table_version
            self._filled[slot] = 0
        filled = self._filled[slot]
        if filled < len(blocks):
            self.host[slot, filled : len(blocks)] = blocks[filled:]
            self._filled[slot] = len(blocks)
            self._stale[slot] = min(filled, self._stale.get(slot, filled))

    def take_changes(self) -> NDArray[np.int64] | None:
        """Return the entries that have changed since the last call, for `DeviceTables.apply`: int64 [2, changes], the
        indices into the flat table and the new values.

        Return None if nothing has changed.
        """
        if not self._stale:
            return None
        spans = [(slot, first, self._filled[slot]) for slot, first in self._stale.items()]
        where = np.concatenate([np.arange(slot * self.width + a, slot * self.width + b) for slot, a, b in spans])
        self._stale.clear()
        return np.stack([where, self.host.reshape(-1)[where]]).astype(np.int64, copy=False)

    def forget(self) -> None:
        """Forget which blocks are in all rows, so that `update` writes whole rows again. Call it after warm-up, before
        other sequences use the same rows with equal version numbers.
        """
        self._versions = [-1] * len(self._versions)


class DeviceTables:
    """The copy of `BlockTables` in device memory, int32 [max_num_seqs + 1, width], always at the same addresses.

    Values beyond the end of a sequence's blocks are undefined.
    """

    def __init__(self, limits: SchedulerConfig, device: torch.device) -> None:
        self.tensor = torch.zeros((limits.max_num_seqs + 1, table_width(limits)), dtype=torch.int32, device=device)

    def apply(self, changes: NDArray[np.int64] | None) -> None:
        """Write the changed entries that `BlockTables.take_changes` has returned to the device; None changes
        nothing.
        """
        if changes is not None:
            packed: Tensor = torch.from_numpy(changes).to(self.tensor.device, non_blocking=True)
            self.tensor.view(-1)[packed[0]] = packed[1].int()


def table_width(limits: SchedulerConfig) -> int:
    """Return the largest number of KV blocks of one sequence, which is the width of block tables."""
    return -(-limits.max_model_len // limits.block_tokens)
