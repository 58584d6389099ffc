"""Counts what a body of JSON would become, before it becomes that.

An empty object takes two bytes of a body and 64 of memory, and an allocation. No parser can be interrupted: what is
too much must be known before one begins.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from baton_serve.services.router.protocol.errors import BadRequestError
from baton_serve.services.router.protocol.sizes import MAX_NUMBERS, MAX_OBJECTS, MAX_TEXTS

UNCOUNTED_BYTES = 64 * 1024
"""Shorter bodies are parsed in a few milliseconds, whatever is in them."""

_PIECE_BYTES = 64 * 1024
"""Counted in 0.5 ms at most; other threads run between two pieces."""


@dataclass(slots=True)
class Counts:
    """`items`: commas, of which there is one between any two values."""

    objects: int = 0
    texts: int = 0
    items: int = 0


def check_counts(body: bytes, what: str = "the body") -> None:
    """Raises `BadRequestError` as soon as there is too much of something. Need not be JSON: a parser will say so."""
    if len(body) <= UNCOUNTED_BYTES:
        return
    counts = Counts()
    for _ in count(body, counts, piece_bytes=_PIECE_BYTES):
        _check(counts, what)


def count(body: bytes, counts: Counts, *, piece_bytes: int) -> Iterator[None]:
    """Adds what is in `body` to `counts`, piece by piece."""
    is_text = False
    at = 0
    while at < len(body):
        end = _end_of_piece(body, at, piece_bytes)
        is_text = _count(body[at:end], counts, is_text=is_text)
        yield
        at = end


def _end_of_piece(body: bytes, start: int, piece_bytes: int) -> int:
    """A piece ends with no backslash, so that no escape sequence is cut in two; one of backslashes alone has an even
    number of them."""
    end = min(start + piece_bytes, len(body))
    backslashes = end - start - len(body[start:end].rstrip(b"\\"))
    return min(end + backslashes % 2, len(body))


def _count(piece: bytes, counts: Counts, *, is_text: bool) -> bool:
    """Adds what is in `piece`, which begins within a text if `is_text`. Returns whether it ends within one."""
    if b"\\" in piece:
        piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
    parts = piece.split(b'"')
    outside = b"".join(parts[1::2] if is_text else parts[::2])
    # The first quote of a text counts it.
    counts.texts += (len(parts) - is_text) // 2
    counts.objects += outside.count(b"{") + outside.count(b"[")
    counts.items += outside.count(b",")
    return is_text ^ (len(parts) % 2 == 0)


def _check(counts: Counts, what: str) -> None:
    for number, limit, name in (
        (counts.objects, MAX_OBJECTS, "objects and lists"),
        (counts.texts, MAX_TEXTS, "texts and names"),
        (counts.items, MAX_NUMBERS, "values"),
    ):
        if number > limit:
            raise BadRequestError(
                f"{what} has more than {limit} {name}, the limit of this server: send several requests",
                code="too_many_values",
            )
