"""Each batch slot's block table: a row on the host that only grows at its end, and its copy on the device.

A row is rewritten when its slot's epoch changes. Growth goes to the device in one upload, taken by a step that
reads the copy; steps that do not need it upload nothing.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton_serve.engine.core.request_table import SchedulerConfig
from baton_serve.engine.core.sequence import Sequence


class BlockTables:
    """The host's. The last row belongs to no slot: padding points there."""

    def __init__(self, limits: SchedulerConfig) -> None:
        self.width = table_width(limits)
        self.host: NDArray[np.int32] = np.zeros((limits.max_num_seqs + 1, self.width), dtype=np.int32)
        self._filled = [0] * limits.max_num_seqs
        self._versions = [-1] * limits.max_num_seqs
        self._stale: dict[int, int] = {}  # by slot: from which column on the copy is behind

    def update(self, sequence: Sequence) -> None:
        slot, blocks = sequence.slot, sequence.blocks
        if self._versions[slot] != sequence.block_table_version:
            self._versions[slot] = sequence.block_table_version
            self._filled[slot] = 0
        filled = self._filled[slot]
        if filled < len(blocks):
            self.host[slot, filled : len(blocks)] = blocks[filled:]
            self._filled[slot] = len(blocks)
            self._stale[slot] = min(filled, self._stale.get(slot, filled))

    def take_changes(self) -> NDArray[np.int64] | None:
        """What the copy lacks since the last call: [2, changes], places in the flat table and what belongs there."""
        if not self._stale:
            return None
        spans = [(slot, first, self._filled[slot]) for slot, first in self._stale.items()]
        where = np.concatenate([np.arange(slot * self.width + a, slot * self.width + b) for slot, a, b in spans])
        self._stale.clear()
        return np.stack([where, self.host.reshape(-1)[where]]).astype(np.int64, copy=False)

    def forget(self) -> None:
        """Epochs count within one roster: call before another one's plans are run."""
        self._versions = [-1] * len(self._versions)


class DeviceTables:
    """The copy: int32 [max_num_seqs + 1, width], in the same memory always. Beyond a row's end nothing has meaning."""

    def __init__(self, limits: SchedulerConfig, device: torch.device) -> None:
        self.tensor = torch.zeros((limits.max_num_seqs + 1, table_width(limits)), dtype=torch.int32, device=device)

    def apply(self, changes: NDArray[np.int64] | None) -> None:
        if changes is not None:
            packed: Tensor = torch.from_numpy(changes).to(self.tensor.device, non_blocking=True)
            self.tensor.view(-1)[packed[0]] = packed[1].int()


def table_width(limits: SchedulerConfig) -> int:
    return -(-limits.max_model_len // limits.block_tokens)
