"""JSON schemas as vLLM's default backend (xgrammar, `strict_mode`) reads them: an object that names its properties has
no others, unless it says so itself.

A small model that may write further properties seldom stops. A schema put together of parts (`allOf`, or `properties`
beside a choice or a reference) is left as it is: there a part names only some of the properties.
"""

from collections.abc import Callable, Mapping
from typing import Any

Schema = Mapping[str, Any]

_NAMED = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
_LISTED = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SINGLE = ("items", "additionalItems", "additionalProperties", "contains")
"""Where schemas stand within one. Not below `not` and `if`, where less would be more, nor in `enum` and `const`."""

_SAYS_ITSELF = frozenset({"additionalProperties", "unevaluatedProperties", "patternProperties"})
_BESIDE = frozenset({"anyOf", "oneOf", "$ref", "if", "then", "else", "not", "dependentSchemas"})


def close_objects(schema: Schema) -> Schema:
    """The same schema where it is put together of parts."""
    try:
        return schema if _is_composed(schema) else _close(schema)
    except RecursionError:  # the compiler refuses what is nested so deeply
        return schema


def _is_composed(schema: Schema) -> bool:
    parts = schema.get("allOf")
    names_some = "properties" in schema
    if isinstance(parts, list) and (len(parts) > 1 or names_some):
        return True
    return (names_some and not _BESIDE.isdisjoint(schema)) or any(map(_is_composed, _within(schema)))


def _within(schema: Schema) -> list[Schema]:
    found: list[Schema] = []

    def see(one: Schema) -> Schema:
        found.append(one)
        return one

    _mapped(schema, see)
    return found


def _close(schema: Schema) -> Schema:
    result = _mapped(schema, _close)
    if isinstance(schema.get("properties"), Mapping) and _SAYS_ITSELF.isdisjoint(schema):
        result["additionalProperties"] = False
    return result


def _mapped(schema: Schema, change: Callable[[Schema], Schema]) -> dict[str, Any]:
    """A copy in which `change` has been made to the schemas right within."""

    def one(value: Any) -> Any:
        return change(value) if isinstance(value, Mapping) else value

    result = dict(schema)
    for key in _NAMED:
        if isinstance(value := schema.get(key), Mapping):
            result[key] = {name: one(inner) for name, inner in value.items()}
    for key in _LISTED:
        if isinstance(value := schema.get(key), list):
            result[key] = [one(inner) for inner in value]
    for key in _SINGLE:
        if isinstance(value := schema.get(key), Mapping):
            result[key] = change(value)
    return result
