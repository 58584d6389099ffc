"""Ids. Each is a distinct type, so that one cannot be passed where another is meant."""

import secrets
from typing import NewType

InstanceId = NewType("InstanceId", str)
"""Stable name of an instance, unique in a cluster (a pod name, `prefill-0`)."""

Generation = NewType("Generation", int)
"""Chosen at random by each process at start, so a restarted instance is never taken for the old one."""

RequestId = NewType("RequestId", str)
TicketId = NewType("TicketId", str)

BlockHash = NewType("BlockHash", bytes)
"""16 bytes that name a block's content (see `contracts.block_hash`)."""


def new_generation() -> Generation:
    """A random positive 53-bit integer: safe in JSON, Redis and JavaScript."""
    return Generation(secrets.randbits(53) | 1)


def new_ticket_id() -> TicketId:
    return TicketId(secrets.token_hex(8))
