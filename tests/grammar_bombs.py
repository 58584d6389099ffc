"""Grammars and schemas that need much stack, time or memory, by size; and the largest that the bounds accept."""

import json
from collections.abc import Callable
from typing import Any

from baton_serve.contracts.grammar_bounds import GrammarBoundsError, check_grammar

Schema = dict[str, Any]


def chain(count: int, link: Callable[[Schema], Schema]) -> Schema:
    """A chain of `count` definitions, each made by `link` of a reference to the next."""
    links = {f"d{i}": link({"$ref": f"#/$defs/d{i + 1}"}) for i in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": links | {f"d{count}": {"type": "object"}}}


def references(count: int) -> Schema:
    return chain(count, lambda to: to)


def objects(count: int) -> Schema:
    return chain(count, lambda to: {"type": "object", "properties": {"a": to}})


def lists_of_choices(count: int) -> Schema:
    null = {"type": "null"}
    return chain(count, lambda to: {"anyOf": [{"type": "array", "items": {"anyOf": [to, null]}}, null]})


def joined(count: int) -> Schema:
    return chain(count, lambda to: {"allOf": [to, {"type": "object"}]})


def deep(count: int) -> Schema:
    schema: Schema = {}
    for _ in range(count):
        schema = {"properties": {"a": schema}}
    return schema


def deep_lists(count: int) -> Schema:
    schema: Schema = {}
    for _ in range(count):
        schema = {"type": "array", "items": schema}
    return schema


def properties(count: int) -> Schema:
    return {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(count)}}


def needed(count: int) -> Schema:
    return {**properties(count), "required": [f"p{i}" for i in range(count)]}


def patterns(count: int) -> Schema:
    return {"type": "object", "patternProperties": {f"^p{i}[a-z]*$": {"type": "string"} for i in range(count)}}


def values(count: int) -> Schema:
    return {"enum": [f"value number {i}" for i in range(count)]}


def rules(count: int) -> str:
    return "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(count)) + f'r{count}: "x"\n'


def nested_rules(count: int) -> str:
    """Rules with as many groups in each other as llguidance reads."""
    depth = 20
    body = "(" * depth + "{}" + '| "b")? "c"' * depth
    lines = [f"r{i}: {body.format(f'r{i + 1}')}\n" for i in range(count)]
    return "start: r0\n" + "".join(lines) + f'r{count}: "x"\n'


def terminals(count: int) -> str:
    return "start: T0\n" + "".join(f'T{i}: "a" T{i + 1} | "b"\n' for i in range(count)) + f'T{count}: "x"\n'


def gbnf(count: int) -> str:
    return "root ::= r-0\n" + "".join(f"r-{i} ::= r-{i + 1}\n" for i in range(count)) + f'r-{count} ::= "x"\n'


def lark_of(schema: Schema) -> str:
    return f"start: %json {json.dumps(schema)}\n"


SCHEMAS: dict[str, Callable[[int], Schema]] = {
    "references": references,
    "objects": objects,
    "lists of choices": lists_of_choices,
    "joined": joined,
    "deep": deep,
    "deep lists": deep_lists,
    "properties": properties,
    "required properties": needed,
    "patterns": patterns,
    "values": values,
}
RULES: dict[str, Callable[[int], str]] = {"rules": rules, "nested rules": nested_rules, "terminals": terminals}
GRAMMARS: dict[str, Callable[[int], str]] = RULES | {
    name: lambda count, made=made: lark_of(made(count)) for name, made in SCHEMAS.items()
}

SLOW_NUMBERS = (999_983, 999_979, 999_961, 999_959, 999_953, 999_931, 999_917, 999_907)
"""As `multipleOf`, seconds of processor time each."""


def slow(number: int) -> Schema:
    return {"type": "integer", "multipleOf": number}


def hungry(count: int) -> str:
    """A regular expression; 20,000 need more than a gigabyte."""
    return "(a|bc)?" * count


def largest_accepted(made: Callable[[int], str]) -> str:
    """The largest grammar of a kind that is within the bounds."""
    low, high = 1, 2
    while is_accepted(made(high)):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_accepted(made(middle)) else (low, middle)
    return made(low)


def is_accepted(grammar: str) -> bool:
    try:
        check_grammar(grammar)
    except GrammarBoundsError:
        return False
    return True
