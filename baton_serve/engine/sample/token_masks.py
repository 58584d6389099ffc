"""Puts each step's constraints on the device while it computes: built in a thread, sent in one copy, never waited for.

The thread works from the moment a step starts until its logits are there; what it needs is known by then.
"""

from collections.abc import Sequence as Rows
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from baton_serve.engine import device as devices
from baton_serve.engine.core.scheduler import SampleRow
from baton_serve.engine.sample.constraints import ConstraintBuilder, Constraints, is_constrained

INDEX_BYTES = 16
"""Of one constrained row: two int64, the row and its mask."""


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """For some rows of a step: which tokens they may choose."""

    rows: Tensor  # int64 [rows]
    masks: Tensor  # int64 [rows]
    bits: Tensor  # uint8 [masks, bytes]

    def apply(self, scores: Tensor) -> None:
        """In place, scores [all rows, vocab_size]: tokens that are not allowed become -inf."""
        powers = (1 << torch.arange(8, device=self.bits.device)).to(torch.uint8)
        allowed = (self.bits[:, :, None] & powers).ne(0).flatten(1)[:, : scores.shape[1]]
        scores[self.rows] = scores[self.rows].masked_fill(~allowed[self.masks], float("-inf"))


class TokenMasker:
    """Owns the thread and the memory that masks travel through; `begin` and `finish` alternate."""

    def __init__(self, builder: ConstraintBuilder, device: torch.device) -> None:
        self._builder = builder
        self._device = device
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="masks")
        self._staging = devices.staging(device, (0,), torch.uint8)

    def prepare(self, grammar: str) -> None:
        """It will be needed soon."""
        self._thread.submit(self._builder.prepare, grammar)

    def begin(self, rows: Rows[SampleRow]) -> "Future[Constraints] | None":
        """None: nobody's choice is constrained. The rows' sequences must stay as they are until it is done."""
        constrained = {number: row for number, row in enumerate(rows) if is_constrained(row)}
        return self._thread.submit(self._builder.build, constrained) if constrained else None

    def send(self, constraints: Constraints) -> TokenMasks | None:
        """Into the device's queue, before whatever reads it."""
        count, (num_masks, width) = len(constraints.rows), constraints.bits.shape
        if not count:
            return None
        index_bytes = count * INDEX_BYTES
        size = index_bytes + num_masks * width
        if self._staging.numel() < size:
            self._staging = devices.staging(self._device, (2 * size,), torch.uint8)
        host = self._staging.numpy()
        host[:index_bytes].view(np.int64)[:] = constraints.rows + constraints.masks
        host[index_bytes:size] = constraints.bits.reshape(-1)
        sent = self._staging[:size].to(self._device, non_blocking=True)
        index = sent[:index_bytes].view(torch.int64).view(2, count)
        return TokenMasks(index[0], index[1], sent[index_bytes:].view(num_masks, width))

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._builder.close()
