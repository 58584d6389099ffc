"""A whole answer, or the rest of one, written by this instance's engine. Shared by the decode and unified roles."""

import asyncio
import time
from collections.abc import Sequence

from baton_serve.contracts.messages import ErrorCode, Generate
from baton_serve.engine.core.outputs import CompletedBlocks, SequenceOutput
from baton_serve.engine.model.vision.placeholders import NO_PIXELS, ImageReader, Pixels
from baton_serve.services.instance.attempt_table import AttemptEntry
from baton_serve.services.instance.engine_thread import EngineCalls
from baton_serve.services.instance.errors import RequestFailed
from baton_serve.services.instance.kv_sharing.pulling import PullPort


async def read_images(images: Sequence[bytes], reader: ImageReader | None) -> Pixels:
    """Without a reader: none, and the engine refuses the prompt. Raises `engine.errors.RequestError`."""
    if not images or reader is None:
        return NO_PIXELS
    return await asyncio.to_thread(reader.read, images)


class GenerationObserver:
    """`Progress` of a request whose answer is written here: all that matters is its end."""

    def __init__(self) -> None:
        self._end: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    def completed(self, blocks: CompletedBlocks) -> None:
        """Nobody waits for these blocks."""

    def completed_layer_groups(self, blocks: CompletedBlocks, parts: range) -> None:
        """Nor parts of them."""

    def token(self, output: SequenceOutput) -> None:
        """The router has it already."""

    def held(self, at: float) -> None:
        """Blocks of an answer are not held."""

    def ended(self) -> None:
        if not self._end.done():
            self._end.set_result(time.monotonic())

    def failed(self, code: ErrorCode, message: str) -> None:
        if not self._end.done():
            self._end.set_exception(RequestFailed(code, message))

    @property
    def is_over(self) -> bool:
        return self._end.done() and not self._end.cancelled() and self._end.exception() is None

    async def wait(self) -> float:
        """Returns when it ended: a moment of `time.monotonic()`. Raises `RequestFailed` when the engine gave it up."""
        return await self._end


async def generate(
    engine: EngineCalls, request: AttemptEntry, puller: PullPort, message: Generate, reader: ImageReader | None = None
) -> None:
    """Computes the prompt, whose images `reader` reads, and writes the answer. Raises `engine.errors.RequestError` when
    it never can."""
    work = request.work
    await puller.pull(request, message.pull)
    pixels = await read_images(message.images, reader)
    writing = GenerationObserver()
    request.progress = writing
    request.is_admitted = True
    try:
        await engine.call(lambda e: e.add(work, pixels=pixels))
        await writing.wait()
    finally:
        if not writing.is_over:
            engine.post(lambda e: e.cancel(work.request_id))
