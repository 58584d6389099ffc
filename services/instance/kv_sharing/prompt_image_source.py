"""Decides where a prompt's images come from: embeddings of encode instances, or files decoded for the engine's own
tower.

The engine begins a prompt when its first image is here, and gets the others as they come.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import aclosing
from typing import NamedTuple

from baton_serve.contracts.media import digest_of, spans_of_file
from baton_serve.contracts.messages import FetchEmbeddings, Generate, Prefill, Work
from baton_serve.engine.errors import RequestError
from baton_serve.engine.model.vision.decoded_media import KeptPictures
from baton_serve.engine.model.vision.image_types import NO_PIXELS, DecodedImage, EncodedImage, ImageReader, Pixels
from baton_serve.services.instance.attempt_table import AttemptEntry
from baton_serve.services.instance.engine_thread import EngineCalls
from baton_serve.services.instance.interfaces import Mode
from baton_serve.services.instance.kv_sharing.encoded_images import EmbeddingFetcher
from baton_serve.services.instance.kv_sharing.file_decoding import FileDecoding


class ArrivedImages(NamedTuple):
    """Images of a prompt that have come, by digest, and the digests of the images that are still `awaited`."""

    pixels: Pixels
    awaited: frozenset[bytes] = frozenset()


class PromptImageSource:
    """Gets the images of prompts for the engine. Event loop only."""

    def __init__(
        self,
        reader: ImageReader | None = None,
        fetcher: EmbeddingFetcher | None = None,
        *,
        can_await_images: bool = False,
    ) -> None:
        """Without `reader`, this instance computes no prompts with images; without `fetcher` it encodes all itself.
        `can_await_images` is that of the engine."""
        self._kept = None if reader is None else KeptPictures(reader)
        self._fetcher = fetcher
        self._can_await_images = can_await_images
        self._decoding = FileDecoding()

    async def add(
        self,
        engine: EngineCalls,
        request: AttemptEntry,
        message: Prefill | Generate,
        *,
        mode: Mode,
        sends_parts: Callable[[], bool] = lambda: False,
    ) -> None:
        """Add the prompt of a request to the engine with its images, and return when the last of them is there.
        `sends_parts` says, when the engine gets the request, whether each rank sends its part of the blocks.

        Raises `engine.errors.RequestError` if the engine refuses the prompt or a file cannot be decoded; the caller
        then ends the request in the engine.
        """
        work = request.work
        is_added = False

        async def pass_on(pixels: Pixels, awaited: frozenset[bytes]) -> None:
            if is_added:
                await engine.call(lambda e: e.supply_images(work.request_id, pixels))
                return
            # Set before the call: a `Cancel` of one sequence that arrives meanwhile is posted after `add` and finds the
            # request.
            request.is_admitted = mode == "generate"
            parts = sends_parts()
            await engine.call(lambda e: e.add(work, mode=mode, pixels=pixels, sends_parts=parts, awaited=awaited))

        async with aclosing(self.arrivals(request, message)) as arrivals:
            async for pixels, awaited in arrivals:
                await pass_on(pixels, awaited)
                is_added = True

    async def arrivals(self, request: AttemptEntry, message: Prefill | Generate) -> AsyncGenerator[ArrivedImages]:
        """Yield the images of a prompt: the first of the prompt with others that have come by then, then the others as
        they come, or all at once if the engine cannot await images.

        Yield `NO_PIXELS` once without images, or if this instance decodes none; the engine then refuses a prompt that
        has images. Raises `engine.errors.RequestError` if a file cannot be decoded, or if an image
        is missing that the engine awaits.
        """
        if not message.images or self._kept is None:
            yield ArrivedImages(NO_PIXELS)
            return
        come: asyncio.Queue[Pixels | None] = asyncio.Queue()
        getting = asyncio.ensure_future(self._get(request, message, self._kept, come))
        getting.add_done_callback(lambda _: come.put_nowait(None))
        try:
            waiting, found = _needed(request.work), dict[bytes, DecodedImage | EncodedImage]()
            first, has_begun = waiting[:1], False
            while (pixels := await come.get()) is not None:
                found.update(pixels)
                waiting = [digest for digest in waiting if digest not in pixels]
                has_first = bool(waiting) and (has_begun or waiting[:1] != first)
                if self._can_await_images and come.empty() and has_first:
                    yield ArrivedImages(found, frozenset(waiting))
                    found, has_begun = {}, True
            await getting
            if has_begun and waiting:
                # The engine would wait for it until the request's deadline.
                raise RequestError("invalid", "an image of the prompt was not sent with the request")
            # The last one, and a prompt of whose images none is needed.
            yield ArrivedImages(found)
        finally:
            getting.cancel()

    async def _get(
        self,
        request: AttemptEntry,
        message: Prefill | Generate,
        kept: KeptPictures,
        come: "asyncio.Queue[Pixels | None]",
    ) -> None:
        """Put all images of a prompt into `come`: embeddings that are fetched, and files that are decoded meanwhile.
        Files whose embeddings do not come are decoded last.
        """
        root, spans = request.work.tenant, {span.digest for span in request.work.media}
        files = _Files(message.images, spans)
        fetched: set[bytes] = set()

        def on_image(digest: bytes, image: EncodedImage) -> None:
            fetched.add(digest)
            come.put_nowait({digest: image})

        async def keep(pixels: Pixels) -> None:
            # Embeddings of some spans of a video may have come.
            come.put_nowait({digest: picture for digest, picture in pixels.items() if digest not in fetched})

        async def decode(wanted: Sequence[bytes]) -> None:
            # Decoding an image takes up to tens of milliseconds: on the loop it would delay all other requests.
            async with self._decoding.turn(wanted) as turn:
                await turn.decode(wanted, lambda file: kept.read(root, [file]), keep)

        asked = _asked(message.embeddings)
        if self._fetcher is None or not asked:
            await decode(message.images)
            return

        async def decode_others() -> None:
            await decode(await asyncio.to_thread(files.outside, asked))

        tasks = [asyncio.ensure_future(decode_others())]
        tasks.append(asyncio.ensure_future(self._fetcher.fetch(request, message.embeddings, on_image)))
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        if missing := asked - fetched:
            await decode(files.outside(spans - missing))


class _Files:
    """The files of a message, with the spans of its prompt that each of them is."""

    def __init__(self, files: Sequence[bytes], present: Collection[bytes]) -> None:
        self._files = files
        self._present = present
        self._spans: list[list[bytes]] = []

    def outside(self, digests: Collection[bytes]) -> list[bytes]:
        """Return the files with spans that are not among `digests`. The first call hashes all files, which takes a
        millisecond for each megabyte."""
        if not self._spans:
            self._spans = [spans_of_file(digest_of(file), self._present) for file in self._files]
        return [
            file
            for file, spans in zip(self._files, self._spans, strict=True)
            if not all(digest in digests for digest in spans)
        ]


def _asked(embeddings: Sequence[FetchEmbeddings]) -> frozenset[bytes]:
    return frozenset(digest for one in embeddings for digest in one.digests)


def _needed(work: Work) -> list[bytes]:
    """Return the digests of the images that the prompt needs, in the order of their first places."""
    return list(dict.fromkeys(span.digest for span in work.media if span.end > work.num_unsent_tokens))
