"""Decodes the files of requests (images, videos, audio) in worker threads, for instances of all roles that read them.

Python starts at least five threads, which all requests share. A video may take one for a minute, so that few requests
with videos have a turn at a time. Event loop only.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import msgspec

from baton_serve.contracts.media import split_header
from baton_serve.engine.model.vision.image_types import NO_PIXELS, Pixels

MAX_VIDEO_REQUESTS = 4
"""Largest number of requests with videos that one instance decodes at a time, or encodes if it does nothing else."""

MAX_REQUEST_THREADS = 2
"""Largest number of threads that decode images of one request at a time. An image takes less time to decode than to
encode, and with more threads the first one, for which the others wait, would be decoded later."""


class FileDecoding:
    """Gives requests their turns to decode files."""

    def __init__(self) -> None:
        self._videos = asyncio.Semaphore(MAX_VIDEO_REQUESTS)

    @asynccontextmanager
    async def turn(self, files: Sequence[bytes]) -> AsyncIterator["DecodingTurn"]:
        """Yield the turn of a request with these files for the duration of a `with` block. With a video it waits for
        its place, which is free again when the block and the threads that it has started have ended.
        """
        if not any(map(_is_video, files)):
            turn = DecodingTurn(MAX_REQUEST_THREADS, lambda: None)
        else:
            await self._videos.acquire()
            turn = DecodingTurn(1, self._videos.release)
        try:
            yield turn
        finally:
            turn.end()


class DecodingTurn:
    """Decodes the files of one request."""

    def __init__(self, num_threads: int, on_end: Callable[[], None]) -> None:
        """Use at most `num_threads` threads at a time. `on_end` is called when the turn and its threads have ended."""
        self._threads = asyncio.Semaphore(num_threads)
        self._on_end = on_end
        self._num_running = 0
        self._is_over = False

    async def decode(
        self, files: Sequence[bytes], read: Callable[[bytes], Pixels], use: Callable[[Pixels], Awaitable[None]]
    ) -> None:
        """Call `read` with each file in a worker thread, and await `use` with each result as soon as it and those of
        the files before it are there.

        Raises the first error of either, and then starts no more files.
        """

        async def one(file: bytes) -> Pixels:
            async with self._threads:
                return await self._run(file, read)

        tasks = [asyncio.ensure_future(one(file)) for file in files]
        try:
            for task in tasks:
                await use(await task)
        finally:
            for task in tasks:
                task.cancel()
            # Their errors, if any, follow the first one.
            await asyncio.gather(*tasks, return_exceptions=True)

    def end(self) -> None:
        """End the turn: files that wait for a thread are not decoded any more."""
        self._is_over = True
        if not self._num_running:
            self._on_end()

    async def _run(self, file: bytes, read: Callable[[bytes], Pixels]) -> Pixels:
        def read_in_time() -> Pixels:
            return NO_PIXELS if self._is_over else read(file)

        # A thread cannot be cancelled: the future ends with it even if nobody awaits it any more.
        running = asyncio.get_running_loop().run_in_executor(None, read_in_time)
        self._num_running += 1
        running.add_done_callback(self._on_read)
        return await asyncio.shield(running)

    def _on_read(self, running: "asyncio.Future[Pixels]") -> None:
        # Reading the exception keeps asyncio from logging it, if the request was cancelled.
        running.cancelled() or running.exception()
        self._num_running -= 1
        if self._is_over and not self._num_running:
            self._on_end()


def _is_video(file: bytes) -> bool:
    try:
        return split_header(file)[0].clip is not None
    # The reader reports a broken header.
    except msgspec.MsgspecError:
        return False
