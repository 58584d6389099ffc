"""A bound on the memory that the requests of one process use together for one purpose, such as images or bodies."""

import asyncio
from collections import deque
from collections.abc import Callable

from baton_serve.services.router.protocol.errors import RateLimitError


class ByteBudget:
    """A number of bytes of memory that requests share: it grants bytes in the order in which they are asked for. Use it
    from one event loop at a time.

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
        """The number of bytes that are not granted now."""
        return self._free

    async def acquire(self, num_bytes: int) -> bool:
        """Wait until `num_bytes` are granted; the caller must give them back with `release`. Return False if they do
        not become free in time.

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
        """Give back bytes that `acquire` has granted. Requests that wait for bytes get them."""
        self._free += num_bytes
        assert self._free <= self._max_bytes, "more bytes were released than granted"
        self._grant()

    def _withdraw(self, entry: tuple[asyncio.Future[None], int]) -> None:
        """Remove the entry of a request that waits no longer, because it was cancelled or has timed out."""
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


class BodyMemory(ByteBudget):
    """Limits the memory of the bodies of all requests of one process together (`--max-body-memory-bytes`).

    While there are several API keys, the requests of one owner get at most half of it, or one body of the largest size:
    one client must not keep all others from sending long requests.
    """

    def __init__(
        self,
        max_bytes: int,
        *,
        wait_s: float,
        max_body_bytes: int = 0,
        has_several_owners: Callable[[], bool] = lambda: False,
    ) -> None:
        """Create the memory with `max_bytes` in total, for which a request waits at most `wait_s` seconds.
        `max_body_bytes` is the largest size of one body. `has_several_owners` returns whether API keys of more than one
        owner are accepted now.
        """
        super().__init__(max_bytes, wait_s=wait_s)
        self._wait_for_share_s = wait_s
        self._share_bytes = max(max_bytes // 2, min(max_body_bytes, max_bytes))
        self._has_several_owners = has_several_owners
        self._shares: dict[str, ByteBudget] = {}

    def share_of(self, owner: str) -> ByteBudget | None:
        """Return the part of the memory that one owner of API keys may use, or None if the owner may use all of it."""
        if not self._has_several_owners():
            return None
        # Only owners of accepted keys come here, so their number is limited.
        if owner not in self._shares:
            self._shares[owner] = ByteBudget(self._share_bytes, wait_s=self._wait_for_share_s)
        return self._shares[owner]


class BodyReservation:
    """The bytes of `BodyMemory` that one request reserves for its body.

    Its creator calls `release` when the request has been answered: the parsed request keeps the strings of its body
    until then. The creator is the gateway, or for a request of a batch the task that runs it. A background request
    hands its bytes over to the task that computes it.
    """

    __slots__ = ("_memory", "_num_reserved", "_share", "owner")

    def __init__(self, memory: BodyMemory, owner: str = "") -> None:
        """Create a reservation out of `memory` that holds nothing yet. `owner` is the name of the API key's owner."""
        self.owner = owner
        self._memory = memory
        self._share: ByteBudget | None = None
        self._num_reserved = 0

    async def grow(self, num_bytes: int) -> None:
        """Reserve memory for a body of which `num_bytes` have arrived so far. Raises `RateLimitError` if too little is
        free.

        Only bytes that have arrived are reserved: a client could announce a length and then send nothing. Requests may
        therefore wait for one another, but only for a short time.
        """
        if num_bytes <= UNCOUNTED_BYTES or num_bytes <= self._num_reserved:
            return
        missing = num_bytes - self._num_reserved
        if not self._num_reserved:
            self._share = self._memory.share_of(self.owner)
        if self._share is not None and not await self._share.acquire(missing):
            raise RateLimitError(
                "the long requests of this API key use all memory that one key may have (half of"
                " --max-body-memory-bytes): wait for their answers",
                retry_after_s=1.0,
            )
        is_granted = False
        try:
            is_granted = await self._memory.acquire(missing)
        finally:
            if self._share is not None and not is_granted:
                self._share.release(missing)
        if not is_granted:
            raise RateLimitError(
                "the server has no memory for more long requests (--max-body-memory-bytes): try again later",
                retry_after_s=1.0,
            )
        self._num_reserved += missing

    async def add(self, num_bytes: int) -> None:
        """Reserve memory for something that the request needs besides its body. Raises `RateLimitError` as `grow` does.

        A short request may refer to much more than it contains, such as a stored conversation.
        """
        await self.grow(self._num_reserved + num_bytes)

    def handed_over(self) -> "BodyReservation":
        """Return a new reservation that holds all bytes of this one, which is empty afterwards.

        It is for work that goes on after its request was answered.
        """
        taken = BodyReservation(self._memory, self.owner)
        taken._share, taken._num_reserved = self._share, self._num_reserved
        self._num_reserved = 0
        return taken

    def release(self) -> None:
        """Give back all bytes that this reservation holds."""
        num_bytes, self._num_reserved = self._num_reserved, 0
        if num_bytes:
            self._memory.release(num_bytes)
            if self._share is not None:
                self._share.release(num_bytes)
