"""Convert a request of OpenAI's Responses API to a chat request."""

from typing import Any

from baton_serve.services.router.api.responses.input_items import messages_of
from baton_serve.services.router.api.responses.schema import (
    INCLUDED,
    LOGPROBS,
    UNSERVED,
    InputTokensRequest,
    ResponsesRequest,
)
from baton_serve.services.router.api.responses.tools import functions_of, tool_choice_of
from baton_serve.services.router.protocol.errors import BadRequestError
from baton_serve.services.router.protocol.openai_requests import (
    ChatCompletionRequest,
    ChatMessage,
)

# Fields with the same name and meaning in a chat request: those of the prompt, and those of the answer.
_OF_INPUT = "model parallel_tool_calls chat_template_kwargs".split()
_OF_ANSWER = (
    "stream temperature top_p user seed top_k min_p presence_penalty frequency_penalty repetition_penalty logit_bias"
    " stop include_stop_str_in_output skip_special_tokens ignore_eos min_tokens structured_outputs priority cache_salt"
    " request_id"
).split()


def check_unserved(request: InputTokensRequest) -> None:
    """Raise `BadRequestError` if a request uses a parameter that is not served. The error names the parameter."""
    for name, value in (request.model_extra or {}).items():
        if name in UNSERVED and value is not None and value not in UNSERVED[name]:
            why = "use previous_response_id, or send the whole conversation as input" if name == "conversation" else ""
            message = f"parameter {name!r} is not supported" + (f"; {why}" if why else "")
            raise BadRequestError(message, param=name, code="unsupported_parameter")


def as_chat(request: ResponsesRequest) -> ChatCompletionRequest:
    """Convert a request of the Responses API to a chat request with the same prompt and sampling parameters. Raises
    `BadRequestError` for something that is not served.
    """
    for name in request.include or []:
        if name not in INCLUDED:
            raise BadRequestError(f"include: {name!r} is not supported", param="include")
    answered = {name: getattr(request, name) for name in _OF_ANSWER}
    return ChatCompletionRequest(
        max_completion_tokens=request.max_output_tokens,
        logprobs=wants_logprobs(request),
        top_logprobs=request.top_logprobs,
        # As in vLLM the oldest tokens are left out; OpenAI leaves out whole items.
        truncate_prompt_tokens=-1 if request.truncation == "auto" else None,
        **answered,
        **_values(request),
    )


def wants_logprobs(request: ResponsesRequest) -> bool:
    """Return whether the request asks for the logprobs of the tokens of its answer's text."""
    return bool(request.top_logprobs) or LOGPROBS in (request.include or ())


def input_as_chat(request: InputTokensRequest) -> ChatCompletionRequest:
    """Convert a request that only counts tokens to a chat request with the same prompt. Raises `BadRequestError` for
    something that is not served.
    """
    return ChatCompletionRequest(**_values(request))


def _values(request: InputTokensRequest) -> dict[str, Any]:
    """Return the fields of the chat request that decide its prompt, by name. Raises `BadRequestError` for something
    that is not served.
    """
    check_unserved(request)
    messages = [ChatMessage(role="system", content=request.instructions)] if request.instructions else []
    messages += [ChatMessage(role="user", content=request.input)] if isinstance(request.input, str) else []
    messages += messages_of(request.input) if not isinstance(request.input, str) else []
    return {
        "messages": messages,
        "tools": functions_of(request.tools or ()) or None,
        "tool_choice": tool_choice_of(request.tool_choice, request.tools or ()),
        "verbosity": request.text.verbosity if request.text is not None else None,
        "reasoning_effort": request.reasoning.effort if request.reasoning is not None else None,
        "response_format": _response_format(request),
        **{name: getattr(request, name) for name in _OF_INPUT},
    }


def _response_format(request: InputTokensRequest) -> dict[str, Any] | None:
    # As for tools: a chat request nests what this API has on the first level.
    text_format = request.text.format if request.text is not None else None
    if text_format is None or text_format.get("type") != "json_schema":
        return text_format
    return {"type": "json_schema", "json_schema": {key: value for key, value in text_format.items() if key != "type"}}
