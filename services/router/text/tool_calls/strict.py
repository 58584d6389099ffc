"""What an answer must be like when the model may call tools and `strict` ones must be called as their schemas say.

One rule a format: free text, and calls in the words of the format. Formats whose arguments are not JSON have none.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton_serve.services.router.text.grammar.closed_objects import Schema
from baton_serve.services.router.text.grammar.lark import Lark, Rule
from baton_serve.services.router.text.tool_calls.deepseek_v3 import ALL_BEGIN, ALL_END, BEGIN, END, SEPARATOR
from baton_serve.services.router.text.tool_calls.forced import Function, name_of, parameters_of
from baton_serve.services.router.text.tool_calls.hermes import CLOSE, OPEN
from baton_serve.services.router.text.tool_calls.llama3_json import TAG
from baton_serve.services.router.text.tool_calls.mistral import MARK

ANY_ARGUMENTS = {"type": "object"}


@dataclass(frozen=True, slots=True)
class ToolCallGrammar:
    """Expressions of one grammar: what offered tools look like in it."""

    lark: Lark
    tools: Sequence[tuple[str, Schema]]
    is_parallel: bool
    form: str | None = None
    """What an answer that calls nothing must be like. None: free text, around calls too."""

    def any(self, begin: Callable[[str], str], end: str) -> str:
        """A call of any tool: `begin` of its name, its arguments, `end`."""
        lark = self.lark
        ways = [f"({lark.literal(begin(name))} {lark.json(schema)} {lark.literal(end)})" for name, schema in self.tools]
        return f"({' | '.join(ways)})"

    def amid_text(self, trigger: str, call: str) -> str:
        """`call` after each `trigger`, and text around."""
        lark = self.lark
        if self.form is not None:
            return f"(({lark.literal(trigger)} {call}){'+' if self.is_parallel else ''} | ({self.form}))"
        times = "*" if self.is_parallel else "?"
        return f"(({lark.text_up_to(trigger)} {call}){times} {lark.free_text([trigger])})"


FormatRule = Callable[[ToolCallGrammar], str]


def strict_rule(format: FormatRule, functions: Sequence[Function], *, is_parallel: bool, form: Rule | None) -> Rule:
    """Tools that are not strict take any arguments. `form`: what an answer that calls nothing must be like.
    Raises `BadRequestError`."""
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
    """A text that does not begin as a call is none."""
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
