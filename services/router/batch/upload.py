"""Read an uploaded file (multipart/form-data) piece by piece and write its content to a file.

Only one piece of the body is in memory at a time, whatever the size of the file.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from baton_serve.services.router.protocol.errors import (
    BadRequestError,
    MediaTypeError,
    RequestTimeoutError,
    RequestTooLargeError,
)

UPLOAD_TIMEOUT_S = 3600.0
"""Longest time for a whole upload. The longest pause within it is `--body-timeout-s`."""
SPACE_CHECK_BYTES = 8 * 1024 * 1024
"""Bytes of a file after which the free space is checked again: other uploads and running batches use it too."""
_MAX_FIELD_BYTES = 1024
_MAX_PARTS = 16
_MAX_NAME_CHARS = 255


@dataclass(slots=True)
class Upload:
    """An uploaded form: its file, which is at the path that was given, and its other fields by name."""

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
    """Write the field `file` of a form to `path` and return the form. The caller removes the file after an error.

    `free_bytes` returns the free space; it is called in a thread, for each `SPACE_CHECK_BYTES` before they are written.

    Raises `MediaTypeError` for another type than multipart/form-data, `BadRequestError` for a malformed form,
    `RequestTooLargeError` for a longer file than `max_bytes` or the free space, and `RequestTimeoutError`.
    """
    # The type names the boundary between the parts of the form, without which nothing can be parsed.
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        raise MediaTypeError("a file must be sent as multipart/form-data (curl: -F purpose=batch -F file=@in.jsonl)")
    with path.open("wb") as file:
        form = _Form(file, boundary, max_bytes, free_bytes)
        try:
            async with asyncio.timeout(UPLOAD_TIMEOUT_S):
                async for piece in pieces:
                    # Parsing takes little time, but the write may wait for a disk or a network.
                    await asyncio.to_thread(form.feed, piece)
        except TimeoutError:
            raise RequestTimeoutError(f"the file did not arrive within {UPLOAD_TIMEOUT_S:g} s") from None
    # A client that disconnects ends the body early. Half a file must not look like a whole one.
    if not form.is_complete:
        raise BadRequestError("the form is not complete: its closing boundary is missing")
    if form.upload.filename is None:
        raise BadRequestError("the form has no file: send it as the field file, with a filename", param="file")
    return form.upload


class _Form:
    """Takes the events of the parser for one form."""

    def __init__(self, file: BinaryIO, boundary: bytes, max_bytes: int, free_bytes: Callable[[], int]) -> None:
        self.upload = Upload()
        self.is_complete = False
        self._file = file
        self._max_bytes = max_bytes
        self._free_bytes = free_bytes
        self._allowed_bytes = 0
        """Size of the file up to which the free space was checked."""
        self._num_parts = 0
        self._header: tuple[bytearray, bytearray] = (bytearray(), bytearray())
        self._disposition = b""
        self._name = ""
        self._is_file = False
        self._value = bytearray()
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._on_part_begin,
                    "on_header_begin": self._on_header_begin,
                    "on_header_field": lambda data, start, end: self._on_header(0, data[start:end]),
                    "on_header_value": lambda data, start, end: self._on_header(1, data[start:end]),
                    "on_header_end": self._on_header_end,
                    "on_headers_finished": self._on_headers_finished,
                    "on_part_data": self._on_part_data,
                    "on_part_end": self._on_part_end,
                    "on_end": self._on_end,
                },
            )
        except FormParserError as exc:
            raise BadRequestError(f"the form cannot be read: {exc}") from exc

    def feed(self, piece: bytes) -> None:
        """Parse the next piece of the body. Raises `ApiError`."""
        try:
            self._parser.write(piece)
        except FormParserError as exc:
            raise BadRequestError(f"the form is malformed: {exc}") from exc

    def _on_part_begin(self) -> None:
        self._num_parts += 1
        if self._num_parts > _MAX_PARTS:
            raise BadRequestError(f"the form has more than {_MAX_PARTS} fields")
        self._disposition = b""
        self._value = bytearray()

    def _on_header_begin(self) -> None:
        self._header = (bytearray(), bytearray())

    def _on_header(self, part: int, data: bytes) -> None:
        self._header[part].extend(data)
        # Some versions of the parser have no limit of their own.
        if len(self._header[part]) > _MAX_FIELD_BYTES:
            raise BadRequestError(f"a header of the form has more than {_MAX_FIELD_BYTES} bytes")

    def _on_header_end(self) -> None:
        if self._header[0].lower() == b"content-disposition":
            self._disposition = bytes(self._header[1])

    def _on_headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode(errors="replace")
        filename = options.get(b"filename")
        self._is_file = self._name == "file" and filename is not None
        if self._is_file and filename is not None:
            # The content of a second file would be appended to the first one.
            if self.upload.filename is not None:
                raise BadRequestError("the form has several files: send one in each request", param="file")
            self.upload.filename = filename.decode(errors="replace")[:_MAX_NAME_CHARS]

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if not self._is_file:
            self._value += data[start:end]
            if len(self._value) > _MAX_FIELD_BYTES:
                raise BadRequestError(f"a field of the form has more than {_MAX_FIELD_BYTES} bytes")
            return
        self.upload.num_bytes += end - start
        if self.upload.num_bytes > self._max_bytes:
            raise RequestTooLargeError(
                f"the file has more than {self._max_bytes} bytes, the limit (--batch-max-file-bytes): split it"
            )
        if self.upload.num_bytes > self._allowed_bytes:
            self._check_space(end - start)
        self._file.write(data[start:end])

    def _check_space(self, num_bytes: int) -> None:
        """Raise `RequestTooLargeError` if the next `num_bytes` of the file find no room."""
        # `free_bytes` reads the size of this file from the file system.
        self._file.flush()
        free = self._free_bytes()
        if free < num_bytes:
            raise RequestTooLargeError(
                "the folder of batches, or the half of it that one API key may use, is full (--batch-max-bytes): delete"
                " files"
            )
        self._allowed_bytes = self.upload.num_bytes - num_bytes + min(free, SPACE_CHECK_BYTES)

    def _on_part_end(self) -> None:
        if not self._is_file:
            self.upload.fields[self._name] = self._value.decode(errors="replace")

    def _on_end(self) -> None:
        self.is_complete = True
