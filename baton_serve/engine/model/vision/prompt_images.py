"""Decides when an image of a prompt is encoded by the engine itself, and keeps embeddings for further requests (encoder
cache). They are encoded when a step first needs them.
"""

import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton_serve.contracts.identity import BlockHash
from baton_serve.contracts.media import MediaSpan, end_of, within
from baton_serve.contracts.messages import Work
from baton_serve.engine.core.scheduler import ScheduledBatch, ScheduledChunk
from baton_serve.engine.core.sequence import Request
from baton_serve.engine.errors import RequestError
from baton_serve.engine.model.batch_inputs import ImageRows
from baton_serve.engine.model.vision.image_reader import HFImageReader
from baton_serve.engine.model.vision.image_types import EncodedImage, Pixels
from baton_serve.engine.model.vision.placeholder_check import check_spans
from baton_serve.engine.model.vision.tower import VisionTower

MAX_KEPT_BYTES = 64 << 20
"""Size of embeddings on the device that are kept without a request that needs them, in bytes: 13 images of LLaVA 1.5
7B.
"""

_Name = tuple[BlockHash, bytes]
"""Key of kept embeddings: the root of the prompt's block hashes, and the image's digest.

The root separates tenants; otherwise one could find out by timing whether another has sent an image.
"""


class VisionPromptImages:
    """Keeps the images of requests and encodes them by the vision tower for the steps that need them. Engine thread
    only; owns the embeddings on the device. Implements `PromptImages`.
    """

    def __init__(self, tower: VisionTower, max_image_tokens: int, *, max_kept_bytes: int = MAX_KEPT_BYTES) -> None:
        """Begin without images. `max_image_tokens` is the largest number of tokens of an image that a single step must
        compute. `max_kept_bytes` limits the embeddings that are kept after their request.
        """
        self._tower = tower
        self._max_image_tokens = max_image_tokens
        self._kept = FeatureCache(max_kept_bytes)
        self._images: WeakKeyDictionary[Request, _Images] = WeakKeyDictionary()

    @property
    def reader(self) -> HFImageReader:
        """The object that decodes and preprocesses image files; usable from any thread."""
        return self._tower.reader

    @property
    def are_whole(self) -> bool:
        """Return whether one step must compute all tokens of an image, because they attend to each other in both
        directions.
        """
        return self._tower.family.attends_both_ways

    @property
    def can_follow(self) -> bool:
        """Return True: the tokens before an image can be computed before it comes."""
        return True

    def check(self, work: Work, pixels: Pixels, awaited: Collection[bytes] = ()) -> None:
        """Check that the images of a request were sent (`pixels`, by digest) unless the router knew their KV to be
        cached or they are `awaited`, that their placeholder tokens are in the prompt, and that they are not too large
        for a step.

        Raises `RequestError` otherwise.
        """
        tokens = work.token_ids
        # A replayed request has tokens of its answer behind the prompt.
        prompt = tokens if len(tokens) == work.num_prompt_tokens else tokens[: work.num_prompt_tokens]
        check_spans(
            work.media, prompt, self._tower.family, pixels, num_unsent_tokens=work.num_unsent_tokens, awaited=awaited
        )
        for span in work.media:
            if self.are_whole and span.length > self._max_image_tokens:
                raise RequestError(
                    "invalid",
                    f"an image has {span.length} tokens, which one step must compute beside one token of each sequence:"
                    " raise max_num_batched_tokens",
                )

    def give(self, request: Request, pixels: Pixels, awaited: Collection[bytes] = ()) -> None:
        """Keep the decoded images of a request until it ends, since a preempted prompt is computed again. `pixels` are
        the images by digest; `supply` brings those of `awaited`.
        """
        media = request.work.media
        request.has_images = True
        request.num_unsent_tokens = end_of([s for s in media if s.digest not in pixels and s.digest not in awaited])
        images = self._images[request] = _Images(dict(pixels), set(awaited))
        request.num_ready_tokens = images.num_ready_tokens(media)

    def supply(self, request: Request, pixels: Pixels) -> None:
        """Keep images of a request that it has awaited, after checking them like the others. Raises `RequestError`."""
        images = self._images[request]
        given, awaited = {**images.pixels, **pixels}, images.awaited - pixels.keys()
        self.check(request.work, given, awaited)
        images.pixels, images.awaited = given, awaited
        request.num_ready_tokens = images.num_ready_tokens(request.work.media)

    def rows(self, plan: ScheduledBatch) -> list[ImageRows]:
        """Return the image embeddings that the tokens of a step need, with the rows of these tokens. Images that are
        not encoded yet are encoded first, without waiting for the device.
        """
        found: list[ImageRows] = []
        first = 0
        for chunk in plan.chunks:
            images = self._images.get(chunk.sequence.request) if chunk.sequence.request.has_images else None
            if images is not None:
                found += self._rows(chunk, images, first)
            first += chunk.length
        return found

    def _rows(self, chunk: ScheduledChunk, images: "_Images", first: int) -> list[ImageRows]:
        """Return the image embeddings that one chunk of a prompt needs. `first` is the chunk's first row in the
        step.
        """
        start, end = chunk.start, chunk.start + chunk.length
        work = chunk.sequence.request.work
        found: list[ImageRows] = []
        for span in within(work.media, start, end):
            # A chunk may begin or end inside an image.
            low, high = max(start - span.start, 0), min(end - span.start, span.length)
            shift = first + span.start - start
            features = self._known(images, work.tenant, span.digest)
            # As many embeddings as the span has tokens: all of them are image tokens, which need not be counted.
            is_full = features is not None and len(features) == span.length
            places = None if is_full else images.places_of(work, span)
            if places is None:
                features = self._features(images, work.tenant, span.digest)
                found.append(ImageRows(low + shift, features[low:high]))
                continue
            begin, stop = np.searchsorted(places, [low, high])
            if begin < stop:
                features = self._features(images, work.tenant, span.digest)
                found.append(_image_rows(places[begin:stop] + shift, features[begin:stop]))
        if end >= end_of(work.media):
            # launched steps read the memory before anything that is launched later can reuse it
            images.features.clear()
        return found

    def _features(self, images: "_Images", root: BlockHash, digest: bytes) -> Tensor:
        """Return the embeddings [tokens, hidden] of an image: of this prompt, kept from an earlier request of the same
        tenant (`root`), or encoded now.
        """
        known = self._known(images, root, digest)
        if known is None:
            picture = images.pixels[digest]
            known = (
                self._tower.sent(picture.features) if isinstance(picture, EncodedImage) else self._tower.encode(picture)
            )
        if digest not in images.features:
            # Keeping it again makes it the most recently used one.
            self._kept.keep((root, digest), known)
            images.features[digest] = known
        return known

    def _known(self, images: "_Images", root: BlockHash, digest: bytes) -> Tensor | None:
        """Return the embeddings of an image that is encoded already, or None."""
        known = images.features.get(digest)
        return self._kept.find((root, digest)) if known is None else known


@dataclass(slots=True)
class _Images:
    """The images of one request; those in `awaited`, by digest, have not come yet. `features` are embeddings on the
    device, by digest, until the prompt's last image has been computed.
    """

    pixels: Pixels
    awaited: set[bytes]
    features: dict[bytes, Tensor] = field(default_factory=dict)
    _places: dict[int, NDArray[np.int64] | None] = field(default_factory=dict)
    """The results of `places_of`, by the first token of a span."""

    def num_ready_tokens(self, media: Sequence[MediaSpan]) -> int:
        """Return how many leading tokens of the prompt can be computed without the awaited images."""
        return next((span.start for span in media if span.digest in self.awaited), sys.maxsize)

    def places_of(self, work: Work, span: MediaSpan) -> NDArray[np.int64] | None:
        """Return the offsets, int64, of the image tokens in the span of an image; None if all of its tokens are."""
        # Counted when a step needs them: of a prompt in the prefix cache no token of an image may be computed.
        if span.start not in self._places:
            self._places[span.start] = _places(work.token_ids, span)
        return self._places[span.start]


def _places(tokens: Sequence[int], span: MediaSpan) -> NDArray[np.int64] | None:
    """Return the offsets of the image tokens in the span of an image; None if all of its tokens are."""
    # `check` has found that the first token of a span is one that stands for the image or video.
    own, image_token = tokens[span.start : span.end], tokens[span.start]
    if own.count(image_token) == len(own):
        return None
    return np.flatnonzero(np.array(own) == image_token)


def _image_rows(rows: NDArray[np.int64], features: Tensor) -> ImageRows:
    """Return an image's embeddings `features` with the step's `rows` that they replace: as a range if the rows are
    consecutive, which is faster.
    """
    is_run = rows[-1] - rows[0] == len(rows) - 1
    where = None if is_run else torch.from_numpy(rows).to(features.device, non_blocking=True)
    return ImageRows(int(rows[0]), features, where)


class FeatureCache:
    """Keeps the most recently used image embeddings on the device, up to a number of bytes. If a cached prefix ends
    inside an image, its other tokens then need no encoding.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._features: dict[_Name, Tensor] = {}

    def find(self, name: _Name) -> Tensor | None:
        """Return the kept embeddings [tokens, hidden] of an image, or None. `name` is the tenant's root hash and the
        image's digest.
        """
        return self._features.get(name)

    def keep(self, name: _Name, features: Tensor) -> None:
        """Keep the embeddings of an image as the most recently used ones. The least recently used ones are dropped
        beyond the limit in bytes.
        """
        old = self._features.pop(name, None)
        self._num_bytes += features.nbytes - (old.nbytes if old is not None else 0)
        self._features[name] = features
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= self._features.pop(next(iter(self._features))).nbytes
