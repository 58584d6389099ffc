"""The images of the prompts that an engine reads: encoded when a step first needs them, and put in place of tokens."""

from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from torch import Tensor

from baton_serve.contracts.identity import BlockHash
from baton_serve.contracts.media import end_of, within
from baton_serve.contracts.messages import Work
from baton_serve.engine.core.scheduler import ScheduledBatch, ScheduledChunk
from baton_serve.engine.core.sequence import Request
from baton_serve.engine.errors import RequestError
from baton_serve.engine.model.batch_inputs import ImageRows
from baton_serve.engine.model.vision.image_reader import HFImageReader
from baton_serve.engine.model.vision.placeholders import Pixels
from baton_serve.engine.model.vision.tower import VisionTower

MAX_KEPT_BYTES = 64 << 20
"""Of embeddings on the device that no request needs now: 13 images of LLaVA 1.5 7B."""

_Name = tuple[BlockHash, bytes]
"""Root of the prompt's names, and digest: what tells tenants apart does so here too, or one could learn from the time
that an image takes whether another has sent it."""


class VisionPromptImages:
    def __init__(self, tower: VisionTower, *, max_kept_bytes: int = MAX_KEPT_BYTES) -> None:
        self._tower = tower
        self._kept = FeatureCache(max_kept_bytes)
        self._images: WeakKeyDictionary[Request, _Images] = WeakKeyDictionary()

    @property
    def reader(self) -> HFImageReader:
        return self._tower.reader

    def check(self, work: Work, pixels: Pixels) -> None:
        """Raises `RequestError`."""
        profile, at = self._tower.profile, 0
        for span in work.media:
            picture = pixels.get(span.digest)
            if picture is None:
                raise RequestError("invalid", "an image of the prompt did not come with it")
            count = profile.tokens_of(width=picture.width, height=picture.height)
            tokens = work.token_ids[span.start : min(span.end, work.num_prompt_tokens)]
            if span.start < at or tokens != [profile.image_token_id] * count:
                raise RequestError("invalid", "the places of its images are not in the prompt")
            at = span.end

    def give(self, request: Request, pixels: Pixels) -> None:
        """They are kept as long as the request is: if it is preempted, it is read again."""
        request.has_images = True
        self._images[request] = _Images(pixels)

    def rows(self, plan: ScheduledBatch) -> list[ImageRows]:
        """Starts what must be encoded for a step."""
        found: list[ImageRows] = []
        first = 0
        for chunk in plan.chunks:
            images = self._images.get(chunk.sequence.request) if chunk.sequence.request.has_images else None
            if images is not None:
                found += self._rows(chunk, images, first)
            first += chunk.length
        return found

    def _rows(self, chunk: ScheduledChunk, images: "_Images", first: int) -> list[ImageRows]:
        start, end = chunk.start, chunk.start + chunk.length
        media = chunk.sequence.request.work.media
        found: list[ImageRows] = []
        for span in within(media, start, end):
            begin, stop = max(span.start, start), min(span.end, end)
            features = self._features(images, chunk.sequence.request.work.root, span.digest)
            found.append(ImageRows(first + begin - start, features[begin - span.start : stop - span.start]))
        if end >= end_of(media):
            images.features.clear()  # steps that read them come before whatever takes their memory
        return found

    def _features(self, images: "_Images", root: BlockHash, digest: bytes) -> Tensor:
        known = images.features.get(digest)
        if known is None:
            known = self._kept.find((root, digest))
            if known is None:
                known = self._tower.encode(images.pixels[digest])
            self._kept.keep((root, digest), known)
            images.features[digest] = known
        return known


@dataclass(slots=True)
class _Images:
    """Of one prompt. `features` are those that it needs until its last image is read."""

    pixels: Pixels
    features: dict[bytes, Tensor] = field(default_factory=dict)


class FeatureCache:
    """The last ones: where a cached prefix ends within an image, the rest of it needs no tower."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._features: dict[_Name, Tensor] = {}

    def find(self, name: _Name) -> Tensor | None:
        return self._features.get(name)

    def keep(self, name: _Name, features: Tensor) -> None:
        """It is the youngest from now on; the oldest give way."""
        old = self._features.pop(name, None)
        self._num_bytes += features.nbytes - (old.nbytes if old is not None else 0)
        self._features[name] = features
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= self._features.pop(next(iter(self._features))).nbytes
