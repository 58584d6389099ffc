"""Serve `/v1/files` and `/v1/batches` as OpenAI does, and decide what a key may see, upload and keep. Files and batches
belong to the owner of the API key.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.responses import FileResponse
from pydantic import BaseModel, ConfigDict, Field

from baton_serve.contracts.batch_lines import BATCH_ENDPOINTS
from baton_serve.services.router.batch.records import FINAL, BatchObject, FileObject, StoredBatch, StoredFile
from baton_serve.services.router.batch.state_machine import cancelling
from baton_serve.services.router.batch.store import BatchStore, new_batch_id
from baton_serve.services.router.batch.upload import Upload, receive_upload
from baton_serve.services.router.protocol.asgi import RequestContext, read_body
from baton_serve.services.router.protocol.errors import (
    BadRequestError,
    NotFoundError,
    RateLimitError,
)
from baton_serve.services.router.protocol.form_data import check_origin
from baton_serve.services.router.protocol.request_parsing import parsed

WINDOW_S = 24 * 3600
"""Length in seconds of OpenAI's only completion window."""
MAX_UPLOADS = 4
"""Largest number of uploads of one owner at a time."""
_MAX_METADATA = 16
_MIN_TTL_S, _MAX_TTL_S = 3600, 30 * 24 * 3600

T = TypeVar("T", FileObject, BatchObject)


class ExpiresAfter(BaseModel):
    """The field of a request that says how many seconds after its creation a file is deleted."""

    model_config = ConfigDict(strict=True, extra="allow")

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=_MIN_TTL_S, le=_MAX_TTL_S)]


class CreateBatchRequest(BaseModel):
    """The body of `POST /v1/batches`."""

    model_config = ConfigDict(strict=True, extra="allow")

    input_file_id: Annotated[str, Field(max_length=64)]
    endpoint: Annotated[str, Field(max_length=64)]
    completion_window: Literal["24h"]
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
            Field(max_length=_MAX_METADATA),
        ]
        | None
    ) = None
    output_expires_after: ExpiresAfter | None = None


class DeletedFile(msgspec.Struct, frozen=True):
    """The answer to a request that deletes a file."""

    id: str
    object: str = "file"
    deleted: bool = True


class Page(msgspec.Struct, frozen=True):
    """One page of a list of files or batches, newest first unless the client asks for the other order. `has_more` says
    whether the list goes on after `last_id`.
    """

    data: Sequence[FileObject | BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


class BatchApi:
    """Implements the HTTP routes of files and batches. `wake` is called for each new batch and each cancelled one."""

    def __init__(
        self,
        store: BatchStore,
        wake: Callable[[], None],
        *,
        allowed_origins: Sequence[str] = (),
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._wake = wake
        self._allowed_origins = allowed_origins
        self._wall_clock = wall_clock
        self._num_uploads: Counter[str] = Counter()
        self._one_at_a_time = asyncio.Lock()

    async def upload(self, request: Request) -> FileObject:
        """Store the file of an upload for the caller and return its description. Raises `ApiError`."""
        self._check_origin(request)
        owner = _owner(request)
        # All uploads that run may reach the room that is left before one of them sees the others.
        if self._num_uploads[owner] >= MAX_UPLOADS:
            raise RateLimitError(
                f"{MAX_UPLOADS} uploads of this API key are running, the largest number: wait for one of them",
                retry_after_s=1.0,
            )
        self._num_uploads[owner] += 1
        try:
            return await self._receive(request, owner)
        finally:
            self._num_uploads[owner] -= 1

    async def _receive(self, request: Request, owner: str) -> FileObject:
        limits = self._store.limits
        if (await asyncio.to_thread(self._store.usage, owner)).num_files >= limits.max_files:
            raise BadRequestError(
                f"this API key has {limits.max_files} files, the largest number: delete files first",
                code="too_many_files",
            )
        file_id, path = self._store.new_upload()
        try:
            upload = await receive_upload(
                request.headers.get("content-type"),
                request.stream(),
                path,
                max_bytes=limits.max_file_bytes,
                # The part that is written is in the folder already, so the space is asked for again and again.
                free_bytes=partial(self._store.free_bytes, owner),
            )
            described = self._described(file_id, upload)
            await asyncio.to_thread(self._store.add_file, path, StoredFile(owner, described))
        finally:
            # `add_file` has moved it, unless something failed before.
            path.unlink(missing_ok=True)
        return described

    def _described(self, file_id: str, upload: Upload) -> FileObject:
        if (purpose := upload.fields.get("purpose")) != "batch":
            raise BadRequestError(
                f"purpose is {purpose!r}: this server stores files for batches only, with purpose=batch",
                param="purpose",
            )
        now, ttl_s = int(self._wall_clock()), self._store.limits.keep_s
        if (seconds := upload.fields.get("expires_after[seconds]")) is not None:
            if not seconds.isdecimal() or not _MIN_TTL_S <= int(seconds) <= _MAX_TTL_S:
                raise BadRequestError(
                    f"expires_after[seconds] must be an integer from {_MIN_TTL_S} to {_MAX_TTL_S}",
                    param="expires_after",
                )
            ttl_s = int(seconds)
        return FileObject(
            id=file_id,
            bytes=upload.num_bytes,
            created_at=now,
            expires_at=now + ttl_s,
            filename=upload.filename or "",
            purpose=purpose,
        )

    def _check_origin(self, request: Request) -> None:
        """Raise `PermissionDeniedError` if a web page of another site sends the upload form."""
        check_origin(request.headers.get("origin"), request.headers.get("host"), self._allowed_origins)

    async def files(self, request: Request) -> Page:
        """Return a page of the list of the caller's files."""
        owner, purpose = _owner(request), request.query_params.get("purpose")
        stored = await asyncio.to_thread(lambda: list(self._store.files()))
        own = [one.file for one in stored if one.owner == owner and purpose in (None, one.file.purpose)]
        return _page(own, request, default=10_000, largest=10_000)

    async def file(self, request: Request, file_id: str) -> FileObject:
        """Return the description of one of the caller's files. Raises `NotFoundError`."""
        return await asyncio.to_thread(self._store.file, file_id, _owner(request))

    async def content(self, request: Request, file_id: str) -> Response:
        """Return the content of one of the caller's files. Raises `NotFoundError`."""
        file = await self.file(request, file_id)
        path = self._store.content(file.id)
        if not await asyncio.to_thread(path.is_file):
            raise NotFoundError(f"the file {file.id} was deleted", param="file_id")
        return FileResponse(path, media_type="application/octet-stream")

    async def delete(self, request: Request, file_id: str) -> DeletedFile:
        """Delete one of the caller's files. Raises `NotFoundError`, and `BadRequestError` while a batch reads the
        file.
        """
        file = await self.file(request, file_id)
        for stored in await asyncio.to_thread(lambda: list(self._store.batches())):
            if stored.batch.input_file_id == file.id and stored.batch.status not in FINAL:
                raise BadRequestError(
                    f"the batch {stored.batch.id} reads this file: cancel it or wait for its end", code="file_in_use"
                )
        await asyncio.to_thread(self._store.delete_file, file.id)
        return DeletedFile(file.id)

    async def create(self, request: Request) -> BatchObject:
        """Create a batch for the caller and return its description. The input file is checked later, in the background.
        Raises `ApiError`.
        """
        body = await parsed(await read_body(request.scope, request.receive), CreateBatchRequest)
        if body.endpoint not in BATCH_ENDPOINTS:
            raise BadRequestError(
                f"the endpoint {body.endpoint!r} serves no batches: use one of {', '.join(BATCH_ENDPOINTS)}",
                param="endpoint",
            )
        # The lines of the file are checked in the background: a large file takes seconds.
        file = await self.file(request, body.input_file_id)
        if file.purpose != "batch":
            raise BadRequestError(
                f"the file {file.id} is for {file.purpose}: upload it with purpose=batch",
                param="input_file_id",
            )
        # One at a time, or many at once would all find room for one more.
        async with self._one_at_a_time:
            await asyncio.to_thread(self._make_room, _owner(request))
            batch = await self._add(request, body, file)
        self._wake()
        return batch

    def _make_room(self, owner: str) -> None:
        """Check that an owner may create a batch, and forget the oldest ended ones if there would be too many. Raises
        `ApiError` if the folder is full or too many batches run.
        """
        limits, usage = self._store.limits, self._store.usage(owner)
        if self._store.free_bytes(owner) <= 0:
            raise BadRequestError(
                "the folder of batches, or the half of it that one API key may use, is full (--batch-max-bytes): delete"
                " files first",
                code="storage_full",
            )
        if usage.num_open_batches >= limits.max_open_batches:
            raise RateLimitError(
                f"{limits.max_open_batches} batches of this API key have not ended, the largest number: wait for one of"
                " them, or cancel it",
                retry_after_s=60.0,
            )
        num_old = usage.num_open_batches + len(usage.ended_batches) + 1 - limits.max_batches
        for batch_id in usage.ended_batches[: max(0, num_old)]:
            self._store.delete_batch(batch_id)

    async def _add(self, request: Request, body: CreateBatchRequest, file: FileObject) -> BatchObject:
        """Store the record of a new batch that reads `file`, and return its description."""
        now, expires = int(self._wall_clock()), body.output_expires_after
        batch = BatchObject(
            id=new_batch_id(),
            endpoint=body.endpoint,
            input_file_id=file.id,
            completion_window=body.completion_window,
            created_at=now,
            expires_at=now + WINDOW_S,
            metadata=body.metadata,
        )
        stored = StoredBatch(
            owner=_owner(request), batch=batch, output_ttl_s=None if expires is None else expires.seconds
        )
        await asyncio.to_thread(self._store.save_batch, stored)
        return batch

    async def batch(self, request: Request, batch_id: str) -> BatchObject:
        """Return the description of one of the caller's batches. Raises `NotFoundError`."""
        stored = await asyncio.to_thread(self._store.batch, batch_id, _owner(request))
        return await asyncio.to_thread(self._with_cancel, stored.batch)

    async def batches(self, request: Request) -> Page:
        """Return a page of the list of the caller's batches."""
        owner = _owner(request)

        def own() -> list[BatchObject]:
            return [self._with_cancel(stored.batch) for stored in self._store.batches() if stored.owner == owner]

        return _page(await asyncio.to_thread(own), request, default=20, largest=100)

    async def cancel(self, request: Request, batch_id: str) -> BatchObject:
        """Cancel one of the caller's batches. Raises `NotFoundError`, and `BadRequestError` for a batch that has
        ended.
        """
        batch = await self.batch(request, batch_id)
        if batch.status in (*FINAL, "finalizing"):
            raise BadRequestError(f"the batch is {batch.status} and cannot be cancelled any more", code="batch_ended")
        # A mark and not a changed record: the record belongs to the process that runs the batch.
        await asyncio.to_thread(self._store.cancel, batch.id)
        self._wake()
        return await self.batch(request, batch_id)

    def _with_cancel(self, batch: BatchObject) -> BatchObject:
        """Return the description of a batch for clients. If one of them has cancelled it, its status says so, even
        before the process that runs it has noticed.
        """
        at = None if batch.status in FINAL else self._store.cancelled_at(batch.id)
        return batch if at is None else cancelling(batch, now=at)


def batch_routes(api: BatchApi | None) -> APIRouter:
    """Return the HTTP routes of files and batches. If `api` is None, they answer 404 and name the flag that turns them
    on.
    """
    router = APIRouter()
    if api is None:

        async def disabled() -> Response:
            raise NotFoundError("this router stores no files and batches: start it with --batch-folder FOLDER")

        for path in ("/v1/files", "/v1/files/{rest:path}", "/v1/batches", "/v1/batches/{rest:path}"):
            for method in ("GET", "POST", "DELETE"):
                # A route for each: FastAPI derives the id of an operation from the first method of its route.
                router.add_api_route(path, disabled, methods=[method], summary="Files and batches: --batch-folder")
        return router
    _add_file_routes(router, api)
    _add_batch_routes(router, api)
    return router


def _add_file_routes(router: APIRouter, api: BatchApi) -> None:
    @router.post("/v1/files", summary="Upload a file for a batch (multipart/form-data: purpose=batch, file)")
    async def upload_file(request: Request) -> Response:
        return _json(await api.upload(request))

    @router.get("/v1/files", summary="List files, newest first (after, limit, order, purpose)")
    async def list_files(request: Request) -> Response:
        return _json(await api.files(request))

    @router.get("/v1/files/{file_id}", summary="Describe a file")
    async def get_file(request: Request, file_id: str) -> Response:
        return _json(await api.file(request, file_id))

    @router.get("/v1/files/{file_id}/content", summary="Download a file")
    async def get_content(request: Request, file_id: str) -> Response:
        return await api.content(request, file_id)

    @router.delete("/v1/files/{file_id}", summary="Delete a file")
    async def delete_file(request: Request, file_id: str) -> Response:
        return _json(await api.delete(request, file_id))


def _add_batch_routes(router: APIRouter, api: BatchApi) -> None:
    @router.post("/v1/batches", summary="Run the requests of a file in the background")
    async def create_batch(request: Request) -> Response:
        return _json(await api.create(request))

    @router.get("/v1/batches", summary="List batches, newest first (after, limit)")
    async def list_batches(request: Request) -> Response:
        return _json(await api.batches(request))

    @router.get("/v1/batches/{batch_id}", summary="Describe a batch")
    async def get_batch(request: Request, batch_id: str) -> Response:
        return _json(await api.batch(request, batch_id))

    @router.post("/v1/batches/{batch_id}/cancel", summary="Cancel a batch")
    async def cancel_batch(request: Request, batch_id: str) -> Response:
        return _json(await api.cancel(request, batch_id))


def _owner(request: Request) -> str:
    return RequestContext.of(request.scope).caller.name


def _page(objects: list[T], request: Request, *, default: int, largest: int) -> Page:
    """Return the page of `objects` that the query parameters `after`, `limit` and `order` ask for. `default` and
    `largest` are values of `limit`. Raises `BadRequestError`.
    """
    order = request.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise BadRequestError("order must be asc or desc", param="order")
    text = request.query_params.get("limit", str(default))
    if not text.isdecimal() or not 1 <= int(text[:9]) <= largest:
        raise BadRequestError(f"limit must be an integer from 1 to {largest}", param="limit")
    # The id decides between objects of one second, so that pages neither repeat nor skip one.
    found = sorted(objects, key=lambda one: (one.created_at, one.id), reverse=order == "desc")
    if (after := request.query_params.get("after")) is not None:
        places = [place for place, one in enumerate(found) if one.id == after]
        if not places:
            raise BadRequestError(f"after names no object of this list: {after[:100]!r}", param="after")
        found = found[places[0] + 1 :]
    data = found[: int(text)]
    return Page(
        data=data,
        first_id=data[0].id if data else None,
        last_id=data[-1].id if data else None,
        has_more=len(found) > len(data),
    )


def _json(body: Any) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
