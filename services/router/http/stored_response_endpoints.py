"""Serve stored answers of the Responses API: `GET` and `DELETE /v1/responses/ID`, its cancellation and its input."""

from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Query, Request, Response

from baton_serve.services.router.api.responses.conversation import ResponseRecord, page_of
from baton_serve.services.router.api.responses.kept_responses import KeptResponses
from baton_serve.services.router.protocol.asgi import RequestContext
from baton_serve.services.router.protocol.errors import BadRequestError
from baton_serve.services.router.protocol.request_bounds import MAX_NAME_CHARS
from baton_serve.services.router.protocol.request_parsing import beside_loop

MAX_PAGE = 100
"""Largest number of input items in one answer."""

ItemId = Annotated[str | None, Query(max_length=MAX_NAME_CHARS)]
PageSize = Annotated[int, Query(ge=1, le=MAX_PAGE)]


class DeletedResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `DELETE /v1/responses/ID`."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


def response_routes(kept: KeptResponses) -> APIRouter:
    """Return the HTTP routes that read, cancel and delete kept answers of the Responses API. Each caller reaches its
    own answers only; others give status 404.
    """
    router = APIRouter(prefix="/v1/responses/{response_id}")

    @router.get("", summary="Return a stored answer in its present state")
    async def retrieve(request: Request, response_id: str, stream: bool = False) -> Response:
        if stream:
            raise BadRequestError(
                "stream: a stored answer is returned as a whole", param="stream", code="unsupported_parameter"
            )
        context = RequestContext.of(request.scope)
        return _json(await kept.answer(context.caller, response_id, memory=context.body))

    @router.delete("", summary="Forget a stored answer")
    async def delete(request: Request, response_id: str) -> Response:
        await kept.delete(RequestContext.of(request.scope).caller, response_id)
        return _json(DeletedResponse(id=response_id))

    @router.post("/cancel", summary="Stop a background answer")
    async def cancel(request: Request, response_id: str) -> Response:
        context = RequestContext.of(request.scope)
        return _json(await kept.cancel(context.caller, response_id, memory=context.body))

    @router.get("/input_items", summary="List the items of the conversation before a stored answer")
    async def list_items(
        request: Request,
        response_id: str,
        after: ItemId = None,
        limit: PageSize = 20,
        order: Literal["asc", "desc"] = "desc",
    ) -> Response:
        context = RequestContext.of(request.scope)
        record = await kept.record(context.caller, response_id, memory=context.body)

        def page(record: bytes) -> bytes:
            items = msgspec.json.decode(record, type=ResponseRecord).input
            return msgspec.json.encode(page_of(items, after=after, limit=limit, newest_first=order == "desc"))

        return Response(await beside_loop(record, page), media_type="application/json")

    return router


def _json(body: object) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
