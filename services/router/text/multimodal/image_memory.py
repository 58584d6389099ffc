"""Bounds the memory of all requests' images in one router process, and how many are fetched at a time.

The files of a request's images are kept until its answer has ended, because a replay sends them to an instance again.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import TracebackType

from baton_serve.contracts.media import MAX_PROMPT_BYTES
from baton_serve.services.router.protocol.byte_budget import ByteBudget
from baton_serve.services.router.protocol.errors import RateLimitError
from baton_serve.services.router.protocol.image_limits import media_error
from baton_serve.services.router.text.multimodal.media_cache import MAX_RECENT_BYTES, MediaCache, RecentImages

MAX_FETCHES = 64
"""Largest number of images that one process fetches from the web at a time."""
MAX_LOADS_PER_REQUEST = 8
"""Largest number of images of one request that are loaded at a time, so that it leaves room for other requests."""
MAX_PROBES = 2
"""Largest number of videos that one process looks at at a time; each takes a process of its own."""
_WAIT_S = 2.0
"""Longest time in seconds that a request waits for memory or for a connection."""


class ImageMemory:
    """Limits the memory of images, and the number of images that are fetched at a time, for all requests of one router
    process together. Use it from one event loop at a time.
    """

    def __init__(
        self,
        max_bytes: int,
        *,
        cache_bytes: int = 0,
        max_fetches: int = MAX_FETCHES,
        wait_s: float = _WAIT_S,
        has_several_owners: Callable[[], bool] = lambda: False,
    ) -> None:
        """Create the limits. `max_bytes` is the value of `--max-image-memory-bytes`, and `cache_bytes` the size of the
        files that are kept by their uuid, beside which up to `MAX_RECENT_BYTES` of recent images are kept, but not more
        than `cache_bytes`; a request waits for memory or a connection at most `wait_s` seconds.
        `has_several_owners` returns whether there are API keys of several owners, which then share these limits.
        """
        self.cache = MediaCache(cache_bytes)
        self.recent = RecentImages(min(MAX_RECENT_BYTES, cache_bytes))
        self.budget = ByteBudget(
            max_bytes,
            wait_s=wait_s,
            smallest_share=min(MAX_PROMPT_BYTES, max_bytes),
            has_several_owners=has_several_owners,
        )
        self._fetches = ByteBudget(max_fetches, wait_s=wait_s, has_several_owners=has_several_owners)
        # Such a process takes longer than a request for memory may wait.
        self._probes = ByteBudget(MAX_PROBES, wait_s=5 * wait_s, has_several_owners=has_several_owners)

    @asynccontextmanager
    async def fetch_slot(self, owner: str) -> AsyncIterator[None]:
        """Hold one of the connections to other hosts for `owner` of an API key. Raises `RateLimitError` if none becomes
        free in time.
        """
        async with _held(self._fetches, owner, "fetches as many images as it may at a time"):
            yield

    @asynccontextmanager
    async def probe_slot(self, owner: str) -> AsyncIterator[None]:
        """Hold one of the processes that look at videos for `owner` of an API key. Raises `RateLimitError` if none
        becomes free in time.
        """
        async with _held(self._probes, owner, "reads as many videos as it may at a time"):
            yield


@asynccontextmanager
async def _held(slots: ByteBudget, owner: str, busy: str) -> AsyncIterator[None]:
    if not await slots.acquire(1, owner):
        raise _too_busy(busy)
    try:
        yield
    finally:
        slots.release(1, owner)


class ImageReservation:
    """The memory that one request reserves for its images. `release` or the end of a `with` block gives it back."""

    def __init__(self, memory: ImageMemory, owner: str = "") -> None:
        """Create a reservation out of `memory` that holds nothing yet. `owner` is that of the API key, whose files are
        found by their uuid.
        """
        self.owner = owner
        self.memory = memory
        self._num_reserved = 0
        self._num_loaded = 0

    async def reserve(self, num_bytes: int) -> None:
        """Reserve `num_bytes`, as many as all images of the request can have together. Call it once, before any of them
        is loaded.

        Raises `RateLimitError` if the images of other requests leave too little memory.
        """
        assert not self._num_reserved, "one request reserves once"
        if not await self.memory.budget.acquire(num_bytes, self.owner):
            raise _too_busy("has no memory for more images and audio (--max-image-memory-bytes)")
        self._num_reserved = num_bytes

    def count(self, num_bytes: int) -> None:
        """Count `num_bytes` more bytes of this request's images, which have arrived. Raises `BadRequestError` if its
        images have too many bytes together.
        """
        self._num_loaded += num_bytes
        if self._num_loaded > MAX_PROMPT_BYTES:
            raise media_error(f"the images of a prompt may have {MAX_PROMPT_BYTES} bytes together: make them smaller")

    def keep(self, num_bytes: int) -> None:
        """Give back what was reserved beyond `num_bytes`, the size of the images now that they are loaded."""
        excess = max(0, self._num_reserved - num_bytes)
        self._num_reserved -= excess
        self.memory.budget.release(excess, self.owner)

    def release(self) -> None:
        """Give back all bytes that are still reserved. Further calls do nothing."""
        num_bytes, self._num_reserved = self._num_reserved, 0
        if num_bytes:
            self.memory.budget.release(num_bytes, self.owner)

    def __enter__(self) -> "ImageReservation":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


def _too_busy(why: str) -> RateLimitError:
    return RateLimitError(
        f"the server {why}: try again later, or send fewer or smaller images", param="messages", retry_after_s=1.0
    )
