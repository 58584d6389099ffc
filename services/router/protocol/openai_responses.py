"""What clients get: OpenAI's answers with vLLM's extra fields, as msgspec structs. Nothing here decides anything."""

from collections.abc import Mapping
from typing import Literal

import msgspec


class Explanation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The `baton` field of an answer whose request has the header `x-baton-explain: 1`. Times in seconds."""

    request_id: str
    decision: str
    prefill: str | None
    decode: str | None
    cached_tokens: Mapping[str, int]
    pulled_tokens: int = 0
    """Cached ones that the instance fetched from another one, `pulled_from`, first."""
    pulled_from: str | None = None
    pull_s: float = 0.0
    predicted_ttft_s: float
    other_ttft_s: float = 0.0
    """What was predicted where another instance would have read the prompt: `decode` itself, or a prefill instance."""
    predicted_itl_s: float
    itl_s: float | None
    admission_s: float | None
    ttft_s: float | None
    held_s: float | None = None
    """Part of `ttft_s`: the first token was held back, for the second to follow in the promised time."""
    tokenize_s: float
    queue_s: float | None
    prefill_s: float | None
    decode_s: float | None
    e2e_s: float
    transport: str | None = None
    handoff_s: float | None = None
    handoff_exposed_s: float | None = None
    handoff_to_step_s: float | None = None
    """From prefill's end to the first step of the decode instance."""
    transferred_blocks: int | None = None
    transferred_bytes: int | None = None
    reused_blocks: int | None = None
    handoff_bytes_per_s: float | None = None
    replays: int = 0


class CachedTokens(msgspec.Struct, frozen=True):
    cached_tokens: int


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: CachedTokens | None = None


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[ChatLogprob]


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(msgspec.Struct, frozen=True, kw_only=True):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]


class FunctionCall(msgspec.Struct, frozen=True):
    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessageAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Reasoning goes by both of the names that clients know."""

    role: str
    content: str | None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] = []


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: ChatMessageAnswer
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatAnswer(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    system_fingerprint: str | None = None
    kv_transfer_params: None = None
    baton: Explanation | list[Explanation] | msgspec.UnsetType = msgspec.UNSET


class PromptTokenIds(msgspec.Struct, frozen=True):
    """Beside the choices of a chunk."""

    prompt_token_ids: list[int]


class FunctionDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    index: int
    id: str | None = None
    type: str | None = None
    function: FunctionDelta


class ChatDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatDeltaChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | msgspec.UnsetType | None = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Streamed and whole."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType | None = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType | None = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class CompletionAnswer(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    kv_transfer_params: None = None
    baton: Explanation | list[Explanation] | msgspec.UnsetType = msgspec.UNSET


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "baton"
    root: str
    parent: str | None = None
    max_model_len: int | None
    permission: list[str] = []


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    prompt: str
