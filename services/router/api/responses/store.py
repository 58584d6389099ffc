"""Keep stored Responses in this process's memory, and decide which is dropped for another.

Both are stores of bytes: only `kept_responses` knows the meaning of keys and records.
"""

import time
from collections import Counter
from collections.abc import Callable
from typing import Protocol

RUN_TTL_S = 10.0
"""Time after which a run counts as lost if its router has not set its state again."""
MAX_KEPT = 10_000
"""Largest number of answers that one process keeps in memory."""


class ResponseStore(Protocol):
    """Stores answers for `--response-store-ttl-s` after they were last written (each with its conversation, as a
    record), and the states of the background requests that compute answers.

    A key is the digest of the record's owner, a colon and an id. Every method but `close` raises `UnavailableError` if
    the store cannot be reached.
    """

    async def size(self, key: str) -> int:
        """Return the length of the record of a key in bytes, or 0 if there is none any more."""
        ...

    async def get(self, key: str) -> bytes | None:
        """Return the record of a key, or None if there is none any more."""
        ...

    async def put(self, key: str, record: bytes) -> None:
        """Store the record of a key, in place of an earlier one."""
        ...

    async def delete(self, key: str) -> bool:
        """Delete the record of a key. Return whether there was one."""
        ...

    async def set_run(self, key: str, state: str) -> None:
        """Set the state of the background request that computes the answer of a key. It is forgotten after
        `RUN_TTL_S`.
        """
        ...

    async def run_state(self, key: str) -> str | None:
        """Return the state that `set_run` has set for a key, or None if the background request has ended or the router
        that computes it is lost.
        """
        ...

    async def end_run(self, key: str) -> None:
        """Forget the state of the background request of a key; it has ended."""
        ...

    async def close(self) -> None:
        """Close the connections of the store."""
        ...


class MemoryResponseStore:
    """A `ResponseStore` in the memory of this process.

    Beyond its limits the oldest record of that owner who has the most bytes is dropped, so that no owner of an API key
    can make the records of the others disappear.
    """

    def __init__(self, ttl_s: float, max_bytes: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Create a store that keeps at most `max_bytes` of records, each for `ttl_s` seconds."""
        self._ttl_s = ttl_s
        self._max_bytes = max_bytes
        self._clock = clock
        # A dict is in the order of insertion: the first record is the oldest, of all and of each owner.
        self._records: dict[str, tuple[float, bytes]] = {}
        self._owned: dict[str, dict[str, None]] = {}
        self._owned_bytes: Counter[str] = Counter()
        self._runs: dict[str, tuple[float, str]] = {}
        self.num_bytes = 0

    async def size(self, key: str) -> int:
        """Return the length of the record of a key in bytes, or 0 if there is none."""
        return len(await self.get(key) or b"")

    async def get(self, key: str) -> bytes | None:
        """Return the record of a key, or None if it was never written, was dropped or is too old."""
        self._drop_old()
        return self._records[key][1] if key in self._records else None

    async def put(self, key: str, record: bytes) -> None:
        """Store the record of a key. If all records together then exceed the limits, drop old ones; drop this one too
        if it exceeds them alone.
        """
        await self.delete(key)
        owner = owner_of(key)
        self._records[key] = (self._clock() + self._ttl_s, record)
        self._owned.setdefault(owner, {})[key] = None
        self._owned_bytes[owner] += len(record)
        self.num_bytes += len(record)
        self._drop_old()

    async def delete(self, key: str) -> bool:
        """Delete the record of a key. Return whether there was one."""
        self._drop_old()
        if key not in self._records:
            return False
        self._drop(key)
        return True

    async def set_run(self, key: str, state: str) -> None:
        """Set the state of the background request that computes the answer of a key."""
        # Thousands of runs renew their states every second. Each goes to the end of the dict, so that the oldest come
        # first, which nobody may ask for any more.
        now = self._clock()
        self._runs.pop(key, None)
        self._runs[key] = (now + RUN_TTL_S, state)
        while next(iter(self._runs.values()))[0] <= now:
            del self._runs[next(iter(self._runs))]

    async def run_state(self, key: str) -> str | None:
        """Return the state that `set_run` has set for a key, or None if there is none."""
        until, state = self._runs.get(key, (0.0, None))
        return state if self._clock() < until else None

    async def end_run(self, key: str) -> None:
        """Forget the state of the background request of a key."""
        self._runs.pop(key, None)

    async def close(self) -> None:
        """Forget all records and all states of background requests."""
        self._records.clear()
        self._owned.clear()
        self._owned_bytes.clear()
        self._runs.clear()
        self.num_bytes = 0

    def _drop(self, key: str) -> None:
        _, record = self._records.pop(key)
        owner = owner_of(key)
        self.num_bytes -= len(record)
        self._owned_bytes[owner] -= len(record)
        del self._owned[owner][key]
        if not self._owned[owner]:
            del self._owned[owner], self._owned_bytes[owner]

    def _drop_old(self) -> None:
        now = self._clock()
        while self._records and next(iter(self._records.values()))[0] <= now:
            self._drop(next(iter(self._records)))
        while self.num_bytes > self._max_bytes:
            self._drop(next(iter(self._owned[max(self._owned_bytes, key=self._owned_bytes.__getitem__)])))
        while len(self._records) > MAX_KEPT:
            self._drop(next(iter(self._owned[max(self._owned, key=lambda owner: len(self._owned[owner]))])))


def owner_of(key: str) -> str:
    """Return the part of a record's key that names its owner (the digest before the colon)."""
    return key.partition(":")[0]
