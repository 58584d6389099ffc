"""Which calls of tools a request wants, how they are read, and what the answer must be like for that.

`required` and named functions are written under a grammar of their own and need no parser; `auto` needs the model's.
"""

from collections.abc import Sequence

import msgspec

from baton_serve.services.router.protocol.errors import BadRequestError
from baton_serve.services.router.protocol.openai_requests import ChatCompletionRequest
from baton_serve.services.router.settings import RouterSettings
from baton_serve.services.router.text.grammar import GrammarSpec
from baton_serve.services.router.text.tool_calls import TOOL_CALL_FORMATS, ToolCallFormat
from baton_serve.services.router.text.tool_calls.forced import (
    Function,
    name_of,
    named_call,
    named_rule,
    required_calls,
    required_rule,
)
from baton_serve.services.router.text.tool_calls.strict import STRICT_RULES, strict_rule


class ToolChoice(msgspec.Struct, frozen=True):
    """`format`: how calls are read; None: all text is content. `grammar_spec`: the form that the answer must have.
    `is_named`: the client knows which function it gets, so its answer ends with `stop`, as OpenAI's do."""

    format: ToolCallFormat | None = None
    grammar_spec: GrammarSpec | None = None
    is_named: bool = False


def tool_choice_of(request: ChatCompletionRequest, settings: RouterSettings, form: GrammarSpec | None) -> ToolChoice:
    """`form`: what the request says of an answer without calls. Raises `BadRequestError` for what cannot be served."""
    choice = request.tool_choice
    functions = [tool.function for tool in request.tools or []]
    if (isinstance(choice, dict) or choice == "required") and form is not None:
        raise BadRequestError(
            f"tool_choice and {form.param} exclude each other: the answer is a call, or has the stated form",
            param=form.param,
        )
    if isinstance(choice, dict):
        return _named(choice, functions)
    if choice == "required":
        if not functions:
            raise BadRequestError("tool_choice: 'required' needs tools", param="tool_choice")
        rule = required_rule(functions, is_parallel=_is_parallel(request))
        return ToolChoice(ToolCallFormat(required_calls), GrammarSpec(rule, "tools"))
    if not functions or choice == "none":
        return ToolChoice(grammar_spec=form)
    return _auto(request, settings, functions, form)


def _auto(
    request: ChatCompletionRequest, settings: RouterSettings, functions: Sequence[Function], form: GrammarSpec | None
) -> ToolChoice:
    parser = settings.tool_call_parser
    if not settings.enable_auto_tool_choice or parser is None:
        raise BadRequestError(
            "parameter 'tools' is not supported by this server with tool_choice 'auto': such calls are read only with "
            "--enable-auto-tool-choice and --tool-call-parser; 'required', a named function and 'none' are served",
            param="tools",
            code="unsupported_parameter",
        )
    if form is None and not any(function.get("strict") is True for function in functions):
        return ToolChoice(TOOL_CALL_FORMATS[parser])
    if parser not in STRICT_RULES:
        asked_for = "strict tools" if form is None else form.param
        raise BadRequestError(
            f"{asked_for} with tool_choice 'auto' is not supported in the format {parser!r} of this server's calls; "
            f"tool_choice 'required', a named function and 'none' are",
            param="tools" if form is None else form.param,
            code="unsupported_parameter",
        )
    rule = strict_rule(
        STRICT_RULES[parser], functions, is_parallel=_is_parallel(request), form=None if form is None else form.rule
    )
    return ToolChoice(TOOL_CALL_FORMATS[parser], GrammarSpec(rule, "tools" if form is None else form.param))


def _is_parallel(request: ChatCompletionRequest) -> bool:
    return request.parallel_tool_calls is not False


def _named(choice: dict[str, object], functions: Sequence[Function]) -> ToolChoice:
    function = choice.get("function")
    wanted = function.get("name") if choice.get("type") == "function" and isinstance(function, dict) else None
    if not isinstance(wanted, str):
        raise BadRequestError(
            'tool_choice: a named function is {"type": "function", "function": {"name": "…"}}', param="tool_choice"
        )
    for offered in functions:
        if name_of(offered) == wanted:
            return ToolChoice(
                ToolCallFormat(named_call(wanted)), GrammarSpec(named_rule(offered), "tools"), is_named=True
            )
    raise BadRequestError(f"tool_choice: no tool is named {wanted!r}", param="tool_choice")
