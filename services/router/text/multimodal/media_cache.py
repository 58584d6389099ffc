"""Keeps files of images and videos that clients have named by a `uuid`, so that later requests need not send them."""

from collections import OrderedDict

from baton_serve.services.router.text.multimodal.media_parts import MediaPart

_Key = tuple[str, str, str]
"""The owner of the API key, the kind of file and the uuid. Owners never see each other's files. Embeddings are a
kind of their own."""


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
