"""Each batch slot's block table: a row on the host that only grows at its end, and its copy on the device.

A row is rewritten when its slot's epoch changes. Growth goes to the device in one upload, asked for by a step that
reads the copy; steps that do not need it upload nothing.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.roster import Limits
from engine.sequence import Sequence


class BlockTables:
    def __init__(self, limits: Limits, device: torch.device) -> None:
        self.width = -(-limits.max_model_len // limits.block_tokens)
        # The last row belongs to no slot: padding points there.
        self.host: NDArray[np.int32] = np.zeros((limits.max_num_seqs + 1, self.width), dtype=np.int32)
        self._device = device
        self._copy: Tensor | None = None
        self._filled = [0] * limits.max_num_seqs
        self._epochs = [-1] * limits.max_num_seqs
        self._stale: dict[int, int] = {}  # by slot: from which column on the copy is behind

    def update(self, sequence: Sequence) -> None:
        slot, blocks = sequence.slot, sequence.blocks
        if self._epochs[slot] != sequence.epoch:
            self._epochs[slot] = sequence.epoch
            self._filled[slot] = 0
        filled = self._filled[slot]
        if filled < len(blocks):
            self.host[slot, filled : len(blocks)] = blocks[filled:]
            self._filled[slot] = len(blocks)
            self._stale[slot] = min(filled, self._stale.get(slot, filled))

    def on_device(self) -> Tensor:
        """int32 [max_num_seqs + 1, width], always the same memory. What lies beyond a row's end has no meaning."""
        if self._copy is None:
            self._copy = torch.from_numpy(self.host).to(self._device, copy=True)
        elif self._stale:
            spans = [(slot, first, self._filled[slot]) for slot, first in self._stale.items()]
            where = np.concatenate([np.arange(slot * self.width + a, slot * self.width + b) for slot, a, b in spans])
            packed = torch.from_numpy(np.stack([where, self.host.reshape(-1)[where]])).to(
                self._device, non_blocking=True
            )
            self._copy.view(-1)[packed[0]] = packed[1].int()
        self._stale.clear()
        return self._copy

    def forget(self) -> None:
        """Epochs count within one roster: call before another one's plans are run."""
        self._epochs = [-1] * len(self._epochs)
