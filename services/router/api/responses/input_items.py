"""Convert the input items of a Responses request to chat messages, and merge those of one earlier answer."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton_serve.services.router.api.responses.schema import InputItem
from baton_serve.services.router.api.responses.tools import flat_name
from baton_serve.services.router.protocol.errors import BadRequestError
from baton_serve.services.router.protocol.openai_requests import ChatMessage, ContentPart, Parts, chat_message
from baton_serve.services.router.text.multimodal.media_parts import image_part

_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal")


def messages_of(items: Iterable[InputItem]) -> list[ChatMessage]:
    """Convert the items of a request's input to chat messages. Raises `BadRequestError` for an item that is not
    served.
    """
    return _merged(_message(item) for item in items)


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
