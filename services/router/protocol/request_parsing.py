"""Bytes of a request's body to a checked request. Says in one sentence what is wrong with a bad one.

What a long body has is counted before it is parsed, and it is parsed beside the event loop.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json

from baton_serve.services.router.protocol.body_scan import UNCOUNTED_BYTES, check_counts
from baton_serve.services.router.protocol.errors import BadRequestError
from baton_serve.services.router.protocol.sizes import MAX_UNKNOWN

logger = logging.getLogger(__name__)

R = TypeVar("R", bound=BaseModel)
T = TypeVar("T")

_pool = ThreadPoolExecutor(1, thread_name_prefix="bodies")
"""For long bodies, one at a time: more threads would only contend with the event loop for the interpreter's lock.
Python ends it with the process."""

_LOGGED_NAMES = 8
_LOGGED_CHARS = 40

_UNIONS = frozenset({"str", "int", "float", "bool", "StreamOptions", "constrained-str", "constrained-int"})

_JSON_WORDS = {
    "list_type": "Input should be a valid array",
    "dict_type": "Input should be an object",
    "model_type": "Input should be an object",
}
"""pydantic has Python's words for a long body, which is parsed before it is validated."""

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


def is_long(body: bytes) -> bool:
    """What is done with it is done beside the event loop."""
    return len(body) > UNCOUNTED_BYTES


async def beside_loop(body: bytes, read: Callable[[bytes], T]) -> T:
    """`read(body)`, in a thread of its own for a long body, so that streams go on. Raises what `read` raises."""
    if not is_long(body):
        return read(body)
    return await asyncio.get_running_loop().run_in_executor(_pool, copy_context().run, read, body)


async def parsed(body: bytes, expected: type[R]) -> R:
    """`parse` beside the event loop. Raises `BadRequestError`."""
    return await beside_loop(body, lambda given: parse(given, expected))


def parse(body: bytes, expected: type[R]) -> R:
    """Raises `BadRequestError`."""
    try:
        request = _long(body, expected) if is_long(body) else expected.model_validate_json(body)
    except ValidationError as exc:
        raise _explained(exc) from exc
    if request.model_extra:
        _check_extra(request.model_extra)
    return request


def _long(body: bytes, expected: type[R]) -> R:
    """In steps, since each holds the interpreter's lock. Raises `BadRequestError` and `ValidationError`."""
    check_counts(body)
    try:
        values = from_json(body)
    except ValueError as exc:
        raise _not_json(str(exc)) from exc
    if isinstance(values, dict) and len(values) > MAX_UNKNOWN + len(expected.model_fields):
        raise _too_many_names()
    return expected.model_validate(values)


def _check_extra(extra: Mapping[str, object]) -> None:
    if len(extra) > MAX_UNKNOWN:
        raise _too_many_names()
    unknown = []
    for name, value in extra.items():
        if name not in UNSUPPORTED:
            unknown.append(name)
        elif value is not None and value not in UNSUPPORTED[name]:
            raise BadRequestError(f"parameter {name!r} is not supported", param=name, code="unsupported_parameter")
    if unknown:
        _log_unknown(unknown)


def _log_unknown(names: Sequence[str]) -> None:
    """One line a request, however many there are."""
    shown = ", ".join(repr(name[:_LOGGED_CHARS]) for name in names[:_LOGGED_NAMES])
    rest = len(names) - _LOGGED_NAMES
    logger.info("unknown parameters are ignored: %s%s", shown, f" and {rest} more" if rest > 0 else "")


def _too_many_names() -> BadRequestError:
    return BadRequestError(
        f"the body has more than {MAX_UNKNOWN} parameters that are not known here", code="too_many_values"
    )


def _not_json(reason: str) -> BadRequestError:
    return BadRequestError(f"the body is not valid JSON: {reason}", code="invalid_json")


def _explained(error: ValidationError) -> BadRequestError:
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    first = errors[0]
    if first["type"] == "json_invalid":
        return _not_json(first["msg"])
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
    message = _JSON_WORDS.get(error["type"], error["msg"])
    text = message[:1].lower() + message[1:]
    return f"{text} (at {'.'.join(path)})" if path else text
