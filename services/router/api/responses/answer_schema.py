"""Define the answers and stream events of OpenAI's Responses API.

Their field names are those of the API. Nothing here decides anything.
"""

from typing import Any, Literal

import msgspec

from baton_serve.services.router.protocol.errors import ErrorDetail
from baton_serve.services.router.protocol.openai_responses import ChatLogprob


class OutputText(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[str] = []
    logprobs: list[ChatLogprob] = []


class ReasoningText(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class MessageItem(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["message"] = "message"
    id: str
    status: str
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class ReasoningItem(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["reasoning"] = "reasoning"
    id: str
    status: str
    summary: list[str] = []
    content: list[ReasoningText]
    encrypted_content: None = None


class CallItem(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["function_call"] = "function_call"
    id: str
    call_id: str
    name: str
    namespace: str | msgspec.UnsetType = msgspec.UNSET
    arguments: str
    status: str


OutputItem = MessageItem | ReasoningItem | CallItem


class InputDetails(msgspec.Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int = 0


class ResponsesUsage(msgspec.Struct, frozen=True, kw_only=True):
    """The token counts of an answer. `reasoning_tokens` stays 0: tokens of reasoning are counted in `output_tokens`
    only.
    """

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails = OutputDetails()
    total_tokens: int


class IncompleteDetails(msgspec.Struct, frozen=True):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer of the Responses API. It repeats most parameters of its request, as OpenAI's does."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool = False
    error: ErrorDetail | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None = None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    previous_response_id: str | None = None
    reasoning: dict[str, str | None]
    service_tier: str = "default"
    store: bool = False
    temperature: float | None
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int = 0
    top_p: float | None
    truncation: str = "disabled"
    usage: ResponsesUsage | None = None
    user: str | None = None


class ResponseEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A streamed event that contains the whole answer as it is at that time."""

    type: str
    sequence_number: int
    response: ResponseAnswer


class ItemEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A streamed event that starts or ends an item of the answer's `output`."""

    type: str
    sequence_number: int
    output_index: int
    item: OutputItem


class PartEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A streamed event that starts or ends a content part of an output item."""

    type: str
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int = 0
    part: OutputText | ReasoningText


class DeltaEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A streamed event with new text of an output item, or at its end with all of its text. Events of tool calls have
    no `content_index` and no `logprobs`.
    """

    type: str
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int | msgspec.UnsetType = 0
    delta: str | msgspec.UnsetType = msgspec.UNSET
    text: str | msgspec.UnsetType = msgspec.UNSET
    arguments: str | msgspec.UnsetType = msgspec.UNSET
    name: str | msgspec.UnsetType = msgspec.UNSET
    logprobs: list[ChatLogprob] | msgspec.UnsetType = msgspec.UNSET


class ErrorEvent(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["error"] = "error"
    sequence_number: int
    code: str | None
    message: str
    param: str | None
