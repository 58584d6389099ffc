"""Forbids additional properties in JSON schemas, as vLLM's default backend (xgrammar, `strict_mode`) does.

An object that names its properties then has no others, unless its schema says so itself: a small model that may
generate additional properties often does not stop. A schema that combines parts (`allOf`, or `properties` beside a
choice or a reference) is not changed, because each part names only some of the properties.
"""

from collections.abc import Callable, Mapping
from typing import Any

Schema = Mapping[str, Any]
"""A JSON schema that is an object."""

_NAMED = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
_LISTED = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SINGLE = ("items", "additionalItems", "additionalProperties", "contains")
"""Keywords that contain schemas: by name, in lists, and directly. `not` and `if` are missing, because closing an object
there would allow more; `enum` and `const` contain values and not schemas."""

_EXPLICIT = frozenset({"additionalProperties", "unevaluatedProperties", "patternProperties"})
"""Keywords with which a schema itself says whether additional properties are allowed."""

_COMBINING = frozenset({"anyOf", "oneOf", "$ref", "if", "then", "else", "not", "dependentSchemas"})
"""Keywords that combine a schema with others, which may name further properties."""


def close_objects(schema: Schema) -> Schema:
    """Return a copy of a JSON schema in which each object allows only the properties that it names
    (`additionalProperties: false`), unless it says otherwise itself. A schema that combines several schemas (such as
    `allOf`) is returned unchanged."""
    try:
        return schema if _is_composed(schema) else _close(schema)
    except RecursionError:
        # The compiler rejects a schema that is nested so deeply, with a better message.
        return schema


def _is_composed(schema: Schema) -> bool:
    parts = schema.get("allOf")
    names_some = "properties" in schema
    if isinstance(parts, list) and (len(parts) > 1 or names_some):
        return True
    return (names_some and not _COMBINING.isdisjoint(schema)) or any(map(_is_composed, _within(schema)))


def _within(schema: Schema) -> list[Schema]:
    found: list[Schema] = []

    def see(one: Schema) -> Schema:
        found.append(one)
        return one

    _mapped(schema, see)
    return found


def _close(schema: Schema) -> Schema:
    result = _mapped(schema, _close)
    if isinstance(schema.get("properties"), Mapping) and _EXPLICIT.isdisjoint(schema):
        result["additionalProperties"] = False
    return result


def _mapped(schema: Schema, change: Callable[[Schema], Schema]) -> dict[str, Any]:
    """Return a copy of a JSON schema in which `change(s)` replaces each schema `s` that stands directly within it."""

    def one(value: Any) -> Any:
        return change(value) if isinstance(value, Mapping) else value

    result = dict(schema)
    for key in _NAMED:
        if isinstance(value := schema.get(key), Mapping):
            result[key] = {name: one(inner) for name, inner in value.items()}
    for key in _LISTED:
        # `items` is a list in old drafts of JSON Schema, and a schema in newer ones.
        if isinstance(value := schema.get(key), list):
            result[key] = [one(inner) for inner in value]
    for key in _SINGLE:
        if isinstance(value := schema.get(key), Mapping):
            result[key] = change(value)
    return result
