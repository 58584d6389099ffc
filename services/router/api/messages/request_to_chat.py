"""Convert a request of Anthropic's Messages API to a chat request."""

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from baton_serve.services.router.api.messages.schema import (
    UNSERVED,
    AnthropicMessage,
    AnthropicTool,
    AnthropicToolChoice,
    ContentBlock,
    CountTokensRequest,
    MessagesRequest,
)
from baton_serve.services.router.protocol.errors import BadRequestError
from baton_serve.services.router.protocol.openai_requests import (
    ChatCompletionRequest,
    ChatMessage,
    ContentPart,
    Tool,
    chat_message,
)
from baton_serve.services.router.text.multimodal.media_parts import image_part

logger = logging.getLogger(__name__)


def as_chat(request: CountTokensRequest) -> ChatCompletionRequest:
    """Convert a request of the Messages API to a chat request with the same prompt and, for a `MessagesRequest`, the
    same sampling parameters.

    Raises `BadRequestError` if the request uses something that is not served.
    """
    # Parameters that are not known are ignored, as elsewhere; these would change the answer, so they are rejected.
    for name, value in (request.model_extra or {}).items():
        if name in UNSERVED and value is not None and value not in UNSERVED[name]:
            raise BadRequestError(f"parameter {name!r} is not supported", param=name, code="unsupported_parameter")
    messages: list[ChatMessage] = []
    if request.system:
        messages.append(ChatMessage(role="system", content=_text(request.system, "system")))
    for message in request.messages:
        messages += _messages(message)
    values: dict[str, Any] = {}
    if isinstance(request, MessagesRequest):
        values = {
            "max_tokens": request.max_tokens,
            "stop": request.stop_sequences or None,
            "stream": request.stream,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
        }
    if request.thinking is not None:
        is_wanted = request.thinking.type != "disabled"
        values |= {"include_reasoning": is_wanted, "chat_template_kwargs": {"enable_thinking": is_wanted}}
    if request.context_management:
        logger.info("ignoring context_management of a request: the prompt is the conversation as the client sent it")
    if request.output_config is not None:
        values["reasoning_effort"] = request.output_config.effort
    choice = request.tool_choice
    return ChatCompletionRequest(
        response_format=_response_format(request),
        model=request.model,
        messages=messages,
        tools=[_tool(tool) for tool in request.tools] if request.tools else None,
        tool_choice=_tool_choice(choice) if choice is not None else None,
        parallel_tool_calls=False if choice is not None and choice.disable_parallel_tool_use else None,
        **values,
    )


def _response_format(request: CountTokensRequest) -> dict[str, Any] | None:
    """Return the `response_format` of the chat request, or None. Raises `BadRequestError` if `output_format` and
    `output_config.format` contradict each other.
    """
    config, form = request.output_config, request.output_format
    # A budget that has no effect could let the answer become longer than the client wants.
    if config is not None and (config.model_extra or {}).get("task_budget") is not None:
        raise BadRequestError("output_config: task_budget is not supported", param="output_config")
    if config is not None and config.format is not None:
        if form is not None and form.schema_ != config.format.schema_:
            raise BadRequestError(
                "output_format and output_config.format exclude each other: set only one of them", param="output_format"
            )
        form = config.format
    return None if form is None else {"type": "json_schema", "json_schema": {"name": "answer", "schema": form.schema_}}


def _messages(message: AnthropicMessage) -> list[ChatMessage]:
    """Convert one message of Anthropic's API to chat messages: one for each tool result, and one for everything else.

    Chat templates expect tool results as messages of their own, directly after the tool calls; so they come first.
    """
    content = [ContentBlock(type="text", text=message.content)] if isinstance(message.content, str) else message.content
    results = [block for block in content if block.type == "tool_result"]
    calls = [block for block in content if block.type == "tool_use"]
    thoughts = [block.thinking or "" for block in content if block.type == "thinking"]
    special = ("tool_result", "tool_use", "thinking", "redacted_thinking")
    texts = [block for block in content if block.type not in special]
    messages = [
        chat_message("tool", _text(block.content or "", "messages"), tool_call_id=block.tool_use_id or "")
        for block in results
    ]
    extra: dict[str, Any] = {}
    if calls:
        extra["tool_calls"] = [_call(block) for block in calls]
    if thoughts:
        extra["reasoning_content"] = "\n".join(thoughts)
    if texts or extra or not messages:
        messages.append(chat_message(message.role, _content(texts) or (None if calls else ""), **extra))
    return messages


def _content(blocks: Sequence[ContentBlock]) -> str | list[ContentPart]:
    """Return the content blocks of a message as one text, or as a list of parts if they contain images."""
    # Templates of models without images often accept only a text.
    if all(block.type != "image" for block in blocks):
        return _text(blocks, "messages")
    return [
        image_part(_url(block.source or {}))
        if block.type == "image"
        else ContentPart(type="text", text=_text([block], "messages"))
        for block in blocks
    ]


def _url(source: Mapping[str, Any]) -> str:
    """Return the URL of an image block's `source`; base64 data becomes a `data:` URL. Raises `BadRequestError` for
    other types of source.
    """
    if source.get("type") == "base64":
        return f"data:{source.get('media_type') or ''};base64,{source.get('data') or ''}"
    if source.get("type") == "url" and isinstance(url := source.get("url"), str):
        return url
    raise BadRequestError("messages: the source of an image must be of type base64 or url", param="messages")


def _call(block: ContentBlock) -> dict[str, Any]:
    function = {"name": block.name or "", "arguments": json.dumps(block.input or {}, ensure_ascii=False)}
    return {"id": block.id or "", "type": "function", "function": function}


def _text(content: str | Sequence[ContentBlock], param: str) -> str:
    """Return the joined text of content blocks, or `content` itself if it is a text. Raises `BadRequestError`, which
    names the field `param`, for a block of another type.
    """
    if isinstance(content, str):
        return content
    for block in content:
        if block.type != "text" or block.text is None:
            raise BadRequestError(
                f"{param}: content of type {block.type!r} is not supported by this model", param=param
            )
    return "\n".join(block.text or "" for block in content)


def _tool(tool: AnthropicTool) -> Tool:
    # Tools of other types, such as web search, run at Anthropic and have no schema.
    if tool.type not in (None, "custom") or tool.input_schema is None:
        raise BadRequestError(
            f"tools: {tool.name!r} has no input_schema; only tools that the client runs are served", param="tools"
        )
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    return Tool(type="function", function=function)


def _tool_choice(choice: AnthropicToolChoice) -> Any:
    if choice.type == "tool":
        if choice.name is None:
            raise BadRequestError("tool_choice: type 'tool' needs a name", param="tool_choice")
        return {"type": "function", "function": {"name": choice.name}}
    return {"auto": "auto", "any": "required", "none": "none"}[choice.type]
