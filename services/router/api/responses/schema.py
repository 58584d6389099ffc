"""Define which fields a request of OpenAI's Responses API may have, and which are refused or ignored.

Fields that are not listed are accepted and ignored, except those in `UNSERVED`.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from baton_serve.services.router.protocol.openai_requests import (
    Effort,
    LogitBias,
    Name,
    Objects,
    StopString,
    StopStrings,
    Verbosity,
)
from baton_serve.services.router.protocol.request_bounds import (
    MAX_MESSAGES,
    MAX_METADATA,
    MAX_NAME_CHARS,
    MAX_TOOLS,
    NonNegative,
    OrAll,
    Penalty,
    Positive,
    Priority,
    RepetitionPenalty,
    Seed,
    Share,
    Temperature,
    TopP,
)


class _Lenient(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())


class ReasoningOptions(_Lenient):
    """The field `reasoning` of a request. `summary` has no effect: the answer contains the reasoning itself."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class TextOptions(_Lenient):
    format: dict[str, Any] | None = None
    verbosity: Verbosity | None = None


class InputItem(_Lenient):
    """An item of a request's input: a message, a tool call, a tool's result, or the reasoning of an earlier answer."""

    type: Name | None = None
    role: Name | None = None
    content: str | Objects | None = None
    call_id: Name | None = None
    name: Name | None = None
    namespace: Name | None = None
    arguments: str | None = None
    output: str | Objects | None = None


class InputTokensRequest(_Lenient):
    """The body of `POST /v1/responses/input_tokens`: those fields of a Responses request that decide its prompt."""

    input: str | Annotated[list[InputItem], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    model: Name | None = None
    previous_response_id: Name | None = None
    instructions: str | None = None
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ResponsesRequest(InputTokensRequest):
    """The body of `POST /v1/responses`."""

    stream: bool | None = None
    store: bool | None = None
    background: bool | None = None
    stream_options: dict[str, Any] | None = None
    max_output_tokens: Positive | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_logprobs: NonNegative | None = None
    max_tool_calls: NonNegative | None = None
    truncation: Literal["auto", "disabled"] | None = None
    include: Annotated[list[Name], Field(fail_fast=True, max_length=MAX_METADATA)] | None = None
    metadata: Annotated[dict[str, str], Field(fail_fast=True, max_length=MAX_METADATA)] | None = None
    user: Name | None = None
    safety_identifier: Name | None = None
    prompt_cache_key: Name | None = None
    seed: Seed | None = None
    top_k: OrAll | None = None
    min_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: LogitBias | None = None
    stop: StopString | StopStrings | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    structured_outputs: dict[str, Any] | None = None
    ignore_eos: bool | None = None
    min_tokens: NonNegative | None = None
    priority: Priority | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)] | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=200)] | None = None


UNSERVED: dict[str, tuple[object, ...]] = {
    "context_management": ([],),
    "conversation": (),
    "image": (),
    "moderation": (),
    "previous_input_messages": (),
    "previous_response": (),
    "prompt": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": ("in_memory",),
    "service_tier": ("auto", "default"),
}
"""Parameters that are not served, each with the values that are accepted because they ask for nothing."""

LOGPROBS = "message.output_text.logprobs"
"""The value of `include` that asks for the logprobs of the text."""

INCLUDED = frozenset(
    {
        LOGPROBS,
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "reasoning.encrypted_content",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)
"""Values of `include` that are accepted. Those of hosted tools ask for parts of calls that the model never makes, and
reasoning is returned unencrypted in any case."""
