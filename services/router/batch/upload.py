"""Receive an uploaded batch file piece by piece, and decide how large it may be and how long it may take.

Only one piece of the body is in memory at a time, whatever the size of the file.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from baton_serve.services.router.protocol.errors import BadRequestError, RequestTimeoutError, RequestTooLargeError
from baton_serve.services.router.protocol.form_data import SEVERAL_FILES, FormReader, form_boundary

UPLOAD_TIMEOUT_S = 3600.0
"""Longest time for a whole upload. The longest pause within it is `--body-timeout-s`."""
SPACE_CHECK_BYTES = 8 * 1024 * 1024
"""Bytes of a file after which the free space is checked again: other uploads and running batches use it too."""
_MAX_FIELD_BYTES = 1024
_MAX_PARTS = 16
_MAX_NAME_CHARS = 255


@dataclass(slots=True)
class Upload:
    """An upload form that has arrived: the name and size of its file, and its other fields by name."""

    filename: str | None = None
    num_bytes: int = 0
    fields: dict[str, str] = field(default_factory=dict)


async def receive_upload(
    content_type: str | None,
    pieces: AsyncIterator[bytes],
    path: Path,
    *,
    max_bytes: int,
    free_bytes: Callable[[], int],
) -> Upload:
    """Receive an upload form, of whose body `pieces` are the parts. Write its file (the field `file`) to `path`, and
    return the other fields. The caller deletes the file after an error.

    `free_bytes` returns the free space in bytes; it is called in a thread, each time before `SPACE_CHECK_BYTES` more
    are written.

    Raises `MediaTypeError` for another type than multipart/form-data, `BadRequestError` for a malformed form,
    `RequestTooLargeError` for a file larger than `max_bytes` or the free space, and `RequestTimeoutError`.
    """
    boundary = form_boundary(content_type, "-F purpose=batch -F file=@in.jsonl")
    with path.open("wb") as file:
        form = _FormOnDisk(file, boundary, max_bytes, free_bytes)
        try:
            async with asyncio.timeout(UPLOAD_TIMEOUT_S):
                async for piece in pieces:
                    # Parsing takes little time, but the write may wait for a disk or a network.
                    await asyncio.to_thread(form.feed, piece)
        except TimeoutError:
            raise RequestTimeoutError(f"the file did not arrive within {UPLOAD_TIMEOUT_S:g} s") from None
    form.check_complete()
    if form.upload.filename is None:
        raise BadRequestError("the form has no file: send it as the field file, with a filename", param="file")
    return form.upload


class _FormOnDisk(FormReader):
    """Parses an upload form while it arrives, and writes the content of its file to `file`, which the caller opens and
    closes.
    """

    def __init__(self, file: BinaryIO, boundary: bytes, max_bytes: int, free_bytes: Callable[[], int]) -> None:
        super().__init__(boundary, max_parts=_MAX_PARTS, max_field_bytes=_MAX_FIELD_BYTES)
        self.upload = Upload()
        self._file = file
        self._max_bytes = max_bytes
        self._free_bytes = free_bytes
        self._allowed_bytes = 0
        """Size of the file up to which the free space was checked."""

    def begin_part(self, name: str, filename: str | None) -> bool:
        if name != "file" or filename is None:
            return False
        # The content of a second file would be appended to the first one.
        if self.upload.filename is not None:
            raise BadRequestError(SEVERAL_FILES, param="file")
        self.upload.filename = filename[:_MAX_NAME_CHARS]
        return True

    def add_to_file(self, data: bytes) -> None:
        self.upload.num_bytes += len(data)
        if self.upload.num_bytes > self._max_bytes:
            raise RequestTooLargeError(
                f"the file has more than {self._max_bytes} bytes, the limit (--batch-max-file-bytes): split it"
            )
        if self.upload.num_bytes > self._allowed_bytes:
            self._check_space(len(data))
        self._file.write(data)

    def add_field(self, name: str, value: str) -> None:
        self.upload.fields[name] = value

    def _check_space(self, num_bytes: int) -> None:
        """Raise `RequestTooLargeError` if the folder of batches has too little room for the next `num_bytes` of the
        file.
        """
        # `free_bytes` reads the size of this file from the file system.
        self._file.flush()
        free = self._free_bytes()
        if free < num_bytes:
            raise RequestTooLargeError(
                "the folder of batches, or the half of it that one API key may use, is full (--batch-max-bytes): delete"
                " files"
            )
        self._allowed_bytes = self.upload.num_bytes - num_bytes + min(free, SPACE_CHECK_BYTES)
