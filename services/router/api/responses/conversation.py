"""Decide how a Responses request continues a stored answer (`previous_response_id`), which `kept_responses.py` finds,
and what is stored.

A record holds the whole conversation before its answer. So a chain of answers is read with one access, and an answer
stays usable after the earlier ones were deleted.
"""

import secrets
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import msgspec
from pydantic_core import to_json

from baton_serve.services.router.api.responses.schema import InputItem, InputTokensRequest
from baton_serve.services.router.protocol.errors import BadRequestError
from baton_serve.services.router.protocol.request_bounds import MAX_MESSAGES

R = TypeVar("R", bound=InputTokensRequest)

_PREFIX = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


class ResponseRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One answer that the router keeps, with its conversation. It is stored as JSON in a `ResponseStore`."""

    answer: msgspec.Raw
    """The answer as the client gets it."""
    input: list[msgspec.Raw]
    """The items of the conversation before the answer, oldest first."""


class AnswerState(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a kept answer that the router reads again when a later request continues, polls or cancels it."""

    status: str
    background: bool
    output: list[msgspec.Raw] = []


class _ItemId(msgspec.Struct, frozen=True):
    id: str


class ItemPage(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `GET /v1/responses/ID/input_items`: one page of the items that were the answer's input."""

    object: Literal["list"] = "list"
    data: list[msgspec.Raw]
    first_id: str | None
    last_id: str | None
    has_more: bool


def continued(request: R, record: bytes | None, *, max_bytes: int) -> R:
    """Return the request with the whole conversation as its input: the input and the output of the answer in `record`,
    then the request's own input. Without a record (None), return the request as it is.

    Raises `BadRequestError` if the answer in the record has not ended, or the conversation has more than `max_bytes` or
    too many items.
    """
    if record is None:
        return request
    earlier = msgspec.json.decode(record, type=ResponseRecord)
    answer = msgspec.json.decode(earlier.answer, type=AnswerState)
    if answer.status not in ("completed", "incomplete"):
        raise BadRequestError(
            f"previous_response_id: that response is {answer.status}, only one that has ended can be continued",
            param="previous_response_id",
        )
    items = [*earlier.input, *answer.output]
    if len(record) > max_bytes:
        raise BadRequestError(
            f"previous_response_id: the conversation has more than {max_bytes} bytes (--max-request-bytes)",
            param="previous_response_id",
            code="too_many_values",
        )
    kept = [InputItem.model_validate_json(bytes(item)) for item in items]
    own = _items(request)
    if len(kept) + len(own) > MAX_MESSAGES:
        raise BadRequestError(
            f"previous_response_id: the conversation has more than {MAX_MESSAGES} items",
            param="previous_response_id",
            code="too_many_values",
        )
    return request.model_copy(update={"input": [*kept, *own]})


def input_items(request: InputTokensRequest) -> list[msgspec.Raw]:
    """Return the items of a request's input as JSON, in the form in which they are kept: each has an id, and a message
    has its content as a list of parts.
    """
    # Not msgspec, which cannot write the numbers beyond 64 bits that an unknown field may have.
    return [msgspec.Raw(to_json(_kept(item), inf_nan_mode="null")) for item in _items(request)]


def page_of(items: Sequence[msgspec.Raw], *, after: str | None, limit: int, newest_first: bool) -> ItemPage:
    """Return at most `limit` items, beginning after the item with the id `after` (None: from the start). `items` are
    oldest first; `newest_first` reverses them. Raises `BadRequestError` if no item has the id.
    """
    ordered = list(reversed(items)) if newest_first else list(items)
    ids = [msgspec.json.decode(item, type=_ItemId).id for item in ordered]
    if after is not None and after not in ids:
        raise BadRequestError(f"after: the response has no item {after!r}", param="after")
    begin = 0 if after is None else ids.index(after) + 1
    shown = ids[begin : begin + limit]
    return ItemPage(
        data=ordered[begin : begin + limit],
        first_id=shown[0] if shown else None,
        last_id=shown[-1] if shown else None,
        has_more=begin + limit < len(ordered),
    )


def _items(request: InputTokensRequest) -> list[InputItem]:
    if isinstance(request.input, str):
        return [InputItem(type="message", role="user", content=request.input)]
    return request.input


def _kept(item: InputItem) -> dict[str, Any]:
    fields = item.model_dump(exclude_none=True)
    kind = fields.setdefault("type", "message")
    if kind == "message":
        if isinstance(text := fields.get("content"), str):
            part = "output_text" if fields.get("role") == "assistant" else "input_text"
            fields["content"] = [{"type": part, "text": text}]
        fields.setdefault("status", "completed")
    if not isinstance(fields.get("id"), str):
        fields["id"] = f"{_PREFIX.get(kind, 'item')}_{secrets.token_hex(12)}"
    return fields
