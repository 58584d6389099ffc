"""Decides where an answer is cut at a stop string, and how much text is held back because it may begin one."""

from array import array
from collections.abc import Sequence
from functools import lru_cache

import msgspec


class StopSearchResult(msgspec.Struct, frozen=True):
    """The result of searching a piece of text for stop strings: `text` may be sent to the client, and `matched` is the
    stop string that ended the sequence, or None.
    """

    text: str
    matched: str | None = None


class _StopPattern:
    """A stop string, prepared for a search by the algorithm of Knuth, Morris and Pratt.

    The search takes constant time per character on average, whatever the text is. A search that compares every end of
    the text with every beginning of a long stop string would take seconds for a text that is chosen for it.
    """

    __slots__ = ("_borders", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        # Entry k belongs to the beginning of k characters. Entries are added when a text has matched that far: most
        # texts match only a few characters.
        self._borders = array("H", [0, 0])

    def advance(self, num_matched: int, char: str) -> int:
        """Return with how many of its first characters the stop string matches the end of the text after the next
        character `char`. Before `char` it matched with `num_matched`.
        """
        text = self.text
        if num_matched == len(text):
            num_matched = self.border(num_matched)
        while num_matched and text[num_matched] != char:
            num_matched = self.border(num_matched)
        return num_matched + (text[num_matched] == char)

    def border(self, length: int) -> int:
        """Return the length of the longest string that is both a beginning and an end of `text[:length]`, but not all
        of it.
        """
        text, borders = self.text, self._borders
        while len(borders) <= length:
            last = len(borders) - 1
            border = borders[last]
            while border and text[last] != text[border]:
                border = borders[border]
            borders.append(border + (text[last] == text[border]))
        return borders[length]


@lru_cache(maxsize=1024)
def _pattern(stop: str) -> _StopPattern:
    """Return the prepared search for a stop string. It is cached, so that the sequences of a request share it."""
    return _StopPattern(stop)


class StopStrings:
    """Searches the text of one sequence for stop strings, piece by piece.

    A stop string may be spread over several pieces, so an end of the text that could begin one is held back. With
    `include` the stop string stays in the text.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._patterns = [_pattern(stop) for stop in stops if stop]
        self._num_matched = [0] * len(self._patterns)
        """Length of the longest beginning of each stop string with which the text so far ends."""
        self._include = include
        self._held = ""

    def push(self, text: str, *, is_active: bool = True) -> StopSearchResult:
        """Search the next piece of text. Return the text that may be sent, and the stop string if one was found.

        With `is_active` false (at most `min_tokens` tokens so far) the piece cannot end the sequence. As in vLLM, a
        stop string counts if it begins in such a piece and ends in a later, active one.
        """
        if not self._patterns:
            return StopSearchResult(text)
        ends = [self._search(i, text) for i in range(len(self._patterns))]
        num_held = len(self._held)
        text = self._held + text
        found = [
            (num_held + end - len(pattern.text), pattern.text)
            for end, pattern in zip(ends, self._patterns, strict=True)
            if end is not None
        ]
        if found and is_active:
            self._held = ""
            at, stop = min(found, key=lambda match: match[0])
            return StopSearchResult(text[: at + len(stop)] if self._include else text[:at], stop)
        keep = max(self._num_matched)
        self._held = text[len(text) - keep :]
        return StopSearchResult(text[: len(text) - keep])

    def finish(self) -> str:
        """Return the text that was held back because it could begin a stop string. Call it when the sequence has ended
        without one.
        """
        text, self._held = self._held, ""
        return text

    def _search(self, i: int, piece: str) -> int | None:
        """Search a piece for the stop string with index `i`. Return the position in the piece after its first
        occurrence, or None.
        """
        pattern, num_matched = self._patterns[i], self._num_matched[i]
        # The fast path of most pieces: nothing has matched, and the stop string cannot begin here.
        if not num_matched and pattern.text[0] not in piece:
            return None
        first_end = None
        for at, char in enumerate(piece):
            num_matched = pattern.advance(num_matched, char)
            if num_matched == len(pattern.text) and first_end is None:
                first_end = at + 1
        # A whole match is not held back, but an end of it may begin another one.
        if num_matched == len(pattern.text):
            num_matched = pattern.border(num_matched)
        self._num_matched[i] = num_matched
        return first_end
