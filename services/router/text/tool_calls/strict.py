"""Grammars for answers that may call `strict` tools, whose arguments must follow their schemas (`tool_choice` `auto`).

Each format has one rule: free text with calls in this format. Formats whose arguments are not JSON have no rule.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton_serve.contracts.closed_objects import Schema
from baton_serve.contracts.lark import Lark, Rule
from baton_serve.services.router.text.tool_calls.deepseek_v3 import ALL_BEGIN, ALL_END, BEGIN, END, SEPARATOR
from baton_serve.services.router.text.tool_calls.forced import Function, name_of, parameters_of
from baton_serve.services.router.text.tool_calls.hermes import CLOSE, OPEN
from baton_serve.services.router.text.tool_calls.llama3_json import TAG
from baton_serve.services.router.text.tool_calls.mistral import MARK

ANY_ARGUMENTS = {"type": "object"}
"""The schema of the arguments of a tool that is not strict."""


@dataclass(frozen=True, slots=True)
class ToolCallGrammar:
    """Builds the grammar expressions for tool calls in one format. `tools` are the functions that the model may
    call.
    """

    lark: Lark
    tools: Sequence[tuple[str, Schema]]
    """Name and schema of the arguments of each tool."""
    is_parallel: bool
    """True if an answer may have several calls."""
    form: str | None = None
    """The expression for an answer without calls. None allows free text, also around calls."""

    def any(self, begin: Callable[[str], str], end: str) -> str:
        """Return a grammar expression for a call of any of the tools: `begin(name)`, then its arguments, then `end`."""
        lark = self.lark
        ways = [f"({lark.literal(begin(name))} {lark.json(schema)} {lark.literal(end)})" for name, schema in self.tools]
        return f"({' | '.join(ways)})"

    def amid_text(self, trigger: str, call: str) -> str:
        """Return a grammar expression for an answer with text and tool calls. `trigger` is the text that begins a call,
        and `call` the grammar expression for the rest of it.
        """
        lark = self.lark
        if self.form is not None:
            return f"(({lark.literal(trigger)} {call}){'+' if self.is_parallel else ''} | ({self.form}))"
        times = "*" if self.is_parallel else "?"
        return f"(({lark.text_up_to(trigger)} {call}){times} {lark.free_text([trigger])})"


FormatRule = Callable[[ToolCallGrammar], str]
"""A function that returns the expression for an answer with calls in one format."""


def strict_rule(format: FormatRule, functions: Sequence[Function], *, is_parallel: bool, form: Rule | None) -> Rule:
    """Return the grammar rule for an answer that may call these functions. The arguments of a `strict` function must
    follow its schema; other functions take any arguments.

    `format` writes calls in the model's format; `form` is the rule for an answer without calls, or None for free text.
    Raises `BadRequestError` if a tool has no name, or if its parameters are not an object.
    """
    tools = [(name_of(one), parameters_of(one) if one.get("strict") is True else ANY_ARGUMENTS) for one in functions]
    return lambda lark: format(ToolCallGrammar(lark, tools, is_parallel, form(lark) if form is not None else None))


def _hermes(calls: ToolCallGrammar) -> str:
    call = calls.any(lambda name: f'{{"name": {json.dumps(name)}, "arguments": ', "}")
    return calls.amid_text(OPEN, f'"\\n"? {call} "\\n"? {calls.lark.literal(CLOSE)}')


def _mistral(calls: ToolCallGrammar) -> str:
    lark = calls.lark
    listed = calls.any(lambda name: f'{{"name": {json.dumps(name)}, "arguments": ', "}")
    more = f" ({lark.literal(', ')} {listed})*" if calls.is_parallel else ""
    plain, marked = calls.any(lambda name: name, ""), calls.any(lambda name: f"{name}[ARGS]", "")
    return calls.amid_text(MARK, f'(" "? "[" {listed}{more} "]" | {plain} | {marked})')


def _deepseek_v3(calls: ToolCallGrammar) -> str:
    lark = calls.lark
    fenced = calls.any(lambda name: f"function{SEPARATOR}{name}\n```json\n", "\n```")
    plain = calls.any(lambda name: f"{name}{SEPARATOR}", "")
    one = f"({fenced} | {plain}) {lark.literal(END)}"
    more = f' ("\\n"? {lark.literal(BEGIN)} {one})*' if calls.is_parallel else ""
    first = lark.literal(BEGIN)
    return calls.amid_text(ALL_BEGIN, f"{first} {one}{more} {lark.literal(ALL_END)}")


def _llama3_json(calls: ToolCallGrammar) -> str:
    # The format has no reliable marker, so an answer without calls must not begin like a call: its first character must
    # not be `{`, white space or `<`.
    call = calls.any(lambda name: f'{{"name": {json.dumps(name)}, "parameters": ', "}")
    more = f'("; " {call})*' if calls.is_parallel else ""
    otherwise = r"/[^{\s<](.|\n)*/" if calls.form is None else calls.form
    return f"(({calls.lark.literal(TAG)})? {call} {more} | ({otherwise}))"


STRICT_RULES: dict[str, FormatRule] = {
    "deepseek_v3": _deepseek_v3,
    "hermes": _hermes,
    "llama3_json": _llama3_json,
    "mistral": _mistral,
}
"""Rules by the value of `--tool-call-parser`. A format without a rule supports no strict tools."""
