"""Sends each step's token masks to the device while it computes; what they allow is decided in `constraints.py`. They
are built in a thread and sent in one copy.

The thread works between the start of a step and its logits. Everything that it needs is known at the start.
"""

from collections.abc import Sequence as Rows
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from baton_serve.engine import device as devices
from baton_serve.engine.core.scheduler import SampleRow
from baton_serve.engine.sample.constraints import ConstraintBuilder, Constraints, is_constrained
from baton_serve.engine.sample.grammar_compiler import Compiled

INDEX_BYTES = 16
"""Size of one row's index in bytes: two int64, the row and its mask."""


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """The allowed tokens of a step, as bit masks on the device, for its rows whose tokens are restricted, such as by a
    grammar."""

    rows: Tensor  # int64 [rows]
    masks: Tensor  # int64 [rows]
    bits: Tensor  # uint8 [masks, bytes]

    def apply(self, scores: Tensor) -> None:
        """Set the scores of tokens that are not allowed to -inf, in place. `scores` is [all rows of the step,
        vocab_size]."""
        # Unpack the bits on the device: one eighth of the bytes have to be copied.
        powers = (1 << torch.arange(8, device=self.bits.device)).to(torch.uint8)
        allowed = (self.bits[:, :, None] & powers).ne(0).flatten(1)[:, : scores.shape[1]]
        scores[self.rows] = scores[self.rows].masked_fill(~allowed[self.masks], float("-inf"))


class TokenMasker:
    """Builds the masks of allowed tokens of each step in a thread of its own, while the device computes the step, and
    copies them to the device. For each step `begin` is called, and then `send`."""

    def __init__(self, builder: ConstraintBuilder, device: torch.device) -> None:
        self._builder = builder
        self._device = device
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="masks")
        self._staging = devices.staging(device, (0,), torch.uint8)

    def prepare(self, grammar: str) -> "Future[object]":
        """Start to compile a grammar that a request will need. The future ends when it is compiled, and raises
        `RequestError` for an invalid grammar.

        A step with a sequence whose grammar is not compiled yet waits for it, and with it all other sequences. So a
        request should be queued only when this future has ended. Its owner should keep the future's result until the
        request has ended: otherwise the grammar may be dropped in favour of others, and a step compiles it again.
        """
        ready: Future[object] = Future()
        self._thread.submit(self._prepare, grammar, ready)
        return ready

    def _prepare(self, grammar: str, ready: "Future[object]") -> None:
        self._builder.prepare(grammar).add_done_callback(partial(_end_like, ready))

    def begin(self, rows: Rows[SampleRow]) -> "Future[Constraints] | None":
        """Start to build the masks of a step with these rows, in the mask thread. Return None if no row needs a mask.

        The sequences of the rows must not change until the future is done.
        """
        constrained = {number: row for number, row in enumerate(rows) if is_constrained(row)}
        return self._thread.submit(self._builder.build, constrained) if constrained else None

    def send(self, constraints: Constraints) -> TokenMasks | None:
        """Copy the masks that `begin` has built to the device. Work that this thread queues later finds them there.
        Return None if there are none."""
        count, (num_masks, width) = len(constraints.rows), constraints.bits.shape
        if not count:
            return None
        # Indices and bits are in one buffer, so that one copy sends both.
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
        """End the mask thread, and the thread that compiles grammars."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._builder.close()


def _end_like(ready: "Future[object]", compiled: "Future[Compiled]") -> None:
    """Give the future `ready` the result or the error of the finished future `compiled`."""
    error = None if compiled.cancelled() else compiled.exception()
    if compiled.cancelled():
        ready.cancel()
    elif error is not None:
        ready.set_exception(error)
    else:
        ready.set_result(compiled.result())
