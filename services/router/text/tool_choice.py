"""Decides how tool calls of an answer are parsed, and which grammar the answer must follow, from `tool_choice`.

With `required` or a named function the answer is generated under a grammar of the router and needs no parser of the
model's format. With `auto` the model calls tools in its own format, which `--tool-call-parser` names.
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
    """The result of `tool_choice_of` for one request."""

    format: ToolCallFormat | None = None
    """The parser of tool calls; None: the whole text is content."""
    grammar_spec: GrammarSpec | None = None
    """The grammar of the answer; None: free text."""
    is_named: bool = False
    """True if the request names the function to call. The finish reason is then `stop`, as in OpenAI's API."""


def tool_choice_of(request: ChatCompletionRequest, settings: RouterSettings, form: GrammarSpec | None) -> ToolChoice:
    """Return how tool calls are parsed and the grammar of the answer. `form` is the grammar of an answer without calls.

    Raises `BadRequestError` if the parameters contradict each other or the server cannot parse such calls.
    """
    choice = request.tool_choice
    functions = [tool.function for tool in request.tools or []]
    if (isinstance(choice, dict) or choice == "required") and form is not None:
        raise BadRequestError(
            f"tool_choice and {form.param} exclude each other: an answer is a tool call, or it follows {form.param}",
            param=form.param,
        )
    if isinstance(choice, dict):
        return _named(choice, functions)
    if choice == "required":
        if not functions:
            raise BadRequestError("tool_choice 'required' needs at least one tool in 'tools'", param="tool_choice")
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
            "parameter 'tools' with tool_choice 'auto' is not supported by this server: start it with "
            "--enable-auto-tool-choice and --tool-call-parser, or use tool_choice 'required', a named function "
            "or 'none'",
            param="tools",
            code="unsupported_parameter",
        )
    # Without strict tools the model writes freely: a grammar would only cost time in each step.
    if form is None and not any(function.get("strict") is True for function in functions):
        return ToolChoice(TOOL_CALL_FORMATS[parser])
    if parser not in STRICT_RULES:
        asked_for = "strict tools" if form is None else form.param
        raise BadRequestError(
            f"{asked_for} with tool_choice 'auto' is not supported with this server's --tool-call-parser {parser}: use "
            "tool_choice 'required', a named function or 'none'",
            param="tools" if form is None else form.param,
            code="unsupported_parameter",
        )
    rule = strict_rule(
        STRICT_RULES[parser], functions, is_parallel=_is_parallel(request), form=None if form is None else form.rule
    )
    return ToolChoice(TOOL_CALL_FORMATS[parser], GrammarSpec(rule, "tools" if form is None else form.param))


def _is_parallel(request: ChatCompletionRequest) -> bool:
    # OpenAI's default is true.
    return request.parallel_tool_calls is not False


def _named(choice: dict[str, object], functions: Sequence[Function]) -> ToolChoice:
    function = choice.get("function")
    wanted = function.get("name") if choice.get("type") == "function" and isinstance(function, dict) else None
    if not isinstance(wanted, str):
        raise BadRequestError(
            'tool_choice must be "none", "auto", "required" or {"type": "function", "function": {"name": "…"}}',
            param="tool_choice",
        )
    for offered in functions:
        if name_of(offered) == wanted:
            return ToolChoice(
                ToolCallFormat(named_call(wanted)), GrammarSpec(named_rule(offered), "tools"), is_named=True
            )
    raise BadRequestError(
        f"tool_choice names the function {wanted!r}, which 'tools' does not have", param="tool_choice"
    )
