"""Count the objects, strings and values in a JSON body before it is parsed, and refuse bodies with too many.

An empty object takes two bytes of a body but 64 bytes of memory. A parser cannot be interrupted while it holds the
interpreter's lock, so a body that would take too much time or memory must be found before the parser starts.

Parses JSON that requests contain as strings: arguments of earlier tool calls, and schemas.

It uses pydantic's parser, as for the body itself, so both are nested at most 200 levels deep. Code that walks such a
value recursively therefore stays below Python's recursion limit. The parser also rejects lone surrogates in strings,
which could not be encoded as UTF-8 later.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from baton_serve.services.router.protocol.errors import BadRequestError
from baton_serve.services.router.protocol.request_bounds import MAX_NUMBERS, MAX_OBJECTS, MAX_TEXTS


class TooDeepError(ValueError):
    """A JSON text is nested more than 200 levels deep."""


def parsed(text: str) -> Any:
    """Parse a JSON text and return its value.

    Raises `ValueError` if the text is not valid JSON, and its subclass `TooDeepError` if it is nested too deeply.
    """
    try:
        # By default pydantic also accepts NaN and Infinity, which are not JSON.
        return from_json(text, allow_inf_nan=False)
    except ValueError as exc:
        # pydantic_core raises ValueError for every error: only the message distinguishes them.
        if str(exc).startswith("recursion limit exceeded"):
            raise TooDeepError("JSON is nested more than 200 levels deep") from exc
        raise


UNCOUNTED_BYTES = 64 * 1024
"""Size up to which a body is not counted: whatever it contains, it is parsed in a few milliseconds."""

_PIECE_BYTES = 64 * 1024
"""Size of the pieces in which a body is counted. One piece takes at most 0.5 ms; other threads run between pieces."""


@dataclass(slots=True)
class Counts:
    """The numbers of values in a JSON text: objects and lists, strings, and commas (`items`), one of which stands
    between any two values.
    """

    objects: int = 0
    texts: int = 0
    items: int = 0


def check_counts(body: bytes, what: str = "the body") -> None:
    """Raise `BadRequestError` if a JSON text has more values than the limits allow, before it is parsed. `what` names
    the text in the error message.

    The text need not be valid JSON: the parser that comes next reports such errors.
    """
    if len(body) <= UNCOUNTED_BYTES:
        return
    counts = Counts()
    for _ in count(body, counts, piece_bytes=_PIECE_BYTES):
        _check(counts, what)


def count(body: bytes, counts: Counts, *, piece_bytes: int) -> Iterator[None]:
    """Add the numbers of values in the JSON text `body` to `counts`, in pieces of `piece_bytes` bytes. The iterator
    yields after each piece.
    """
    is_text = False
    at = 0
    while at < len(body):
        end = _end_of_piece(body, at, piece_bytes)
        is_text = _count(body[at:end], counts, is_text=is_text)
        yield
        at = end


def _end_of_piece(body: bytes, start: int, piece_bytes: int) -> int:
    """Return the end of the piece that begins at byte `start`, so that no escape sequence of the JSON text is cut in
    two.
    """
    # An odd number of backslashes at the end means that the last one escapes the next byte: take that byte as well.
    end = min(start + piece_bytes, len(body))
    backslashes = end - start - len(body[start:end].rstrip(b"\\"))
    return min(end + backslashes % 2, len(body))


def _count(piece: bytes, counts: Counts, *, is_text: bool) -> bool:
    """Add the numbers of values in one piece of a JSON text to `counts`. Return whether the piece ends within a string.

    `is_text` says whether the piece begins within a string.
    """
    # Remove escaped backslashes before escaped quotes: in `\\"` the quote ends the string.
    if b"\\" in piece:
        piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
    # Without escapes each quote begins or ends a string, so every second part lies outside of strings. `split` and
    # `count` run in C; a loop over the bytes would be far slower.
    parts = piece.split(b'"')
    outside = b"".join(parts[1::2] if is_text else parts[::2])
    # A string is counted at its opening quote, so one that crosses the border of two pieces counts once.
    counts.texts += (len(parts) - is_text) // 2
    counts.objects += outside.count(b"{") + outside.count(b"[")
    counts.items += outside.count(b",")
    return is_text ^ (len(parts) % 2 == 0)


def _check(counts: Counts, what: str) -> None:
    for number, limit, name in (
        (counts.objects, MAX_OBJECTS, "objects and lists"),
        (counts.texts, MAX_TEXTS, "strings"),
        (counts.items, MAX_NUMBERS, "values"),
    ):
        if number > limit:
            raise BadRequestError(
                f"{what} has more than {limit} {name}, the limit of this server: split it into several requests",
                code="too_many_values",
            )
