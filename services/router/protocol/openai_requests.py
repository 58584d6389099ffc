"""Define the fields of OpenAI requests with vLLM's extra parameters, and their types and ranges. Only schemas of
requests use pydantic.

A schema checks types and ranges that depend on the request alone; `text.sampling_params` checks the rest against the
model. Undeclared parameters go to `model_extra`: `request_parsing` rejects those of OpenAI's or vLLM's API that are not
supported and ignores all others.

Every list has a maximum length, and its first invalid element ends its validation (`fail_fast`). Otherwise pydantic
would report every invalid element, once for each type that the field may have.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo
from pydantic_core import PydanticCustomError

from baton_serve.contracts.flag_choices import LoadFormat
from baton_serve.services.router.protocol.request_bounds import (
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_CHOICES,
    MAX_INPUTS,
    MAX_LOGIT_BIAS,
    MAX_MESSAGES,
    MAX_METADATA,
    MAX_NAME_CHARS,
    MAX_NUMBERS,
    MAX_OBJECTS,
    MAX_STOP_CHARS,
    MAX_STOP_TOKENS,
    MAX_STOPS,
    MAX_TOOLS,
    AnyInt,
    Bias,
    LengthPenalty,
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

Name = Annotated[str, Field(max_length=MAX_NAME_CHARS)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
BadWord = Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_CHARS)]
StopStrings = Annotated[list[StopString], Field(fail_fast=True, max_length=MAX_STOPS)]
Numbers = Annotated[list[AnyInt], Field(fail_fast=True, max_length=MAX_NUMBERS)]
LogitBias = Annotated[dict[str, Bias], Field(fail_fast=True, max_length=MAX_LOGIT_BIAS)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MAX_OBJECTS)]
Metadata = Annotated[dict[str, Any], Field(max_length=MAX_METADATA)]

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""How much a model should reason. OpenAI has no `max`; vLLM and Anthropic have it."""

Verbosity = Literal["low", "medium", "high"]
"""How long an answer should be. Like `Effort` it has the meaning that the chat template gives it."""

TruncationSide = Literal["left", "right"]
"""The side from which `truncate_prompt_tokens` takes tokens away. With `right` the first ones remain."""


class _Request(BaseModel):
    """The base class of all request schemas. It is strict: a string that contains a number is not accepted as a
    number.
    """

    # Without `protected_namespaces=()` pydantic warns about fields whose name begins with `model_`.
    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())


class StreamOptions(_Request):
    """The field `stream_options` of a request: whether the answer's stream has token counts in an extra last chunk, or
    in every chunk.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


def _only_streamed(options: StreamOptions | None, info: ValidationInfo) -> StreamOptions | None:
    """Return `options`, the value of `stream_options`. Raises an error if it asks for something and the answer is not
    streamed, as OpenAI and vLLM do.
    """
    # Empty options ask for nothing. Some clients always send them.
    if options is not None and options.model_fields_set and not info.data.get("stream"):
        raise PydanticCustomError("not_streamed", "stream options are only allowed with stream: true")
    return options


class AdapterRequest(_Request):
    """A request about one LoRA adapter. `model` names its base model; by default it is the router's first model."""

    lora_name: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]
    model: Name | None = None


class LoadAdapterRequest(AdapterRequest):
    """The body of `POST /v1/load_lora_adapter`. Every instance of the model must be able to read the folder
    `lora_path`.
    """

    lora_path: Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
    load_inplace: bool | None = None


class UnloadAdapterRequest(AdapterRequest):
    """The body of `POST /v1/unload_lora_adapter`."""


class UpdateWeightsRequest(_Request):
    """The body of `POST /update_weights_from_disk`, as in SGLang. Every instance must be able to read the folder
    `model_path`.
    """

    model_path: Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
    load_format: LoadFormat = "auto"
    model: Name | None = None
    flush_cache: Literal[True] | None = None
    """The cache is always emptied: its blocks belong to the old weights."""
    abort_all_requests: Literal[False] | None = None
    """Running requests always finish first."""


class GenerationRequest(_Request):
    """The parameters that chat requests and completion requests have in common."""

    model: Name | None = None
    stream: bool | None = None
    stream_options: Annotated[StreamOptions | None, AfterValidator(_only_streamed)] = None
    n: Positive | None = None
    best_of: Positive | None = None
    use_beam_search: bool | None = None
    length_penalty: LengthPenalty | None = None
    early_stopping: bool | Literal["never"] | None = None
    max_tokens: NonNegative | None = None
    min_tokens: NonNegative | None = None
    seed: Seed | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: OrAll | None = None
    min_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: LogitBias | None = None
    allowed_token_ids: Annotated[list[AnyInt], Field(fail_fast=True, max_length=MAX_ALLOWED_TOKENS)] | None = None
    stop: StopString | StopStrings | None = None
    stop_token_ids: Annotated[list[AnyInt], Field(fail_fast=True, max_length=MAX_STOP_TOKENS)] | None = None
    bad_words: Annotated[list[BadWord], Field(fail_fast=True, max_length=MAX_BAD_WORDS)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    prompt_logprobs: OrAll | None = None
    logprob_token_ids: (
        Annotated[list[AnyInt], Field(fail_fast=True, min_length=1, max_length=MAX_STOP_TOKENS)] | None
    ) = None
    truncate_prompt_tokens: OrAll | None = None
    truncation_side: TruncationSide | None = None
    add_special_tokens: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    echo: bool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    # vLLM's older names of `structured_outputs`. Clients still send them.
    guided_json: str | dict[str, Any] | bool | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(fail_fast=True, max_length=MAX_CHOICES)] | None = None
    guided_grammar: str | None = None
    guided_decoding_backend: Name | None = None
    guided_whitespace_pattern: str | None = None
    # The names of SGLang (`regex`, `ebnf`, `json_schema`) and of llama.cpp (`grammar`, `json_schema`).
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None
    json_schema: str | dict[str, Any] | bool | None = None
    priority: Priority | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)] | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    user: Name | None = None
    metadata: Metadata | None = None


class ContentPart(_Request):
    """One part of a message's content: text, an image, a video or audio."""

    type: Name
    text: str | None = None
    image_url: dict[str, Any] | str | None = None
    image_embeds: dict[str, Any] | str | None = None
    video_url: dict[str, Any] | str | None = None
    audio_url: dict[str, Any] | str | None = None
    input_audio: dict[str, Any] | None = None
    uuid: Name | None = None
    """The client's name of the image, video or audio, under which it is kept for later requests."""


Parts = Annotated[list[ContentPart], Field(fail_fast=True, max_length=MAX_OBJECTS)]


class ChatMessage(_Request):
    """One message of a chat. Other fields (`tool_calls`, `name`, ...) stay in `model_extra`, for the chat template."""

    role: Name
    content: str | Parts | None = None


def chat_message(role: str, content: Any, **more: Any) -> ChatMessage:
    """Return a chat message with additional fields, such as `tool_calls`, which only chat templates use."""
    return ChatMessage.model_validate({"role": role, "content": content, **more})


class Tool(_Request):
    """A tool that a request offers to the model. `function` has `name`, `description`, `parameters` and `strict`."""

    type: Literal["function"]
    function: dict[str, Any]


ProcessorSettings = Annotated[dict[str, Any], Field(max_length=MAX_METADATA)]
Messages = Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
Tools = Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)]


class ChatCompletionRequest(GenerationRequest):
    """The body of `POST /v1/chat/completions`."""

    messages: Messages
    max_completion_tokens: NonNegative | None = None
    logprobs: bool | None = None
    top_logprobs: OrAll | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    documents: Objects | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: ProcessorSettings | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: Effort | None = None
    verbosity: Verbosity | None = None
    prediction: dict[str, Any] | None = None


class CompletionRequest(GenerationRequest):
    """The body of `POST /v1/completions`."""

    prompt: (
        str
        | Annotated[list[str], Field(fail_fast=True, max_length=MAX_INPUTS)]
        | Numbers
        | Annotated[list[Numbers], Field(fail_fast=True, max_length=MAX_INPUTS)]
    )
    logprobs: OrAll | None = None


class TokenizeRequest(_Request):
    """The body of `POST /tokenize`. It has either `prompt` or `messages`, as in vLLM."""

    model: Name | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: ProcessorSettings | None = None
    tools: Tools | None = None


class DetokenizeRequest(_Request):
    """The body of `POST /detokenize`."""

    model: Name | None = None
    tokens: Annotated[list[NonNegative], Field(fail_fast=True, max_length=MAX_NUMBERS)]
