"""Decides which kernel or library (custom all-reduce, NCCL, XCCL, gloo) runs a collective between tensor-parallel
ranks.
"""

import importlib
import itertools
import logging
from typing import Any, Protocol

import torch
from torch import Tensor

from baton_serve.engine import device as devices
from baton_serve.engine.collectives.custom_all_reduce import MAX_ARGMAX_ROWS, FusedAllReduceNorm, OneShotAllReduce
from baton_serve.engine.collectives.shard import Shard

TIMEOUT_S = 300.0
"""Longest wait for another rank, in seconds. No step and no compilation at the start takes so long."""

_groups_that_map = itertools.count()
"""Counts groups of this process that map memory.

Torch numbers exchanges of addresses by process, not by group: rank 0's second group would wait for addresses that its
new ranks publish under other numbers.
"""
logger = logging.getLogger(__name__)


class Collectives(Protocol):
    """The operations that the ranks of one tensor-parallel group execute together, such as all-reduce. Every rank must
    call them in the same order.
    """

    def prepare(self, weight: Tensor) -> None:
        """Allocate the memory that `sum_norm` needs for norm weights of the shape of `weight`, [hidden]. All ranks must
        call it together, before the first step.
        """
        ...

    def sum_norm(self, values: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor | None:
        """Set `residual` to `residual` + the sum of `values` over the ranks, both [rows, hidden], and return the
        RMSNorm of the new `residual`.

        Return None, and change nothing, if this backend has no single kernel for it: the caller then uses `all_reduce`.
        """
        ...

    def all_reduce(self, values: Tensor) -> Tensor:
        """Return the sum of `values` over the ranks, of the same shape. The memory of `values` may be overwritten."""
        ...

    def gather_columns(self, values: Tensor) -> Tensor:
        """Return the ranks' values [rows, columns] concatenated along the columns, in the order of ranks."""
        ...

    @property
    def argmax_rows(self) -> int:
        """The largest number of rows that `argmax` supports; 0 if it is not supported."""
        ...

    def argmax(self, values: Tensor, out: Tensor) -> None:
        """Write to `out`, int64 [rows], the argmax of each row of `gather_columns(values)`, without gathering.

        Among equal values the first column is taken. A row with NaN gets the number of all columns. Call it only for at
        most `argmax_rows` rows.
        """
        ...

    def broadcast(self, values: Tensor) -> None:
        """Overwrite the tensor `values` of every rank with that of rank 0."""
        ...

    def abort(self) -> None:
        """Make operations return that wait for a rank that has exited, if the backend supports that. Callable from any
        thread.
        """
        ...


class SingleRank:
    """Implements `Collectives` for one rank: nothing is exchanged."""

    def prepare(self, weight: Tensor) -> None:
        """Do nothing: a single rank exchanges nothing, so it needs no memory for that."""

    def sum_norm(self, values: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor | None:
        return None

    def all_reduce(self, values: Tensor) -> Tensor:
        return values

    def gather_columns(self, values: Tensor) -> Tensor:
        return values

    argmax_rows = 0

    def argmax(self, values: Tensor, out: Tensor) -> None:
        raise AssertionError("argmax_rows is 0")

    def broadcast(self, values: Tensor) -> None:
        """Do nothing: a single rank has the values of rank 0 already."""

    def abort(self) -> None:
        """Do nothing: a single rank never waits for another one."""


class TorchCollectives:
    """Implements `Collectives` with torch.distributed: nccl on cuda, xccl on xpu, gloo on CPUs.

    Device calls go to the current stream.
    """

    def __init__(self, group: Any, shard: Shard, device: torch.device, *, maps_memory: bool = False) -> None:
        """Connect to the other ranks of `group`, a process group that `World` has made. `maps_memory` allows kernels
        that write directly into other ranks' device memory; then `group` must be that of all ranks of the engine.
        """
        self._distributed: Any = importlib.import_module("torch.distributed.distributed_c10d")
        self._group, self._shard = group, shard
        self.broadcast(torch.zeros(1, device=device))  # connects to the other ranks now, not in the first step
        devices.synchronize(device)
        self._one_shot: OneShotAllReduce | None = None
        self._direct: FusedAllReduceNorm | None = None
        self._maps_memory = maps_memory and self._are_first(device)
        if self._maps_memory:
            self._one_shot = OneShotAllReduce.make(self._group, device)

    def prepare(self, weight: Tensor) -> None:
        self._direct = FusedAllReduceNorm.make(self._group, self._shard, weight) if self._maps_memory else None

    def sum_norm(self, values: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor | None:
        return None if self._direct is None else self._direct.sum_norm(values, residual, weight, eps)

    def all_reduce(self, values: Tensor) -> Tensor:
        # Small sums of decode steps: one kernel has a lower latency than the library.
        if self._one_shot is not None and self._one_shot.fits(values):
            return self._one_shot.all_reduce(values)
        # Synchronous operations are ordered by the current stream. Asynchronous ones would use a stream of their own,
        # which graphs cannot capture here.
        options = self._distributed.AllreduceOptions()
        options.asyncOp = False
        _wait(self._group.allreduce([values], options))
        return values

    def gather_columns(self, values: Tensor) -> Tensor:
        rows, columns = values.shape
        # The library gathers along rows; the columns are put side by side below.
        gathered = values.new_empty((self._shard.size * rows, columns))
        options = self._distributed.AllgatherOptions()
        options.asyncOp = False
        _wait(self._group._allgather_base(gathered, values.contiguous(), options))
        return gathered.view(self._shard.size, rows, columns).transpose(0, 1).reshape(rows, -1)

    @property
    def argmax_rows(self) -> int:
        return 0 if self._direct is None else MAX_ARGMAX_ROWS

    def argmax(self, values: Tensor, out: Tensor) -> None:
        assert self._direct is not None
        self._direct.argmax(values, out)

    def broadcast(self, values: Tensor) -> None:
        options = self._distributed.BroadcastOptions()
        options.rootRank, options.asyncOp = 0, False
        _wait(self._group.broadcast([values], options))

    def abort(self) -> None:
        if hasattr(self._group, "abort"):
            self._group.abort()

    def _are_first(self, device: torch.device) -> bool:
        """Return whether this is the first group in which these processes map each other's device memory.

        A process can do that for one group only, so later groups get False and use the collective library. All ranks
        must call it together.
        """
        # A sum over the ranks: all of them must come to the same decision.
        earlier = self.all_reduce(torch.tensor([next(_groups_that_map)], device=device)).item()
        if earlier:
            logger.warning(
                "sums over ranks use the collective library: an earlier engine of this process mapped memory"
            )
        return not earlier


def _wait(work: Any) -> None:
    """Wait for an operation of a process group. `work` is what the operation returned: None from backends that order a
    synchronous operation by the stream, for which nothing has to be done.
    """
    if work is not None:
        work.wait()
