"""Shows one rank's part of the KV cache to its transfer node, and hashes how blocks are divided."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from baton_serve.contracts.identity import Generation, InstanceId
from baton_serve.engine import device as devices
from baton_serve.engine.kv.kv_cache import KVCache
from baton_serve.kvtransfer import (
    LocalTransferError,
    NodePorts,
    TransferNode,
    TransferObserver,
    TransferSettings,
    part_layout,
)


class PartMemory:
    """The part of every KV block that one rank holds in its own memory. Implements `kvtransfer`'s `DeviceMemory`.

    `mark` and the transports of the node belong to different threads.
    """

    host_view = None
    shared_fd = None

    def __init__(self, cache: KVCache) -> None:
        self.device_tensor: torch.Tensor = cache.device_tensor
        self.num_blocks, self.block_bytes = self.device_tensor.shape
        self._device = cache.device
        self._ready: dict[int, devices.DeviceEvent] = {}
        self._copying = cache.copying

    def mark(self, blocks: Sequence[int]) -> None:
        """Let transports of these blocks wait for all work that is queued on the device now."""
        if not devices.is_host(self._device):
            devices.enter(self._device)
            self._ready.update(dict.fromkeys(blocks, devices.record(self._device)))

    def ready_after(self, blocks: Iterable[int]) -> Sequence[Any]:
        blocks = list(blocks)
        return devices.distinct([*map(self._ready.get, blocks), *map(self._copying.get, blocks)])


def describe_part(cache: KVCache, layout: str, rank: int, num_ranks: int) -> str:
    """Return a hash of what a rank holds of each block: equal ones mean interchangeable bytes. `layout` describes the
    whole blocks.
    """
    text = f"{layout} {rank}/{num_ranks} {cache.part} {cache.device_tensor.shape[1]}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def part_node(
    instance: InstanceId,
    generation: Generation,
    *,
    memory: PartMemory,
    division: str,
    settings: TransferSettings,
    observer: TransferObserver,
) -> TransferNode:
    """Return a node, not started yet, for one rank's part. Raises `LocalTransferError` if a part has no bytes that
    transports can move.
    """
    if not memory.block_bytes:
        raise LocalTransferError("a rank has no layers with KV")
    layout = part_layout(division, memory.block_bytes)
    return TransferNode(
        instance=instance,
        generation=generation,
        layout=layout,
        memory=memory,
        settings=settings,
        ports=NodePorts(observer=observer),
    )
