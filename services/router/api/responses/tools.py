"""Convert the tools and `tool_choice` of a Responses request to functions of a chat request; refuse hosted tools.

A namespace groups functions. Chat templates have no such groups, so a function `f` of the namespace `n` becomes `n__f`
for the model, as in vLLM, and the answer names both again.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton_serve.services.router.protocol.errors import BadRequestError
from baton_serve.services.router.protocol.openai_requests import Tool
from baton_serve.services.router.protocol.request_bounds import MAX_TOOLS

logger = logging.getLogger(__name__)

HOSTED_TOOLS = frozenset(
    {
        "apply_patch",
        "code_interpreter",
        "computer",
        "computer_use",
        "computer_use_preview",
        "custom",
        "file_search",
        "image_generation",
        "local_shell",
        "mcp",
        "shell",
        "tool_search",
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
    }
)
"""Types of tools that OpenAI runs itself or trained its models for. Clients such as Codex always offer some of them.
As in vLLM they are left out of the prompt, so that the model never calls them."""

_SEPARATOR = "__"


@dataclass(frozen=True, slots=True)
class ToolName:
    """The name of a function as the client knows it, with its namespace (a group of functions) if it has one."""

    name: str
    namespace: str | None = None

    def flat(self) -> str:
        """Return the name under which the model calls the function: `namespace__name`, or the name alone."""
        return flat_name(self.namespace, self.name)


def flat_name(namespace: str | None, name: str) -> str:
    """Return the name under which the model calls a function: `namespace__name`, or the name alone without a
    namespace.
    """
    return name if not namespace else f"{namespace}{_SEPARATOR}{name}"


def functions_of(tools: Sequence[Mapping[str, Any]]) -> list[Tool]:
    """Return the functions that a request offers, for the chat request. Hosted tools, which only OpenAI's service can
    run, are left out.

    Raises `BadRequestError` for a tool without a name, for a tool of an unknown type, and for too many functions.
    """
    functions = [_function(name, fields) for name, fields in _named(tools)]
    # The schema bounds the tools of a request, but not the functions within its namespaces.
    if len(functions) > MAX_TOOLS:
        raise BadRequestError(
            f"tools: the namespaces have {len(functions)} functions, the limit is {MAX_TOOLS}",
            param="tools",
            code="too_many_values",
        )
    hosted = dict.fromkeys(str(tool["type"]) for tool in tools if tool.get("type") in HOSTED_TOOLS)
    if hosted:
        logger.info("tools that only OpenAI's service has are not offered to the model: %s", ", ".join(hosted))
    return functions


def names_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, ToolName]:
    """Return the functions that belong to a namespace, by the name under which the model calls them. Call it after
    `functions_of`, which checks `tools`.
    """
    return {name.flat(): name for name, _ in _named(tools) if name.namespace is not None}


def tool_choice_of(choice: Any, tools: Sequence[Mapping[str, Any]]) -> Any:
    """Convert the `tool_choice` of a Responses request to that of the chat request. Raises `BadRequestError` if it has
    an unknown form.

    As in vLLM, a function of a namespace may be named with or without the namespace.
    """
    if not isinstance(choice, dict):
        return choice
    offered = [name for name, _ in _named(tools)]
    flat_names = {name.flat() for name in offered}
    # The first of several functions of one name. A flat name has precedence over it.
    known = {name.name: name.flat() for name in reversed(offered)} | {flat: flat for flat in flat_names}
    if choice.get("type") == "allowed_tools":
        allowed = choice.get("tools")
        named = [_chosen(tool, known) for tool in allowed] if isinstance(allowed, list) else allowed
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": named}}
    return _chosen(choice, known)


def _chosen(choice: Any, known: Mapping[str, str]) -> dict[str, Any]:
    """Convert `{"type": "function", "name": ...}` to the form of a chat request. Raises `BadRequestError` if `choice`
    has another form.

    `known` maps all names that a client may use to the names under which the model calls the functions.
    """
    fields = choice if isinstance(choice, dict) else {}
    wanted, namespace = fields.get("name"), fields.get("namespace")
    if fields.get("type") != "function" or not isinstance(wanted, str) or not isinstance(namespace, str | None):
        raise BadRequestError(
            'tool_choice must be "none", "auto", "required" or {"type": "function", "name": "…"}', param="tool_choice"
        )
    flat = flat_name(namespace, wanted)
    return {"type": "function", "function": {"name": known.get(flat, known.get(wanted, flat))}}


def _named(tools: Sequence[Mapping[str, Any]]) -> Iterator[tuple[ToolName, Mapping[str, Any]]]:
    """Yield the name and the fields of each function of a request, those in namespaces included. Raises
    `BadRequestError` for a tool without a name or of an unknown type.
    """
    for tool in tools:
        kind = tool.get("type")
        if kind == "function":
            yield ToolName(_name(tool)), tool
        elif kind == "namespace":
            namespace, members = _name(tool), tool.get("tools")
            if not isinstance(members, list) or not all(isinstance(member, Mapping) for member in members):
                raise BadRequestError(f"tools: the namespace {namespace!r} needs a list of tools", param="tools")
            for member in members:
                # Members of other types run at OpenAI, as hosted tools.
                if member.get("type") == "function":
                    yield ToolName(_name(member), namespace), member
        # A mistyped type would otherwise lose the tool without a word.
        elif kind not in HOSTED_TOOLS:
            raise BadRequestError(
                f"tools: functions and namespaces of functions are supported, not {str(kind)[:50]!r}", param="tools"
            )


def _name(tool: Mapping[str, Any]) -> str:
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        raise BadRequestError(f"tools: a tool of type {tool.get('type')!r} needs a name", param="tools")
    return name


def _function(name: ToolName, fields: Mapping[str, Any]) -> Tool:
    # This API has the fields of a function in the tool itself, a chat request has them in an object `function`.
    function = {key: value for key, value in fields.items() if key != "type" and value is not None}
    return Tool(type="function", function=function | {"name": name.flat()})
