"""Describes images, videos and audio of a prompt: files, digests, positions of their tokens, and limits of size.

An image is the file that the client sent, not its decoded pixels: equal bytes give equal KV. Instances that only move
blocks or decode get the positions and hashes without the files.
"""

from collections.abc import Collection, Iterable, Sequence
from hashlib import sha256
from itertools import takewhile
from struct import pack, unpack
from typing import Annotated, Any, Literal

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

MAX_FRAME_SIDE = 1 << 15
"""Largest width and height of a video's frame in pixels."""

MAX_VIDEO_FRAMES = 2048
"""Maximum number of frames of one video that a model sees."""

Digest = Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
Digests = Annotated[list[Digest], Meta(max_length=MAX_IMAGES)]
MAX_HEADER_BYTES = 64 * 1024
"""Room for the header of a file (`MediaHeader`)."""
Image = Annotated[bytes, Meta(max_length=MAX_IMAGE_BYTES + MAX_HEADER_BYTES)]
Images = Annotated[list[Image], Meta(max_length=MAX_IMAGES)]


TURNED_FORMATS = ("JPEG", "WEBP")
ORIENTATION_TAG = 0x0112
"""EXIF tag of the orientation. It is read in `TURNED_FORMATS` only: other formats may store it after the pixels, so
that the whole file would have to be decoded."""


def float32(value: float) -> float:
    """Return the nearest number that a 32-bit float can have."""
    return float(unpack("f", pack("f", value))[0])


class TokenGrid(msgspec.Struct, frozen=True, array_like=True):
    """The grid that the tokens of an image form, for models whose positions have three parts (M-RoPE): frame, row and
    column."""

    frames: Annotated[int, Meta(ge=1)]
    rows: Annotated[int, Meta(ge=1)]
    columns: Annotated[int, Meta(ge=1)]
    frame_step: Annotated[float, Meta(ge=0, le=1 << 20)] = 1.0
    """The distance of two frames in positions, which are rounded down. Frames of a video are apart by their time in
    some models."""


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


Spans = Annotated[list[MediaSpan], Meta(max_length=MAX_IMAGES)]


class Clip(msgspec.Struct, frozen=True, kw_only=True):
    """The frames of a video that a model sees."""

    width: Annotated[int, Meta(ge=1, le=MAX_FRAME_SIDE)]
    height: Annotated[int, Meta(ge=1, le=MAX_FRAME_SIDE)]
    num_frames: Annotated[int, Meta(ge=1)]
    """Number of frames of the whole video."""
    fps: Annotated[float, Meta(gt=0)]
    """Frames per second of the whole video."""
    indexes: Annotated[list[int], Meta(min_length=1, max_length=MAX_VIDEO_FRAMES)]
    """The frames that are seen, by their number in the video, in ascending order; one may stand twice."""
    is_raw: bool = False
    """True if the file is just the frames that are seen, one after another, as RGB bytes [height, width, 3]."""


class VideoFile(msgspec.Struct, frozen=True, kw_only=True):
    """Describes a video file, as the process that decodes videos (`baton_serve.video_decoder`) reports it.

    `error` says why the file cannot be used.
    """

    width: int = 0
    height: int = 0
    num_frames: int = 0
    fps: float = 0.0
    error: str = ""


class VideoTask(msgspec.Struct, frozen=True, kw_only=True):
    """Asks that process for the frames `indexes` of a video, or without `indexes` for its description."""

    max_pixels: int
    """Largest size of a frame, width times height."""
    max_s: float
    """Longest video in seconds."""
    cpu_s: float = 60.0
    """Processor time for one file, after which the process ends."""
    memory_bytes: int = 2 * 1024 * 1024 * 1024
    """Address space beside that of the process itself."""
    indexes: list[int] = []


class Embedded(msgspec.Struct, frozen=True, kw_only=True):
    """Embeddings of an image that a client has computed. The file is their rows, one after another."""

    num_rows: Annotated[int, Meta(ge=1, le=1 << 20)]
    width: Annotated[int, Meta(ge=1, le=1 << 20)]
    """Values of one row."""
    dtype: Literal["float32", "float16", "bfloat16"]
    grid: tuple[int, int, int] | None = None
    """Frames, and rows and columns of patches (`image_grid_thw`), for models whose tokens form a grid."""


class MediaHeader(msgspec.Struct, frozen=True, omit_defaults=True):
    """How an image or video is to be read, where that does not follow from the file alone.

    It stands before the file, so that the digest of both names what the model sees.
    """

    settings: dict[str, Any] = {}
    """Values that replace some of the model's processor (`mm_processor_kwargs`)."""
    clip: Clip | None = None
    """The frames of a video; None: the file is an image."""
    embedded: Embedded | None = None
    """The file holds embeddings instead of a picture; None: it does not."""


NO_HEADER = MediaHeader()
"""The header of an image that is read as the model's processor says."""
_MARK = b"\0baton media 1\0"
"""Begins a file with a header. No accepted format begins like this."""


def with_header(file: bytes, header: MediaHeader) -> bytes:
    """Return a file with its header; without anything to say, the file itself."""
    if header == NO_HEADER:
        return file
    # Settings that are equal must give equal bytes, in whichever order a client writes them.
    written = msgspec.msgpack.encode(header, order="deterministic")
    return b"".join([_MARK, len(written).to_bytes(4, "little"), written, file])


def has_header(data: bytes) -> bool:
    """Return whether a file has a header, so that it is not read as any image is."""
    return data.startswith(_MARK)


def split_header(data: bytes) -> tuple[MediaHeader, memoryview]:
    """Return the header of a file, and the file. Raises `ValueError` if the header is damaged."""
    view = memoryview(data)
    if not has_header(data):
        return NO_HEADER, view
    start = len(_MARK) + 4
    end = start + int.from_bytes(view[len(_MARK) : start], "little")
    return msgspec.msgpack.decode(view[start:end], type=MediaHeader), view[end:]


def span_digests(digest: bytes, count: int) -> list[bytes]:
    """Return the digests of the spans of one image or video, which has `count` of them."""
    # A video whose frames stand apart from each other in the prompt has a span for each.
    return (
        [digest] if count == 1 else [sha256(digest + number.to_bytes(4, "little")).digest() for number in range(count)]
    )


def spans_of_file(digest: bytes, present: Collection[bytes]) -> list[bytes]:
    """Return the digests of the spans of the file with this digest. `present` are those of all spans of its prompt."""
    if digest in present:
        return [digest]
    counted = (sha256(digest + number.to_bytes(4, "little")).digest() for number in range(MAX_IMAGES))
    return list(takewhile(present.__contains__, counted))


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
