"""What ranks compute together. One port; one rank alone, and a group through torch.distributed."""

import importlib
import itertools
import logging
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from baton_serve.engine import device as devices
from baton_serve.engine.collectives.custom_all_reduce import MAX_ARGMAX_ROWS, FusedAllReduceNorm, OneShotAllReduce
from baton_serve.engine.collectives.shard import Shard

TIMEOUT_S = 300.0
"""No step, and no compilation at start, takes so long: a rank that is behind by more is lost."""

_groups_that_map = itertools.count()
"""Of this process. Torch numbers exchanges of addresses by process, not by group: rank 0's second group would wait for
what its new ranks write under other numbers."""
logger = logging.getLogger(__name__)


class Collectives(Protocol):
    def prepare(self, weight: Tensor) -> None:
        """For `sum_norm` with such weights. All ranks call it together."""
        ...

    def sum_norm(self, values: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor | None:
        """RMSNorm of the ranks' sum and `residual` [rows, hidden], which becomes their sum; None, and nothing is done,
        where no kernel does all of it at once."""
        ...

    def all_reduce(self, values: Tensor) -> Tensor:
        """The ranks' sum. `values` may be overwritten."""
        ...

    def gather_columns(self, values: Tensor) -> Tensor:
        """[rows, columns] of each rank, side by side in the order of ranks."""
        ...

    @property
    def argmax_rows(self) -> int:
        """Of how many rows, at most, `argmax` finds the largest; 0: of none."""
        ...

    def argmax(self, values: Tensor, out: Tensor) -> None:
        """`out`, int64 [rows]: where in `gather_columns` of `values` each row's largest is, the first among equals; of
        a row with NaN the number of all columns."""
        ...

    def broadcast(self, values: Tensor) -> None:
        """Every rank's `values` become those of rank 0."""
        ...

    def abort(self) -> None:
        """From any thread: whoever waits for another rank stops waiting, as far as the backend can."""
        ...

    def close(self) -> None: ...


class SingleRank:
    """A group of one."""

    def prepare(self, weight: Tensor) -> None:
        """Nothing is."""

    def sum_norm(self, values: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor | None:
        return None

    def all_reduce(self, values: Tensor) -> Tensor:
        return values

    def gather_columns(self, values: Tensor) -> Tensor:
        return values

    argmax_rows = 0

    def argmax(self, values: Tensor, out: Tensor) -> None:
        raise AssertionError("of no rows")

    def broadcast(self, values: Tensor) -> None:
        """Nobody else is there."""

    def abort(self) -> None:
        """Nobody waits."""

    def close(self) -> None:
        """Nothing is held."""


class TorchCollectives:
    """`nccl` on cuda, `xccl` on xpu, `gloo` on CPUs. Calls on devices are queued on the current stream."""

    def __init__(self, store_path: Path, shard: Shard, device: torch.device, *, maps_memory: bool = True) -> None:
        """Returns when all ranks are there. `maps_memory`: devices may write into each other's. Raises RuntimeError."""
        distributed: Any = importlib.import_module("torch.distributed.distributed_c10d")
        timeout = timedelta(seconds=TIMEOUT_S)
        store = importlib.import_module("torch.distributed").FileStore(str(store_path), shard.size)
        store.set_timeout(timeout)
        self._shard = shard
        self._distributed = distributed
        self._is_world = not devices.is_host(device)
        if self._is_world:
            backend = devices.collective_backend(device)
            kwargs = {"rank": shard.rank, "world_size": shard.size, "timeout": timeout, "device_id": device}
            distributed.init_process_group(backend, store=store, **kwargs)
            self._group = distributed.group.WORLD
        else:
            options = distributed.ProcessGroupGloo._Options()
            options._timeout = timeout
            options._devices = [distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
            self._group = distributed.ProcessGroupGloo(store, shard.rank, shard.size, options)
        self.broadcast(torch.zeros(1, device=device))  # connects
        devices.synchronize(device)
        self._one_shot: OneShotAllReduce | None = None
        self._direct: FusedAllReduceNorm | None = None
        self._maps_memory = self._is_world and maps_memory and self._are_first(device)
        if self._maps_memory:
            self._one_shot = OneShotAllReduce.make(self._group, device)

    def prepare(self, weight: Tensor) -> None:
        self._direct = FusedAllReduceNorm.make(self._group, self._shard, weight) if self._maps_memory else None

    def sum_norm(self, values: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor | None:
        return None if self._direct is None else self._direct.sum_norm(values, residual, weight, eps)

    def all_reduce(self, values: Tensor) -> Tensor:
        if self._one_shot is not None and self._one_shot.fits(values):
            return self._one_shot.all_reduce(values)
        options = self._distributed.AllreduceOptions()
        options.asyncOp = False
        _wait(self._group.allreduce([values], options))
        return values

    def gather_columns(self, values: Tensor) -> Tensor:
        rows, columns = values.shape
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
        """Whether no rank's process has mapped memory for another group before."""
        earlier = self.all_reduce(torch.tensor([next(_groups_that_map)], device=device)).item()
        if earlier:
            logger.warning("sums over ranks go through the collective library: memory is mapped once a process")
        return not earlier

    def close(self) -> None:
        """The other ranks may be gone already, so this does not wait for them where it can be helped."""
        if self._is_world:
            end = getattr(self._distributed, "_abort_process_group", self._distributed.destroy_process_group)
            end()


def _wait(work: Any) -> None:
    """Some backends order a synchronous sum by the stream and hand out nothing to wait for."""
    if work is not None:
        work.wait()
