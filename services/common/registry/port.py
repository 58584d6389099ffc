"""Defines the interface of the registry, in which instances register and renew a record. An instance registers a
record, renews it before its TTL ends, and removes it at exit.

Every implementation follows these rules (tests/contract/test_registries.py). A newer generation of an instance replaces
the older one immediately, and the older one can never overwrite or remove it again. Generations are ordered by their
first registration. A generation that has left cannot register again. When the backend is lost, views keep their
records.
"""

from collections.abc import Callable
from typing import Protocol

import msgspec

from baton_serve.contracts.identity import Generation, InstanceId
from baton_serve.contracts.instance import InstanceRecord, Load


class RegistryClient(Protocol):
    """The interface by which an instance adds its record to the registry, renews it and removes it."""

    async def register(self, record: InstanceRecord, ttl_s: float) -> None:
        """Add or renew the record of this instance, which expires after `ttl_s` seconds.

        Raises `RegistryUnavailable` if the registry does not answer: the instance should go on serving and try again.
        Raises `Superseded` if a newer generation has registered: this instance should stop.
        """

    async def leave(self, instance: InstanceId, generation: Generation) -> None:
        """Remove the record of this instance, unless it belongs to a newer generation. Raises `RegistryUnavailable` if
        the registry does not answer.
        """

    async def close(self) -> None: ...


class RegistryView(Protocol):
    """The interface by which routers and `baton rotate` read the records of all instances of the cluster."""

    async def start(self, on_change: Callable[[], None]) -> None:
        """Connect to the registry and read all records once. Return also if it did not answer.

        Later `on_change` is called on the event loop when an instance has come, gone or changed in more than its load,
        or when the connection to the registry was lost or came back.
        """

    def records(self) -> list[InstanceRecord]:
        """Return the records of all instances that have not expired, ordered by instance. While the registry does not
        answer, return the records that were read last.
        """

    def is_connected(self) -> bool:
        """Return whether the registry answered when its records were read last."""

    async def close(self) -> None: ...


_NO_LOAD = Load(free_blocks=0, total_blocks=0)


def without_load(record: InstanceRecord) -> InstanceRecord:
    """Return a copy of an instance's record with an empty load, for comparisons: a changed load alone does not count as
    a change.
    """
    return msgspec.structs.replace(record, load=_NO_LOAD)
