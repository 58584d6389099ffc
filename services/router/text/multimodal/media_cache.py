"""Keeps media files for later requests: files that clients have named by a `uuid`, and recent images."""

from collections import OrderedDict
from typing import NamedTuple

import msgspec

from baton_serve.contracts.media import Clip, Embedded, MediaHeader
from baton_serve.services.router.text.multimodal.media_parts import MediaPart

MAX_RECENT_BYTES = 64 << 20
"""Size of recent images and their URLs that one process keeps: about 130 photos of 1,024 x 1,024 pixels."""

_Key = tuple[str, str, str]
"""The owner of the API key, the kind of file and the uuid. Owners never see each other's files. Embeddings are a
kind of their own."""


class ImageFile(NamedTuple):
    """A file that was checked, with its header. `width` and `height` are in pixels, of an image after the EXIF
    orientation is applied. `clip` says which frames of a video are seen.
    """

    digest: bytes
    data: bytes
    width: int
    height: int
    clip: Clip | None = None
    num_samples: int = 0
    """Samples of an audio at the model's rate; 0 for images and videos."""
    embedded: Embedded | None = None
    """Describes embeddings that a client has computed; None for all other files."""


class MediaCache:
    """The most recently used files of one router process. Use it from one event loop at a time."""

    def __init__(self, max_bytes: int) -> None:
        """Create an empty cache of at most `max_bytes` bytes; 0 keeps nothing."""
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._files: OrderedDict[_Key, bytes] = OrderedDict()

    def find(self, owner: str, part: MediaPart) -> bytes | None:
        """Return the file that the owner has sent with the uuid of `part`, or None."""
        if part.uuid is None or (file := self._files.get(key := _key(owner, part))) is None:
            return None
        self._files.move_to_end(key)
        return file

    def keep(self, owner: str, part: MediaPart, file: bytes) -> None:
        """Keep a file under the uuid of `part`, if it has one. The oldest files are dropped beyond the limit."""
        if part.uuid is None or len(file) > self._max_bytes:
            return
        key = _key(owner, part)
        self._num_bytes += len(file) - len(self._files.pop(key, b""))
        self._files[key] = file
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= len(self._files.popitem(last=False)[1])


def _key(owner: str, part: MediaPart) -> _Key:
    return owner, "embeddings" if part.is_embedded else part.kind, part.uuid or ""


class _ImageKey(NamedTuple):
    """Names a kept image. `header` is MessagePack: it says how the model reads the file."""

    owner: str
    url: str
    header: bytes


class RecentImages:
    """The most recently used images of `data:` URLs, checked, because each turn of a chat sends all images again. Use
    it from one event loop at a time.

    An owner of API keys finds only own images; otherwise one could find out by timing what others have sent.
    """

    def __init__(self, max_bytes: int = MAX_RECENT_BYTES) -> None:
        """Create an empty cache of at most `max_bytes` bytes of files and URLs; 0 keeps nothing."""
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._images: OrderedDict[_ImageKey, ImageFile] = OrderedDict()

    def find(self, owner: str, url: str, header: MediaHeader) -> ImageFile | None:
        """Return the image that `keep` was given for the same arguments, or None."""
        # Python keeps the hash of a string with it, so that this costs less than a digest of the URL.
        key = _ImageKey(owner, url, msgspec.msgpack.encode(header))
        if (found := self._images.get(key)) is not None:
            self._images.move_to_end(key)
        return found

    def keep(self, owner: str, url: str, header: MediaHeader, image: ImageFile) -> None:
        """Keep an image that was read with `header`. The least recently used ones are dropped beyond the limit."""
        key = _ImageKey(owner, url, msgspec.msgpack.encode(header))
        num_bytes = _size(key, image)
        if key in self._images or num_bytes > self._max_bytes:
            return
        self._images[key] = image
        self._num_bytes += num_bytes
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= _size(*self._images.popitem(last=False))


def _size(key: _ImageKey, image: ImageFile) -> int:
    return len(key.url) + len(key.header) + len(image.data)
