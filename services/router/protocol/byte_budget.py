"""A bound on the memory that the requests of one process use together for one purpose, such as images or bodies."""

import asyncio
from collections import deque

from baton_serve.services.router.protocol.errors import RateLimitError


class ByteBudget:
    """Grants bytes to requests in the order in which they ask. Use it from one event loop at a time.

    A request should ask once for all that it needs: then no two requests can each wait for what the other one has.
    """

    def __init__(self, max_bytes: int, *, wait_s: float) -> None:
        """Create a budget of `max_bytes`, in which a request waits for at most `wait_s` seconds."""
        self._max_bytes = max_bytes
        self._free = max_bytes
        self._wait_s = wait_s
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()

    @property
    def num_free(self) -> int:
        """Number of bytes that are not granted."""
        return self._free

    async def acquire(self, num_bytes: int) -> bool:
        """Wait for `num_bytes`, which the caller must return with `release`. Return False if they do not become free.

        More than the whole budget never becomes free.
        """
        if num_bytes > self._max_bytes:
            return False
        if not self._waiting and num_bytes <= self._free:
            self._free -= num_bytes
            return True
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (granted, num_bytes)
        self._waiting.append(entry)
        try:
            async with asyncio.timeout(self._wait_s):
                await granted
        except (TimeoutError, asyncio.CancelledError) as exc:
            self._withdraw(entry)
            if isinstance(exc, TimeoutError):
                return False
            raise
        return True

    def release(self, num_bytes: int) -> None:
        """Return bytes that `acquire` has granted, and grant them to the requests that wait."""
        self._free += num_bytes
        assert self._free <= self._max_bytes, "more bytes were released than granted"
        self._grant()

    def _withdraw(self, entry: tuple[asyncio.Future[None], int]) -> None:
        """Remove a request that was cancelled or has timed out."""
        granted, num_bytes = entry
        if granted.done() and not granted.cancelled():
            # The bytes were granted just before the request was cancelled or timed out.
            self.release(num_bytes)
            return
        if entry in self._waiting:
            self._waiting.remove(entry)
        # The request may have stood before others that need fewer bytes.
        self._grant()

    def _grant(self) -> None:
        while self._waiting and (self._waiting[0][1] <= self._free or self._waiting[0][0].cancelled()):
            granted, num_bytes = self._waiting.popleft()
            if not granted.cancelled():
                self._free -= num_bytes
                granted.set_result(None)


UNCOUNTED_BYTES = 64 * 1024
"""Size up to which a body is not counted, so that short requests are served while long ones use all the memory. The
number of connections bounds the memory of these bodies."""
BODY_WAIT_S = 2.0
"""Longest time in seconds that a request waits for memory for its body."""


class BodyReservation:
    """The memory of one request's body, out of that of all bodies (`--max-body-memory-bytes`).

    The gateway owns it and calls `release` when the request has been answered: the parsed request keeps the strings of
    its body until then.
    """

    __slots__ = ("_budget", "_num_reserved")

    def __init__(self, budget: ByteBudget) -> None:
        """Create a reservation without bytes."""
        self._budget = budget
        self._num_reserved = 0

    async def grow(self, num_bytes: int) -> None:
        """Reserve memory for a body of which `num_bytes` have arrived. Raises `RateLimitError` if too little is free.

        Only bytes that have arrived are reserved: a client could announce a length and then send nothing. Requests may
        therefore wait for one another, but only for a short time.
        """
        if num_bytes <= UNCOUNTED_BYTES or num_bytes <= self._num_reserved:
            return
        missing = num_bytes - self._num_reserved
        if not await self._budget.acquire(missing):
            raise RateLimitError(
                "the server has no memory for more long requests (--max-body-memory-bytes): try again later",
                retry_after_s=1.0,
            )
        self._num_reserved += missing

    def release(self) -> None:
        """Return all reserved bytes."""
        num_bytes, self._num_reserved = self._num_reserved, 0
        if num_bytes:
            self._budget.release(num_bytes)
