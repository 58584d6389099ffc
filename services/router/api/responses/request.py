"""Convert a request of OpenAI's Responses API to a chat request."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton_serve.services.router.api.responses.schema import (
    INCLUDED,
    LOGPROBS,
    UNSERVED,
    InputItem,
    InputTokensRequest,
    ResponsesRequest,
)
from baton_serve.services.router.api.responses.tools import flat_name, functions_of, tool_choice_of
from baton_serve.services.router.protocol.errors import BadRequestError
from baton_serve.services.router.protocol.openai_requests import (
    ChatCompletionRequest,
    ChatMessage,
    ContentPart,
    Parts,
    chat_message,
)
from baton_serve.services.router.text.multimodal.media_parts import image_part

_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal")
# Fields with the same name and meaning in a chat request: those of the prompt, and those of the answer.
_OF_INPUT = "model parallel_tool_calls chat_template_kwargs".split()
_OF_ANSWER = (
    "stream temperature top_p user seed top_k min_p presence_penalty frequency_penalty repetition_penalty logit_bias"
    " stop include_stop_str_in_output skip_special_tokens ignore_eos min_tokens structured_outputs priority cache_salt"
    " request_id"
).split()


def check_unserved(request: InputTokensRequest) -> None:
    """Raise `BadRequestError` if a request uses a parameter that is not served. The error names the parameter."""
    for name, value in (request.model_extra or {}).items():
        if name in UNSERVED and value is not None and value not in UNSERVED[name]:
            why = "use previous_response_id, or send the whole conversation as input" if name == "conversation" else ""
            message = f"parameter {name!r} is not supported" + (f"; {why}" if why else "")
            raise BadRequestError(message, param=name, code="unsupported_parameter")


def as_chat(request: ResponsesRequest) -> ChatCompletionRequest:
    """Convert a request of the Responses API to a chat request with the same prompt and sampling parameters. Raises
    `BadRequestError` for something that is not served.
    """
    for name in request.include or []:
        if name not in INCLUDED:
            raise BadRequestError(f"include: {name!r} is not supported", param="include")
    answered = {name: getattr(request, name) for name in _OF_ANSWER}
    return ChatCompletionRequest(
        max_completion_tokens=request.max_output_tokens,
        logprobs=wants_logprobs(request),
        top_logprobs=request.top_logprobs,
        # As in vLLM the oldest tokens are left out; OpenAI leaves out whole items.
        truncate_prompt_tokens=-1 if request.truncation == "auto" else None,
        **answered,
        **_values(request),
    )


def wants_logprobs(request: ResponsesRequest) -> bool:
    """Return whether the request asks for the logprobs of the tokens of its answer's text."""
    return bool(request.top_logprobs) or LOGPROBS in (request.include or ())


def input_as_chat(request: InputTokensRequest) -> ChatCompletionRequest:
    """Convert a request that only counts tokens to a chat request with the same prompt. Raises `BadRequestError` for
    something that is not served.
    """
    return ChatCompletionRequest(**_values(request))


def _values(request: InputTokensRequest) -> dict[str, Any]:
    """Return the fields of the chat request that decide its prompt, by name. Raises `BadRequestError` for something
    that is not served.
    """
    check_unserved(request)
    messages = [ChatMessage(role="system", content=request.instructions)] if request.instructions else []
    messages += [ChatMessage(role="user", content=request.input)] if isinstance(request.input, str) else []
    messages += _merged(_message(item) for item in request.input) if not isinstance(request.input, str) else []
    return {
        "messages": messages,
        "tools": functions_of(request.tools or ()) or None,
        "tool_choice": tool_choice_of(request.tool_choice, request.tools or ()),
        "verbosity": request.text.verbosity if request.text is not None else None,
        "reasoning_effort": request.reasoning.effort if request.reasoning is not None else None,
        "response_format": _response_format(request),
        **{name: getattr(request, name) for name in _OF_INPUT},
    }


def _message(item: InputItem) -> ChatMessage:
    """Convert one item of a request's input to a chat message. Raises `BadRequestError` for a type that is not
    served.
    """
    match item.type or "message":
        case "message":
            # OpenAI renamed the role for its own models; templates of open models know only "system".
            role = "system" if item.role == "developer" else item.role or "user"
            return ChatMessage(role=role, content=_content(item.content))
        case "function_call":
            function = {"name": flat_name(item.namespace, item.name or ""), "arguments": item.arguments or "{}"}
            call = {"id": item.call_id or "", "type": "function", "function": function}
            return chat_message("assistant", None, tool_calls=[call])
        case "function_call_output":
            return chat_message("tool", _text(item.output), tool_call_id=item.call_id or "")
        case "reasoning":
            return chat_message("assistant", None, reasoning_content=_text(item.content))
        case other:
            raise BadRequestError(f"input: items of type {other!r} are not supported", param="input")


@dataclass(slots=True)
class _Merging:
    """Collects the items of one earlier answer (reasoning, text, tool calls) into one assistant message.

    Pieces are kept in lists: there may be thousands, and appending to strings would take quadratic time.
    """

    content: str | Parts | None = None
    reasoning: list[str] = field(default_factory=list)
    calls: list[Any] = field(default_factory=list)

    def continues(self, message: ChatMessage) -> bool:
        """Return whether an assistant message belongs to the same earlier answer as the items collected so far.

        It does not if it has text although text or a tool call was collected already: an answer has one text, before
        its tool calls.
        """
        return not message.content or not (self.content or self.calls)

    def add(self, message: ChatMessage) -> None:
        """Add an assistant message that holds one item: reasoning, a text or a tool call."""
        extra = message.model_extra or {}
        if message.content is not None and not self.content:
            self.content = message.content
        self.calls += extra.get("tool_calls", ())
        if "reasoning_content" in extra:
            self.reasoning.append(extra["reasoning_content"])

    def message(self) -> ChatMessage:
        """Return all collected items as one assistant message."""
        extra: dict[str, Any] = {}
        if self.reasoning:
            extra["reasoning_content"] = "".join(self.reasoning)
        if self.calls:
            extra["tool_calls"] = self.calls
        return chat_message("assistant", self.content, **extra)


def _merged(messages: Iterable[ChatMessage]) -> list[ChatMessage]:
    """Merge consecutive assistant messages that belong to one answer.

    In this API reasoning, text and tool calls of an answer are separate items. Chat templates expect one message.
    """
    merged: list[ChatMessage] = []
    merging: _Merging | None = None
    for message in messages:
        if merging is not None and (message.role != "assistant" or not merging.continues(message)):
            merged.append(merging.message())
            merging = None
        if message.role != "assistant":
            merged.append(message)
            continue
        merging = merging or _Merging()
        merging.add(message)
    return merged if merging is None else [*merged, merging.message()]


def _content(content: str | Sequence[dict[str, Any]] | None) -> str | list[ContentPart]:
    """Return the content of an input item as one text, or as a list of parts if it contains images."""
    if content is None or isinstance(content, str) or all(part.get("type") != "input_image" for part in content):
        return _text(content)
    return [
        image_part(_url(part)) if part.get("type") == "input_image" else ContentPart(type="text", text=_text([part]))
        for part in content
    ]


def _url(part: dict[str, Any]) -> str:
    """Return the URL of an image part. Raises `BadRequestError` if it refers to an uploaded file instead."""
    if isinstance(url := part.get("image_url"), str):
        return url
    raise BadRequestError("input: give an image by its image_url, uploaded files are not supported", param="input")


def _text(content: str | Sequence[dict[str, Any]] | None) -> str:
    """Return the texts of content parts, joined by line breaks, or `content` itself if it is a text. Raises
    `BadRequestError` for parts that are not text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[str] = []
    for part in content:
        kind, text = part.get("type"), part.get("text", part.get("refusal"))
        if kind not in _TEXTS or not isinstance(text, str):
            raise BadRequestError(f"input: content of type {kind!r} is not supported by this model", param="input")
        texts.append(text)
    return "\n".join(texts)


def _response_format(request: InputTokensRequest) -> dict[str, Any] | None:
    # As for tools: a chat request nests what this API has on the first level.
    text_format = request.text.format if request.text is not None else None
    if text_format is None or text_format.get("type") != "json_schema":
        return text_format
    return {"type": "json_schema", "json_schema": {key: value for key, value in text_format.items() if key != "type"}}
