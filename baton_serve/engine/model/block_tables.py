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
    """The block tables in host memory, int32 [slots + 1, width].

    Padding uses the last row, which belongs to no slot.
    """

    def __init__(self, limits: SchedulerConfig) -> None:
        self.width = table_width(limits)
        self.host: NDArray[np.int32] = np.zeros((limits.max_num_seqs + 1, self.width), dtype=np.int32)
        self._filled = [0] * limits.max_num_seqs
        self._versions = [-1] * limits.max_num_seqs
        self._stale: dict[int, int] = {}  # by slot: the first column that the device does not have

    def update(self, sequence: Sequence) -> None:
        """Bring the row of a sequence up to date."""
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
        """Return the changes since the last call, int64 [2, changes]: indices into the flat table, and their values.

        Return None if nothing has changed.
        """
        if not self._stale:
            return None
        spans = [(slot, first, self._filled[slot]) for slot, first in self._stale.items()]
        where = np.concatenate([np.arange(slot * self.width + a, slot * self.width + b) for slot, a, b in spans])
        self._stale.clear()
        return np.stack([where, self.host.reshape(-1)[where]]).astype(np.int64, copy=False)

    def forget(self) -> None:
        """Forget all rows. Versions count within one request table, so call this before batches of another one."""
        self._versions = [-1] * len(self._versions)


class DeviceTables:
    """The copy on the device, int32 [max_num_seqs + 1, width], always in the same memory.

    Values beyond a row's end are undefined.
    """

    def __init__(self, limits: SchedulerConfig, device: torch.device) -> None:
        self.tensor = torch.zeros((limits.max_num_seqs + 1, table_width(limits)), dtype=torch.int32, device=device)

    def apply(self, changes: NDArray[np.int64] | None) -> None:
        """Write the changes of `BlockTables.take_changes`."""
        if changes is not None:
            packed: Tensor = torch.from_numpy(changes).to(self.tensor.device, non_blocking=True)
            self.tensor.view(-1)[packed[0]] = packed[1].int()


def table_width(limits: SchedulerConfig) -> int:
    """Return the number of blocks of the longest sequence."""
    return -(-limits.max_model_len // limits.block_tokens)
