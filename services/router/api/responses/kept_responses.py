"""Decide which stored Response an id and the owner of a key find; keep, delete and cancel them, run `background` ones,
and limit how many.

Answers belong to the owner of an API key: the key of a record contains the owner, so that nobody can read, replace or
continue an answer of somebody else, even with its id.
"""

import asyncio
import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from baton_serve.services.common.logs import LimitedLog
from baton_serve.services.router.api.chat_preparation import BegunChat
from baton_serve.services.router.api.content_block_writer import Dialect, whole_answer
from baton_serve.services.router.api.responses.answer_schema import ResponseAnswer
from baton_serve.services.router.api.responses.conversation import AnswerState, ResponseRecord
from baton_serve.services.router.api.responses.store import RUN_TTL_S, MemoryResponseStore, ResponseStore, owner_of
from baton_serve.services.router.protocol.body_scan import UNCOUNTED_BYTES
from baton_serve.services.router.protocol.byte_budget import BodyReservation
from baton_serve.services.router.protocol.caller import Caller
from baton_serve.services.router.protocol.errors import (
    ApiError,
    BadRequestError,
    InternalError,
    NotFoundError,
    RateLimitError,
    UnavailableError,
)
from baton_serve.services.router.protocol.request_parsing import beside_loop
from baton_serve.services.router.settings import RouterSettings
from baton_serve.services.router.text.thread_pools import ANSWERS

logger = logging.getLogger(__name__)

MAX_RUNS = 1024
"""Largest number of background responses of one owner. They need no connection, so that nothing else bounds them but
the number of all requests, which others need too."""
_REFRESH_S = RUN_TTL_S / 10
_CANCELLED = "cancelled"


@dataclass(slots=True)
class _Run:
    """A background request that this process computes: its asyncio task and the status that clients see."""

    task: asyncio.Task[None] | None = None
    """It is None until the store has the record of the run."""
    state: str = "queued"


class KeptResponses:
    """The answers that the router keeps for all API keys, and the background requests that this process computes.

    It is created with the router and closed when the router stops. Runs on the event loop.
    """

    def __init__(self, store: ResponseStore | None, *, lost_hint: str = "") -> None:
        """Keep answers in `store`, which this object then owns and closes. With None no answers are kept.

        `lost_hint` is added to the error message for an answer that is not found.
        """
        self._store = store
        self._lost_hint = lost_hint
        self._runs: dict[str, _Run] = {}
        self._log = LimitedLog(logger)

    @staticmethod
    def of(settings: RouterSettings) -> "KeptResponses":
        """Return the kept answers of a router with these settings: stored in the registry's Redis, or without Redis in
        the memory of this process.
        """
        ttl_s = settings.response_store_ttl_s
        if ttl_s == 0:
            return KeptResponses(None)
        if not settings.registry.startswith("memory:"):
            # Importing the Redis client takes 0.1 s. A router without Redis should not pay for it at its start.
            from baton_serve.services.router.api.responses.redis_store import RedisResponseStore

            return KeptResponses(RedisResponseStore(settings.registry, ttl_s, settings.response_store_bytes))
        hint = "; the processes of --workers share responses only with Redis as the registry"
        return KeptResponses(
            MemoryResponseStore(ttl_s, settings.response_store_bytes), lost_hint=hint if settings.workers > 1 else ""
        )

    @property
    def is_enabled(self) -> bool:
        """True if answers are kept (`--response-store-ttl-s` is not 0)."""
        return self._store is not None

    async def record(
        self,
        caller: Caller,
        response_id: str,
        *,
        memory: BodyReservation | None = None,
        param: str | None = None,
    ) -> bytes:
        """Return the stored JSON of an answer of this caller, to be decoded as a `ResponseRecord`.

        Its size is reserved in `memory`, if given, before it is read: a request of a hundred bytes may refer to
        megabytes. `param` is the request's parameter that errors name. Raises `NotFoundError`, `RateLimitError` if too
        little memory is free, and `UnavailableError` if the store cannot be reached.
        """
        record = None
        if self._store is not None:
            if memory is not None:
                await memory.add(await self._store.size(_key(caller, response_id)))
            record = await self._store.get(_key(caller, response_id))
        if record is None:
            raise NotFoundError(
                f"no response {response_id[:100]!r} is kept for this API key: it was not stored, was deleted, or is"
                f" older than --response-store-ttl-s{self._lost_hint}",
                param=param,
                code="response_not_found",
            )
        return record

    async def answer(self, caller: Caller, response_id: str, *, memory: BodyReservation | None = None) -> msgspec.Raw:
        """Return an answer of this caller with its present status, as JSON. Its size is reserved in `memory`, if given.
        Raises the errors of `record`.
        """
        key = _key(caller, response_id)
        state: str | None = None
        # Read before the record: if the run ends in between, the record has its result.
        if self._store is not None:
            state = self._runs[key].state if key in self._runs else await self._store.run_state(key)
        kept = await _decoded(await self.record(caller, response_id, memory=memory))
        if not _is_running(kept):
            return kept.answer
        if state is not None:
            return _changed(kept.answer, status=state)
        error = UnavailableError("the router that computed this response has stopped: send the request again")
        return _changed(kept.answer, status="failed", error=error.body().error)

    async def keep(self, caller: Caller, response_id: str, answer: bytes, items: Sequence[msgspec.Raw]) -> None:
        """Store a complete answer for its caller. `answer` is its JSON, `items` are the conversation before it. If the
        store cannot be reached, log it and keep nothing.
        """
        try:
            await self._put(_key(caller, response_id), answer, items)
        except ApiError as exc:
            self._log.warning("a response is not kept: %s", exc.message)

    async def delete(self, caller: Caller, response_id: str) -> None:
        """Delete a kept answer of this caller, and stop the background request that computes it. Raises the errors of
        `record`.
        """
        await self.record(caller, response_id)
        key = _key(caller, response_id)
        await self._stop(key)
        if self._store is not None:
            await self._store.delete(key)

    async def cancel(self, caller: Caller, response_id: str, *, memory: BodyReservation | None = None) -> msgspec.Raw:
        """Stop the background request that computes an answer, and return the answer with the status `cancelled`. An
        answer that has ended already is returned as it is. Its size is reserved in `memory`, if given.

        Raises `BadRequestError` for an answer that was not asked for with `background`, and the errors of `record`.
        """
        key = _key(caller, response_id)
        kept = await _decoded(await self.record(caller, response_id, memory=memory))
        if not msgspec.json.decode(kept.answer, type=AnswerState).background:
            raise BadRequestError("only a response with background=true can be cancelled; close the connection instead")
        if not _is_running(kept):
            return kept.answer
        await self._stop(key)
        # The run may have ended just before it was stopped.
        kept = await _decoded(await self.record(caller, response_id))
        if not _is_running(kept):
            return kept.answer
        cancelled = _changed(kept.answer, status=_CANCELLED)
        await self._put(key, bytes(cancelled), kept.input)
        return cancelled

    async def start(
        self,
        caller: Caller,
        begun: BegunChat,
        dialect: Dialect,
        empty: ResponseAnswer,
        items: Sequence[msgspec.Raw],
        memory: BodyReservation | None = None,
    ) -> ResponseAnswer:
        """Let a chat run in the background and return its answer so far (`empty` with the status `queued`). This takes
        over the ownership of `begun`, also if it raises.

        `items` are the conversation, to be kept with the answer. The background task also takes over what is reserved
        in `memory`, and releases it at its end.

        Raises `BadRequestError` if a background request has this id already, `RateLimitError` if the caller has too
        many of them, and `UnavailableError` if the store cannot be reached.
        """
        key, run = _key(caller, empty.id), _Run()
        if sum(owner_of(other) == owner_of(key) for other in self._runs) >= MAX_RUNS:
            begun.__exit__(None, None, None)
            raise RateLimitError(
                f"{MAX_RUNS} background responses of this API key run, the largest number: wait for one of them",
                retry_after_s=1.0,
            )
        queued = msgspec.structs.replace(empty, status=run.state)
        is_new = key not in self._runs
        try:
            if not is_new or self._store is None:
                raise BadRequestError(f"the response {empty.id[:100]!r} is running: choose another request id")
            self._runs[key] = run
            await self._store.set_run(key, run.state)
            await self._put(key, msgspec.json.encode(queued), items)
        except BaseException:
            if is_new:
                self._runs.pop(key, None)
            begun.__exit__(None, None, None)
            raise
        run.task = asyncio.create_task(self._run(key, run, begun, dialect, empty, items))
        # The gateway releases the memory of a request at its answer, but the run still holds the conversation.
        held = None if memory is None else memory.handed_over()

        # Not in `_run`: a task that is cancelled before its first step runs nothing of it.
        def ended(_: object) -> None:
            self._runs.pop(key, None)
            begun.__exit__(None, None, None)
            if held is not None:
                held.release()

        run.task.add_done_callback(ended)
        return queued

    async def close(self) -> None:
        """Cancel all background requests of this process and close the store."""
        tasks = [run.task for run in self._runs.values() if run.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._store is not None:
            await self._store.close()

    async def _run(
        self,
        key: str,
        run: _Run,
        begun: BegunChat,
        dialect: Dialect,
        empty: ResponseAnswer,
        items: Sequence[msgspec.Raw],
    ) -> None:
        """Compute the answer of a background request and store it under `key`, unless it is cancelled meanwhile, by
        this router or another.
        """

        def begin() -> None:
            run.state = "in_progress"

        work = asyncio.ensure_future(_outcome(begun, dialect, empty, begin))
        try:
            while not work.done():
                await asyncio.wait([work], timeout=_REFRESH_S)
                if await self._is_cancelled(key, run.state):
                    return
            await self._put(key, work.result(), items)
            if self._store is not None:
                await self._store.end_run(key)
        except ApiError as exc:
            self._log.warning("the answer of a background response is lost: %s", exc.message)
        finally:
            work.cancel()

    async def _is_cancelled(self, key: str, state: str) -> bool:
        """Return whether a router has cancelled the background request of `key`. If not, write its `state` again, which
        would otherwise expire.
        """
        try:
            if self._store is None or await self._store.run_state(key) == _CANCELLED:
                return True
            await self._store.set_run(key, state)
        except ApiError as exc:
            self._log.warning("the state of a background response is not renewed: %s", exc.message)
        return False

    async def _stop(self, key: str) -> None:
        """Stop the background request of `key`, if there is one. If another router computes it, it ends there within a
        second.
        """
        run = self._runs.get(key)
        if run is not None and run.task is not None:
            run.task.cancel()
            await asyncio.gather(run.task, return_exceptions=True)
        elif self._store is not None:
            await self._store.set_run(key, _CANCELLED)

    async def _put(self, key: str, answer: bytes, items: Sequence[msgspec.Raw]) -> None:
        if self._store is not None:
            await self._store.put(key, await _encoded(ResponseRecord(answer=msgspec.Raw(answer), input=list(items))))


def _key(caller: Caller, response_id: str) -> str:
    # The id may be chosen by the client. A digest of the owner has a fixed length, so no id reaches another owner's.
    return f"{hashlib.sha256(caller.name.encode()).hexdigest()[:32]}:{response_id}"


async def _encoded(record: ResponseRecord) -> bytes:
    """Return the record as JSON. A long one is encoded in a thread, because it takes up to 25 ms and many may come at
    once.
    """
    if len(record.answer) + sum(map(len, record.input)) <= UNCOUNTED_BYTES:
        return msgspec.json.encode(record)
    return await ANSWERS.run(msgspec.json.encode, record)


async def _decoded(record: bytes) -> ResponseRecord:
    return await beside_loop(record, partial(msgspec.json.decode, type=ResponseRecord))


def _is_running(record: ResponseRecord) -> bool:
    return msgspec.json.decode(record.answer, type=AnswerState).status in ("queued", "in_progress")


def _changed(answer: msgspec.Raw, **fields: Any) -> msgspec.Raw:
    """Return an answer (JSON) in which the given fields have other values."""
    values: dict[str, Any] = msgspec.json.decode(answer, type=dict[str, msgspec.Raw])
    return msgspec.Raw(msgspec.json.encode(values | fields))


async def _outcome(begun: BegunChat, dialect: Dialect, empty: ResponseAnswer, on_delta: Callable[[], None]) -> bytes:
    """Wait for the answer of a background request and return it as JSON; if it fails, return the answer with the status
    `failed` and the error. `on_delta` is called whenever new tokens arrive.
    """
    try:
        return await whole_answer(begun, dialect, on_delta)
    except ApiError as exc:
        error = exc
    except Exception:
        logger.exception("a background response failed with an internal error")
        error = InternalError("an internal error occurred and was logged")
    return msgspec.json.encode(msgspec.structs.replace(empty, status="failed", error=error.body().error))
