"""What clients of Anthropic's Messages API may send."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from services.router.openai_schema import StopString


class _Lenient(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())


class ContentBlock(_Lenient):
    """Of any type; which fields it has depends on that."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    source: dict[str, Any] | None = None
    content: "str | list[ContentBlock] | None" = None


class AnthropicMessage(_Lenient):
    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]


class AnthropicTool(_Lenient):
    name: Annotated[str, Field(min_length=1)]
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class ToolChoice(_Lenient):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(_Lenient):
    """`budget_tokens` has no effect: reasoning ends where the model ends it."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None


class CountTokensRequest(_Lenient):
    """`POST /v1/messages/count_tokens`."""

    messages: Annotated[list[AnthropicMessage], Field(min_length=1)]
    model: str | None = None
    system: str | list[ContentBlock] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None


class MessagesRequest(CountTokensRequest):
    """`POST /v1/messages`."""

    max_tokens: Annotated[int, Field(ge=1)]
    stream: bool | None = None
    stop_sequences: list[StopString] | None = None
    temperature: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None


UNSERVED: dict[str, tuple[object, ...]] = {
    "container": (),
    "context_management": ({},),
    "inference_geo": (),
    "mcp_servers": ([],),
    "output_config": ({},),
    "output_format": (),
}
"""Parameters that nothing here does, with values that ask for nothing."""
