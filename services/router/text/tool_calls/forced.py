"""Calls that a request insists on: `tool_choice` `required` or a named function. Written under a grammar, read as JSON.

With `required` the answer is a list, `[{"name": …, "parameters": {…}}, …]`; with a named function it is the arguments
alone. So no format of the model's own is needed. Each tool's schema stands by itself: its references stay its own.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from baton_serve.services.router.protocol.errors import BadRequestError
from baton_serve.services.router.text.grammar.closed_objects import Schema
from baton_serve.services.router.text.grammar.lark import Lark, Rule
from baton_serve.services.router.text.scanning.characters import Characters, Scan
from baton_serve.services.router.text.scanning.parts import Parts
from baton_serve.services.router.text.tool_calls.call_object import call_list
from baton_serve.services.router.text.tool_calls.tools import Tools

Function = Mapping[str, Any]

NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


def required_rule(functions: Sequence[Function], *, is_parallel: bool) -> Rule:
    """Raises `BadRequestError` for tools without a name."""
    tools = [(name_of(function), parameters_of(function)) for function in functions]

    def rule(lark: Lark) -> str:
        calls = [f"({lark.literal(_head(name))} {lark.json(schema)} {lark.literal('}')})" for name, schema in tools]
        call = f"({' | '.join(calls)})"
        more = f" ({lark.literal(', ')} {call})*" if is_parallel else ""
        return f"({lark.literal('[')} {call}{more} {lark.literal(']')})"

    return rule


def named_rule(function: Function) -> Rule:
    schema = parameters_of(function)
    return lambda lark: lark.json(schema)


def required_calls(text: Characters, out: Parts, tools: Tools) -> Scan[None]:
    """What a limit left of a further call, without a name or arguments, is nothing."""
    text.mark()
    char = yield from text.next()
    text.back(char)
    if (char != "[" or not (yield from call_list(text, out))) and not out.num_calls:
        out.content(text.since_mark())


def named_call(name: str) -> Callable[[Characters, Parts, Tools], Scan[None]]:
    def scan(text: Characters, out: Parts, tools: Tools) -> Scan[None]:
        out.begin(name)
        while char := (yield from text.next()):
            text.mark()
            out.arguments(char)

    return scan


def name_of(function: Function) -> str:
    """Raises `BadRequestError`."""
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise BadRequestError("tools: every function needs a name", param="tools")
    return name


def parameters_of(function: Function) -> Schema:
    """Raises `BadRequestError`."""
    schema = function.get("parameters")
    if schema is None or schema == {}:
        return NO_PARAMETERS
    if not isinstance(schema, Mapping):
        raise BadRequestError("tools: parameters must be a JSON schema", param="tools")
    return schema


def _head(name: str) -> str:
    return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "parameters": '
