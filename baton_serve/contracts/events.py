"""Events that report which blocks an instance caches. Published over ZeroMQ PUB and numbered without gaps.

A router that joins or detects a gap asks the instance for a `messages.Snapshot`.
"""

from typing import Literal

import msgspec

from baton_serve.contracts.identity import BlockHash, Generation, InstanceId

Tier = Literal["device", "host"]


class BlocksStored(msgspec.Struct, frozen=True, tag="stored"):
    """These block hashes are cached in `tier` from now on."""

    names: list[BlockHash]
    tier: Tier = "device"


class BlocksRemoved(msgspec.Struct, frozen=True, tag="removed"):
    """These block hashes have been evicted from `tier`."""

    names: list[BlockHash]
    tier: Tier = "device"


BlockEvent = BlocksStored | BlocksRemoved


class EventBatch(msgspec.Struct, frozen=True):
    """The events of one engine step. `sequence` is 1 for an instance's first batch and grows by one per batch."""

    instance: InstanceId
    generation: Generation
    sequence: int
    events: list[BlockEvent]
