"""The images of the prompts that an engine reads: encoded when a step first needs them, and put in place of tokens."""

from weakref import WeakKeyDictionary

from torch import Tensor

from contracts.media import end_of, within
from contracts.messages import Work
from engine.errors import RequestError
from engine.inputs import ImageRows
from engine.scheduler import Chunk, Plan
from engine.sequence import Request
from engine.vision.given import Pixels
from engine.vision.reader import ImageReader
from engine.vision.tower import VisionTower


class PromptImages:
    def __init__(self, tower: VisionTower) -> None:
        self._tower = tower
        self._images: WeakKeyDictionary[Request, _Images] = WeakKeyDictionary()

    @property
    def reader(self) -> ImageReader:
        return self._tower.reader

    def check(self, work: Work, pixels: Pixels) -> None:
        """Raises `RequestError`."""
        profile, at = self._tower.profile, 0
        for span in work.media:
            tokens = work.token_ids[span.start : min(span.end, work.num_prompt_tokens)]
            if span.start < at or tokens != [profile.image_token_id] * profile.tokens_per_image:
                raise RequestError("invalid", "the places of its images are not in the prompt")
            if span.digest not in pixels:
                raise RequestError("invalid", "an image of the prompt did not come with it")
            at = span.end

    def give(self, request: Request, pixels: Pixels) -> None:
        """They are kept as long as the request is: if it is preempted, it is read again."""
        request.has_images = True
        self._images[request] = _Images(pixels)

    def rows(self, plan: Plan) -> list[ImageRows]:
        """Starts what must be encoded for a step."""
        found: list[ImageRows] = []
        first = 0
        for chunk in plan.chunks:
            images = self._images.get(chunk.sequence.request) if chunk.sequence.request.has_images else None
            if images is not None:
                found += self._rows(chunk, images, first)
            first += chunk.length
        return found

    def _rows(self, chunk: Chunk, images: "_Images", first: int) -> list[ImageRows]:
        start, end = chunk.start, chunk.start + chunk.length
        media = chunk.sequence.request.work.media
        found: list[ImageRows] = []
        for span in within(media, start, end):
            begin, stop = max(span.start, start), min(span.end, end)
            features = images.features(span.digest, self._tower)
            found.append(ImageRows(first + begin - start, features[begin - span.start : stop - span.start]))
        if end >= end_of(media):
            images.forget()
        return found


class _Images:
    def __init__(self, pixels: Pixels) -> None:
        self._pixels = pixels
        self._features: dict[bytes, Tensor] = {}

    def features(self, digest: bytes, tower: VisionTower) -> Tensor:
        known = self._features.get(digest)
        if known is None:
            known = self._features[digest] = tower.encode(self._pixels[digest])
        return known

    def forget(self) -> None:
        """Of the device; steps that read them come before whatever takes their memory."""
        self._features.clear()
