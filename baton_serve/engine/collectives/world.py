"""Creates the process groups of all tensor- and pipeline-parallel ranks (vLLM: parallel_state), and each rank's place
among them.
"""

import importlib
import socket
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from baton_serve.engine import device as devices
from baton_serve.engine.collectives.backends import TIMEOUT_S, Collectives, SingleRank, TorchCollectives
from baton_serve.engine.collectives.shard import Shard
from baton_serve.engine.collectives.stage_layers import STEPS_BEYOND_STAGES, WHOLE_PIPELINE, Stage
from baton_serve.engine.collectives.stage_links import Peers, StageLinks

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class RankPlace:
    """The place of a rank among all ranks of an engine: `shard`, its number in the tensor-parallel group, and `stage`,
    its pipeline stage.
    """

    shard: Shard
    stage: Stage = WHOLE_PIPELINE

    @property
    def num_stages(self) -> int:
        return max(1, len(self.stage.num_layers))

    @property
    def rank(self) -> int:
        """Return the number of this rank among all ranks of the engine, over all stages."""
        return self.stage.number * self.shard.size + self.shard.rank

    @property
    def world_size(self) -> int:
        return self.num_stages * self.shard.size

    def peers(self) -> Peers:
        """Return the ranks of the other pipeline stages with which this rank exchanges activations: those with the same
        number in their tensor-parallel group.
        """
        size, rank = self.shard.size, self.rank
        return Peers(
            before=None if self.stage.is_first else rank - size,
            after=None if self.stage.is_last else rank + size,
            first=self.shard.rank,
            last=self.shard.rank + (self.num_stages - 1) * size,
        )


def place_of(rank: int, tensor_parallel_size: int, num_layers: tuple[int, ...]) -> RankPlace:
    """Return the shard and the stage of the rank with the number `rank` among all ranks. `num_layers` is the number of
    layers of each stage; () without a pipeline.
    """
    stage, part = divmod(rank, tensor_parallel_size)
    return RankPlace(Shard(part, tensor_parallel_size), Stage(stage, num_layers))


class World:
    """The process groups of one engine, as one rank sees them. All ranks must call its methods in the same order."""

    def __init__(
        self, store: str, place: RankPlace, device: torch.device, listener: socket.socket | None = None
    ) -> None:
        """Connect this process with the other ranks. `store` is how they find each other: the path of a file, or
        tcp://HOST:PORT if they are on several hosts. Then rank 0 serves the store on `listener`, its socket with that
        address.

        Raises `RuntimeError` if the connection fails.
        """
        self._place, self._device = place, device
        self._distributed: Any = importlib.import_module("torch.distributed.distributed_c10d")
        self._timeout = timedelta(seconds=TIMEOUT_S)
        self._store = _open_store(store, place.world_size, self._timeout, listener)
        self._address = _own_address(store)
        self._is_device = not devices.is_host(device)
        if self._is_device:
            kwargs = {"rank": place.rank, "world_size": place.world_size, "timeout": self._timeout, "device_id": device}
            # With `device_id` the library connects the ranks here, and not within the first step.
            backend = devices.collective_backend(device)
            self._distributed.init_process_group(backend, store=self._store, **kwargs)

    def collectives(self, *, maps_memory: bool) -> Collectives:
        """Return the collectives of the tensor-parallel group to which this rank belongs. `maps_memory` allows kernels
        that write directly into the device memory of other ranks.
        """
        place = self._place
        if place.shard.is_whole:
            return SingleRank()
        # torch's symmetric memory finds its group by name, so the group must be that of all ranks.
        is_world = self._is_device and place.num_stages == 1
        group = self._distributed.group.WORLD if is_world else self._stage_group()
        return TorchCollectives(group, place.shard, self._device, maps_memory=maps_memory and is_world)

    def links(self, like: Tensor) -> StageLinks | None:
        """Return this rank's connections to the other pipeline stages, or None if there is only one stage. `like` is an
        empty tensor [0, hidden_size] with device and dtype of the activations.
        """
        place = self._place
        if place.num_stages == 1:
            return None
        if self._is_device:
            # The second group has the same ranks, because the operations of one group run in one order (see `links`).
            every = list(range(place.world_size))
            forward, back = self._distributed.group.WORLD, self._distributed.new_group(every)
        else:
            forward = back = self._gloo("stages", place.rank, place.world_size)
        return StageLinks(
            forward,
            back,
            place.peers(),
            like,
            is_first=place.stage.is_first,
            max_in_flight=place.num_stages + STEPS_BEYOND_STAGES,
        )

    def close(self) -> None:
        """Leave the process groups, if torch supports that without waiting for the other ranks, which may have exited
        already.
        """
        if self._is_device:
            end = getattr(self._distributed, "_abort_process_group", self._distributed.destroy_process_group)
            end()

    def _stage_group(self) -> Any:
        """Return the torch.distributed process group of the ranks of this rank's pipeline stage. All ranks must call it
        together.
        """
        place, size = self._place, self._place.shard.size
        if not self._is_device:
            return self._gloo(f"stage-{place.stage.number}", place.shard.rank, size)
        # Every rank must take part in making every group.
        groups = [
            self._distributed.new_group(list(range(number * size, (number + 1) * size)))
            for number in range(place.num_stages)
        ]
        return groups[place.stage.number]

    def _gloo(self, name: str, rank: int, size: int) -> Any:
        """Return a gloo process group of `size` ranks for CPU tensors, under a `name` of its own in the store. It is
        not torch's global group, because a process may have several engines (tests).
        """
        options = self._distributed.ProcessGroupGloo._Options()
        options._timeout = self._timeout
        options._devices = [self._distributed.ProcessGroupGloo.create_device(hostname=self._address)]
        store = self._distributed.PrefixStore(name, self._store)
        return self._distributed.ProcessGroupGloo(store, rank, size, options)


def _open_store(store: str, world_size: int, timeout: timedelta, listener: socket.socket | None) -> Any:
    """Return the torch.distributed store by which the ranks find each other: at a path, or at tcp://HOST:PORT."""
    distributed = importlib.import_module("torch.distributed")
    if store.startswith("tcp://"):
        host, _, port = store.removeprefix("tcp://").rpartition(":")
        own = {} if listener is None else {"is_master": True, "master_listen_fd": listener.detach()}
        # Forming the groups waits for the ranks, so that the store need not.
        return distributed.TCPStore(host, int(port), None, timeout=timeout, wait_for_workers=False, **own)
    file = distributed.FileStore(str(Path(store)), world_size)
    # Joining must not wait forever for a rank that failed to load.
    file.set_timeout(timeout)
    return file


def _own_address(store: str) -> str:
    """Return the IP address at which other ranks reach this process: that of the interface towards the host in `store`,
    or the loopback address if `store` is a path.
    """
    if not store.startswith("tcp://"):
        return LOOPBACK
    host, _, port = store.removeprefix("tcp://").rpartition(":")
    family, kind, proto, _, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
    # Connecting a datagram socket sends nothing, but chooses the interface through which the host is reached.
    with socket.socket(family, kind, proto) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
