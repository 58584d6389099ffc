"""Decides whether a JSON object is a tool call, its name and its arguments, for several tool parsers."""

from collections.abc import Callable

from baton_serve.services.router.text.scanning.characters import Characters, Scan, skip_space
from baton_serve.services.router.text.scanning.json_text import json_string, json_value
from baton_serve.services.router.text.scanning.message_parts import Parts

_ARGUMENTS = ("arguments", "parameters")


def call_object(text: Characters, out: Parts, *, needs_arguments: bool = False) -> Scan[bool]:
    """Read one tool call, a JSON object, and emit it to `out`. Return whether it is one: its name and its arguments
    were found.

    If it is not, the caller must emit the text since the last `text.mark()` as content. Arguments are emitted as the
    model wrote them, so they may be invalid JSON, as in OpenAI's API. With `needs_arguments`, an object with only a
    name is not a call.
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
            # The object is broken. A call that has begun has been streamed already and cannot be taken back.
            text.back(char)
            return call.is_begun
        separator = ","
        if char != '"' or not (yield from _member(text, call)):
            text.back(char if char != '"' else "")
            return call.is_begun
    call.end(needs_arguments=needs_arguments)
    return call.is_begun


def call_list(text: Characters, out: Parts) -> Scan[bool]:
    """Read a JSON list of tool calls, whose opening bracket comes next, and emit them to `out`.

    Return False if an element is not a call: the caller must then emit the text since the last `text.mark()` as
    content.
    """
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
    """Read one key of a call's JSON object, whose opening quote has been read, and its value. Return False if they are
    not valid JSON.
    """
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
    """One tool call that is being read. It is emitted as soon as its name and the beginning of its arguments are known.

    Arguments that come before the name are held back.
    """

    def __init__(self, out: Parts) -> None:
        self.name: str | None = None
        self.is_begun = False
        self._out = out
        self._held: str | None = None
        self._has_arguments = False

    def named(self, name: str) -> bool:
        """Set the function's name, and begin to emit the call if its arguments have been read already. Return True."""
        self.name = name
        if self._held is not None:
            self._begin()
            self._emit(self._held)
        return True

    def arguments(self) -> Callable[[str], None]:
        """Return the function to which the caller passes the text of the arguments, which it reads next."""
        # An object may have both `arguments` and `parameters`: the first one counts.
        if self._has_arguments:
            return _ignore
        self._has_arguments = True
        if self.name is None:
            self._held = ""
            return self._hold
        self._begin()
        return self._emit

    def end(self, *, needs_arguments: bool) -> None:
        """End the call. A call with a name but no arguments gets empty arguments; with `needs_arguments` it is not a
        call and is dropped.
        """
        if self.name is not None and not self.is_begun and not needs_arguments:
            self._begin()
            self._out.arguments("{}")

    def _begin(self) -> None:
        self._out.begin(self.name or "")
        self.is_begun = True

    def _emit(self, text: str) -> None:
        # Clients parse the arguments as an object.
        self._out.arguments("{}" if text == "null" else text)

    def _hold(self, text: str) -> None:
        self._held = (self._held or "") + text


def _ignore(_: str) -> None:
    """Ignore the value of a key that is not part of a tool call."""
