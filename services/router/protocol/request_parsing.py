"""Parse and validate a request's body; decide whether an unknown field is refused, and explain errors in one sentence.

The values of a long body are counted before it is parsed (`body_scan`), and it is parsed in a thread, so that the event
loop and with it all streams go on.
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
from baton_serve.services.router.protocol.request_bounds import MAX_UNKNOWN

logger = logging.getLogger(__name__)

R = TypeVar("R", bound=BaseModel)
T = TypeVar("T")

_pool = ThreadPoolExecutor(1, thread_name_prefix="bodies")
"""The thread that parses long bodies. With more threads they would only contend with the event loop for the
interpreter's lock. Python ends it with the process."""

_LOGGED_NAMES = 8
"""Number of unknown parameters of one request that are logged by name."""
_LOGGED_CHARS = 40
"""Characters of a logged parameter name."""

_UNIONS = frozenset({"str", "int", "float", "bool", "StreamOptions", "constrained-str", "constrained-int"})
"""Names of types that pydantic puts into the path of an error within a union."""

_JSON_WORDS = {
    "list_type": "Input should be a valid array",
    "dict_type": "Input should be an object",
    "model_type": "Input should be an object",
}
"""Messages by pydantic's error type. A long body is validated as Python values, so that pydantic would write "list" and
"dictionary"; these are the words that it uses for JSON."""

UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "audio": (),
    "ec_transfer_params": ({},),
    "embed_dtype": ("float32",),
    "enable_response_messages": (False,),
    "function_call": ("none",),
    "endianness": ("native", "little"),
    "functions": ([],),
    "grammar_lazy": (False,),
    "grammar_triggers": ([],),
    "lora_int_id": (),
    "logits_processors": ([],),
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
    "stop_regex": ([],),
    "structural_tag": (),
    "suffix": ("",),
    "thinking_token_budget": (),
    "vllm_xargs": ({},),
    "watermarking": (False,),
    "web_search_options": (),
}
"""Parameters of OpenAI's and vLLM's API that are not supported, with the values that are accepted nevertheless because
they ask for the default behaviour. Null is always accepted."""


EXPLAINED: Mapping[str, str] = {
    "kv_transfer_params": "the router plans the transfers of KV blocks, and the instances make them",
}
"""Parameters whose work is done in any case, with the reason. They are accepted with any value, and logged."""


def is_long(body: bytes) -> bool:
    """Return whether a request's body is so long that it must be processed in a thread and not on the event loop."""
    return len(body) > UNCOUNTED_BYTES


async def beside_loop(body: bytes, read: Callable[[bytes], T], *, is_slow: bool = False) -> T:
    """Return the result of `read(body)`. If the body is long, or slow to read for another reason (`is_slow`), `read`
    runs in a thread, so that other requests are not delayed. Raises what `read` raises.
    """
    if not is_slow and not is_long(body):
        return read(body)
    # The copied context carries the request id, which log lines of `read` show.
    return await asyncio.get_running_loop().run_in_executor(_pool, copy_context().run, read, body)


async def parsed(body: bytes, expected: type[R]) -> R:
    """Parse and validate the JSON body of a request as `parse` does, in a thread if it is long. Raises
    `BadRequestError`.
    """
    if not is_long(body):
        return parse(body, expected)
    return await beside_loop(body, lambda given: parse(given, expected))


def parse(body: bytes, expected: type[R]) -> R:
    """Parse the JSON body of a request and validate it as a request of the class `expected`. Raises `BadRequestError`
    if it is invalid or has an unsupported parameter.
    """
    try:
        request = _parse_long(body, expected) if is_long(body) else expected.model_validate_json(body)
    except ValidationError as exc:
        raise _validation_error(exc) from exc
    if request.model_extra:
        _check_extra(request.model_extra)
    return request


def _parse_long(body: bytes, expected: type[R]) -> R:
    """Parse and validate a long body, after its values were counted. Raises `BadRequestError`, and pydantic's
    `ValidationError` if it does not fit the class `expected`.
    """
    # Parsing and validating are separate calls, because each call holds the interpreter's lock until it returns. Other
    # threads, such as the event loop, run in between.
    check_counts(body)
    try:
        values = from_json(body)
    except ValueError as exc:
        raise _not_json(str(exc)) from exc
    # Checked before the validation, which would copy all unknown names to `model_extra`.
    if isinstance(values, dict) and len(values) > MAX_UNKNOWN + len(expected.model_fields):
        raise _too_many_names()
    return expected.model_validate(values)


def _check_extra(extra: Mapping[str, object]) -> None:
    if len(extra) > MAX_UNKNOWN:
        raise _too_many_names()
    unknown = []
    for name, value in extra.items():
        if name in EXPLAINED:
            logger.info("ignoring %s of a request: %s", name, EXPLAINED[name])
        elif name not in UNSUPPORTED:
            unknown.append(name)
        elif value is not None and value not in UNSUPPORTED[name]:
            # An unsupported parameter is rejected and not ignored: the client relies on its effect.
            raise BadRequestError(f"parameter {name!r} is not supported", param=name, code="unsupported_parameter")
    if unknown:
        _log_unknown(unknown)


def _log_unknown(names: Sequence[str]) -> None:
    """Log the names of unknown parameters of a request in one line, however many there are."""
    shown = ", ".join(repr(name[:_LOGGED_CHARS]) for name in names[:_LOGGED_NAMES])
    rest = len(names) - _LOGGED_NAMES
    logger.info("ignoring unknown parameters of a request: %s%s", shown, f" and {rest} more" if rest > 0 else "")


def _too_many_names() -> BadRequestError:
    return BadRequestError(f"the body has more than {MAX_UNKNOWN} unknown parameters", code="too_many_values")


def _not_json(reason: str) -> BadRequestError:
    return BadRequestError(f"the body is not valid JSON: {reason}", code="invalid_json")


def _validation_error(error: ValidationError) -> BadRequestError:
    # By default pydantic would copy the client's values into each of its errors.
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    first = errors[0]
    if first["type"] == "json_invalid":
        return _not_json(first["msg"])
    if not first["loc"]:
        return BadRequestError("the body must be a JSON object", code="invalid_json")
    # A client gets one error at a time, for the first invalid parameter. In a union pydantic reports one error for each
    # type that the value does not match, and all of them are needed to say what is accepted.
    param = str(first["loc"][0])
    same = [e for e in errors if str(e["loc"][0]) == param]
    reasons = dict.fromkeys(_error_text(e) for e in same[:4])
    return BadRequestError(f"{param}: {'; or '.join(reasons)}", param=param)


def _error_text(error: ErrorDetails) -> str:
    # Within a union pydantic adds the name of the tried type to the path. Keep only the parts that exist in the
    # client's JSON: list indexes and field names.
    path = [str(part) for part in error["loc"][1:] if isinstance(part, int) or part.isidentifier()]
    path = [part for part in path if part not in _UNIONS]
    message = _JSON_WORDS.get(error["type"], error["msg"])
    text = message[:1].lower() + message[1:]
    return f"{text} (at {'.'.join(path)})" if path else text
