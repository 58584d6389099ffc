"""Parse a form with a file (multipart/form-data) that is in memory, and refuse forms that pages of other sites send."""

from collections.abc import Container
from urllib.parse import urlsplit

import msgspec
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from baton_serve.services.router.protocol.errors import BadRequestError, MediaTypeError, PermissionDeniedError

MAX_PARTS = 64
"""Largest number of fields of a form."""
MAX_HEADER_BYTES = 1024
"""Largest size of a header of a field."""
MAX_FIELD_BYTES = 64 * 1024
"""Largest size of a field without a filename."""


class Form(msgspec.Struct):
    """A form: the content of its file, None without one, and all values of each other field, by name."""

    file: bytes | None = None
    fields: dict[str, list[str]] = {}


def parse_form(content_type: str | None, body: bytes) -> Form:
    """Parse a form whose file is the field `file`.

    Raises `MediaTypeError` for another type of body, and `BadRequestError` for a form that is malformed or incomplete.
    """
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        raise MediaTypeError("the file must be sent as multipart/form-data (curl: -F file=@speech.wav -F model=NAME)")
    reader = _FormReader(boundary)
    try:
        reader.parser.write(body)
    except FormParserError as exc:
        raise BadRequestError(f"the form is malformed: {exc}") from exc
    # A client that disconnects ends the body early. Half a file must not look like a whole one.
    if not reader.is_complete:
        raise BadRequestError("the form is not complete: its closing boundary is missing")
    return reader.form


def check_origin(origin: str | None, host: str | None, allowed_origins: Container[str]) -> None:
    """Raise `PermissionDeniedError` if a page of another site sends the form.

    A browser sends a form to any server without asking it (CORS), so a foreign page could use this server.
    """
    if origin is None or "*" in allowed_origins or origin in allowed_origins:
        return
    # The page of this server itself has its own host as origin, whatever the name of the host.
    if urlsplit(origin).netloc != host:
        raise PermissionDeniedError(f"pages of {origin[:100]} may not send files (--allowed-origins)")


class _FormReader:
    """Takes the events of the parser for one form."""

    def __init__(self, boundary: bytes) -> None:
        self.form = Form()
        self.is_complete = False
        self._num_parts = 0
        self._header: tuple[bytearray, bytearray] = (bytearray(), bytearray())
        self._disposition = b""
        self._name = ""
        self._is_file = False
        self._value = bytearray()
        self.parser = MultipartParser(
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

    def _on_part_begin(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise BadRequestError(f"the form has more than {MAX_PARTS} fields")
        self._disposition = b""
        self._value = bytearray()

    def _on_header_begin(self) -> None:
        self._header = (bytearray(), bytearray())

    def _on_header(self, part: int, data: bytes) -> None:
        self._header[part].extend(data)
        # Some versions of the parser have no limit of their own.
        if len(self._header[part]) > MAX_HEADER_BYTES:
            raise BadRequestError(f"a header of the form has more than {MAX_HEADER_BYTES} bytes")

    def _on_header_end(self) -> None:
        if self._header[0].lower() == b"content-disposition":
            self._disposition = bytes(self._header[1])

    def _on_headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode(errors="replace")
        self._is_file = self._name == "file"
        if self._is_file and self.form.file is not None:
            raise BadRequestError("the form has several files: send one in each request", param="file")

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]
        # The size of the file is bounded with that of the body, which is read before it is parsed.
        if not self._is_file and len(self._value) > MAX_FIELD_BYTES:
            raise BadRequestError(f"a field of the form has more than {MAX_FIELD_BYTES} bytes")

    def _on_part_end(self) -> None:
        if self._is_file:
            self.form.file = bytes(self._value)
        else:
            # Lists are sent as several fields whose names end in brackets.
            name = self._name.removesuffix("[]")
            self.form.fields.setdefault(name, []).append(self._value.decode(errors="replace"))

    def _on_end(self) -> None:
        self.is_complete = True
