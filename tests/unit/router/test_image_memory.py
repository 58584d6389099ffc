"""The memory and connections that the images of all requests share in one router process."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from baton_serve.contracts.media import MAX_PROMPT_BYTES, NO_HEADER, MediaHeader
from baton_serve.services.router.protocol.errors import BadRequestError, RateLimitError
from baton_serve.services.router.protocol.image_limits import ImageLimits
from baton_serve.services.router.text.multimodal import image_files
from baton_serve.services.router.text.multimodal.image_memory import (
    MAX_LOADS_PER_REQUEST,
    ImageMemory,
    ImageReservation,
)
from baton_serve.services.router.text.multimodal.media_cache import ImageFile, RecentImages
from baton_serve.services.router.text.multimodal.media_parts import MediaPart
from tests.images import data_url, load_images, picture

BUDGET = MAX_PROMPT_BYTES
A = picture(1)
NAMED = frozenset({"127.0.0.1"})


class SlowSite:
    """Sends `answer` to every request once `is_open` is set; `num_open` connections wait at a time."""

    def __init__(self, answer: bytes) -> None:
        self.is_open = asyncio.Event()
        self.num_open = self.most_open = 0
        self.changed = asyncio.Condition()
        self._answer = answer

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        async with server:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def wait_open(self, count: int) -> None:
        async with asyncio.timeout(10), self.changed:
            await self.changed.wait_for(lambda: self.num_open == count)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._add(1)
        try:
            await reader.readuntil(b"\r\n\r\n")
            if not await self._is_opened(reader):
                return
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(self._answer) + self._answer)
            await writer.drain()
        except ConnectionError:
            pass
        finally:
            await self._add(-1)
            writer.close()

    async def _is_opened(self, reader: asyncio.StreamReader) -> bool:
        """Wait until the site is open or the client has gone, and return whether it is open."""
        waits = [asyncio.create_task(self.is_open.wait()), asyncio.create_task(reader.read())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return self.is_open.is_set()

    async def _add(self, change: int) -> None:
        async with self.changed:
            self.num_open += change
            self.most_open = max(self.most_open, self.num_open)
            self.changed.notify_all()


def limits(**more: Any) -> ImageLimits:
    return ImageLimits(domains=NAMED, fetch_timeout_s=30.0, **more)


def test_a_request_opens_few_connections_at_a_time() -> None:
    async def scenario() -> None:
        site = SlowSite(A)
        async with site.serving() as url:
            with ImageReservation(ImageMemory(BUDGET)) as reservation:
                loading = asyncio.create_task(load_images([f"{url}/{i}" for i in range(20)], limits(), reservation))
                await site.wait_open(MAX_LOADS_PER_REQUEST)
                site.is_open.set()
                assert [file.data for file in await loading] == [A] * 20
        assert site.most_open == MAX_LOADS_PER_REQUEST

    asyncio.run(scenario())


def test_a_process_fetches_few_images_at_a_time_and_refuses_the_rest_after_a_wait() -> None:
    async def scenario() -> None:
        site, memory = SlowSite(A), ImageMemory(BUDGET, max_fetches=2, wait_s=0.05)
        async with site.serving() as url:
            with ImageReservation(memory) as first, ImageReservation(memory) as second:
                loading = asyncio.create_task(load_images([f"{url}/1", f"{url}/2"], limits(max_bytes=1000), first))
                await site.wait_open(2)
                with pytest.raises(RateLimitError, match="try again later"):
                    await load_images([f"{url}/3"], limits(max_bytes=1000), second)
                assert site.most_open == 2
                site.is_open.set()
                await loading
                with ImageReservation(memory) as third:
                    await load_images([f"{url}/3"], limits(max_bytes=1000), third)

    asyncio.run(scenario())


def test_images_that_are_kept_leave_no_memory_for_those_of_other_requests() -> None:
    async def scenario() -> None:
        memory = ImageMemory(1000, wait_s=0.01)
        own = limits(max_bytes=600)
        site = SlowSite(A)
        async with site.serving() as url:
            with ImageReservation(memory) as first, ImageReservation(memory) as second:
                loading = asyncio.create_task(load_images([f"{url}/1"], own, first))
                await site.wait_open(1)
                with pytest.raises(RateLimitError, match="--max-image-memory-bytes"):
                    await load_images([f"{url}/2"], own, second)
                site.is_open.set()
                await loading
                assert memory.budget.num_free == 1000 - len(A), "only the loaded bytes stay reserved"
        assert memory.budget.num_free == 1000

    asyncio.run(scenario())


def test_the_first_broken_image_ends_the_fetches_of_the_others() -> None:
    async def scenario() -> None:
        site, memory = SlowSite(A), ImageMemory(BUDGET)
        async with site.serving() as url:
            with ImageReservation(memory) as reservation, pytest.raises(BadRequestError, match="must begin with data:"):
                await load_images([f"{url}/1", f"{url}/2", "ftp://x"], limits(), reservation)
            await site.wait_open(0)
        assert memory.budget.num_free == BUDGET

    asyncio.run(scenario())


def test_images_of_a_prompt_that_are_too_large_together_are_refused_while_they_arrive() -> None:
    async def scenario() -> None:
        large = A + bytes(15 << 20)
        site, memory = SlowSite(large), ImageMemory(BUDGET)
        site.is_open.set()
        async with site.serving() as url:
            with (
                ImageReservation(memory) as reservation,
                pytest.raises(BadRequestError, match="bytes together: make them smaller"),
            ):
                await load_images([f"{url}/{i}" for i in range(4)], limits(), reservation)
        assert memory.budget.num_free == BUDGET

    asyncio.run(scenario())


def test_images_within_a_body_reserve_no_more_than_their_size() -> None:
    async def scenario() -> None:
        memory = ImageMemory(2 * len(data_url(A)))
        with ImageReservation(memory) as reservation:
            await load_images([data_url(A)], limits(), reservation)
            assert memory.budget.num_free == 2 * len(data_url(A)) - len(A)

    asyncio.run(scenario())


def test_an_image_that_comes_again_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each turn of a chat sends all images again. A broken image is kept by no process."""
    decoded: list[str] = []
    original = image_files._of_data_url

    def counted(part: MediaPart, own: ImageLimits) -> bytes:
        decoded.append(part.url)
        return original(part, own)

    monkeypatch.setattr(image_files, "_of_data_url", counted)
    small, broken = data_url(A), data_url(b"no image")
    large = data_url(A + bytes(100_000))

    async def loaded(memory: ImageMemory, url: str, *, owner: str = "") -> ImageFile:
        with ImageReservation(memory, owner) as reservation:
            (file,) = await load_images([url], limits(), reservation)
        assert memory.budget.num_free == BUDGET
        return file

    async def scenario() -> None:
        memory = ImageMemory(BUDGET, cache_bytes=1 << 20)
        for url in (small, large):
            first = await loaded(memory, url)
            assert await loaded(memory, url) == first
            assert await loaded(memory, url, owner="other") == first
        assert decoded == [small, small, large, large], "another owner finds no image"
        for _ in range(2):
            with pytest.raises(BadRequestError, match="cannot be decoded"):
                await loaded(memory, broken)
        decoded.clear()
        nothing = ImageMemory(BUDGET)
        await loaded(nothing, small)
        await loaded(nothing, small)
        assert decoded == [small, small]

    asyncio.run(scenario())


def test_recent_images_are_bounded_and_known_by_how_they_are_read() -> None:
    recent, file = RecentImages(100), ImageFile(b"digest", bytes(30), 5, 4)
    other = MediaHeader({"max_pixels": 3})
    recent.keep("", "one", NO_HEADER, file)
    assert (recent.find("", "one", NO_HEADER), recent.find("", "one", other)) == (file, None)
    recent.keep("", "two", NO_HEADER, file)
    recent.find("", "one", NO_HEADER)
    recent.keep("", "three", NO_HEADER, file)
    assert [recent.find("", url, NO_HEADER) for url in ("one", "two", "three")] == [file, None, file]
    recent.keep("", "large", NO_HEADER, file._replace(data=bytes(101)))
    assert recent.find("", "large", NO_HEADER) is None
    assert recent.find("", "one", NO_HEADER) == file


def test_libraries_are_loaded_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first image of a process stopped all streams for 0.2 s, and so did the first broken one and the first URL."""
    threads: dict[str, list[str]] = {}

    def recorded(name: str) -> None:
        original = getattr(image_files, name)

        def load() -> Any:
            threads.setdefault(name, []).append(threading.current_thread().name)
            return original()

        monkeypatch.setattr(image_files, name, load)

    recorded("_load_pillow")
    recorded("_import_fetch")
    monkeypatch.setattr(image_files, "_PILLOW_IS_LOADED", threading.Event())

    async def scenario() -> None:
        site = SlowSite(A)
        site.is_open.set()
        async with site.serving() as url:
            for address in (data_url(A), data_url(picture(2)), f"{url}/1"):
                with ImageReservation(ImageMemory(BUDGET)) as reservation:
                    await load_images([address], limits(), reservation)

    asyncio.run(scenario())
    assert [len(names) for names in threads.values()] == [1, 1]
    assert all(name.startswith("images") for names in threads.values() for name in names)
