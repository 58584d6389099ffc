"""Tries and runs all-reduces by kernels that write into other ranks' memory, alone or fused with residual sum and norm.

A decode step has two sums per layer, each of a few kilobytes, so latency counts and not bandwidth. If ranks cannot map
each other's memory, or if data written there does not arrive, `make` returns None.
"""

import importlib
import logging
from typing import Any

import torch
from torch import Tensor

from baton_serve.engine.collectives.shard import Shard

BUFFER_BYTES = 4 << 20
"""Size of the shared buffer in bytes. Larger sums are limited by the link, which a collective library uses better."""
ALIGNMENT_BYTES = 16
"""The kernel reads 16 bytes by one instruction."""
ALL_REDUCE_DTYPES = (torch.bfloat16, torch.float32)
"""Dtypes that torch's one-shot kernel supports."""


class OneShotAllReduce:
    """Computes the all-reduce of small tensors with one kernel of torch, which reads the other ranks' memory
    directly.
    """

    def __init__(self, group_name: str, device: torch.device) -> None:
        """Allocate this rank's buffer and map those of the other ranks. Raises `RuntimeError` if the devices cannot map
        each other's memory.
        """
        memory: Any = importlib.import_module("torch.distributed._symmetric_memory")
        self._buffer: Tensor = memory.empty(BUFFER_BYTES, dtype=torch.uint8, device=device)
        memory.rendezvous(self._buffer, group_name)
        self._name = group_name
        self._sum: Any = torch.ops.symm_mem.one_shot_all_reduce_copy

    @classmethod
    def make(cls, group: Any, device: torch.device) -> "OneShotAllReduce | None":
        """Create the object on every rank if the kernel works on all of them; otherwise return None on every rank. All
        ranks of the process group `group` must call it together.
        """
        made: OneShotAllReduce | None = None
        try:
            made = cls(group.group_name, device)
            made.all_reduce(torch.ones(1024, dtype=torch.bfloat16, device=device))
        except (ImportError, AttributeError, RuntimeError, NotImplementedError, ValueError) as error:
            logger.warning("small sums over ranks use the collective library: %s", str(error).splitlines()[0])
            made = None
        # The ranks must agree: one that used another way would wait forever.
        agreed = torch.tensor([1.0 if made is not None else 0.0], device=device)
        distributed: Any = importlib.import_module("torch.distributed")
        distributed.all_reduce(agreed, op=distributed.ReduceOp.MIN)
        return made if agreed.item() else None

    def fits(self, values: Tensor) -> bool:
        """Return whether `all_reduce` supports `values`: contiguous, bf16 or float32, at most `BUFFER_BYTES`, and a
        multiple of 16 bytes.
        """
        size = values.numel() * values.element_size()
        return (
            size <= BUFFER_BYTES
            and size % ALIGNMENT_BYTES == 0
            and values.dtype in ALL_REDUCE_DTYPES
            and values.is_contiguous()
        )

    def all_reduce(self, values: Tensor) -> Tensor:
        """Return the sum of `values` over the ranks as a new tensor. Call it only if `fits`."""
        buffer = self._buffer[: values.numel() * values.element_size()].view(values.dtype).view_as(values)
        summed: Tensor = self._sum(buffer, values, "sum", self._name)
        return summed


logger = logging.getLogger(__name__)

MAX_ROWS = 128
"""Largest number of rows in one sum.

Each row is a program that waits for other ranks, so all must run at the same time. Larger batches are limited by the
link.
"""
MAX_ARGMAX_ROWS = 1024
"""Largest number of rows in one argmax. Each row is a program of one warp."""
INBOX_BYTES = 64 << 20
"""Largest size of the memory into which other ranks write sums, in bytes."""
MAX_TRIAL_POLLS = 1 << 20
"""Longest wait in the first test of the kernel, in polls, so that broken links are found and nothing hangs."""
ERRORS = (ImportError, AttributeError, RuntimeError, NotImplementedError, ValueError, TypeError)
"""Errors that missing or unsupported parts of torch raise."""


class FusedAllReduceNorm:
    """Runs one rank's kernels that combine an exchange between ranks with a norm or an argmax. It owns the rank's
    inbox: device memory into which the other ranks write their values.
    """

    def __init__(self, group_name: str, shard: Shard, weight: Tensor) -> None:
        """Map the inboxes of all ranks and run the kernels once, which compiles them; the result of this run is
        ignored. Raises an error of a type in `ERRORS` if the device or torch cannot do that.
        """
        memory: Any = importlib.import_module("torch.distributed._symmetric_memory")
        self._kernels: Any = importlib.import_module("baton_serve.engine.kernels.triton.all_reduce")
        self._shard = shard
        words = weight.numel() * weight.element_size() // 4  # the kernels move data in words of four bytes
        row_bytes = self._kernels.inbox_bytes(shard.size, 1, words)
        # Models with a large hidden size get fewer rows, to bound the memory.
        rows = min(MAX_ROWS, INBOX_BYTES // row_bytes)
        words_of_largest = self._kernels.WORDS_PER_ARGMAX
        sums = rows * row_bytes
        largest = self._kernels.inbox_bytes(shard.size, MAX_ARGMAX_ROWS, words_of_largest)
        self._buffer: Tensor = memory.empty(sums + largest, dtype=torch.uint8, device=weight.device)
        self._buffer.zero_()
        handle = memory.rendezvous(self._buffer, group_name)
        inboxes = [handle.get_buffer(rank, (1,), torch.int64) for rank in range(shard.size)]
        addresses = torch.tensor([inbox.data_ptr() for inbox in inboxes], device=weight.device)
        # One counter per row: rows wait for other ranks independently of each other.
        counters = torch.zeros(rows, dtype=torch.int32, device=weight.device)
        self._inboxes = self._kernels.Inboxes(shard.rank, addresses, counters, words, rows)
        counters = torch.zeros(MAX_ARGMAX_ROWS, dtype=torch.int32, device=weight.device)
        self._largest = self._kernels.Inboxes(shard.rank, addresses + sums, counters, words_of_largest, MAX_ARGMAX_ROWS)
        self._try(weight, polls=0)

    @classmethod
    def make(cls, group: Any, shard: Shard, weight: Tensor) -> "FusedAllReduceNorm | None":
        """Create the object on every rank if the kernels give right results on all of them; otherwise return None on
        every rank. All ranks call it together. `weight` has the shape, dtype and device of the norms' weights,
        [hidden].
        """
        made: FusedAllReduceNorm | None = None
        try:
            made = cls(group.group_name, shard, weight)
        except ERRORS as error:
            logger.warning("cannot sum over ranks through mapped memory: %s", str(error).split("\n")[0])
        if not _agree(made is not None, weight.device):
            return None
        assert made is not None
        # The first run only compiled, without waiting. Now the ranks run at the same time, and the results must be
        # right.
        arrived = made._try(weight, polls=MAX_TRIAL_POLLS)
        if not arrived:
            logger.warning("data written into another rank's memory does not arrive: sums use the collective library")
        return made if _agree(arrived, weight.device) else None

    def sum_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor | None:
        """Add the sum of `x` over all ranks to `residual`, both [rows, hidden], in place, and return the RMSNorm of the
        new `residual` with `weight` [hidden].

        Every rank holds the same `residual`, which is counted once. Return None, and do nothing, if `x` has an
        unsupported shape, such as too many rows.
        """
        if not self._inboxes.fits(x):
            return None
        normed: Tensor = self._kernels.sum_norm(x, residual, weight, eps, self._inboxes)
        return normed

    def argmax(self, logits: Tensor, out: Tensor) -> None:
        """Write to `out`, int64 [rows], the argmax of each row of the logits of all ranks, put side by side. `logits`
        are this rank's columns, [rows, columns].

        Among equals the first is taken; a row with NaN gets the number of all columns. At most `MAX_ARGMAX_ROWS` rows.
        """
        self._kernels.argmax(logits, out, self._largest)

    def _try(self, weight: Tensor, polls: int) -> bool:
        """Return whether `sum_norm` and `argmax` give the right result for known numbers, in every row of the inbox.
        `polls` is the largest number of reads for which a kernel waits for other ranks.

        Each is run twice, because an inbox has two halves that are used alternately.
        """
        rows, hidden, size = self._inboxes.max_rows, weight.numel(), self._shard.size
        column = torch.arange(hidden, device=weight.device) % 64
        is_right = True
        for turn in range(2):
            x = (column + self._shard.rank + turn).to(weight.dtype).expand(rows, hidden).contiguous()
            residual = torch.zeros_like(x)
            self._kernels.sum_norm(x, residual, torch.ones_like(weight), 1e-6, self._inboxes, polls=polls)
            expected = size * (column + turn) + size * (size - 1) // 2
            is_right = is_right and bool((residual == expected.to(weight.dtype)).all())
            logits = ((column[:64] == turn) * float(self._shard.rank)).expand(MAX_ARGMAX_ROWS, 64).contiguous()
            out = torch.zeros(MAX_ARGMAX_ROWS, dtype=torch.int64, device=weight.device)
            self._kernels.argmax(logits, out, self._largest, polls=polls)
            is_right = is_right and bool((out == (size - 1) * 64 + turn).all())
        return is_right


def _agree(mine: bool, device: torch.device) -> bool:
    """Return whether `mine` is True on all ranks, by an all-reduce on `device`. All ranks must call it together."""
    distributed: Any = importlib.import_module("torch.distributed")
    agreed = torch.tensor([1.0 if mine else 0.0], device=device)
    distributed.all_reduce(agreed, op=distributed.ReduceOp.MIN)
    return bool(agreed.item())
