"""Token ids to text, as they come: what is still open (half a character, half a stop string) is not shown yet."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

_BROKEN = "�"


class IncrementalTokenizer(Protocol):
    """A tokenizer of transformers."""

    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool, spaces_between_special_tokens: bool
    ) -> str: ...


class StopMatch(NamedTuple):
    """`text` ends where the stop string `matched` begins, or after it."""

    text: str
    matched: str


class StopSearch:
    """The text of one sequence while it grows, searched for stop strings."""

    def __init__(
        self, stops: Sequence[str], *, include: bool, tokenizer: IncrementalTokenizer, skip_special_tokens: bool
    ) -> None:
        self._stops = stops
        self._include = include
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        self._text = ""
        self._prefix = self._read = 0
        """Ids before `_read` are in the text; decoding begins at `_prefix`, for tokens that depend on those before."""

    def push(self, token_id: int) -> StopMatch | None:
        """The earliest stop string that the text has now."""
        self._ids.append(token_id)
        known, grown = self._decode(self._prefix, self._read), self._decode(self._prefix, len(self._ids))
        if len(grown) <= len(known) or grown.endswith(_BROKEN):
            return None
        searched = max(0, len(self._text) - max(map(len, self._stops)) + 1)
        self._text += grown[len(known) :]
        self._prefix, self._read = self._read, len(self._ids)
        found = [(at, stop) for stop in self._stops if (at := self._text.find(stop, searched)) >= 0]
        if not found:
            return None
        at, stop = min(found)
        return StopMatch(self._text[: at + len(stop)] if self._include else self._text[:at], stop)

    def _decode(self, start: int, end: int) -> str:
        return self._tokenizer.decode(
            self._ids[start:end], skip_special_tokens=self._skip, spaces_between_special_tokens=True
        )
