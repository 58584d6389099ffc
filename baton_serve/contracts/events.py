"""Defines the events by which an instance reports which blocks it caches. Published over ZeroMQ PUB and numbered
without gaps.

A router that joins or detects a gap asks the instance for a `messages.Snapshot`.
"""

from typing import Literal

import msgspec

from baton_serve.contracts.identity import BlockHash, Generation, InstanceId

Tier = Literal["device", "host"]


class BlocksStored(msgspec.Struct, frozen=True, tag="stored"):
    """Reports that the KV blocks with these hashes are cached from now on, on the device or in host memory (`tier`)."""

    names: list[BlockHash]
    tier: Tier = "device"


class BlocksRemoved(msgspec.Struct, frozen=True, tag="removed"):
    """Reports that the KV blocks with these hashes were evicted from the cache on the device or in host memory
    (`tier`)."""

    names: list[BlockHash]
    tier: Tier = "device"


BlockEvent = BlocksStored | BlocksRemoved


class EventBatch(msgspec.Struct, frozen=True):
    """The changes of an instance's prefix cache in one engine step. `sequence` is 1 for an instance's first batch and
    grows by one per batch, so that routers notice a lost one."""

    instance: InstanceId
    generation: Generation
    sequence: int
    events: list[BlockEvent]
