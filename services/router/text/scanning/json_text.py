"""Scans JSON that is still being generated, to find the end of a value. It checks only as much as is needed to find the
end of a value.
"""

import json
from collections.abc import Callable

from baton_serve.services.router.text.scanning.characters import Characters, Scan, skip_space

_CLOSES = {"{": "}", "[": "]"}


def json_string(text: Characters) -> Scan[str | None]:
    """Read the rest of a JSON string, whose opening quote has been read. Return its decoded value, or None if it is
    invalid or not complete.
    """
    raw = ['"']
    is_escaped = False
    while char := (yield from text.next()):
        raw.append(char)
        if is_escaped:
            is_escaped = False
        elif char == "\\":
            is_escaped = True
        elif char == '"':
            return _decoded("".join(raw))
    return None


def json_value(text: Characters, emit: Callable[[str], None]) -> Scan[None]:
    """Read the next JSON value, and pass its text to `emit` while it arrives.

    Objects, arrays and scalars are emitted as they are written. A string is decoded first: tool arguments that are sent
    as a string, as in OpenAI's API, contain JSON.
    """
    char = yield from skip_space(text)
    if char in _CLOSES:
        emit(char)
        yield from _container(text, emit, _CLOSES[char])
    elif char == '"':
        emit((yield from json_string(text)) or "")
    else:
        scalar = ""
        while char and char not in ",}]" and not char.isspace():
            scalar += char
            char = yield from text.next()
        text.back(char)
        emit(scalar)


def to_json(value: object) -> str:
    """Return `value` as JSON text. Characters outside of ASCII are not escaped.

    Raises `ValueError` or `TypeError` if JSON cannot express the value, and `RecursionError` if it is nested too deep.
    """
    # A lone surrogate cannot be encoded as UTF-8. It is written as an escape.
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if _is_utf8(text) else json.dumps(value, allow_nan=False)


def _container(text: Characters, emit: Callable[[str], None], close: str) -> Scan[None]:
    closes = [close]
    is_string = is_escaped = False
    while closes and (char := (yield from text.next())):
        emit(char)
        if is_escaped:
            is_escaped = False
        elif is_string:
            is_escaped, is_string = char == "\\", char != '"'
        elif char == '"':
            is_string = True
        elif char in _CLOSES:
            closes.append(_CLOSES[char])
        elif char == closes[-1]:
            closes.pop()


def _decoded(raw: str) -> str | None:
    # With `strict=False` a string may contain raw newlines and tabs, which models write.
    try:
        decoded = json.loads(raw, strict=False)
    except ValueError:
        return None
    assert isinstance(decoded, str)
    return decoded if _is_utf8(decoded) else decoded.encode("utf-8", "replace").decode()


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
