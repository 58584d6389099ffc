"""Lets parsers read text that arrives in pieces, and holds back what may begin a marker. It is independent of all
formats.

A scan is a generator: it waits for the next character with `yield from text.next()`, and returns its result. It never
sees where a piece ended, so its output cannot depend on that.
"""

from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

T = TypeVar("T")

Scan = Generator[None, str, T]
"""A generator that is sent one character at a time, or the empty string at the end of the text, and returns a `T`."""


class Characters:
    """The text of one sequence that arrives in pieces, for generators (scans) that read it character by character. A
    scan can put characters back and read them again.
    """

    def __init__(self) -> None:
        self._returned: list[str] = []
        self._taken: list[str] = []
        self._is_over = False

    def next(self) -> Scan[str]:
        """Wait for the next character and return it. At the end of the text, and after it, return the empty string."""
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
        """Put `text`, which must be the characters read last, back, so that they are read again."""
        if text:
            # The list is a stack: its last element is read first.
            self._returned.extend(reversed(text))
            del self._taken[-len(text) :]

    def mark(self) -> None:
        """Start to record the characters that are read from now on, for `since_mark`."""
        self._taken.clear()

    def since_mark(self) -> str:
        """Return the characters that were read since the last `mark`. A scan that does not find what it expects passes
        them on as content.
        """
        return "".join(self._taken)


def skip_space(text: Characters) -> Scan[str]:
    """Read white space and the first character after it, and return that character ("" at the end of the text)."""
    while (char := (yield from text.next())).isspace():
        pass
    return char


def literal(text: Characters, wanted: str) -> Scan[bool]:
    """Read the text `wanted` if it comes next, and return True. Otherwise read nothing and return False."""
    seen = ""
    for expected in wanted:
        char = yield from text.next()
        seen += char
        if char != expected:
            text.back(seen)
            return False
    return True


def until(text: Characters, emit: Callable[[str], None], markers: Sequence[str]) -> Scan[str]:
    """Read up to the first of the `markers`. Pass the text before it to `emit`, and return the marker, which is read
    too, or "" at the end of the text.

    No marker may be a beginning of another one. Characters that may belong to a marker are held back until it is clear.
    """
    held = ""
    firsts = {marker[0] for marker in markers}
    while char := (yield from text.next()):
        # Nothing that is emitted is needed again. Without the mark the record would grow with the text.
        text.mark()
        if not held and char not in firsts:
            emit(char)
            continue
        held += char
        # A marker may begin within the beginning of another that failed, as in "<<tool_call>": drop one character at a
        # time.
        while held and not any(marker.startswith(held) for marker in markers):
            emit(held[0])
            held = held[1:]
        if held in markers:
            return held
    emit(held)
    return ""


def collect(text: Characters, markers: Sequence[str], *, longest: int = 4096) -> Scan[tuple[str, str]]:
    """Read up to the first of the `markers`. Return the text before it, and the marker.

    The marker is "" if the text ends first or has more than `longest` characters. The bound keeps a broken answer from
    being held back as a whole.
    """
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
