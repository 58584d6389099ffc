"""From an image's URL to its file: within the URL, in a folder that clients may see, or on the web (`web`)."""

import asyncio
import binascii
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from baton_serve.contracts.media import (
    FORMATS,
    MAX_ASPECT,
    MAX_PROMPT_BYTES,
    ORIENTATION_TAG,
    TURNED_FORMATS,
    digest_of,
    is_strip,
)
from baton_serve.services.router.protocol.image_limits import ImageLimits, image_error, image_too_large_error
from baton_serve.services.router.text.thread_pools import IMAGES

_INLINE_CHARS = 64 * 1024
"""Longer ones are decoded in a thread, so that running streams go on."""

_ON_ITS_SIDE = range(5, 9)
"""Orientations that swap width and height."""


class ImageFile(NamedTuple):
    """`width` and `height` as it is to be seen."""

    digest: bytes
    data: bytes
    width: int
    height: int


async def load(urls: Sequence[str], limits: ImageLimits) -> list[ImageFile]:
    """In their order; each is an image that may be shown. Raises `BadRequestError`."""
    distinct = list(dict.fromkeys(urls))
    loaded = await asyncio.gather(*(_load(url, limits) for url in distinct), return_exceptions=True)
    files: dict[str, ImageFile] = {}
    for url, found in zip(distinct, loaded, strict=True):
        if isinstance(found, BaseException):
            raise found
        files[url] = found
    if sum(len(file.data) for file in {file.digest: file for file in files.values()}.values()) > MAX_PROMPT_BYTES:
        raise image_error(f"the images of a prompt may have {MAX_PROMPT_BYTES} bytes together: make them smaller")
    return [files[url] for url in urls]


async def _load(url: str, limits: ImageLimits) -> ImageFile:
    scheme = url[:6].partition(":")[0].lower()
    match scheme:
        case "data" if len(url) <= _INLINE_CHARS:
            return _checked(_of_data_url(url, limits), limits)
        case "data":
            return await IMAGES.run(lambda: _checked(_of_data_url(url, limits), limits))
        case "file":
            return await IMAGES.run(lambda: _checked(_of_file(url, limits), limits))
        case "http" | "https":
            from baton_serve.services.router.text.multimodal.web import (
                fetch,  # a tenth of a second that only such images should cost
            )

            found = await fetch(url, limits)
            return await IMAGES.run(_checked, found, limits)
        case _:
            raise image_error("an image's URL begins with data:, https:, http: or file:")


def _of_data_url(url: str, limits: ImageLimits) -> bytes:
    head, comma, data = url.partition(",")
    kind, *options = head[len("data:") :].lower().split(";")
    if not comma or "base64" not in options or not (kind.startswith("image/") or not kind):
        raise image_error("a data: URL of an image is data:image/png;base64,…")
    if len(data) // 4 * 3 > limits.max_bytes + 2:
        raise image_too_large_error(limits)
    try:
        return binascii.a2b_base64(data, strict_mode=True)
    except (binascii.Error, ValueError) as exc:
        raise image_error(f"a data: URL of an image is no base64: {exc}") from exc


def _of_file(url: str, limits: ImageLimits) -> bytes:
    if limits.local_path is None:
        raise image_error("files are not read: send the image as a data: URL, or start with --allowed-local-media-path")
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise image_error("a file: URL names a path on the router's own machine")
    try:
        path = Path(unquote(parts.path)).resolve(strict=True)
        is_allowed = path.is_relative_to(limits.local_path.resolve()) and path.is_file()
        if is_allowed and path.stat().st_size > limits.max_bytes:
            raise image_too_large_error(limits)
        if is_allowed:
            return path.read_bytes()
    except (OSError, ValueError):
        pass  # whether there is such a file is nobody's business either
    raise image_error(f"{unquote(parts.path)[:200]!r} is no file below --allowed-local-media-path")


def _checked(data: bytes, limits: ImageLimits) -> ImageFile:
    """Reads no more than the head of the file: whoever shows it finds out about the rest."""
    from PIL import Image, UnidentifiedImageError  # only requests with images need it

    if len(data) > limits.max_bytes:
        raise image_too_large_error(limits)
    try:
        with Image.open(BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            if image.format in TURNED_FORMATS and image.getexif().get(ORIENTATION_TAG, 1) in _ON_ITS_SIDE:
                width, height = height, width
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError) as exc:
        raise image_error(f"an image is none of {', '.join(FORMATS)}, or broken") from exc
    if width * height > limits.max_pixels:
        raise image_error(
            f"an image has {width * height} pixels; at most {limits.max_pixels} are read (--max-image-pixels)"
        )
    if is_strip(width, height):
        raise image_error(
            f"an image of {width} x {height} pixels: one side may be {MAX_ASPECT} times the other at most"
        )
    return ImageFile(digest_of(data), data, width, height)
