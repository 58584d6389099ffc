"""Loads and checks media of a request: `data:` URLs, local files (`--allowed-local-media-path`), pixels; `url_fetch.py`
fetches the web.
"""

import asyncio
import binascii
import threading
from collections.abc import Awaitable, Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import unquote, urlsplit

from baton_serve.contracts.audio import Cut, CutterLimits
from baton_serve.contracts.media import (
    FORMATS,
    MAX_ASPECT,
    MAX_HEADER_BYTES,
    MAX_PROMPT_BYTES,
    ORIENTATION_TAG,
    TURNED_FORMATS,
    Embedded,
    MediaHeader,
    VideoFile,
    digest_of,
    is_strip,
    split_header,
    with_header,
)
from baton_serve.services.common.process_lifecycle import cancel_all
from baton_serve.services.router.protocol.errors import BadRequestError
from baton_serve.services.router.protocol.image_limits import ImageLimits, media_error, too_large_error
from baton_serve.services.router.text.multimodal.client_tensors import TensorFile, read_tensor
from baton_serve.services.router.text.multimodal.image_memory import MAX_LOADS_PER_REQUEST, ImageReservation
from baton_serve.services.router.text.multimodal.media_cache import ImageFile
from baton_serve.services.router.text.multimodal.media_parts import MediaPart
from baton_serve.services.router.text.multimodal.video_probe import probe
from baton_serve.services.router.text.thread_pools import IMAGES

_INLINE_CHARS = 64 * 1024
"""Longest `data:` URL that is decoded on the event loop. Longer ones are decoded in a thread, so that streams go on."""

_EMBEDDING_DTYPES = ("float32", "float16", "bfloat16")
_MAX_GRID_BYTES = 64 * 1024
"""Largest file of an `image_grid_thw`, which holds three numbers."""

_LISTED_FORMATS = f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}"

_ROTATED = range(5, 9)
"""Values of the EXIF orientation that exchange width and height."""


Describe = Callable[[VideoFile | None], MediaHeader]
"""Returns the header of a video, or of an image for None. It says how the model reads the file."""


class SoundDecoder(Protocol):
    """Decodes audio files for a model that reads audio in chats: `AudioCutter`."""

    limits: CutterLimits

    @property
    def max_file_bytes(self) -> int: ...
    async def decode(self, file: bytes) -> Cut: ...


async def load(
    parts: Sequence[MediaPart],
    limits: ImageLimits,
    reservation: ImageReservation,
    describe: Describe,
    decoder: SoundDecoder | None = None,
) -> list[ImageFile]:
    """Load and check images, videos and audio, and return them in this order. `decoder` is that of a model that reads
    audio.

    The caller releases `reservation` after the last use of the files. Raises `BadRequestError` if one cannot be
    loaded, is not an image or a video or exceeds a limit, and `RateLimitError` if the limits of `ImageMemory` are
    reached.
    """
    # An image that a chat shows several times is loaded once.
    distinct = list(dict.fromkeys(parts))
    await reservation.reserve(min(MAX_PROMPT_BYTES, sum([_max_bytes(part, limits, decoder) for part in distinct])))
    slots = asyncio.Semaphore(MAX_LOADS_PER_REQUEST)
    loading = _Loading(limits, reservation, describe, slots, decoder)
    tasks = [asyncio.ensure_future(_numbered(loading, parts, part)) for part in distinct]
    try:
        loaded = await asyncio.gather(*tasks)
    finally:
        # The first error ends the request, so the other images are not needed.
        await cancel_all(tasks)
    files = dict(zip(distinct, loaded, strict=True))
    reservation.keep(sum({file.digest: len(file.data) for file in files.values()}.values()))
    return [files[part] for part in parts]


async def _numbered(loading: "_Loading", parts: Sequence[MediaPart], part: MediaPart) -> ImageFile:
    """Load one of the `parts` of a request; if it has several, an error says which one it is about."""
    try:
        return await loading.load_in_turn(part)
    except BadRequestError as exc:
        if len(parts) == 1:
            raise
        message = f"{exc.message} (file {parts.index(part) + 1} of {len(parts)})"
        raise BadRequestError(message, param=exc.param, code=exc.code) from exc


def _max_bytes(part: MediaPart, limits: ImageLimits, decoder: SoundDecoder | None) -> int:
    """Return the largest size that a file can have, of audio also after it was decoded."""
    most = limits.bytes_of(part.kind)
    if part.is_embedded and part.url:
        return min(most, len(part.url)) + MAX_HEADER_BYTES
    most = min(most, len(part.url)) if _scheme(part.url) == "data" else most
    return most if decoder is None or part.kind != "audio" else max(most, decoder.max_file_bytes)


def _scheme(url: str) -> str:
    return url[:6].partition(":")[0].lower()


class _Loading(NamedTuple):
    """Loads the files of one request, with its limits and its share of memory."""

    limits: ImageLimits
    reservation: ImageReservation
    describe: Describe
    slots: asyncio.Semaphore
    decoder: SoundDecoder | None

    async def load_in_turn(self, part: MediaPart) -> ImageFile:
        async with self.slots:
            if part.is_embedded:
                return await self._embedded(part)
            is_data_url = _scheme(part.url) == "data"
            if is_data_url and part.kind == "image" and part.uuid is None:
                return await self._image_of_data_url(part)
            is_fetched = _scheme(part.url) in ("http", "https")
            is_small = is_data_url and len(part.url) <= _INLINE_CHARS
            if not part.url:
                data = self._kept(part)
            elif is_fetched:
                data = await self._fetched(part)
            else:
                data = self._read(part) if is_small else await IMAGES.run(self._read, part)
            file = await self._checked(part, data, is_small=is_small)
            # A file that arrives from the web is counted piece by piece, and audio also as it is decoded.
            if not is_fetched or part.kind == "audio":
                self.reservation.count(len(file.data))
            self.reservation.memory.cache.keep(self.reservation.owner, part, data)
            return file

    async def _image_of_data_url(self, part: MediaPart) -> ImageFile:
        """Return the image of a `data:` URL: a kept one, or else decode it from base64 and check it."""
        recent, owner, header = self.reservation.memory.recent, self.reservation.owner, self.describe(None)
        image = recent.find(owner, part.url, header)
        if image is None:
            is_small = len(part.url) <= _INLINE_CHARS
            data = self._read(part) if is_small else await IMAGES.run(self._read, part)
            image = await self._checked(part, data, is_small=is_small)
            recent.keep(owner, part.url, header, image)
        self.reservation.count(len(image.data))
        return image

    async def _embedded(self, part: MediaPart) -> ImageFile:
        """Return embeddings as the file that an instance takes."""
        file = await IMAGES.run(_embedded_file, part, self.limits) if part.url else self._kept(part)
        self.reservation.count(len(file))
        self.reservation.memory.cache.keep(self.reservation.owner, part, file)
        return ImageFile(digest_of(file), file, 0, 0, embedded=split_header(file)[0].embedded)

    def _kept(self, part: MediaPart) -> bytes:
        """Return the file that was sent before with the same uuid."""
        data = self.reservation.memory.cache.find(self.reservation.owner, part)
        if data is None:
            raise media_error(
                f"there is no {part.kind} {(part.uuid or '')[:80]!r} here: send the {part.kind} with its uuid"
                " (--mm-processor-cache-gb)",
                part.kind,
            )
        return data

    async def _fetched(self, part: MediaPart) -> bytes:
        fetch = await IMAGES.run(_import_fetch)
        async with self.reservation.memory.fetch_slot(self.reservation.owner):
            return await fetch(part, self.limits, count=self.reservation.count)

    def _read(self, part: MediaPart) -> bytes:
        """Return the file of a data: or file: URL."""
        match _scheme(part.url):
            case "data":
                return _of_data_url(part, self.limits)
            case "file":
                return _of_file(part, self.limits)
            case _:
                raise media_error(f"the URL of {part.noun} must begin with data:, https:, http: or file:", part.kind)

    async def _checked(self, part: MediaPart, data: bytes, *, is_small: bool) -> ImageFile:
        """Check a file, and return it with its header."""
        if part.kind == "image":
            if not _PILLOW_IS_LOADED.is_set():
                await IMAGES.run(_load_pillow)
            if is_small:
                return _checked_image(data, self.limits, self.describe(None))
            return await IMAGES.run(_checked_image, data, self.limits, self.describe(None))
        if len(data) > self.limits.bytes_of(part.kind):
            raise too_large_error(self.limits, part.kind)
        if part.kind == "audio":
            return await self._heard(data)
        async with self.reservation.memory.probe_slot(self.reservation.owner):
            found = await probe(data, self.limits)
        return await IMAGES.run(_named, data, found.width, found.height, self.describe(found))

    async def _heard(self, data: bytes) -> ImageFile:
        """Decode an audio file. Return it as the WAV file that an instance takes."""
        assert self.decoder is not None, "chats with audio are rendered only for models that read it"
        cut = await self.decoder.decode(data)
        if cut.error:
            raise media_error(f"an audio cannot be used: {cut.error}", "audio")
        (window,) = cut.windows
        num_samples = round(window.duration_s * self.decoder.limits.rate_hz)
        return ImageFile(digest_of(window.file), window.file, 0, 0, num_samples=num_samples)


_PILLOW_IS_LOADED = threading.Event()


def _load_pillow() -> None:
    """Import Pillow with all its formats. It takes 0.2 s, so it runs in a thread, before the first image."""
    from PIL import Image

    # Otherwise the first broken image would load further formats, on the event loop.
    Image.init()
    _PILLOW_IS_LOADED.set()


def _import_fetch() -> "Callable[..., Awaitable[bytes]]":
    """Import the HTTP client, which takes 0.2 s, and return the function that fetches a file."""
    from baton_serve.services.router.text.multimodal.url_fetch import fetch

    return fetch


def _named(data: bytes, width: int, height: int, header: MediaHeader) -> ImageFile:
    """Return a file with its header and the digest of both."""
    whole = with_header(data, header)
    return ImageFile(digest_of(whole), whole, width, height, header.clip)


def _of_data_url(part: MediaPart, limits: ImageLimits) -> bytes:
    head, comma, data = part.url.partition(",")
    kind, *options = head[len("data:") :].lower().split(";")
    if not comma or "base64" not in options or not (kind.startswith(f"{part.kind}/") or not kind):
        raise media_error(f"a data: URL of {part.noun} must look like {part.example}", part.kind)
    # Checked before decoding. The two bytes are the padding, which the estimate counts as data.
    if len(data) // 4 * 3 > limits.bytes_of(part.kind) + 2:
        raise too_large_error(limits, part.kind)
    return _decoded(data, f"a data: URL of {part.noun}", part.kind)


def _decoded(text: str, what: str, kind: str) -> bytes:
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except (binascii.Error, ValueError) as exc:
        raise media_error(f"{what} is not valid base64: {exc}", kind) from exc


def _embedded_file(part: MediaPart, limits: ImageLimits) -> bytes:
    """Return the file of embeddings that an instance takes: a header, and the rows as a client has sent them."""
    rows = _tensor_of(part.url, "image_embeds", limits.max_bytes)
    shape = rows.shape
    # One image may stand in a batch of one, as the tower returns it.
    shape = shape[1:] if len(shape) == 3 and shape[0] == 1 else shape
    dtype: Any = rows.dtype
    if len(shape) != 2 or dtype not in _EMBEDDING_DTYPES:
        raise media_error(
            f"image_embeds has the shape {list(rows.shape)} of {dtype}; it must be [embeddings, hidden size] of"
            f" {' or '.join(_EMBEDDING_DTYPES)}"
        )
    grid: Any = None
    if part.grid:
        stated = _tensor_of(part.grid, "image_grid_thw", _MAX_GRID_BYTES)
        try:
            grid = tuple(stated.integers())
        except ValueError as exc:
            raise media_error(f"image_grid_thw cannot be used: {exc}") from exc
        if len(grid) != 3:
            raise media_error(f"image_grid_thw has {len(grid)} values; one image has three")
    embedded = Embedded(num_rows=shape[0], width=shape[1], dtype=dtype, grid=grid)
    return with_header(rows.data, MediaHeader(embedded=embedded))


def _tensor_of(text: str, name: str, max_bytes: int) -> TensorFile:
    # Checked before decoding. The two bytes are the padding, which the estimate counts as data.
    if len(text) // 4 * 3 > max_bytes + 2:
        raise media_error(f"{name} has more than {max_bytes} bytes (--max-image-bytes)")
    try:
        return read_tensor(_decoded(text, name, "image"))
    except ValueError as exc:
        raise media_error(f"{name} cannot be used: {exc}") from exc


def _of_file(part: MediaPart, limits: ImageLimits) -> bytes:
    if limits.local_path is None:
        raise media_error(
            f"file: URLs are not allowed: send the {part.kind} as a data: URL, or start the router with "
            "--allowed-local-media-path",
            part.kind,
        )
    parts = urlsplit(part.url)
    if parts.netloc not in ("", "localhost"):
        raise media_error("a file: URL must name a path on the machine of the router, without another host", part.kind)
    try:
        # `resolve` follows links and removes "..", so a path cannot lead out of the folder.
        path = Path(unquote(parts.path)).resolve(strict=True)
        is_allowed = path.is_relative_to(limits.local_path.resolve()) and path.is_file()
        if is_allowed and path.stat().st_size > limits.bytes_of(part.kind):
            raise too_large_error(limits, part.kind)
        if is_allowed:
            return path.read_bytes()
    except (OSError, ValueError):
        # A missing file and a forbidden one get the same error, which does not reveal what files exist.
        pass
    raise media_error(f"{unquote(parts.path)[:200]!r} is not a file below --allowed-local-media-path", part.kind)


def _checked_image(data: bytes, limits: ImageLimits, header: MediaHeader) -> ImageFile:
    """Check the format and size of an image. Only its header is read; the instance that decodes it checks the rest."""
    # Imported here because only requests with images need it.
    from PIL import Image, UnidentifiedImageError

    if len(data) > limits.max_bytes:
        raise too_large_error(limits, "image")
    try:
        with Image.open(BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            # The number of tokens depends on width and height. The vision tower gets the image after the rotation.
            if image.format in TURNED_FORMATS and image.getexif().get(ORIENTATION_TAG, 1) in _ROTATED:
                width, height = height, width
    # The warning is an exception only if Python was started with `-W error`.
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as exc:
        raise media_error(f"an image has more than {limits.max_pixels} pixels (--max-image-pixels)") from exc
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError) as exc:
        raise media_error(f"an image cannot be decoded: it is broken, or its format is not {_LISTED_FORMATS}") from exc
    if width * height > limits.max_pixels:
        raise media_error(
            f"an image has {width * height} pixels, the limit is {limits.max_pixels} (--max-image-pixels)"
        )
    if is_strip(width, height):
        raise media_error(
            f"an image has {width} x {height} pixels: the longer side may be at most {MAX_ASPECT} times the shorter"
        )
    return _named(data, width, height, header)
