"""Llama 3.2, Llama 4 and others: an answer that is a Python list of calls, `[name(key="value", other=3), …]`.

Only a text that begins with such a list is one. An argument is streamed once its value is whole.
"""

import ast
import re
import warnings

from baton_serve.services.router.text.scanning.characters import Characters, Scan, literal, skip_space
from baton_serve.services.router.text.scanning.json_text import to_json
from baton_serve.services.router.text.scanning.parts import Parts
from baton_serve.services.router.text.tool_calls.tools import Tools

_START, _END = "<|python_start|>", "<|python_end|>"
_NAME = re.compile(r"[A-Za-z_][\w.\-]*")
_KEY = re.compile(r"\s*([A-Za-z_]\w*)\s*=(.*)", re.DOTALL)
_CLOSES = {"(": ")", "[": "]", "{": "}"}
_MAX_NAME_CHARS = 256


def pythonic(text: Characters, out: Parts, tools: Tools) -> Scan[None]:
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
    """Whether a call began."""
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
    """One argument's source, and what ended it: a comma, the last parenthesis, or nothing at the end of the text."""
    held: list[str] = []
    closes: list[str] = []
    quote = ""
    while char := (yield from text.next()):
        if not closes and not quote and char in ",)":
            return "".join(held), char
        held.append(char)
        if quote:
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
    """`key=value` as a member of a JSON object; None when it is none.

    `accepts_all`: a value that is no literal becomes a string of its source, since the call has begun already.
    """
    match = _KEY.fullmatch(written)
    if match is None:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python does not know
            value = ast.literal_eval(match.group(2).strip())
        return f"{to_json(match.group(1))}: {to_json(value)}"
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        source = match.group(2).strip()
    if source in ("true", "false", "null"):  # models mix the languages
        return f"{to_json(match.group(1))}: {source}"
    return f"{to_json(match.group(1))}: {to_json(source)}" if accepts_all else None
