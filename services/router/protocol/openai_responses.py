"""Define OpenAI's answers with vLLM's extra fields. This module contains no logic.

A field of type `UnsetType` is left out of the JSON when it is not set; a field that is None is sent as null.
"""

from collections.abc import Mapping
from typing import Literal

import msgspec


class Explanation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The field `baton` of an answer: where the request was placed, and how long each phase took, in seconds. It is
    sent if the request has the header `x-baton-explain: 1`.
    """

    request_id: str
    decision: str
    prefill: str | None
    decode: str | None
    cached_tokens: Mapping[str, int]
    pulled_tokens: int = 0
    """Number of the cached tokens whose KV blocks the instance first fetched from another instance, `pulled_from`."""
    pulled_from: str | None = None
    pull_s: float | None = None
    predicted_ttft_s: float
    other_ttft_s: float | None = None
    """TTFT predicted for the alternative placement: prefill on the decode instance, or on a prefill instance."""
    predicted_itl_s: float
    itl_s: float | None
    admission_s: float | None
    ttft_s: float | None
    held_s: float | None = None
    """Time that the router held back the first token so that the second met the ITL SLO. It is part of `ttft_s`."""
    tokenize_s: float
    queue_s: float | None
    prefill_s: float | None
    decode_s: float | None
    e2e_s: float
    transport: str | None = None
    handoff_s: float | None = None
    handoff_exposed_s: float | None = None
    handoff_to_step_s: float | None = None
    """Time from the end of prefill to the first step of the decode instance."""
    transferred_blocks: int | None = None
    transferred_bytes: int | None = None
    reused_blocks: int | None = None
    handoff_bytes_per_s: float | None = None
    replays: int = 0


class InputTokens(msgspec.Struct, frozen=True, tag_field="object", tag="response.input_tokens"):
    """The answer to a request that only counts tokens: the number of its prompt tokens."""

    input_tokens: int


class CachedTokens(msgspec.Struct, frozen=True):
    """The number of an answer's prompt tokens whose KV was already in a cache."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """The field `usage` of an answer: the token counts, as OpenAI reports them."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: CachedTokens | None = None


class TopLogprob(msgspec.Struct, frozen=True):
    """One of the most likely tokens at a position of a chat answer, with its logprob."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct, frozen=True):
    """The generated token at one position of a chat answer, with its logprob and the most likely tokens there."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """The logprobs of one choice in the format of the chat completions API."""

    content: list[ChatLogprob]


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """The logprobs of one choice in the format of the completions API: parallel lists with one entry for each token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """The logprob of one token at a position of the prompt, in vLLM's format. `rank` 1 is the most likely token."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]
"""Logprobs by token id for each position of the prompt. The first entry is None: no token precedes the first one."""


class FunctionCall(msgspec.Struct, frozen=True):
    """The name of the function that a tool call calls, with its arguments as a JSON string."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A complete tool call in an answer that is not streamed."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessageAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The message of one choice of a chat answer. Reasoning is sent under both names that clients read."""

    role: str
    content: str | None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET
    """Left out if the answer has no calls, as in OpenAI's API and vLLM."""


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One of the `n` choices of a chat answer that is not streamed."""

    index: int
    message: ChatMessageAnswer
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The response of /v1/chat/completions, if it is not streamed."""

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
    """The additional field of a streamed chunk that has the token ids of the prompt."""

    prompt_token_ids: list[int]


class FunctionDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """A piece of a streamed tool call's function: its name, or more text of its arguments."""

    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A piece of a streamed tool call. Only the first piece of a tool call has `id` and `type`."""

    index: int
    id: str | None = None
    type: str | None = None
    function: FunctionDelta


class ChatDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """The field `delta` of a streamed chunk: the new part of the chat message."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatDeltaChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One choice in a chunk of a streamed chat answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | msgspec.UnsetType | None = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of /v1/completions, both in streamed chunks and in whole responses."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType | None = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType | None = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class CompletionAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The response of /v1/completions, if it is not streamed."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    kv_transfer_params: None = None
    baton: Explanation | list[Explanation] | msgspec.UnsetType = msgspec.UNSET


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of /v1/models: a model, or a LoRA adapter whose `parent` is its base model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "baton"
    root: str
    parent: str | None = None
    max_model_len: int | None
    permission: list[str] = []
    tasks: list[str] = []
    """Baton's own: `generate`, or the tasks of a pooling model (`embed`, `token_embed`, `classify`, `score`); empty
    while no instance is known."""
    inputs: list[str] = []
    """Baton's own: what the model reads beside text, `image` or `audio` in chats, `speech` in files that it
    transcribes."""


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """The response of /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The response of /tokenize."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The response of /detokenize: the text of the token ids."""

    prompt: str
