"""Images of a prompt: the bytes of each file, its hash, and the positions of the tokens that stand for it.

An image is the file that the client sent, not its decoded pixels: equal bytes give equal KV. Instances that only move
blocks or decode get the positions and hashes without the files.
"""

from collections.abc import Iterable, Sequence
from hashlib import sha256
from itertools import repeat
from typing import Annotated

import msgspec
from msgspec import Meta

DIGEST_BYTES = 32
"""Length of an image's SHA-256 digest."""
MAX_IMAGE_BYTES = 32 * 1024 * 1024
"""Maximum size of one image file."""
MAX_IMAGES = 1024
"""Maximum number of images in one prompt."""
MAX_PROMPT_BYTES = 48 * 1024 * 1024
"""Maximum size of all images of a prompt together; they are sent in one message."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Accepted image formats, as Pillow names them; of animations the first frame is used. Pillow's other decoders never
see files from clients."""

MAX_ASPECT = 100
"""Maximum ratio of the longer to the shorter side. Image processors scale the shorter side up to the tower's size and
the longer one in proportion: an image of a few pixels by thousands would become gigabytes."""

Digest = Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
Image = Annotated[bytes, Meta(max_length=MAX_IMAGE_BYTES)]
Images = Annotated[list[Image], Meta(max_length=MAX_IMAGES)]


TURNED_FORMATS = ("JPEG", "WEBP")
ORIENTATION_TAG = 0x0112
"""EXIF tag of the orientation. It is read in `TURNED_FORMATS` only: other formats may store it after the pixels, so
that the whole file would have to be decoded."""


class MediaSpan(msgspec.Struct, frozen=True, array_like=True):
    """`length` tokens of a prompt, from token `start` on, stand for the image with this digest."""

    start: Annotated[int, Meta(ge=0)]
    length: Annotated[int, Meta(ge=1)]
    digest: Digest

    @property
    def end(self) -> int:
        """Return the position after the last token of the span."""
        return self.start + self.length


Spans = Annotated[list[MediaSpan], Meta(max_length=MAX_IMAGES)]


def source_span(digest: bytes) -> MediaSpan:
    """Return the span of a source, such as a window of audio. An encoder reads it and the decoder attends to all of it,
    so that no token stands for it: the span is that of the first token, on which all blocks depend.
    """
    return MediaSpan(0, 1, digest)


def is_strip(width: int, height: int) -> bool:
    """Return whether an image is too long and narrow to be processed (`MAX_ASPECT`)."""
    return max(width, height) > MAX_ASPECT * min(width, height)


def digest_of(image: bytes) -> bytes:
    """Return the SHA-256 digest of an image file."""
    return sha256(image).digest()


def end_of(spans: Sequence[MediaSpan]) -> int:
    """Return the position after the last image token of a prompt, or 0 if it has no images.

    An instance that does not have the images needs the KV of all tokens before this position.
    """
    return spans[-1].end if spans else 0


def within(spans: Iterable[MediaSpan], start: int, end: int) -> list[MediaSpan]:
    """Return the spans of which at least one token lies in [start, end)."""
    return [span for span in spans if span.start < end and start < span.end]


def expand_images(token_ids: Sequence[int], counts: Sequence[int], image_token_id: int) -> list[int]:
    """Return the prompt with `counts[i]` image tokens in the place of the i-th image token.

    Raises `ValueError` if the prompt does not have one image token for each image.
    """
    if (count := token_ids.count(image_token_id)) != len(counts):
        raise ValueError(f"there are {len(counts)} images, but the prompt has {count} image tokens")
    found: list[int] = []
    lengths = iter(counts)
    for token_id in token_ids:
        found += repeat(image_token_id, next(lengths)) if token_id == image_token_id else (token_id,)
    return found


def image_spans(
    token_ids: Sequence[int], counts: Sequence[int], digests: Sequence[bytes], image_token_id: int
) -> list[MediaSpan]:
    """Return the positions of the images in a prompt that `expand_images` has expanded."""
    spans: list[MediaSpan] = []
    at = 0
    for count, digest in zip(counts, digests, strict=True):
        at = token_ids.index(image_token_id, at)
        spans.append(MediaSpan(at, count, digest))
        at += count
    return spans
