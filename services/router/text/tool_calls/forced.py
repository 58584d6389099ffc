"""Grammar and parser of tool calls that a request demands: `tool_choice` `required` or a named function.

The answer is generated under a grammar and parsed as JSON, so the model's own format is not needed. With `required` the
answer is a list, `[{"name": …, "parameters": {…}}, …]`; with a named function it is only the arguments. The schema of
each tool is a separate part of the grammar, so that references in it (`$ref`) stay within it.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from baton_serve.contracts.closed_objects import Schema
from baton_serve.contracts.lark import Lark, Rule
from baton_serve.services.router.protocol.errors import BadRequestError
from baton_serve.services.router.text.scanning.characters import Characters, Scan
from baton_serve.services.router.text.scanning.message_parts import Parts
from baton_serve.services.router.text.tool_calls.call_object import call_list
from baton_serve.services.router.text.tool_calls.parameter_types import Tools

Function = Mapping[str, Any]

NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
"""The schema of a function that declares no parameters."""


def required_rule(functions: Sequence[Function], *, is_parallel: bool) -> Rule:
    """Return the grammar rule for an answer that must be a list of tool calls (`tool_choice: required`); it has exactly
    one call unless `is_parallel` is set. Raises `BadRequestError` if a tool has no name or its parameters are not an
    object.
    """
    tools = [(name_of(function), parameters_of(function)) for function in functions]

    def rule(lark: Lark) -> str:
        calls = [f"({lark.literal(_head(name))} {lark.json(schema)} {lark.literal('}')})" for name, schema in tools]
        call = f"({' | '.join(calls)})"
        more = f" ({lark.literal(', ')} {call})*" if is_parallel else ""
        return f"({lark.literal('[')} {call}{more} {lark.literal(']')})"

    return rule


def named_rule(function: Function) -> Rule:
    """Return the grammar rule for an answer that must be the arguments of this function (`tool_choice` names it).
    Raises `BadRequestError` if its parameters are not an object.
    """
    schema = parameters_of(function)
    return lambda lark: lark.json(schema)


def required_calls(text: Characters, out: Parts, tools: Tools) -> Scan[None]:
    """Read an answer that follows `required_rule`, a list of tool calls, and emit the calls to `out`."""
    text.mark()
    char = yield from text.next()
    text.back(char)
    is_list = char == "["
    if (is_list and (yield from call_list(text, out))) or out.num_calls:
        return
    following = yield from text.next()
    text.back(following)
    # If the text ends here, `max_tokens` has cut it off before the arguments of the first call. The incomplete call is
    # dropped: as content its JSON would look like an answer. A text without a call becomes content.
    if following or not is_list:
        out.content(text.since_mark())


def named_call(name: str) -> Callable[[Characters, Parts, Tools], Scan[None]]:
    """Return a parser that emits the whole text as the arguments of one tool call of the function `name`."""

    def scan(text: Characters, out: Parts, tools: Tools) -> Scan[None]:
        out.begin(name)
        while char := (yield from text.next()):
            text.mark()
            out.arguments(char)

    return scan


def name_of(function: Function) -> str:
    """Return the name of a function that a request offers. Raises `BadRequestError` if it has none."""
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise BadRequestError("tools: every function needs a name", param="tools")
    return name


def parameters_of(function: Function) -> Schema:
    """Return the JSON schema of a function's arguments. Raises `BadRequestError` if it is not an object."""
    schema = function.get("parameters")
    if schema is None or schema == {}:
        return NO_PARAMETERS
    if not isinstance(schema, Mapping):
        raise BadRequestError("tools: the parameters of a function must be a JSON schema object", param="tools")
    return schema


def _head(name: str) -> str:
    return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "parameters": '
