"""Define which fields a request of Anthropic's Messages API may have, and which are refused or ignored.

Fields that are not listed are accepted and ignored, except those in `UNSERVED`.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from baton_serve.services.router.protocol.openai_requests import Metadata, Name, StopStrings
from baton_serve.services.router.protocol.request_bounds import (
    MAX_MESSAGES,
    MAX_METADATA,
    MAX_NAME_CHARS,
    MAX_OBJECTS,
    MAX_TOOLS,
    OrAll,
    Positive,
    Temperature,
    TopP,
)


class _Lenient(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())


class ContentBlock(_Lenient):
    """A content block of a message in a request, of any type; `type` decides which of the other fields are set."""

    type: Name
    text: str | None = None
    thinking: str | None = None
    id: Name | None = None
    name: Name | None = None
    input: dict[str, Any] | None = None
    tool_use_id: Name | None = None
    source: dict[str, Any] | None = None
    content: "str | Annotated[list[ContentBlock], Field(fail_fast=True, max_length=MAX_OBJECTS)] | None" = None


Blocks = Annotated[list[ContentBlock], Field(fail_fast=True, max_length=MAX_OBJECTS)]


class AnthropicMessage(_Lenient):
    role: Literal["user", "assistant", "system"]
    content: str | Blocks


class AnthropicTool(_Lenient):
    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]
    type: Name | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class AnthropicToolChoice(_Lenient):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(_Lenient):
    """Turns the model's reasoning on or off. `budget_tokens` has no effect: the model alone decides when its reasoning
    ends.
    """

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Positive | None = None


class OutputFormat(_Lenient):
    """Requires the answer to follow a JSON schema. Anthropic's API has no other type of output format."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(_Lenient):
    """Says in which form (`format`) and with how much reasoning (`effort`) the model answers."""

    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class CountTokensRequest(_Lenient):
    """The body of `POST /v1/messages/count_tokens`."""

    messages: Annotated[list[AnthropicMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    model: Name | None = None
    system: str | Blocks | None = None
    tools: Annotated[list[AnthropicTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    # Edits that would shorten the prompt are not made. Claude Code asks for one in every request.
    context_management: Annotated[dict[str, Any], Field(max_length=MAX_METADATA)] | None = None
    # The name of `output_config.format` before it left its beta.
    output_format: OutputFormat | None = None


class MessagesRequest(CountTokensRequest):
    """The body of `POST /v1/messages`."""

    max_tokens: Positive
    stream: bool | None = None
    stop_sequences: StopStrings | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: OrAll | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None


UNSERVED: dict[str, tuple[object, ...]] = {
    "container": (),
    "inference_geo": (),
    "mcp_servers": ([],),
}
"""Parameters that are not served, each with the values that are accepted because they ask for nothing."""
