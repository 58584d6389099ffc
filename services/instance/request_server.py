"""Runs one task per request of a router, with deadline and abort, and reports load, failures and results of steps to
routers.

The role decides how a request is served. This module guarantees that each request ends exactly once, that its resources
are free before its router receives a failure, and that it ends with its router's connection or at its deadline.
Everything runs on the event loop.
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
from baton_serve.services.common.rpc.instance_link import RouterId
from baton_serve.services.instance.attempt_table import AttemptEntry, AttemptTable
from baton_serve.services.instance.drain.drainable_server import DrainableServer
from baton_serve.services.instance.engine_thread import EngineCalls, TimedStepResult
from baton_serve.services.instance.errors import RequestFailed
from baton_serve.services.instance.interfaces import EngineStats, EventsPort, LinksPort, RouterPort

logger = logging.getLogger(__name__)

RoleMessage = Prefill | Decode | Generate

MAX_TIMEOUT_S = 86_400.0
"""Longest timeout of a request, in seconds: one day."""


class RoleHandler(Protocol):
    """The interface of the code that serves the requests of one role: prefill, decode or unified. Its methods are
    called on the event loop.
    """

    def can_serve(self, message: RoleMessage) -> bool:
        """Return whether this role serves messages of this type (`Prefill`, `Decode` or `Generate`)."""

    def refused(self, message: RoleMessage, reason: str) -> None:
        """Called for a request that this instance refuses because of `reason`. If the request has a ticket, fail the
        ticket, so that the other instance does not wait for the blocks.
        """

    async def serve(self, request: AttemptEntry, message: RoleMessage) -> None:
        """Serve the request of `message` from start to end. The request's resources must be free when this returns,
        raises or is cancelled.
        """

    def on_stats(self, stats: EngineStats) -> None:
        """Called with new statistics of the engine: a role whose requests wait for free blocks tries to start them."""

    def num_queued(self) -> int:
        """Return the number of requests of this role that wait and are not in the engine yet."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The id of an instance and the generation of its process, which every report to a router contains."""

    instance: InstanceId
    generation: Generation


@dataclass(slots=True)
class _Attempt:
    """The task and the deadline of one running attempt. `failure` is sent to the router when the task has ended; None
    sends nothing.
    """

    task: asyncio.Task[None]
    deadline: asyncio.TimerHandle
    is_aborted: bool = False
    failure: Failed | None = None


class RequestServer(DrainableServer):
    """The server of an instance whose model generates text: it receives messages of routers and sends them the results.
    Implements `services.instance.role_interface.InstanceService`.
    """

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
        """Returns the LoRA adapters that requests may name now."""
        self.stats = stats

    @property
    def num_requests(self) -> int:
        """Return the number of requests that run on this instance; a canceled request counts until its work ends."""
        return len(self._attempts)

    def load(self) -> Load:
        """Return the current load of this instance, as routers and registry get it."""
        return load_of(self.stats, num_queued=self._role.num_queued())

    def on_message(self, router: RouterId, message: ToInstance) -> None:
        """Handle one message of a router: start or cancel a request, or answer a query."""
        match message:
            case Prefill() | Decode() | Generate():
                self._accept(router, message)
            case Cancel():
                self._cancel(router, message)
            case Heartbeat():
                self._router.send(router, self._load_report())
            case Pool():
                message_ = "this model generates text and cannot compute vectors (embeddings, scores)"
                self._router.send(router, Failed(request_id=message.request_id, code="invalid", message=message_))
            case SnapshotRequest():
                self._take_snapshot(router)

    def on_router_lost(self, router: RouterId) -> None:
        """End all requests of a router whose connection is lost."""
        for request in self.table.of_router(router):
            self._abort(request, None)

    def on_step_result(self, step: TimedStepResult) -> None:
        """Send the tokens and reports of an engine step to their routers, and publish the changes of the KV cache."""
        for router, answers in self.table.apply(step.result, step.at).items():
            self._router.send(router, Batch(answers))
        self._events.publish(step.result.events)

    def on_stats(self, stats: EngineStats) -> None:
        """Keep the engine's latest statistics and pass them to the handler of the role."""
        self.stats = stats
        self._role.on_stats(stats)

    def on_layer_groups(self, tail: CompletedLayerGroups) -> None:
        """Pass layer groups that the engine computed, before their step has ended, to the handoffs of
        their requests.
        """
        self.table.apply_layer_groups(tail)

    def _end_all(self, code: ErrorCode, reason: str) -> None:
        for request in self.table.all():
            self._abort(request, Failed(request_id=request.request_id, code=code, message=reason))

    def _accept(self, router: RouterId, message: RoleMessage) -> None:
        """Start a task that serves the new request of `message`, or refuse the request."""
        work = message.work
        refused = self._refused(work.request_id) or _misplaced(message, can_serve=self._role.can_serve(message))
        if refused is not None:
            self._role.refused(message, refused.message)
            self._router.send(router, refused)
            return
        if (previous := self.table.find(router, work.request_id)) is not None:
            logger.info("a new attempt replaces the running one", extra={"request_id": work.request_id})
            # A router repeats an id only when it has given up the earlier attempt, for example to replay it on this
            # instance.
            self._abort(previous, None)
        request = self.table.add(router, work)
        loop = asyncio.get_running_loop()
        task = loop.create_task(self._role.serve(request, message), name=request.work.request_id)
        # The value comes from the network: keep it in a range that `call_later` accepts.
        timeout_s = min(max(work.timeout_s, 0.0), MAX_TIMEOUT_S)
        late = RequestFailed("timeout", f"the request was not finished within its timeout of {timeout_s:g} s")
        deadline = loop.call_later(timeout_s, self._abort, request, _failed(request, late))
        self._attempts[request] = _Attempt(task, deadline)
        self._idle.clear()
        # A callback and not the end of a coroutine: it also runs for a task that was cancelled before its first step.
        task.add_done_callback(lambda _: self._end(request))

    def _cancel(self, router: RouterId, message: Cancel) -> None:
        """End a request, or only one of its sequences, because its router asked for it."""
        request = self.table.find(router, message.request_id)
        if request is None:
            return
        sequence = message.sequence
        if sequence is None or request.live <= {sequence}:
            self._abort(request, None)
        elif sequence in request.live:
            request.live.discard(sequence)
            # Before that, the role starts only the sequences that are still in `live`.
            if request.is_admitted:
                inner = request.work.request_id
                self._engine.post(lambda engine: engine.cancel(inner, sequence))

    def _abort(self, request: AttemptEntry, failure: Failed | None) -> None:
        """Cancel the task of a request. Its router gets `failure` when the task has ended; None sends nothing.

        If all sequences have ended, the router has received the whole answer although the task may not have run since;
        then `failure` is not sent.
        """
        attempt = self._attempts[request]
        if failure is None:
            self.table.detach(request)
        if not attempt.is_aborted:
            attempt.is_aborted = True
            attempt.failure = failure if request.live else None
            request.live.clear()
            # `_end` sends the failure, when the task has freed its resources.
            attempt.task.cancel()

    def _end(self, request: AttemptEntry) -> None:
        """Send the failure of a request, if it has one, and forget the request. Called when its task has ended and its
        resources are free.
        """
        attempt = self._attempts.pop(request)
        attempt.deadline.cancel()
        failure = attempt.failure
        if not attempt.task.cancelled() and (error := attempt.task.exception()) is not None:
            failure = failure or _failed(request, error)
        # The router may have detached this attempt or replaced it by a new one of the same id.
        if failure is not None and self.table.find(request.router, request.request_id) is request:
            logger.info(
                "request failed: %s: %s", failure.code, failure.message, extra={"request_id": failure.request_id}
            )
            self._router.send(request.router, failure)
        self.table.remove(request)
        if not self._attempts:
            self._idle.set()

    def _take_snapshot(self, router: RouterId) -> None:
        """Send a router all block hashes that the engine caches, with the number of the last published batch of changes
        that these hashes contain.

        The engine's answer is handled before the changes of any later step are published, so that the number is exact.
        """
        taken = self._engine.call(
            lambda engine: (engine.cached_block_hashes(), engine.host_block_hashes()),
            then=partial(self._send_snapshot, router),
        )
        # A stopped engine has been reported already. Reading the exception keeps asyncio from logging it as never
        # retrieved.
        taken.add_done_callback(lambda done: done.cancelled() or done.exception())

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
            draining=self.refuses_new,
            adapters=self.adapters(),
        )


def _misplaced(message: RoleMessage, *, can_serve: bool) -> Failed | None:
    if can_serve:
        return None
    text = f"an instance of this role does not serve {type(message).__name__} messages"
    return Failed(request_id=message.work.request_id, code="invalid", message=text)


def failure_of(request_id: RequestId, error: BaseException) -> Failed:
    """Return the message that reports `error` of a request to its router. An error of an unexpected type is logged with
    its traceback.
    """
    match error:
        case RequestFailed():
            return Failed(request_id=request_id, code=error.code, message=str(error), lost=error.lost)
        case RequestError():
            return Failed(request_id=request_id, code=error.code, message=error.message)
        case TransferError():
            return Failed(request_id=request_id, code="handoff_failed", message=f"{type(error).__name__}: {error}")
        case _:
            logger.error("request failed unexpectedly", exc_info=error, extra={"request_id": request_id})
            return Failed(request_id=request_id, code="internal", message=f"{type(error).__name__}: {error}")


def load_of(stats: EngineStats, *, num_queued: int) -> Load:
    """Return the load of an instance, which routers use for placement, from the engine's statistics. `num_queued`
    requests wait outside the engine.
    """
    return Load(
        # Routers count the tokens that fit, and know blocks with the KV of all layers only.
        free_blocks=stats.for_tokens(stats.free_blocks),
        total_blocks=stats.for_tokens(stats.total_blocks),
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
    """Await the coroutine `cleanup` to its end, even if the caller is cancelled before that; in this case raise
    `CancelledError` at the end.
    """
    task = asyncio.ensure_future(cleanup)
    is_cancelled = False
    while not task.done():
        try:
            # Without the shield the cancellation would stop the cleanup, and blocks would leak.
            await asyncio.shield(task)
        except asyncio.CancelledError:
            is_cancelled = True
    if is_cancelled:
        raise asyncio.CancelledError


def _failed(request: AttemptEntry, error: BaseException) -> Failed:
    return failure_of(request.request_id, error)
