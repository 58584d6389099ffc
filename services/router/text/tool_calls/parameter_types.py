"""Looks up the types of tool parameters, for formats that write values without quotes."""

import json
from collections.abc import Mapping, Sequence

from baton_serve.services.router.text.scanning.json_text import to_json

_TYPES = {"int": "integer", "float": "number", "bool": "boolean", "dict": "object", "list": "array", "str": "string"}
"""Python's names of types, which some clients write in schemas, with those of JSON Schema."""


class Tools:
    """The types of the parameters of all tools that a request offers. Clients write the tools' schemas, so anything
    unexpected in them is ignored.
    """

    def __init__(self, functions: Sequence[Mapping[str, object]] = ()) -> None:
        self._types: dict[tuple[str, str], str | None] = {}
        for function in functions:
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
            if not isinstance(properties, Mapping):
                continue
            for name, schema in properties.items():
                self._types[str(function.get("name")), str(name)] = _type(schema)

    def is_string(self, tool: str, parameter: str) -> bool:
        """Return whether a parameter of a tool is a string, so that its value is taken as the model wrote it. An
        unknown parameter is a string.
        """
        return self._types.get((tool, parameter), "string") == "string"


def json_of(written: str) -> str:
    """Return the JSON of a value that the model wrote without quotes. A value that is not valid JSON becomes a
    string.
    """
    plain = written.strip()
    plain = {"True": "true", "False": "false", "None": "null"}.get(plain, plain)
    try:
        return to_json(json.loads(plain))
    except (ValueError, RecursionError):
        return to_json(written)


def _type(schema: object) -> str | None:
    stated = schema.get("type") if isinstance(schema, Mapping) else None
    return _TYPES.get(stated, stated) if isinstance(stated, str) else None
