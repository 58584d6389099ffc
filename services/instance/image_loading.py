"""The images of a prompt, read in a thread of their own before its turn comes: neither the event loop nor the engine's
thread waits for a file to be decoded."""

import asyncio
from collections.abc import Sequence

from baton_serve.engine.model.vision.placeholders import NO_PIXELS, ImageReader, Pixels


async def read_images(images: Sequence[bytes], reader: ImageReader | None) -> Pixels:
    """Without a reader: none, and the engine refuses the prompt. Raises `engine.errors.RequestError`."""
    if not images or reader is None:
        return NO_PIXELS
    return await asyncio.to_thread(reader.read, images)
