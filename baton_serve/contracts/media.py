"""Images of a prompt: the bytes of each file, its hash, and the positions of the tokens that stand for it.

An image is the file that the client sent, not its decoded pixels: equal bytes give equal KV. Instances that only move
blocks or decode get the positions and hashes without the files.
"""

from collections.abc import Iterable, Sequence
from hashlib import sha256
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
Digests = Annotated[list[Digest], Meta(max_length=MAX_IMAGES)]
Image = Annotated[bytes, Meta(max_length=MAX_IMAGE_BYTES)]
Images = Annotated[list[Image], Meta(max_length=MAX_IMAGES)]


TURNED_FORMATS = ("JPEG", "WEBP")
ORIENTATION_TAG = 0x0112
"""EXIF tag of the orientation. It is read in `TURNED_FORMATS` only: other formats may store it after the pixels, so
that the whole file would have to be decoded."""


class TokenGrid(msgspec.Struct, frozen=True, array_like=True):
    """The grid that the tokens of an image form, for models whose positions have three parts (M-RoPE): frame, row and
    column."""

    frames: Annotated[int, Meta(ge=1)]
    rows: Annotated[int, Meta(ge=1)]
    columns: Annotated[int, Meta(ge=1)]


class MediaSpan(msgspec.Struct, frozen=True, array_like=True):
    """The tokens of a prompt that stand for one image: `length` tokens, from token `start` on. `digest` is that of the
    image file.

    Other tokens may stand among the image tokens, such as one after each row.
    """

    start: Annotated[int, Meta(ge=0)]
    length: Annotated[int, Meta(ge=1)]
    digest: Digest
    grid: TokenGrid | None = None
    """None: the tokens have positions like those of text."""

    @property
    def end(self) -> int:
        """Return the position in the prompt after the last token of this image."""
        return self.start + self.length


class EmbeddingShape(msgspec.Struct, frozen=True, array_like=True):
    """Describes the embeddings of an image that an encode instance sends: their number, and the size of the file in
    pixels, from which the receiver checks the prompt.
    """

    digest: Digest
    num_rows: Annotated[int, Meta(ge=1)]
    width: Annotated[int, Meta(ge=1)]
    height: Annotated[int, Meta(ge=1)]


Spans = Annotated[list[MediaSpan], Meta(max_length=MAX_IMAGES)]


def source_span(digest: bytes) -> MediaSpan:
    """Return the span for a source with this digest, such as a window of audio, which an encoder reads.

    The decoder attends to all of the source, so that no token stands for it: the span is that of the first token, on
    which all block hashes depend.
    """
    return MediaSpan(0, 1, digest)


def is_strip(width: int, height: int) -> bool:
    """Return whether an image of this size is too long and narrow to be processed: one side is more than `MAX_ASPECT`
    times the other."""
    return max(width, height) > MAX_ASPECT * min(width, height)


def digest_of(image: bytes) -> bytes:
    """Return the SHA-256 digest of the bytes of an image file, by which the image is identified."""
    return sha256(image).digest()


def end_of(spans: Sequence[MediaSpan]) -> int:
    """Return the position after the last image token of a prompt, or 0 if it has no images. `spans` are the prompt's
    images, in order.

    An instance that does not have the images needs the KV of all tokens before this position.
    """
    return spans[-1].end if spans else 0


def position_shift(spans: Iterable[MediaSpan], at: int) -> int:
    """Return by how much the position of the text token at index `at` of a prompt differs from `at`, because of the
    images before it (M-RoPE).

    Text after an image continues behind the longer side of its grid, so the grid takes up fewer positions than tokens.
    """
    grids = [(span.grid, span.length) for span in spans if span.grid is not None and span.end <= at]
    return sum(max(grid.rows, grid.columns) - length for grid, length in grids)


def within(spans: Iterable[MediaSpan], start: int, end: int) -> list[MediaSpan]:
    """Return the spans of images of which at least one token lies among the tokens from `start` to `end`
    (exclusive)."""
    return [span for span in spans if span.start < end and start < span.end]
