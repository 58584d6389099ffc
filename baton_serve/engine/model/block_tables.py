"""Keeps the block table of each batch slot on the host, and decides when its copy on the device is updated.

Each cache group has a table of its own. Blocks that were freed in groups with a sliding window become block 0. A row is
rewritten when its version changes. Changes are sent to the device in one upload, and only by steps that read
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
        self._all: NDArray[np.int32] = np.zeros(table_shape(limits), dtype=np.int32)
        self.host: NDArray[np.int32] = self._all[0]
        self.windows: NDArray[np.int32] = self._all[1:]
        """The tables of the groups with a sliding window, int32 [groups, slots + 1, width]."""
        self._filled = [0] * limits.max_num_seqs
        self._filled_windows = [0] * limits.max_num_seqs
        self._cleared = [0] * limits.max_num_seqs
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
            self._filled[slot] = self._filled_windows[slot] = self._cleared[slot] = 0
        filled = self._filled[slot]
        if filled < len(blocks):
            self.host[slot, filled : len(blocks)] = blocks[filled:]
            self._filled[slot] = len(blocks)
            self._stale[slot] = min(filled, self._stale.get(slot, filled))
        if len(self.windows):
            self._update_windows(sequence)

    def _update_windows(self, sequence: Sequence) -> None:
        """Bring the row of a sequence up to date in the tables of groups with a window."""
        slot, freed, end = sequence.slot, sequence.num_window_freed, len(sequence.window_blocks)
        cleared, first = self._cleared[slot], max(self._filled_windows[slot], freed)
        if cleared < freed:
            self.windows[:, slot, cleared:freed] = 0
            self._stale[slot] = min(cleared, self._stale.get(slot, cleared))
        if first < end:
            self.windows[:, slot, first:end] = np.array(sequence.window_blocks[first:end], dtype=np.int32).T
            # Prompts get these blocks later than those of full attention, which are on the device already.
            self._stale[slot] = min(first, self._stale.get(slot, first))
        self._cleared[slot], self._filled_windows[slot] = freed, max(end, self._filled_windows[slot])

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
        if len(self.windows):
            where = (where + np.arange(len(self._all))[:, None] * self.host.size).reshape(-1)
        return np.stack([where, self._all.reshape(-1)[where]]).astype(np.int64, copy=False)

    def forget(self) -> None:
        """Forget which blocks are in all rows, so that `update` writes whole rows again. Call it after warm-up, before
        other sequences use the same rows with equal version numbers.
        """
        self._versions = [-1] * len(self._versions)


class DeviceTables:
    """The copy of `BlockTables` in device memory, always at the same addresses: `tensor`, int32 [max_num_seqs + 1,
    width], and `windows`, [groups, max_num_seqs + 1, width], for the groups with a sliding window.

    Values beyond the end of a sequence's blocks are undefined.
    """

    def __init__(self, limits: SchedulerConfig, device: torch.device) -> None:
        self._all = torch.zeros(table_shape(limits), dtype=torch.int32, device=device)
        self.tensor, self.windows = self._all[0], self._all[1:]

    def fill(self, row: int, blocks: list[int]) -> None:
        """Write the same blocks into a row of all groups, for a proof."""
        self._all[:, row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)

    def apply(self, changes: NDArray[np.int64] | None) -> None:
        """Write the changed entries that `BlockTables.take_changes` has returned to the device; None changes
        nothing.
        """
        if changes is not None:
            packed: Tensor = torch.from_numpy(changes).to(self.tensor.device, non_blocking=True)
            self._all.view(-1)[packed[0]] = packed[1].int()


def table_shape(limits: SchedulerConfig) -> tuple[int, int, int]:
    """Return the shape of the tables of all cache groups; the last row of each is padding."""
    return 1 + limits.num_window_groups, limits.max_num_seqs + 1, table_width(limits)


def table_width(limits: SchedulerConfig) -> int:
    """Return the largest number of KV blocks of one sequence, which is the width of block tables."""
    return -(-limits.max_model_len // limits.block_tokens)
