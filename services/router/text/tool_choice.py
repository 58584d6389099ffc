"""Decides from `tool_choice` how tool calls are parsed, and which grammar the answer follows; refuses `auto` without a
parser.

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
    """How the tool calls of one request are parsed, and the grammar that its answers follow. `tool_choice_of` returns
    it.
    """

    format: ToolCallFormat | None = None
    """The parser of tool calls; None: the whole text is content."""
    grammar_spec: GrammarSpec | None = None
    """The grammar of the answer; None: free text."""
    is_named: bool = False
    """True if the request names the function to call. The finish reason is then `stop`, as in OpenAI's API."""


def tool_choice_of(request: ChatCompletionRequest, settings: RouterSettings, form: GrammarSpec | None) -> ToolChoice:
    """Return how the tool calls in the answers to a request are parsed, and the grammar of these answers. `form` is the
    grammar of an answer without tool calls, or None.

    Raises `BadRequestError` if parameters of the request contradict each other or the server cannot parse such calls.
    """
    offered = [tool.function for tool in request.tools or []]
    choice, functions = _allowed(request.tool_choice, offered)
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
    # The prompt has all tools, so only a grammar keeps the model from calling the others.
    return _auto(request, settings, functions, form, is_restricted=len(functions) < len(offered))


def _allowed(choice: object, functions: Sequence[Function]) -> tuple[object, Sequence[Function]]:
    """Return the `tool_choice` without `allowed_tools`, and the functions that the model may call, which
    `allowed_tools` restricts as in OpenAI's API.

    Raises `BadRequestError` if it is malformed or names a function that the request does not offer.
    """
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return choice, functions
    stated = choice.get("allowed_tools")
    mode, tools = (stated.get("mode"), stated.get("tools")) if isinstance(stated, dict) else (None, None)
    if mode not in ("auto", "required") or not isinstance(tools, list) or not tools:
        raise BadRequestError(
            'tool_choice: allowed_tools needs a mode, "auto" or "required", and a list of tools', param="tool_choice"
        )
    # Each list may have thousands of elements, so none is searched once for each element of the other.
    names = dict.fromkeys(_name_in(tool) for tool in tools)
    known = {name_of(function) for function in functions}
    if missing := [name for name in names if name not in known]:
        raise _not_offered(missing[0])
    return mode, [function for function in functions if name_of(function) in names]


def _auto(
    request: ChatCompletionRequest,
    settings: RouterSettings,
    functions: Sequence[Function],
    form: GrammarSpec | None,
    *,
    is_restricted: bool,
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
    is_strict = is_restricted or any(function.get("strict") is True for function in functions)
    if form is None and not is_strict:
        return ToolChoice(TOOL_CALL_FORMATS[parser])
    if parser not in STRICT_RULES:
        asked_for = ("allowed_tools" if is_restricted else "strict tools") if form is None else form.param
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
    wanted = _name_in(choice)
    if wanted is None:
        raise BadRequestError(
            'tool_choice must be "none", "auto", "required" or {"type": "function", "function": {"name": "…"}}',
            param="tool_choice",
        )
    for offered in functions:
        if name_of(offered) == wanted:
            return ToolChoice(
                ToolCallFormat(named_call(wanted)), GrammarSpec(named_rule(offered), "tools"), is_named=True
            )
    raise _not_offered(wanted)


def _name_in(tool: object) -> str | None:
    """Return the function's name in `{"type": "function", "function": {"name": ...}}`, or None if `tool` has another
    form.
    """
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def _not_offered(name: str | None) -> BadRequestError:
    return BadRequestError(f"tool_choice names the function {name!r}, which 'tools' does not have", param="tool_choice")
