"""A text that comes in pieces, read by a generator that waits for the next character. Knows no format.

A scan is a generator: it waits for characters with `yield from text.next()` and returns its result. Since it never sees
where one piece ended and the next began, its output cannot depend on that.
"""

from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

T = TypeVar("T")

Scan = Generator[None, str, T]


class Characters:
    """`next` returns the empty string at the end, and from then on."""

    def __init__(self) -> None:
        self._returned: list[str] = []
        self._taken: list[str] = []
        self._is_over = False

    def next(self) -> Scan[str]:
        if self._returned:
            char = self._returned.pop()
        elif self._is_over:
            return ""
        else:
            char = yield
            if not char:
                self._is_over = True
                return ""
        self._taken.append(char)
        return char

    def back(self, text: str) -> None:
        """`text` was read last and will be read again."""
        if text:
            self._returned.extend(reversed(text))
            del self._taken[-len(text) :]

    def mark(self) -> None:
        self._taken.clear()

    def since_mark(self) -> str:
        return "".join(self._taken)


def skip_space(text: Characters) -> Scan[str]:
    """The first character that is no white space, which is taken."""
    while (char := (yield from text.next())).isspace():
        pass
    return char


def literal(text: Characters, wanted: str) -> Scan[bool]:
    """Takes `wanted` if it is what comes next, else nothing."""
    seen = ""
    for expected in wanted:
        char = yield from text.next()
        seen += char
        if char != expected:
            text.back(seen)
            return False
    return True


def until(text: Characters, emit: Callable[[str], None], markers: Sequence[str]) -> Scan[str]:
    """Emits what comes before the first marker; returns that marker, taken, or the empty string at the end.

    No marker may be the beginning of another.
    """
    held = ""
    firsts = {marker[0] for marker in markers}
    while char := (yield from text.next()):
        text.mark()
        if not held and char not in firsts:
            emit(char)
            continue
        held += char
        while held and not any(marker.startswith(held) for marker in markers):
            emit(held[0])
            held = held[1:]
        if held in markers:
            return held
    emit(held)
    return ""


def collect(text: Characters, markers: Sequence[str], *, longest: int = 4096) -> Scan[tuple[str, str]]:
    """What comes before the first marker, and that marker: empty at the end or after `longest` characters."""
    held: list[str] = []
    tail = ""
    size = max(len(marker) for marker in markers)
    while len(held) < longest and (char := (yield from text.next())):
        held.append(char)
        tail = (tail + char)[-size:]
        marker = next((marker for marker in markers if tail.endswith(marker)), None)
        if marker is not None:
            return "".join(held)[: -len(marker)], marker
    return "".join(held), ""
