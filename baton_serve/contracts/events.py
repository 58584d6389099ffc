"""Which blocks an instance caches, published over ZeroMQ PUB and numbered without gaps.

A router that joins, or sees a gap, asks the instance for a `messages.Snapshot`.
"""

from typing import Literal

import msgspec

from baton_serve.contracts.identity import BlockHash, Generation, InstanceId

Tier = Literal["device", "host"]


class BlocksStored(msgspec.Struct, frozen=True, tag="stored"):
    names: list[BlockHash]
    tier: Tier = "device"


class BlocksRemoved(msgspec.Struct, frozen=True, tag="removed"):
    names: list[BlockHash]
    tier: Tier = "device"


BlockEvent = BlocksStored | BlocksRemoved


class EventBatch(msgspec.Struct, frozen=True):
    """`sequence` is 1 for an instance's first batch and grows by one."""

    instance: InstanceId
    generation: Generation
    sequence: int
    events: list[BlockEvent]
