"""What clients of OpenAI's Responses API may send, as far as it needs no memory of earlier answers."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from baton_serve.services.router.protocol.bounds import (
    NonNegative,
    OrAll,
    Positive,
    Priority,
    RepetitionPenalty,
    Seed,
    Share,
    Temperature,
    TopP,
)
from baton_serve.services.router.protocol.openai_requests import Name, Objects, StopString, StopStrings
from baton_serve.services.router.protocol.sizes import MAX_MESSAGES, MAX_METADATA, MAX_NAME_CHARS, MAX_TOOLS

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class _Lenient(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())


class ReasoningOptions(_Lenient):
    """`summary` has no effect: reasoning is shown as it is."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class TextOptions(_Lenient):
    format: dict[str, Any] | None = None
    verbosity: Name | None = None


class InputItem(_Lenient):
    """A message, a call of a tool, its result, or reasoning of an earlier answer."""

    type: Name | None = None
    role: Name | None = None
    content: str | Objects | None = None
    call_id: Name | None = None
    name: Name | None = None
    arguments: str | None = None
    output: str | Objects | None = None


class InputTokensRequest(_Lenient):
    """`POST /v1/responses/input_tokens`: what the model would read."""

    input: str | Annotated[list[InputItem], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    model: Name | None = None
    instructions: str | None = None
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ResponsesRequest(InputTokensRequest):
    """`POST /v1/responses`."""

    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    max_output_tokens: Positive | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    include: Annotated[list[Name], Field(fail_fast=True, max_length=MAX_METADATA)] | None = None
    metadata: Annotated[dict[str, str], Field(fail_fast=True, max_length=MAX_METADATA)] | None = None
    user: Name | None = None
    safety_identifier: Name | None = None
    prompt_cache_key: Name | None = None
    seed: Seed | None = None
    top_k: OrAll | None = None
    min_p: Share | None = None
    repetition_penalty: RepetitionPenalty | None = None
    stop: StopString | StopStrings | None = None
    ignore_eos: bool | None = None
    min_tokens: NonNegative | None = None
    priority: Priority | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)] | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=200)] | None = None


UNSERVED: dict[str, tuple[object, ...]] = {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "image": (),
    "max_tool_calls": (),
    "moderation": (),
    "previous_response_id": (),
    "prompt": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": ("in_memory",),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
"""Parameters that need a memory of answers, or that nothing here does, with values that ask for nothing."""

INCLUDED = frozenset({"reasoning.encrypted_content"})
"""What a client may want included and gets as far as it exists: reasoning is shown in the clear."""
