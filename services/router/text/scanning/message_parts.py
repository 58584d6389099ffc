"""Collects the parts of an answer (content, reasoning, tool calls) that parsers find. It is independent of formats and
of HTTP.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from baton_serve.services.router.text.scanning.characters import Characters, Scan


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of an answer's text that is neither reasoning nor a tool call."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the reasoning that the model writes before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """A piece of a tool call in an answer. The first piece of a call has its name; later ones (`name` is None) only
    continue the arguments.
    """

    index: int
    name: str | None
    arguments: str


Part: TypeAlias = Content | Reasoning | Call


@dataclass(slots=True)
class _Open:
    """A part of an answer that is being collected. `index` and `name` are set for a tool call."""

    kind: type[Content] | type[Reasoning] | type[Call]
    index: int = 0
    name: str | None = None
    texts: list[str] = field(default_factory=list)

    def close(self) -> Part:
        text = "".join(self.texts)
        return Call(self.index, self.name, text) if self.kind is Call else self._plain(text)

    def _plain(self, text: str) -> Part:
        return Content(text) if self.kind is Content else Reasoning(text)


class Parts:
    """Collects the parts of an answer (content, reasoning, tool calls) that scans emit, until `take` returns them.

    White space and markup are held back until the next part is known: before a tool call they are dropped, and in a
    text without tool calls they are content.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        self._open: list[_Open] = []
        self._held: list[str] = []
        self._held_reasoning: list[str] = []
        self._has_reasoning = False

    def content(self, text: str) -> None:
        """Append text to the content of the answer."""
        for char in text:
            if char.isspace():
                self._held.append(char)
            else:
                self._append(Content, "".join(self._held) + char)
                self._held.clear()

    def markup(self, text: str) -> None:
        """Append markup that belongs to a tool call. It becomes content unless a call comes next."""
        self._held.append(text)

    def reasoning(self, text: str) -> None:
        """Append text to the reasoning. White space at the beginning and the end of the reasoning is dropped."""
        for char in text:
            if char.isspace():
                if self._has_reasoning:
                    self._held_reasoning.append(char)
            else:
                self._append(Reasoning, "".join(self._held_reasoning) + char)
                self._held_reasoning.clear()
                self._has_reasoning = True

    def within_reasoning(self) -> None:
        """Note that the reasoning began in the prompt, so that white space at the beginning of the answer is kept: it
        separates words.
        """
        self._has_reasoning = True

    def begin(self, name: str) -> None:
        """Begin the next tool call, of the function `name`. White space and markup that are held back are dropped."""
        self._held.clear()
        self._open.append(_Open(Call, self.num_calls, name))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """Append text to the arguments of the tool call that began last."""
        if text:
            self._append(Call, text)

    def finish(self) -> None:
        """Add white space and markup that are held back to the content, unless the answer has tool calls. Call it at
        the end of the text.
        """
        if self._held and not self.num_calls:
            self._append(Content, "".join(self._held))
        self._held.clear()

    def take(self) -> list[Part]:
        """Return the parts that were emitted since the last `take`, and forget them."""
        taken, self._open = self._open, []
        return [part.close() for part in taken]

    def _append(self, kind: type[Content] | type[Reasoning] | type[Call], text: str) -> None:
        if not self._open or self._open[-1].kind is not kind:
            self._open.append(_Open(kind, self.num_calls - 1))
        self._open[-1].texts.append(text)


ScanText = Callable[[Characters, Parts], Scan[None]]
"""A function that scans a whole text and emits its parts."""


class PartReader:
    """Divides the text of one sequence into content, reasoning and tool calls, while it arrives. It runs one scan (a
    parser of one format); text that remains when the scan has ended is content.
    """

    def __init__(self, scan: ScanText) -> None:
        self._text = Characters()
        self._parts = Parts()
        self._run = self._all(scan)
        # A generator must run up to its first `yield` before it can be sent a character.
        next(self._run)

    def push(self, text: str) -> list[Part]:
        """Parse the next piece of the text and return what it adds: new parts, or further pieces of a part."""
        for char in text:
            self._run.send(char)
        return self._parts.take()

    def finish(self) -> list[Part]:
        """Return the parts that are still held back. Call it once, at the end of the text."""
        try:
            self._run.send("")
        except StopIteration:
            self._parts.finish()
        return self._parts.take()

    def _all(self, scan: ScanText) -> Scan[None]:
        yield from scan(self._text, self._parts)
        while char := (yield from self._text.next()):
            self._text.mark()
            self._parts.content(char)


def merged(parts: Sequence[Part]) -> list[Part]:
    """Join the pieces of a complete answer: the result has at most one part of reasoning and one of content, and one
    for each tool call.
    """
    content = "".join(part.text for part in parts if isinstance(part, Content))
    reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
    calls: dict[int, list[Call]] = {}
    for part in parts:
        if isinstance(part, Call):
            calls.setdefault(part.index, []).append(part)
    texts: list[Part] = [Reasoning(reasoning)] if reasoning else []
    return [*texts, *([Content(content)] if content else []), *map(_one, calls.values())]


def _one(pieces: Sequence[Call]) -> Call:
    return replace(pieces[0], arguments="".join(piece.arguments for piece in pieces))
