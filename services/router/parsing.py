"""Bytes of a request's body to a checked request. Says in one sentence what is wrong with a bad one."""

import logging
from collections.abc import Mapping
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from services.router.errors import BadRequestError

logger = logging.getLogger(__name__)

R = TypeVar("R", bound=BaseModel)

_UNIONS = frozenset({"str", "int", "float", "bool", "StreamOptions", "constrained-str", "constrained-int"})

UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "audio": (),
    "ec_transfer_params": ({},),
    "embed_dtype": ("float32",),
    "enable_response_messages": (False,),
    "function_call": ("none",),
    "endianness": ("native", "little"),
    "functions": ([],),
    "kv_transfer_params": ({},),
    "load_inplace": (False,),
    "lora_int_id": (),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "media_io_kwargs": ({},),
    "max_chunks_per_doc": (),
    "max_tokens_per_doc": (),
    "min_thinking_tokens": (),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "prompt_embeds": (),
    "repetition_detection": (),
    "return_prompt_text": (False,),
    "return_token_offsets": (False,),
    "routed_experts_prompt_start": (0,),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "thinking_token_budget": (),
    "truncation_side": ("left",),
    "vllm_xargs": ({},),
    "watermarking": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Parameters of OpenAI's and vLLM's API that are not served yet, with values that ask for nothing (null never does)."""


def parse(body: bytes, expected: type[R]) -> R:
    """Raises `BadRequestError`."""
    try:
        request = expected.model_validate_json(body)
    except ValidationError as exc:
        raise _explained(exc) from exc
    if request.model_extra:
        _check_extra(request.model_extra)
    return request


def _check_extra(extra: Mapping[str, object]) -> None:
    for name, value in extra.items():
        if name not in UNSUPPORTED:
            logger.info("unknown parameter %r is ignored", name[:100])
        elif value is not None and value not in UNSUPPORTED[name]:
            raise BadRequestError(f"parameter {name!r} is not supported", param=name, code="unsupported_parameter")


def _explained(error: ValidationError) -> BadRequestError:
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    first = errors[0]
    if first["type"] == "json_invalid":
        return BadRequestError(f"the body is not valid JSON: {first['msg']}", code="invalid_json")
    if not first["loc"]:
        return BadRequestError("the body must be a JSON object", code="invalid_json")
    param = str(first["loc"][0])
    same = [e for e in errors if str(e["loc"][0]) == param]
    reasons = dict.fromkeys(_reason(e) for e in same[:4])
    return BadRequestError(f"{param}: {'; or '.join(reasons)}", param=param)


def _reason(error: ErrorDetails) -> str:
    # Within a union pydantic adds the name of the tried type to the path; keep only places in the client's JSON.
    path = [str(part) for part in error["loc"][1:] if isinstance(part, int) or part.isidentifier()]
    path = [part for part in path if part not in _UNIONS]
    text = error["msg"][:1].lower() + error["msg"][1:]
    return f"{text} (at {'.'.join(path)})" if path else text
