"""Parse forms with a file (multipart/form-data), and refuse forms that pages of other sites send."""

from abc import ABC, abstractmethod
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
SEVERAL_FILES = "the form has several files: send one in each request"


class Form(msgspec.Struct):
    """The content of a form (multipart/form-data): its file, None without one, and all values of each other field, by
    name.
    """

    file: bytes | None = None
    fields: dict[str, list[str]] = {}


def parse_form(content_type: str | None, body: bytes) -> Form:
    """Parse the body of a request that sends a form whose file is the field `file`. `content_type` is the request's
    header.

    Raises `MediaTypeError` for another type of body, and `BadRequestError` for a form that is malformed or incomplete.
    """
    reader = _FormInMemory(form_boundary(content_type, "-F file=@speech.wav -F model=NAME"))
    reader.feed(body)
    reader.check_complete()
    return reader.form


def form_boundary(content_type: str | None, example: str) -> bytes:
    """Return the boundary between the parts of a form, from the header `Content-Type`.

    `example` is the options of curl that the message of `MediaTypeError` names, for any other type of body.
    """
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        raise MediaTypeError(f"the file must be sent as multipart/form-data (curl: {example})")
    return boundary


def check_origin(origin: str | None, host: str | None, allowed_origins: Container[str]) -> None:
    """Raise `PermissionDeniedError` if a web page of another site sends the form. `origin` and `host` are the headers
    of the request.

    A browser sends a form to any server without asking it (CORS), so a foreign page could use this server.
    """
    if origin is None or "*" in allowed_origins or origin in allowed_origins:
        return
    # The page of this server itself has its own host as origin, whatever the name of the host.
    if urlsplit(origin).netloc != host:
        raise PermissionDeniedError(f"pages of {origin[:100]} may not send files (--allowed-origins)")


class FormReader(ABC):
    """Parses one form, piece by piece. A subclass keeps the content of its file and its other fields.

    Each limit is checked before more of the form is kept. Parts are named by their header `Content-Disposition`.
    """

    def __init__(self, boundary: bytes, *, max_parts: int, max_field_bytes: int) -> None:
        self.is_complete = False
        """True after the closing boundary. Without it the form was cut, and half a file looks like a whole one."""
        self._max_parts = max_parts
        self._max_field_bytes = max_field_bytes
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
        """Parse the next piece of the form's body. Raises `BadRequestError` if the form is malformed, and `ApiError` if
        it exceeds a limit.
        """
        try:
            self._parser.write(piece)
        except FormParserError as exc:
            raise BadRequestError(f"the form is malformed: {exc}") from exc

    def check_complete(self) -> None:
        """Raise `BadRequestError` if the form has no end, because the client disconnected while it sent the form."""
        if not self.is_complete:
            raise BadRequestError("the form is not complete: its closing boundary is missing")

    @abstractmethod
    def begin_part(self, name: str, filename: str | None) -> bool:
        """Begin the form's part with this name. `filename` is None if the part's header names no file.

        Return whether the part is the file: its content goes to `add_to_file`, that of other parts to `add_field`.
        """

    @abstractmethod
    def add_to_file(self, data: bytes) -> None:
        """Keep `data`, the next piece of the content of the form's file."""

    @abstractmethod
    def add_field(self, name: str, value: str) -> None:
        """Keep a field of the form that is not the file. `value` has at most `max_field_bytes` bytes."""

    def _on_part_begin(self) -> None:
        self._num_parts += 1
        if self._num_parts > self._max_parts:
            raise BadRequestError(f"the form has more than {self._max_parts} fields")
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
        filename = options.get(b"filename")
        self._is_file = self.begin_part(self._name, None if filename is None else filename.decode(errors="replace"))

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self.add_to_file(data[start:end])
            return
        self._value += data[start:end]
        if len(self._value) > self._max_field_bytes:
            raise BadRequestError(f"a field of the form has more than {self._max_field_bytes} bytes")

    def _on_part_end(self) -> None:
        if not self._is_file:
            self.add_field(self._name, self._value.decode(errors="replace"))

    def _on_end(self) -> None:
        self.is_complete = True


class _FormInMemory(FormReader):
    """Parses a form and keeps the content of its file in memory. The size of the body was limited before it was
    read.
    """

    def __init__(self, boundary: bytes) -> None:
        super().__init__(boundary, max_parts=MAX_PARTS, max_field_bytes=MAX_FIELD_BYTES)
        self._file: bytearray | None = None
        self._fields: dict[str, list[str]] = {}

    @property
    def form(self) -> Form:
        """The file and the fields of the form that were parsed so far."""
        return Form(None if self._file is None else bytes(self._file), self._fields)

    def begin_part(self, name: str, filename: str | None) -> bool:
        if name != "file":
            return False
        if self._file is not None:
            raise BadRequestError(SEVERAL_FILES, param="file")
        self._file = bytearray()
        return True

    def add_to_file(self, data: bytes) -> None:
        assert self._file is not None, "begin_part creates it"
        self._file += data

    def add_field(self, name: str, value: str) -> None:
        # Lists are sent as several fields whose names end in brackets.
        self._fields.setdefault(name.removesuffix("[]"), []).append(value)
