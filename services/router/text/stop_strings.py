"""Ends a text at the first stop string, also when it spans tokens. Only text that may begin one is held back."""

from collections.abc import Sequence

import msgspec


class StopSearchResult(msgspec.Struct, frozen=True):
    """`text` may be sent. `matched` is the stop string that ended it."""

    text: str
    matched: str | None = None


class StopStrings:
    """One sequence's search. `include` keeps the stop string in the text."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = [stop for stop in stops if stop]
        self._include = include
        self._held = ""

    def push(self, text: str, *, is_active: bool = True) -> StopSearchResult:
        """Text that comes while `is_active` is false (too few tokens yet) cannot end the sequence."""
        if not self._stops:
            return StopSearchResult(text)
        if not is_active:
            sent, self._held = self._held + text, ""
            return StopSearchResult(sent)
        text = self._held + text
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._held = ""
            at, stop = min(found, key=lambda match: match[0])
            return StopSearchResult(text[: at + len(stop)] if self._include else text[:at], stop)
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return StopSearchResult(text[: len(text) - keep])

    def finish(self) -> str:
        """What was held back: the stop string never came."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
