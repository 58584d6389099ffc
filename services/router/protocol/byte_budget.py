"""Bound the memory that all requests of a process use together for bodies or images, with a wait for a share."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from baton_serve.services.router.protocol.errors import RateLimitError
from baton_serve.services.router.protocol.owner_shares import OwnerShares


class ByteBudget:
    """A number of bytes of memory, or of places, that requests share. Those of one owner of API keys are served in the
    order in which they ask, the owners in turn. Use it from one event loop at a time.

    A request should ask once for all that it needs: then no two requests can each wait for what the other one has.
    """

    def __init__(
        self,
        max_bytes: int,
        *,
        wait_s: float,
        smallest_share: int = 1,
        has_several_owners: Callable[[], bool] = lambda: False,
    ) -> None:
        """Create a budget of `max_bytes`, in which a request waits for at most `wait_s` seconds. See `OwnerShares` for
        `smallest_share` and `has_several_owners`.
        """
        self._shares = OwnerShares(max_bytes, smallest_share=smallest_share, has_several_owners=has_several_owners)
        self._wait_s = wait_s
        self._waiting: OrderedDict[str, deque[_Waiting]] = OrderedDict()
        """The waiting requests of each owner that has any; the owner that comes next is the first."""

    @property
    def num_free(self) -> int:
        """The number of bytes that are not granted now."""
        return self._shares.free

    def permits(self, owner: str, num_bytes: int) -> bool:
        """Return whether the share of `owner` has room for `num_bytes` more, be they free or not."""
        return self._shares.permits(owner, num_bytes)

    async def acquire(self, num_bytes: int, owner: str = "") -> bool:
        """Wait until `num_bytes` are granted to `owner`; the caller must give them back with `release`. Return False if
        they do not become free in time.

        More than the whole budget never becomes free.
        """
        if num_bytes > self._shares.limit:
            return False
        if not self._waiting and num_bytes <= self._shares.free and self._shares.permits(owner, num_bytes):
            self._shares.add(owner, num_bytes)
            return True
        waiting = _Waiting(asyncio.get_running_loop().create_future(), num_bytes)
        self._waiting.setdefault(owner, deque()).append(waiting)
        # The others may wait only for the shares of their owners.
        self._grant()
        try:
            async with asyncio.timeout(self._wait_s):
                await waiting.granted
        except (TimeoutError, asyncio.CancelledError) as exc:
            self._withdraw(owner, waiting)
            if isinstance(exc, TimeoutError):
                return False
            raise
        return True

    def release(self, num_bytes: int, owner: str = "") -> None:
        """Give back bytes that `acquire` has granted to `owner`. Requests that wait for bytes get them."""
        self._shares.remove(owner, num_bytes)
        self._grant()

    def _withdraw(self, owner: str, waiting: "_Waiting") -> None:
        """Remove a request that waits no longer, because it was cancelled or has timed out."""
        if waiting.granted.done() and not waiting.granted.cancelled():
            # The bytes were granted just before the request was cancelled or timed out.
            self.release(waiting.num_bytes, owner)
            return
        if waiting in self._waiting.get(owner, ()):
            self._waiting[owner].remove(waiting)
            if not self._waiting[owner]:
                del self._waiting[owner]
        # The request may have stood before others that need fewer bytes.
        self._grant()

    def _grant(self) -> None:
        """Grant bytes to the waiting requests for which they are free."""
        num_over = 0
        while num_over < len(self._waiting):
            owner, requests = next(iter(self._waiting.items()))
            first = requests[0]
            is_over = not first.granted.cancelled() and not self._shares.permits(owner, first.num_bytes)
            # Bytes are kept for a request that comes next and needs many: small ones could overtake it for ever.
            if not first.granted.cancelled() and not is_over and first.num_bytes > self._shares.free:
                return
            self._waiting.move_to_end(owner)
            if is_over:
                num_over += 1
                continue
            num_over = 0
            requests.popleft()
            if not requests:
                del self._waiting[owner]
            if not first.granted.cancelled():
                self._shares.add(owner, first.num_bytes)
                first.granted.set_result(None)


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    """A request that waits for bytes."""

    granted: asyncio.Future[None]
    num_bytes: int


UNCOUNTED_BYTES = 64 * 1024
"""Size up to which a body is not counted, so that short requests are served while long ones use all the memory. The
number of connections bounds the memory of these bodies."""
BODY_WAIT_S = 2.0
"""Longest time in seconds that a request waits for memory for its body."""


class BodyMemory(ByteBudget):
    """Limits the memory of the bodies of all requests of one process together (`--max-body-memory-bytes`).

    While there are several API keys, the requests of one owner get at most as much as stays free, or one body of the
    largest size: one client must not keep all others from sending long requests.
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
        super().__init__(
            max_bytes,
            wait_s=wait_s,
            smallest_share=min(max_body_bytes, max_bytes),
            has_several_owners=has_several_owners,
        )


class BodyReservation:
    """The bytes of `BodyMemory` that one request reserves for its body.

    Its creator calls `release` when the request has been answered: the parsed request keeps the strings of its body
    until then. The creator is the gateway, or for a request of a batch the task that runs it. A background request
    hands its bytes over to the task that computes it.
    """

    __slots__ = ("_memory", "_num_reserved", "owner")

    def __init__(self, memory: BodyMemory, owner: str = "") -> None:
        """Create a reservation out of `memory` that holds nothing yet. `owner` is the name of the API key's owner."""
        self.owner = owner
        self._memory = memory
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
        if not await self._memory.acquire(missing, self.owner):
            raise RateLimitError(
                "the server has no memory for more long requests (--max-body-memory-bytes): try again later"
                if self._memory.permits(self.owner, missing)
                else "the long requests of this API key use all memory that one key may have (as much of"
                " --max-body-memory-bytes as stays free): wait for their answers",
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
        taken._num_reserved, self._num_reserved = self._num_reserved, 0
        return taken

    def release(self) -> None:
        """Give back all bytes that this reservation holds."""
        num_bytes, self._num_reserved = self._num_reserved, 0
        if num_bytes:
            self._memory.release(num_bytes, self.owner)
