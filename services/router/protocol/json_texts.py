"""Parses JSON that requests contain as strings: arguments of earlier tool calls, and schemas.

It uses pydantic's parser, as for the body itself, so both are nested at most 200 levels deep. Code that walks such a
value recursively therefore stays below Python's recursion limit. The parser also rejects lone surrogates in strings,
which could not be encoded as UTF-8 later.
"""

from typing import Any

from pydantic_core import from_json


class TooDeepError(ValueError):
    """The JSON text is nested more than 200 levels deep."""


def parsed(text: str) -> Any:
    """Return the value of a JSON text.

    Raises `ValueError` if the text is not valid JSON, and its subclass `TooDeepError` if it is nested too deeply.
    """
    try:
        # By default pydantic also accepts NaN and Infinity, which are not JSON.
        return from_json(text, allow_inf_nan=False)
    except ValueError as exc:
        # pydantic_core raises ValueError for every error: only the message distinguishes them.
        if str(exc).startswith("recursion limit exceeded"):
            raise TooDeepError("JSON is nested more than 200 levels deep") from exc
        raise
