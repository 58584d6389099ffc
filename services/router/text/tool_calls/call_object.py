"""A call written as a JSON object with `name` and `arguments` (or `parameters`), in any order. Shared by formats."""

from collections.abc import Callable

from baton_serve.services.router.text.scanning.characters import Characters, Scan, skip_space
from baton_serve.services.router.text.scanning.json_text import json_string, json_value
from baton_serve.services.router.text.scanning.parts import Parts

_ARGUMENTS = ("arguments", "parameters")


def call_object(text: Characters, out: Parts, *, needs_arguments: bool = False) -> Scan[bool]:
    """Whether a call began. If not, what was read since the last mark is for the caller to make content of.

    Arguments are emitted as the model writes them, so they may be no valid JSON, as in OpenAI's API.
    """
    call = _Call(out)
    if (char := (yield from skip_space(text))) != "{":
        text.back(char)
        return False
    separator = ""
    while (char := (yield from skip_space(text))) != "}":
        if separator and char == separator:
            char = yield from skip_space(text)
        elif separator:
            text.back(char)
            return call.is_begun
        separator = ","
        if char != '"' or not (yield from _member(text, call)):
            text.back(char if char != '"' else "")
            return call.is_begun
    call.end(needs_arguments=needs_arguments)
    return call.is_begun


def call_list(text: Characters, out: Parts) -> Scan[bool]:
    """Calls between brackets, of which the first comes next. False when the last of them is broken: what was read since
    the mark is content then."""
    yield from text.next()
    while True:
        if not (yield from call_object(text, out)):
            return False
        text.mark()
        char = yield from skip_space(text)
        if char != ",":
            text.back("" if char == "]" else char)
            return True


def _member(text: Characters, call: "_Call") -> Scan[bool]:
    """One key and its value; the key's first quote has been taken. False when they are broken."""
    key = yield from json_string(text)
    char = yield from skip_space(text)
    if key is None or char != ":":
        text.back(char)
        return False
    if key == "name" and call.name is None:
        char = yield from skip_space(text)
        if char != '"':
            text.back(char)
            return False
        name = yield from json_string(text)
        return bool(name) and call.named(name or "")
    yield from json_value(text, call.arguments() if key in _ARGUMENTS else _ignore)
    return True


class _Call:
    """Begins as soon as both a name and arguments are there."""

    def __init__(self, out: Parts) -> None:
        self.name: str | None = None
        self.is_begun = False
        self._out = out
        self._held: str | None = None
        self._has_arguments = False

    def named(self, name: str) -> bool:
        self.name = name
        if self._held is not None:
            self._begin()
            self._emit(self._held)
        return True

    def arguments(self) -> Callable[[str], None]:
        if self._has_arguments:
            return _ignore
        self._has_arguments = True
        if self.name is None:
            self._held = ""
            return self._hold
        self._begin()
        return self._emit

    def end(self, *, needs_arguments: bool) -> None:
        if self.name is not None and not self.is_begun and not needs_arguments:
            self._begin()
            self._out.arguments("{}")

    def _begin(self) -> None:
        self._out.begin(self.name or "")
        self.is_begun = True

    def _emit(self, text: str) -> None:
        self._out.arguments("{}" if text == "null" else text)

    def _hold(self, text: str) -> None:
        self._held = (self._held or "") + text


def _ignore(_: str) -> None:
    """For members that say nothing about a call."""
