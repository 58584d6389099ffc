"""JSON that is still being written. Checks no more than is needed to know where a value ends."""

import json
from collections.abc import Callable

from baton_serve.services.router.text.scanning.characters import Characters, Scan, skip_space

_CLOSES = {"{": "}", "[": "]"}


def json_string(text: Characters) -> Scan[str | None]:
    """Decoded; its first quote has been taken. None when it is broken."""
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
    """Emits the next value: objects, arrays and scalars as they are written, a string decoded."""
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
    """Raises `ValueError` or `TypeError` for what JSON cannot say, `RecursionError` for what is nested too deep."""
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
