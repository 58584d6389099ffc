"""The interface of the registry. An instance registers a record, renews it before its TTL ends, and removes it at exit.

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
    """Registers one instance. Used by the instance."""

    async def register(self, record: InstanceRecord, ttl_s: float) -> None:
        """Add or renew a record, which expires after `ttl_s`.

        Raises `RegistryUnavailable` if the backend does not answer: the instance should go on serving and try again.
        Raises `Superseded` if a newer generation has registered: this instance should stop.
        """

    async def leave(self, instance: InstanceId, generation: Generation) -> None:
        """Remove the record, unless it belongs to a newer generation. Raises `RegistryUnavailable`."""

    async def close(self) -> None: ...


class RegistryView(Protocol):
    """Shows all instances of the cluster. Used by routers, and by `baton rotate`."""

    async def start(self, on_change: Callable[[], None]) -> None:
        """Connect and read the records once. Return also if the backend did not answer.

        Later `on_change` is called on the event loop when an instance has come, gone or changed in more than its load,
        or when the connection to the backend was lost or came back.
        """

    def records(self) -> list[InstanceRecord]:
        """Return the live records, ordered by instance. While the backend is lost, return the last ones."""

    def is_connected(self) -> bool:
        """Return whether the backend answered last time."""

    async def close(self) -> None: ...


_NO_LOAD = Load(free_blocks=0, total_blocks=0)


def without_load(record: InstanceRecord) -> InstanceRecord:
    """Return a record without its load, for comparisons: a changed load alone is not reported as a change."""
    return msgspec.structs.replace(record, load=_NO_LOAD)
