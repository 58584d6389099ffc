"""Check every line of a batch's input file, and decide the order in which the lines run.

A large file takes seconds to read. Call `read_input` in a thread.
"""

import codecs
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from baton_serve.contracts.batch_lines import InvalidLineError, parse_line, prefix_key
from baton_serve.services.router.batch.records import BatchError
from baton_serve.services.router.batch.state_machine import MAX_ERRORS
from baton_serve.services.router.protocol.body_scan import check_counts
from baton_serve.services.router.protocol.errors import BadRequestError

_LINES_PER_REQUEST = 2
"""Largest number of lines, with empty ones, for each request that a file may have."""
_LINES_PER_PAUSE = 20
_PAUSE_S = 0.0005
"""Pause after `_LINES_PER_PAUSE` lines. In it the event loop gets the interpreter's lock, which this thread would
otherwise hold for 5 ms at a time: live requests would wait for it."""


@dataclass(frozen=True, slots=True)
class InputLine:
    """The position and length of one request in the input file, in bytes, and its `custom_id`."""

    custom_id: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class InputFile:
    """The requests of a batch's input file, in the order in which they run, and the errors found in the file."""

    lines: list[InputLine]
    errors: list[BatchError]


def read_input(
    path: Path,
    endpoint: str,
    *,
    max_lines: int,
    max_line_bytes: int,
    pause: Callable[[float], None] = time.sleep,
) -> InputFile:
    """Read and check the input file of a batch, whose lines must all call `endpoint`. Empty lines are skipped.

    Requests with equal beginnings of their prompts are next to each other in the result, so that cached prefixes are
    used before they are evicted. Reading ends after `MAX_ERRORS` errors. Raises `OSError` if the file cannot be read.
    """
    found: list[tuple[bytes, int, InputLine]] = []
    first_lines: dict[str, int] = {}
    errors: list[BatchError] = []
    for number, offset, line in _numbered(path, max_line_bytes):
        if len(errors) >= MAX_ERRORS:
            break
        if number % _LINES_PER_PAUSE == 0:
            # Other threads get the interpreter's lock.
            pause(_PAUSE_S)
        is_empty = not line.strip()
        if (too_many := _too_many(number, len(found) + (not is_empty), max_lines)) is not None:
            errors.append(too_many)
            break
        if is_empty:
            continue
        try:
            _check_size(line, max_line_bytes)
            request = parse_line(line, (endpoint,))
            if (first := first_lines.setdefault(request.custom_id, number)) != number:
                raise InvalidLineError(
                    f"line {first} has the same custom_id: each must be unique",
                    code="duplicate_custom_id",
                    param="custom_id",
                )
        except InvalidLineError as exc:
            errors.append(BatchError(exc.code, exc.message, number, exc.param))
            continue
        found.append((prefix_key(request.body), number, InputLine(request.custom_id, offset, len(line))))
    if not found and not errors:
        errors.append(BatchError("empty_file", "the input file has no request: write one JSON object per line"))
    # The number of the line decides between equal keys, so that the order is the same after a restart.
    found.sort(key=lambda one: one[:2])
    return InputFile([line for _, _, line in found], errors)


def _too_many(number: int, num_requests: int, max_lines: int) -> BatchError | None:
    """Return an error if line `number` makes the file longer than allowed (more than `max_lines` requests, or too many
    lines), or else None.
    """
    if num_requests > max_lines:
        message = f"the file has more than {max_lines} requests (--batch-max-requests): split it"
        return BatchError("too_many_requests", message, number)
    # A large file of empty lines would keep a thread for hours.
    if number > max_lines * _LINES_PER_REQUEST:
        message = f"the file has more than {max_lines * _LINES_PER_REQUEST} lines, many of them empty: remove these"
        return BatchError("too_many_lines", message, number)
    return None


def _check_size(line: bytes, max_line_bytes: int) -> None:
    """Raise `InvalidLineError` if a line has more than `max_line_bytes`, or more values than the endpoint would
    accept.
    """
    if len(line) > max_line_bytes:
        raise InvalidLineError(f"the line has more than {max_line_bytes} bytes (--max-request-bytes)")
    # The parser holds the interpreter's lock, and live requests would wait for it.
    try:
        check_counts(line, "the line")
    except BadRequestError as exc:
        raise InvalidLineError(str(exc), code="too_many_values") from exc


def _numbered(path: Path, max_line_bytes: int) -> Iterator[tuple[int, int, bytes]]:
    """Yield the number, the byte offset and the content of each line of a file. A line is cut after `max_line_bytes`,
    to bound memory. A byte order mark at the beginning of the file is skipped.
    """
    with path.open("rb") as file:
        mark = codecs.BOM_UTF8
        number, offset = 1, len(mark) if file.read(len(mark)) == mark else 0
        file.seek(offset)
        while line := file.readline(max_line_bytes + 1):
            yield number, offset, line
            number, offset = number + 1, offset + len(line)
            while not line.endswith(b"\n") and (line := file.readline(max_line_bytes)):
                offset += len(line)


def read_line(path: Path, line: InputLine) -> bytes:
    """Return the content of one line of the input file at `path`. Raises `OSError` if the file cannot be read."""
    with path.open("rb") as file:
        file.seek(line.offset)
        return file.read(line.length)
