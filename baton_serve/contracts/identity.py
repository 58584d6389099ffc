"""Types of ids, each distinct, so that type checking prevents mixing them up. Each kind is a distinct type, so that
type checking prevents mixing them up.
"""

import secrets
from typing import NewType

InstanceId = NewType("InstanceId", str)
"""Stable name of an instance, unique in a cluster (a pod name, `prefill-0`)."""

Generation = NewType("Generation", int)
"""Random number that each process chooses at start, so that a restarted instance is not mistaken for the previous one.
"""

RequestId = NewType("RequestId", str)
TicketId = NewType("TicketId", str)

BlockHash = NewType("BlockHash", bytes)
"""16 bytes that identify the content of a KV block (see `contracts.block_hash`)."""


def new_generation() -> Generation:
    """Return a new generation of a process: a random positive 53-bit integer, which JSON, Redis and JavaScript
    represent exactly."""
    # The lowest bit is set so that it is never 0.
    return Generation(secrets.randbits(53) | 1)


def new_ticket_id() -> TicketId:
    """Return a new id for the ticket of a transfer. It is random, and therefore unique in the cluster."""
    return TicketId(secrets.token_hex(8))
