"""Bounds the memory that the bodies of all requests use together in one router process.

A body counts until its request has been answered, because the parsed request keeps its strings.
"""

from baton_serve.services.router.protocol.byte_budget import ByteBudget
from baton_serve.services.router.protocol.errors import RateLimitError

UNCOUNTED_BYTES = 64 * 1024
"""Size up to which a body is not counted, so that short requests are served while long ones use all the memory. The
number of connections bounds the memory of these bodies."""
_WAIT_S = 2.0
"""Longest time in seconds that a request waits for memory."""


class BodyMemory:
    """The bytes that all requests of one router process share. Use it from one event loop at a time."""

    def __init__(self, max_bytes: int, *, wait_s: float = _WAIT_S) -> None:
        """Create the memory; `max_bytes` is that of `--max-body-memory-bytes`."""
        self.budget = ByteBudget(max_bytes, wait_s=wait_s)


class BodyReservation:
    """The memory of one request's body. The gateway owns it and calls `release` when the request has ended."""

    __slots__ = ("_memory", "_num_reserved")

    def __init__(self, memory: BodyMemory) -> None:
        """Create a reservation without bytes."""
        self._memory = memory
        self._num_reserved = 0

    async def grow(self, num_bytes: int) -> None:
        """Reserve memory for a body of which `num_bytes` have arrived. Raises `RateLimitError` if too little is free.

        Only bytes that have arrived are reserved: a client could announce a length and then send nothing. Requests may
        therefore wait for one another, but only for a short time.
        """
        if num_bytes <= UNCOUNTED_BYTES or num_bytes <= self._num_reserved:
            return
        missing = num_bytes - self._num_reserved
        if not await self._memory.budget.acquire(missing):
            raise RateLimitError(
                "the server has no memory for more long requests (--max-body-memory-bytes): try again later",
                retry_after_s=1.0,
            )
        self._num_reserved += missing

    def release(self) -> None:
        """Return all reserved bytes."""
        num_bytes, self._num_reserved = self._num_reserved, 0
        if num_bytes:
            self._memory.budget.release(num_bytes)
