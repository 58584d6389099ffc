"""JSON inside strings of requests: arguments of earlier calls of tools, schemas that are given as texts.

It is nested at most as deep as a request's body may be, 200 levels: pydantic's parser refuses both. So code that
follows such a value recursively does not reach Python's limit, and no string holds a lone surrogate.
"""

from typing import Any

from pydantic_core import from_json


class TooDeepError(ValueError):
    """JSON that is nested more than 200 levels deep."""


def parsed(text: str) -> Any:
    """Return the value of a JSON text. Raises `ValueError` for other texts, `TooDeepError` among them."""
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError as exc:
        if str(exc).startswith("recursion limit exceeded"):
            raise TooDeepError("JSON is nested more than 200 levels deep") from exc
        raise
