"""Videos that take long to decode leave threads for the images of other prompts."""

import asyncio
import threading
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, cast

from baton_serve.contracts.media import Clip, MediaHeader, digest_of, with_header
from baton_serve.engine.model.vision.image_types import NO_PIXELS, Pixels
from baton_serve.services.instance.kv_sharing.encoded_images import MAX_VIDEO_PROMPTS, PromptImageSource

CLIP = Clip(width=8, height=8, num_frames=1, fps=1.0, indexes=[0])


class SlowVideos:
    """Reads images at once, and videos when `may_end` is set."""

    embedding_layout = None

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.num_begun = 0

    def read(self, images: Iterable[bytes]) -> Pixels:
        if any(file != b"image" for file in images):
            self.num_begun += 1
            self.may_end.wait(30)
        return NO_PIXELS


def test_images_do_not_wait_for_many_videos() -> None:
    reader = SlowVideos()
    request = cast(Any, SimpleNamespace(work=SimpleNamespace(tenant=digest_of(b"root"), media=[])))

    def message(file: bytes) -> Any:
        return SimpleNamespace(images=[file], embeddings=[])

    async def scenario() -> None:
        source = PromptImageSource(reader)
        videos = [with_header(b"video %d" % number, MediaHeader(clip=CLIP)) for number in range(64)]
        decoding = [asyncio.create_task(source.images(request, message(file))) for file in videos]
        await asyncio.sleep(0)
        try:
            assert await asyncio.wait_for(source.images(request, message(b"image")), 20) == {}
            assert reader.num_begun <= MAX_VIDEO_PROMPTS
        finally:
            reader.may_end.set()
            await asyncio.gather(*decoding)
        assert reader.num_begun == len(videos)

    asyncio.run(scenario())
