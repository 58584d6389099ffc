"""Takes the messages of routers, keeps one task per request, and sends back what its engine's steps bring.

What serving a request means is for the role to know; that each request ends once, frees all it had before its router
hears of a failure, and outlives neither its router nor its deadline, is decided here. Everything runs on the event
loop's thread.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from baton_serve.contracts.identity import BlockHash, Generation, InstanceId, RequestId
from baton_serve.contracts.instance import AdapterRecord, Load
from baton_serve.contracts.messages import (
    Batch,
    Cancel,
    Decode,
    ErrorCode,
    Failed,
    Generate,
    Heartbeat,
    LoadReport,
    Pool,
    Prefill,
    Snapshot,
    SnapshotRequest,
    ToInstance,
)
from baton_serve.engine.core.outputs import CompletedLayerGroups
from baton_serve.engine.errors import RequestError
from baton_serve.kvtransfer.errors import TransferError
from baton_serve.services.common.zmq.rpc import RouterId
from baton_serve.services.instance.attempt_table import AttemptEntry, AttemptTable
from baton_serve.services.instance.drain.shutdown import DrainableServer
from baton_serve.services.instance.engine_thread import EngineCalls, TimedStepResult
from baton_serve.services.instance.errors import RequestFailed
from baton_serve.services.instance.ports import EngineStats, EventsPort, LinksPort, RouterPort

logger = logging.getLogger(__name__)

RoleMessage = Prefill | Decode | Generate

MAX_TIMEOUT_S = 86_400.0


class RoleHandler(Protocol):
    """What makes a prefill, a decode or a unified instance of this process."""

    def can_serve(self, message: RoleMessage) -> bool: ...

    def refused(self, message: RoleMessage, reason: str) -> None:
        """It is not served. Peers that wait for something of it are told."""

    async def serve(self, request: AttemptEntry, message: RoleMessage) -> None:
        """The whole life of a request. Whether it returns, raises or is cancelled: when it is over, all is free."""

    def on_stats(self, stats: EngineStats) -> None:
        """The engine has moved on; blocks may have become free."""

    def num_queued(self) -> int:
        """Requests that wait outside the engine."""


@dataclass(frozen=True, slots=True)
class Identity:
    instance: InstanceId
    generation: Generation


@dataclass(slots=True)
class _Attempt:
    task: asyncio.Task[None]
    deadline: asyncio.TimerHandle
    is_aborted: bool = False
    failure: Failed | None = None


class RequestServer(DrainableServer):
    def __init__(
        self,
        identity: Identity,
        *,
        role: RoleHandler,
        engine: EngineCalls,
        stats: EngineStats,
        router: RouterPort,
        events: EventsPort,
        links: LinksPort,
    ) -> None:
        super().__init__(router)
        self._identity = identity
        self._role = role
        self._engine = engine
        self._events = events
        self._links = links
        self._attempts: dict[AttemptEntry, _Attempt] = {}
        self.table = AttemptTable()
        self.adapters: Callable[[], list[AdapterRecord]] = list
        """Those that requests may name now."""
        self.stats = stats

    @property
    def num_requests(self) -> int:
        return len(self._attempts)

    def load(self) -> Load:
        return load_of(self.stats, num_queued=self._role.num_queued())

    def on_message(self, router: RouterId, message: ToInstance) -> None:
        match message:
            case Prefill() | Decode() | Generate():
                self._accept(router, message)
            case Cancel():
                self._cancel(router, message)
            case Heartbeat():
                self._router.send(router, self._load_report())
            case Pool():
                message_ = "this model writes text: it does not answer with vectors"
                self._router.send(router, Failed(request_id=message.request_id, code="invalid", message=message_))
            case SnapshotRequest():
                self._take_snapshot(router)

    def on_router_lost(self, router: RouterId) -> None:
        for request in self.table.of_router(router):
            self._abort(request, None)

    def on_step_result(self, turn: TimedStepResult) -> None:
        for router, answers in self.table.apply(turn.result, turn.at).items():
            self._router.send(router, Batch(answers))
        self._events.publish(turn.result.events)

    def on_stats(self, stats: EngineStats) -> None:
        self.stats = stats
        self._role.on_stats(stats)

    def on_layer_groups(self, tail: CompletedLayerGroups) -> None:
        self.table.apply_layer_groups(tail)

    def _end_all(self, code: ErrorCode, reason: str) -> None:
        for request in self.table.all():
            self._abort(request, Failed(request_id=request.request_id, code=code, message=reason))

    def _accept(self, router: RouterId, message: RoleMessage) -> None:
        work = message.work
        refused = self._refused(work.request_id) or _misplaced(message, can_serve=self._role.can_serve(message))
        if refused is not None:
            self._role.refused(message, refused.message)
            self._router.send(router, refused)
            return
        if (previous := self.table.find(router, work.request_id)) is not None:
            logger.info("a new attempt replaces the running one", extra={"request_id": work.request_id})
            self._abort(previous, None)
        request = self.table.add(router, work)
        loop = asyncio.get_running_loop()
        task = loop.create_task(self._role.serve(request, message), name=request.work.request_id)
        timeout_s = min(max(work.timeout_s, 0.0), MAX_TIMEOUT_S)
        late = RequestFailed("timeout", f"not done within {timeout_s:g} s")
        deadline = loop.call_later(timeout_s, self._abort, request, _failed(request, late))
        self._attempts[request] = _Attempt(task, deadline)
        self._idle.clear()
        task.add_done_callback(lambda _: self._end(request))

    def _cancel(self, router: RouterId, message: Cancel) -> None:
        request = self.table.find(router, message.request_id)
        if request is None:
            return
        sequence = message.sequence
        if sequence is None or request.live <= {sequence}:
            self._abort(request, None)
        elif sequence in request.live:
            request.live.discard(sequence)
            if request.is_admitted:
                inner = request.work.request_id
                self._engine.post(lambda engine: engine.cancel(inner, sequence))

    def _abort(self, request: AttemptEntry, failure: Failed | None) -> None:
        """Ends a request from outside. Without `failure` its router wants to hear no more of it; one whose sequences
        have all ended has told it all, though its task may not have run since: that is no failure any more."""
        attempt = self._attempts[request]
        if failure is None:
            self.table.detach(request)
        if not attempt.is_aborted:
            attempt.is_aborted = True
            attempt.failure = failure if request.live else None
            request.live.clear()
            attempt.task.cancel()

    def _end(self, request: AttemptEntry) -> None:
        attempt = self._attempts.pop(request)
        attempt.deadline.cancel()
        failure = attempt.failure
        if not attempt.task.cancelled() and (error := attempt.task.exception()) is not None:
            failure = failure or _failed(request, error)
        if failure is not None and self.table.find(request.router, request.request_id) is request:
            logger.info("failed: %s: %s", failure.code, failure.message, extra={"request_id": failure.request_id})
            self._router.send(request.router, failure)
        self.table.remove(request)
        if not self._attempts:
            self._idle.set()

    def _take_snapshot(self, router: RouterId) -> None:
        """Its number is that of the last batch before it: it is sent before any later step's events are published."""
        taken = self._engine.call(
            lambda engine: (engine.cached_block_hashes(), engine.host_block_hashes()),
            then=partial(self._send_snapshot, router),
        )
        taken.add_done_callback(lambda done: done.cancelled() or done.exception())  # a broken engine has been told of

    def _send_snapshot(self, router: RouterId, names: tuple[list[BlockHash], list[BlockHash]]) -> None:
        identity, (device, host) = self._identity, names
        snapshot = Snapshot(
            instance=identity.instance,
            generation=identity.generation,
            sequence=self._events.sequence,
            device=device,
            host=host,
        )
        self._router.send(router, snapshot)

    def _load_report(self) -> LoadReport:
        return LoadReport(
            instance=self._identity.instance,
            generation=self._identity.generation,
            load=self.load(),
            links=self._links.links(),
            draining=self.is_draining,
            adapters=self.adapters(),
        )


def _misplaced(message: RoleMessage, *, can_serve: bool) -> Failed | None:
    if can_serve:
        return None
    text = f"this instance's role does not serve {type(message).__name__}"
    return Failed(request_id=message.work.request_id, code="invalid", message=text)


def failure_of(request_id: RequestId, error: BaseException) -> Failed:
    match error:
        case RequestFailed():
            return Failed(request_id=request_id, code=error.code, message=str(error), lost=error.lost)
        case RequestError():
            return Failed(request_id=request_id, code=error.code, message=error.message)
        case TransferError():
            return Failed(request_id=request_id, code="handoff_failed", message=f"{type(error).__name__}: {error}")
        case _:
            logger.error("failed", exc_info=error, extra={"request_id": request_id})
            return Failed(request_id=request_id, code="internal", message=f"{type(error).__name__}: {error}")


def load_of(stats: EngineStats, *, num_queued: int) -> Load:
    return Load(
        free_blocks=stats.free_blocks,
        total_blocks=stats.total_blocks,
        running=stats.running,
        waiting=stats.waiting + stats.reserved + num_queued,
        queued_tokens=stats.queued_tokens,
        prefill_tokens_per_s=stats.prefill_tokens_per_s,
        prefill_is_measured=stats.prefill_is_measured,
        decode_step_s=stats.decode_step_s,
        spare_tokens_per_s=stats.spare_tokens_per_s,
        held_blocks=stats.held_blocks,
        host_used_blocks=stats.host_used_blocks,
        host_total_blocks=stats.host_total_blocks,
    )


async def await_uncancelled(cleanup: Coroutine[object, object, None]) -> None:
    """Awaits `cleanup` until it is over, even when cancelled meanwhile; the cancellation comes afterwards."""
    task = asyncio.ensure_future(cleanup)
    is_cancelled = False
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            is_cancelled = True
    if is_cancelled:
        raise asyncio.CancelledError


def _failed(request: AttemptEntry, error: BaseException) -> Failed:
    return failure_of(request.request_id, error)
