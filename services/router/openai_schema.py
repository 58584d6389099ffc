"""What clients may send: OpenAI's requests with vLLM's extra parameters. The only place where pydantic is used.

Types and ranges that need nothing but the request itself are checked here; the rest is for `parameters`. Names that are
not declared reach `model_extra`: `parsing` refuses those known to OpenAI's or vLLM's API and ignores others.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

NonNegative = Annotated[int, Field(ge=0)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
StopString = Annotated[str, Field(min_length=1)]


class _Request(BaseModel):
    """Numbers are numbers and strings are strings: nothing is converted."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())


class StreamOptions(_Request):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class AdapterRequest(_Request):
    """`model`: which one's adapter it is, where the router serves several; the first if it is not said."""

    lora_name: Annotated[str, Field(min_length=1)]
    model: str | None = None


class LoadAdapterRequest(AdapterRequest):
    """`lora_path` is a folder that every instance of the model sees."""

    lora_path: Annotated[str, Field(min_length=1)]


class UnloadAdapterRequest(AdapterRequest):
    pass


class GenerationRequest(_Request):
    """What chats and completions have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    use_beam_search: bool | None = None
    length_penalty: Annotated[float, Field(allow_inf_nan=False)] | None = None
    early_stopping: bool | Literal["never"] | None = None
    max_tokens: NonNegative | None = None
    min_tokens: NonNegative | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    temperature: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    stop: StopString | list[StopString] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[StopString] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    prompt_logprobs: NonNegative | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    add_special_tokens: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    echo: bool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_decoding_backend: str | None = None
    guided_whitespace_pattern: str | None = None
    priority: int | None = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None


class Part(_Request):
    type: str
    text: str | None = None
    image_url: dict[str, Any] | str | None = None


class ChatMessage(_Request):
    role: str
    content: str | list[Part] | None = None


def chat_message(role: str, content: Any, **more: Any) -> ChatMessage:
    """A message with fields that only templates know, such as `tool_calls`."""
    return ChatMessage.model_validate({"role": role, "content": content, **more})


class Tool(_Request):
    type: Literal["function"]
    function: dict[str, Any]


class ChatCompletionRequest(GenerationRequest):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: NonNegative | None = None
    logprobs: bool | None = None
    top_logprobs: NonNegative | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    prediction: dict[str, Any] | None = None


class CompletionRequest(GenerationRequest):
    """`POST /v1/completions`."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: NonNegative | None = None


class TokenizeRequest(_Request):
    """`POST /tokenize`: of a prompt, or of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None


class DetokenizeRequest(_Request):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: list[NonNegative]
