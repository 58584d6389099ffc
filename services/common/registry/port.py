"""The registry's port. A record lives for its TTL, is renewed by its instance and removed when the instance leaves.

Rules that hold for every implementation (tests/contract/test_registries.py): a newer generation of an instance
replaces the older one at once, and the older one can never overwrite or remove it again; generations are ordered by
their first registration; one that has left stays gone. Losing the registry's backend loses no record from a view.
"""

from collections.abc import Callable
from typing import Protocol

import msgspec

from baton_serve.contracts.identity import Generation, InstanceId
from baton_serve.contracts.instance import InstanceRecord, Load


class RegistryClient(Protocol):
    """The instance's side."""

    async def register(self, record: InstanceRecord, ttl_s: float) -> None:
        """A new record or a renewal. Raises `RegistryUnavailable` (serve on, try again) or `Superseded` (stop)."""

    async def leave(self, instance: InstanceId, generation: Generation) -> None:
        """Removes the record if it is this generation's. Raises `RegistryUnavailable`."""

    async def close(self) -> None: ...


class RegistryView(Protocol):
    """The router's side."""

    async def start(self, on_change: Callable[[], None]) -> None:
        """Returns after the first look, successful or not.

        `on_change`: instances came, went or changed other than in load, or the connection to the backend did.
        """

    def records(self) -> list[InstanceRecord]:
        """Live records, ordered by instance. While the backend is lost: the last view, without expiry."""

    def is_connected(self) -> bool: ...

    async def close(self) -> None: ...


_NO_LOAD = Load(free_blocks=0, total_blocks=0)


def without_load(record: InstanceRecord) -> InstanceRecord:
    """What of a record, when it changes, is news."""
    return msgspec.structs.replace(record, load=_NO_LOAD)
