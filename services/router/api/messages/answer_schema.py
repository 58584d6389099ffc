"""Define the answers, stream events and errors of Anthropic's Messages API.

Their field names are those of the API. Nothing here decides anything.
"""

from typing import Any, Literal

import msgspec

from baton_serve.services.router.protocol.errors import ApiError


class TextBlock(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["text"] = "text"
    text: str


class ThinkingBlock(msgspec.Struct, frozen=True, kw_only=True):
    """A content block with the model's reasoning. `signature` stays empty: with it Anthropic's own service verifies
    reasoning that a client sends back.
    """

    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: str = ""


class ToolUseBlock(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any]


AnswerBlock = TextBlock | ThinkingBlock | ToolUseBlock
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessagesUsage(msgspec.Struct, frozen=True, kw_only=True):
    """The token counts of an answer. As in Anthropic's API, `input_tokens` does not include the tokens found in the
    cache, which `cache_read_input_tokens` counts.
    """

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int


class MessagesAnswer(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnswerBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessagesUsage


class TokenCount(msgspec.Struct, frozen=True):
    input_tokens: int


class MessageStart(msgspec.Struct, frozen=True, tag="message_start"):
    message: MessagesAnswer


class BlockStart(msgspec.Struct, frozen=True, tag="content_block_start"):
    index: int
    content_block: AnswerBlock


class TextBlockDelta(msgspec.Struct, frozen=True, tag="text_delta"):
    text: str


class ThinkingDelta(msgspec.Struct, frozen=True, tag="thinking_delta"):
    thinking: str


class InputDelta(msgspec.Struct, frozen=True, tag="input_json_delta"):
    partial_json: str


class BlockDelta(msgspec.Struct, frozen=True, tag="content_block_delta"):
    index: int
    delta: TextBlockDelta | ThinkingDelta | InputDelta


class BlockStop(msgspec.Struct, frozen=True, tag="content_block_stop"):
    index: int


class StopDelta(msgspec.Struct, frozen=True):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, frozen=True, tag="message_delta"):
    delta: StopDelta
    usage: MessagesUsage


class MessageStop(msgspec.Struct, frozen=True, tag="message_stop"):
    """The last event of a stream of the Messages API."""


class AnthropicError(msgspec.Struct, frozen=True):
    type: str
    message: str


class ErrorAnswer(msgspec.Struct, frozen=True, tag="error"):
    error: AnthropicError


# Anthropic's clients decide by the type of an error, not only by its status, whether they retry.
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_answer(error: ApiError) -> ErrorAnswer:
    """Return the error as a response body of Anthropic's API."""
    return ErrorAnswer(AnthropicError(_ERROR_TYPES.get(error.status, "api_error"), error.message))
