"""Tool parser of Llama 3.2, Llama 4 and others: a Python list of calls, `[name(key="value", other=3), …]`.

A text has calls only if it begins with such a list. An argument is streamed when its value is complete, because an
incomplete Python literal cannot be converted to JSON.
"""

import ast
import re
import warnings

from baton_serve.services.router.text.scanning.characters import Characters, Scan, literal, skip_space
from baton_serve.services.router.text.scanning.json_text import to_json
from baton_serve.services.router.text.scanning.message_parts import Parts
from baton_serve.services.router.text.tool_calls.parameter_types import Tools

_START, _END = "<|python_start|>", "<|python_end|>"
_NAME = re.compile(r"[A-Za-z_][\w.\-]*")
_KEY = re.compile(r"\s*([A-Za-z_]\w*)\s*=(.*)", re.DOTALL)
_CLOSES = {"(": ")", "[": "]", "{": "}"}
_MAX_NAME_CHARS = 256


def pythonic(text: Characters, out: Parts, tools: Tools) -> Scan[None]:
    """Read an answer and emit its parts to `out`: tool calls if it begins with a list of calls in Python's syntax,
    otherwise content.
    """
    text.mark()
    text.back((yield from skip_space(text)))
    yield from literal(text, _START)
    char = yield from skip_space(text)
    while char == "[" or (char == "," and out.num_calls):
        if not (yield from _call(text, out)):
            out.content(text.since_mark())
            return
        text.mark()
        char = yield from skip_space(text)
    if not out.num_calls:
        out.content(text.since_mark())
    elif char == "]":
        yield from literal(text, _END)
    else:
        text.back(char)


def _call(text: Characters, out: Parts) -> Scan[bool]:
    """Read one tool call in Python's syntax and emit it to `out`. Return whether a call was found."""
    name = yield from skip_space(text)
    while name and _NAME.fullmatch(name) and len(name) < _MAX_NAME_CHARS:
        char = yield from text.next()
        if char == "(":
            return (yield from _arguments(text, out, name))
        name += char
        if not char:
            break
    return False


def _arguments(text: Characters, out: Parts, name: str) -> Scan[bool]:
    # The call begins with its first valid argument. Until then nothing has been emitted, and the text can still become
    # content.
    is_begun = False
    while True:
        written, end = yield from _written(text)
        is_none = end == ")" and not written.strip()
        member = "" if is_none else _member(written, accepts_all=is_begun)
        if not end or (member is None and not is_begun):
            return is_begun
        if not is_begun:
            out.begin(name)
        if member is not None:
            separator = "" if is_none else ", " if is_begun else ""
            out.arguments(f"{separator if is_begun else '{'}{member}")
        is_begun = True
        if end == ")":
            out.arguments("}")
            return True


def _written(text: Characters) -> Scan[tuple[str, str]]:
    """Return the source text of one argument, and the character that ended it: `,` or `)`, or "" at the end of the
    text.
    """
    held: list[str] = []
    closes: list[str] = []
    quote = ""
    while char := (yield from text.next()):
        if not closes and not quote and char in ",)":
            return "".join(held), char
        held.append(char)
        if quote:
            # An escaped quote does not end the string.
            if char == "\\":
                held.append((yield from text.next()))
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char in _CLOSES:
            closes.append(_CLOSES[char])
        elif closes and char == closes[-1]:
            closes.pop()
    return "".join(held), ""


def _member(written: str, *, accepts_all: bool) -> str | None:
    """Convert a Python keyword argument (`name=value`) to a member of a JSON object, or return None if it does not
    parse.

    With `accepts_all`, a value that is not a literal becomes a JSON string of its source text: the start of the call
    has been streamed already and cannot be taken back.
    """
    match = _KEY.fullmatch(written)
    if match is None:
        return None
    try:
        with warnings.catch_warnings():
            # Python warns about unknown escapes such as "\d".
            warnings.simplefilter("ignore")
            value = ast.literal_eval(match.group(2).strip())
        return f"{to_json(match.group(1))}: {to_json(value)}"
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        source = match.group(2).strip()
    # Models mix up Python and JSON.
    if source in ("true", "false", "null"):
        return f"{to_json(match.group(1))}: {source}"
    return f"{to_json(match.group(1))}: {to_json(source)}" if accepts_all else None
