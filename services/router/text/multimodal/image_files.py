"""Loads image files from URLs: from `data:` URLs, from a local folder that the settings allow, or from the web."""

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
from baton_serve.services.common.lifecycle import cancel_all
from baton_serve.services.router.protocol.image_limits import ImageLimits, image_error, image_too_large_error
from baton_serve.services.router.text.multimodal.image_memory import MAX_LOADS_PER_REQUEST, ImageReservation
from baton_serve.services.router.text.thread_pools import IMAGES

_INLINE_CHARS = 64 * 1024
"""Longest `data:` URL that is decoded on the event loop. Longer ones are decoded in a thread, so that streams go on."""

_ROTATED = range(5, 9)
"""Values of the EXIF orientation that exchange width and height."""


class ImageFile(NamedTuple):
    """An image file whose format and size were checked. `width` and `height` are in pixels, after the EXIF orientation
    is applied.
    """

    digest: bytes
    data: bytes
    width: int
    height: int


async def load(urls: Sequence[str], limits: ImageLimits, reservation: ImageReservation) -> list[ImageFile]:
    """Fetch or decode the images at `urls` and check them. Return them in this order.

    Their bytes count in `reservation`, which the caller releases after the last use of the files. Raises
    `BadRequestError` if an image cannot be loaded, is not an image or exceeds a limit, and `RateLimitError` if the
    limits of `ImageMemory` are reached.
    """
    # An image that a chat shows several times is loaded once.
    distinct = list(dict.fromkeys(urls))
    await reservation.reserve(min(MAX_PROMPT_BYTES, sum([_max_bytes(url, limits) for url in distinct])))
    slots = asyncio.Semaphore(MAX_LOADS_PER_REQUEST)
    tasks = [asyncio.ensure_future(_load_in_turn(url, limits, reservation, slots)) for url in distinct]
    try:
        files = dict(zip(distinct, await asyncio.gather(*tasks), strict=True))
    finally:
        # The first error ends the request, so the other images are not needed.
        await cancel_all(tasks)
    reservation.keep(sum({file.digest: len(file.data) for file in files.values()}.values()))
    return [files[url] for url in urls]


def _max_bytes(url: str, limits: ImageLimits) -> int:
    """Return the largest number of bytes that the image at `url` can have. A `data:` URL cannot hold more than its own
    length.
    """
    return min(limits.max_bytes, len(url)) if _scheme(url) == "data" else limits.max_bytes


def _scheme(url: str) -> str:
    return url[:6].partition(":")[0].lower()


async def _load_in_turn(
    url: str, limits: ImageLimits, reservation: ImageReservation, slots: asyncio.Semaphore
) -> ImageFile:
    async with slots:
        if _scheme(url) in ("http", "https"):
            return await _fetched(url, limits, reservation)
        file = await _load(url, limits)
        reservation.count(len(file.data))
        return file


async def _fetched(url: str, limits: ImageLimits, reservation: ImageReservation) -> ImageFile:
    # Importing httpx takes a tenth of a second. Only a request with such an image should pay for it.
    from baton_serve.services.router.text.multimodal.web import fetch

    async with reservation.memory.fetch_slot():
        found = await fetch(url, limits, count=reservation.count)
    return await IMAGES.run(_checked, found, limits)


async def _load(url: str, limits: ImageLimits) -> ImageFile:
    match _scheme(url):
        case "data" if len(url) <= _INLINE_CHARS:
            return _checked(_of_data_url(url, limits), limits)
        case "data":
            return await IMAGES.run(lambda: _checked(_of_data_url(url, limits), limits))
        case "file":
            return await IMAGES.run(lambda: _checked(_of_file(url, limits), limits))
        case _:
            raise image_error("the URL of an image must begin with data:, https:, http: or file:")


def _of_data_url(url: str, limits: ImageLimits) -> bytes:
    head, comma, data = url.partition(",")
    kind, *options = head[len("data:") :].lower().split(";")
    if not comma or "base64" not in options or not (kind.startswith("image/") or not kind):
        raise image_error("a data: URL of an image must look like data:image/png;base64,…")
    # Checked before decoding. The two bytes are the padding, which the estimate counts as data.
    if len(data) // 4 * 3 > limits.max_bytes + 2:
        raise image_too_large_error(limits)
    try:
        return binascii.a2b_base64(data, strict_mode=True)
    except (binascii.Error, ValueError) as exc:
        raise image_error(f"a data: URL of an image is not valid base64: {exc}") from exc


def _of_file(url: str, limits: ImageLimits) -> bytes:
    if limits.local_path is None:
        raise image_error(
            "file: URLs are not allowed: send the image as a data: URL, or start the router with "
            "--allowed-local-media-path"
        )
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise image_error("a file: URL must name a path on the machine of the router, without another host")
    try:
        # `resolve` follows links and removes "..", so a path cannot lead out of the folder.
        path = Path(unquote(parts.path)).resolve(strict=True)
        is_allowed = path.is_relative_to(limits.local_path.resolve()) and path.is_file()
        if is_allowed and path.stat().st_size > limits.max_bytes:
            raise image_too_large_error(limits)
        if is_allowed:
            return path.read_bytes()
    except (OSError, ValueError):
        # A missing file and a forbidden one get the same error, which does not reveal what files exist.
        pass
    raise image_error(f"{unquote(parts.path)[:200]!r} is not a file below --allowed-local-media-path")


def _checked(data: bytes, limits: ImageLimits) -> ImageFile:
    """Check the format and size of an image file and return it. Only its header is read; the instance that decodes the
    image checks the rest. Raises `BadRequestError`.
    """
    # Imported here because only requests with images need it.
    from PIL import Image, UnidentifiedImageError

    if len(data) > limits.max_bytes:
        raise image_too_large_error(limits)
    try:
        with Image.open(BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            # The number of tokens depends on width and height. The vision tower gets the image after the rotation.
            if image.format in TURNED_FORMATS and image.getexif().get(ORIENTATION_TAG, 1) in _ROTATED:
                width, height = height, width
    # The warning is an exception only if Python was started with `-W error`.
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as exc:
        raise image_error(f"an image has more than {limits.max_pixels} pixels (--max-image-pixels)") from exc
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError) as exc:
        raise image_error(
            f"an image cannot be decoded: it is broken, or its format is not {' or '.join(FORMATS)}"
        ) from exc
    if width * height > limits.max_pixels:
        raise image_error(
            f"an image has {width * height} pixels, the limit is {limits.max_pixels} (--max-image-pixels)"
        )
    if is_strip(width, height):
        raise image_error(
            f"an image has {width} x {height} pixels: the longer side may be at most {MAX_ASPECT} times the shorter"
        )
    return ImageFile(digest_of(data), data, width, height)
