"""Keeps decoded images, videos and audio for prompts that have them again, such as later turns of a chat."""

from collections.abc import Iterable
from threading import Lock

from baton_serve.contracts.identity import BlockHash
from baton_serve.contracts.media import digest_of
from baton_serve.engine.model.vision.image_types import DecodedImage, EncodedImage, ImageReader, Pixels

MAX_KEPT_BYTES = 256 << 20
"""Size of decoded files in host memory: 20 images of 1,024 x 1,024 pixels for Qwen2.5-VL."""

_Name = tuple[BlockHash, bytes]
"""Key of a decoded file: the root of the prompt's block hashes, and the file's digest.

The root separates tenants; otherwise one could find out by timing whether another has sent a file.
"""


class KeptPictures:
    """Decodes files with an `ImageReader`, and keeps the most recently used ones up to a number of bytes. Callable from
    any thread.
    """

    def __init__(self, reader: ImageReader, max_bytes: int = MAX_KEPT_BYTES) -> None:
        self._reader = reader
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._lock = Lock()
        self._files: dict[_Name, Pixels] = {}

    def read(self, root: BlockHash, files: Iterable[bytes]) -> dict[bytes, DecodedImage | EncodedImage]:
        """Return what `ImageReader.read` returns for `files`, of a prompt whose block hashes begin with `root`. Raises
        `RequestError` for a file that cannot be decoded, of which nothing is kept.
        """
        found: dict[bytes, DecodedImage | EncodedImage] = {}
        for file in files:
            name = root, digest_of(file)
            with self._lock:
                known = self._files.get(name)
            # Two threads may decode the same file at the same time: then the second result replaces the first.
            decoded = self._reader.read([file]) if known is None else known
            self._keep(name, decoded)
            found.update(decoded)
        return found

    def _keep(self, name: _Name, decoded: Pixels) -> None:
        """Keep a decoded file as the most recently used one. The least recently used ones are dropped beyond the
        limit."""
        with self._lock:
            self._num_bytes += _num_bytes(decoded) - _num_bytes(self._files.pop(name, {}))
            self._files[name] = decoded
            while self._num_bytes > self._max_bytes:
                self._num_bytes -= _num_bytes(self._files.pop(next(iter(self._files))))


def _num_bytes(decoded: Pixels) -> int:
    return sum(picture.num_bytes for picture in decoded.values())
