"""Images of a prompt: where the tokens stand that take the place of each, and the bytes of each, named by their hash.

An image is the file that a client sent, not what was made of it: equal bytes, equal KV. Who only moves or writes after
a prompt gets the places alone.
"""

from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Annotated

import msgspec
from msgspec import Meta

DIGEST_BYTES = 32
MAX_IMAGE_BYTES = 32 * 1024 * 1024
MAX_IMAGES = 1024
MAX_PROMPT_BYTES = 48 * 1024 * 1024
"""Of all images of a prompt, which travel in one message."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""As Pillow calls them; of moving ones the first picture. No other decoder of Pillow's sees what a client sent."""

MAX_ASPECT = 100
"""Processors enlarge the shorter side to the tower's size, and the longer one with it: a strip of a few pixels would
become gigabytes."""

Digest = Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
Image = Annotated[bytes, Meta(max_length=MAX_IMAGE_BYTES)]
Images = Annotated[list[Image], Meta(max_length=MAX_IMAGES)]


TURNED_FORMATS = ("JPEG", "WEBP")
ORIENTATION_TAG = 0x0112
"""Whether a picture is to be turned is read in these alone: others may say it behind the picture."""


class MediaSpan(msgspec.Struct, frozen=True, array_like=True):
    """`length` tokens of a prompt from `start` on stand for the image of this hash."""

    start: Annotated[int, Meta(ge=0)]
    length: Annotated[int, Meta(ge=1)]
    digest: Digest

    @property
    def end(self) -> int:
        return self.start + self.length


Spans = Annotated[list[MediaSpan], Meta(max_length=MAX_IMAGES)]


def is_strip(width: int, height: int) -> bool:
    """One that nobody reads."""
    return max(width, height) > MAX_ASPECT * min(width, height)


def digest_of(image: bytes) -> bytes:
    return sha256(image).digest()


def end_of(spans: Sequence[MediaSpan]) -> int:
    """So many tokens of a prompt cannot be computed without its images."""
    return spans[-1].end if spans else 0


def within(spans: Iterable[MediaSpan], start: int, end: int) -> list[MediaSpan]:
    """Those of which a token lies in [start, end)."""
    return [span for span in spans if span.start < end and start < span.end]
