"""Serves `Pool` messages (embeddings, scores) on an instance: queues inputs in the engine and sends back the
vectors.

A request consists of one or more inputs; each result is sent after the engine step that computed it. No state is kept
between inputs, so a request needs no task, except to decode its images: it ends with its last result, its deadline, a
`Cancel`, or the loss of its router.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton_serve.contracts.identity import RequestId
from baton_serve.contracts.instance import Load
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
    Pooled,
    Prefill,
    Snapshot,
    SnapshotRequest,
    ToInstance,
)
from baton_serve.contracts.vision import READERS
from baton_serve.contracts.wire import MAX_FRAME_BYTES
from baton_serve.engine.core.outputs import PooledOutput
from baton_serve.engine.errors import RequestError
from baton_serve.engine.model.vision.image_types import NO_PIXELS, DecodedImage, EncodedImage, ImageReader, Pixels
from baton_serve.services.common.rpc.instance_link import RouterId
from baton_serve.services.instance.drain.drainable_server import DrainableServer
from baton_serve.services.instance.engine_thread import PoolingEngineCalls, TimedStepResult
from baton_serve.services.instance.errors import RequestFailed
from baton_serve.services.instance.interfaces import EngineStats, EventsPort, RouterPort
from baton_serve.services.instance.kv_sharing.file_decoding import FileDecoding
from baton_serve.services.instance.request_server import MAX_TIMEOUT_S, Identity, failure_of, load_of

logger = logging.getLogger(__name__)

MAX_BATCH_BYTES = 4 * 1024 * 1024
"""Maximum size of the vectors in one frame to a router, in bytes; a single larger vector gets a frame of its own."""

MAX_DECODED = 16
"""Largest number of requests whose images are decoded and not computed yet. Pixels take tens of times the memory of the
files, so the others wait as files."""

MAX_RESULT_BYTES = MAX_FRAME_BYTES - 64 * 1024
"""Maximum size of one result in bytes, with room for the other fields of its frame.

A router closes the connection when a longer frame arrives, and then all of its requests here would fail.
"""


@dataclass(eq=False, slots=True)
class _Request:
    """One running request for vectors. `inner` is its id inside this process, because two routers may
    use the same id.
    """

    router: RouterId
    request_id: RequestId
    inner: RequestId
    num_left: int
    deadline: asyncio.TimerHandle
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class PoolingServer(DrainableServer):
    """The server of an instance whose model computes vectors (embeddings, scores); implements
    `services.instance.role_interface.InstanceService`. Use it only on the event loop.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        engine: PoolingEngineCalls,
        stats: EngineStats,
        router: RouterPort,
        events: EventsPort,
        reader: ImageReader | None = None,
    ) -> None:
        """`reader` decodes the images of inputs; None if the engine reads none."""
        super().__init__(router)
        self._identity = identity
        self._engine = engine
        self._events = events
        self._requests: dict[RequestId, _Request] = {}
        self._by_router: dict[tuple[RouterId, RequestId], _Request] = {}
        self._num_accepted = 0
        self._reader = reader
        self._files = FileDecoding()
        self._decoding = asyncio.Semaphore(MAX_DECODED)
        self._tasks: set[asyncio.Task[None]] = set()
        self.stats = stats

    @property
    def num_requests(self) -> int:
        """Return the number of requests that run on this instance."""
        return len(self._requests)

    def load(self) -> Load:
        """Return the current load of this instance, as routers and registry get it."""
        return load_of(self.stats, num_queued=0)

    def on_message(self, router: RouterId, message: ToInstance) -> None:
        """Handle one message of a router: start or cancel a request, or answer a query."""
        match message:
            case Pool():
                self._accept(router, message)
            case Cancel():
                if (request := self._by_router.get((router, message.request_id))) is not None:
                    self._end(request, None)
            case Heartbeat():
                self._router.send(router, self._load_report())
            case SnapshotRequest():
                self._router.send(router, self._snapshot())
            case Prefill() | Decode() | Generate():
                text = "this model computes vectors (embeddings, scores) and cannot generate text"
                self._router.send(router, Failed(request_id=message.work.request_id, code="invalid", message=text))

    def on_router_lost(self, router: RouterId) -> None:
        """End all requests of a router whose connection is lost."""
        for request in [r for r in self._requests.values() if r.router == router]:
            self._end(request, None)

    def on_stats(self, stats: EngineStats) -> None:
        self.stats = stats

    def on_step_result(self, step: TimedStepResult) -> None:
        """Send the vectors that an engine step computed to their routers, and end completed and failed requests."""
        answers: dict[RouterId, list[Pooled]] = {}
        for output in step.result.pooled:
            # None if the request was cancelled while the step that computed it was running.
            request = self._requests.get(output.request_id)
            if request is None:
                continue
            if len(output.data) > MAX_RESULT_BYTES:
                self._end(request, _too_large(request, output))
            else:
                answers.setdefault(request.router, []).append(_pooled(request, output))
                request.num_left -= 1
                if not request.num_left:
                    self._forget(request)
        for router, pooled in answers.items():
            for frame in frames(pooled):
                self._router.send(router, Batch(list(frame)))
        for inner, message, code in step.result.failed:
            if (request := self._requests.get(inner)) is not None:
                self._end(request, Failed(request_id=request.request_id, code=code, message=message))

    def _end_all(self, code: ErrorCode, reason: str) -> None:
        for request in list(self._requests.values()):
            self._end(request, Failed(request_id=request.request_id, code=code, message=reason))

    def _accept(self, router: RouterId, message: Pool) -> None:
        """Pass the new request `message` to the engine, or refuse it during a drain or a pause."""
        if (refused := self._refused(message.request_id)) is not None:
            self._router.send(router, refused)
            return
        if (previous := self._by_router.get((router, message.request_id))) is not None:
            # A router repeats an id only when it has given up the earlier attempt.
            self._end(previous, None)
        self._num_accepted += 1
        inner = RequestId(f"{message.request_id}#{self._num_accepted}")
        # The value comes from the network: keep it in a range that `call_later` accepts.
        timeout_s = min(max(message.timeout_s, 0.0), MAX_TIMEOUT_S)
        deadline = asyncio.get_running_loop().call_later(timeout_s, self._on_deadline, inner, timeout_s)
        request = _Request(router, message.request_id, inner, len(message.inputs), deadline)
        self._requests[inner] = request
        self._by_router[router, message.request_id] = request
        self._idle.clear()
        if not message.images:
            self._add(request, message, NO_PIXELS)
            return
        task = asyncio.get_running_loop().create_task(self._decode(request, message), name=f"decode-{inner}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _decode(self, request: _Request, message: Pool) -> None:
        """Decode the images of a request in worker threads, pass it to the engine, and wait for its end."""
        pixels: dict[bytes, DecodedImage | EncodedImage] = {}

        async def keep(read: Pixels) -> None:
            pixels.update(read)

        async with self._files.turn(message.images) as turn, self._decoding:
            if request.ended.is_set():
                return
            try:
                if (reader := self._reader) is None:
                    raise RequestError("invalid", f"this instance reads no images in inputs: {READERS}")
                await turn.decode(message.images, lambda file: reader.read([file]), keep)
            except Exception as exc:  # noqa: BLE001 - the router gets the reason
                if not request.ended.is_set():
                    self._refuse(request, exc)
                return
            if not request.ended.is_set():
                self._add(request, message, pixels)
                await request.ended.wait()

    def _add(self, request: _Request, message: Pool, pixels: Pixels) -> None:
        """Pass a request to the engine, with its images by digest."""
        added = self._engine.call(
            lambda engine: engine.pool(
                request.inner, message.inputs, message.params, priority=message.priority, pixels=pixels
            )
        )
        added.add_done_callback(lambda done: self._on_added(request, done))

    def _on_added(self, request: _Request, done: "asyncio.Future[None]") -> None:
        """End a request with an error if the engine refused it; `done` is the engine's answer."""
        # The request may have ended (deadline, cancel) before the engine refused it.
        if done.cancelled() or (error := done.exception()) is None or request.inner not in self._requests:
            return
        self._refuse(request, error)

    def _refuse(self, request: _Request, error: BaseException) -> None:
        """End a request that cannot be computed."""
        # A `RequestError` is the client's fault; only other errors need a traceback.
        if not isinstance(error, RequestError):
            logger.error("pooling request failed", exc_info=error, extra={"request_id": request.request_id})
        self._end(request, failure_of(request.request_id, error))

    def _on_deadline(self, inner: RequestId, timeout_s: float) -> None:
        request = self._requests[inner]
        self._end(
            request,
            failure_of(
                request.request_id,
                RequestFailed("timeout", f"the request was not finished within its timeout of {timeout_s:g} s"),
            ),
        )

    def _end(self, request: _Request, failure: Failed | None) -> None:
        """End a request before all of its results are sent. Its router gets `failure`; None sends nothing."""
        self._forget(request)
        self._engine.post(lambda engine: engine.cancel(request.inner))
        if failure is not None:
            logger.info(
                "pooling request failed: %s: %s",
                failure.code,
                failure.message,
                extra={"request_id": failure.request_id},
            )
            self._router.send(request.router, failure)

    def _forget(self, request: _Request) -> None:
        """Remove a request from the lists of running requests and cancel its deadline."""
        request.deadline.cancel()
        request.ended.set()
        del self._requests[request.inner]
        del self._by_router[request.router, request.request_id]
        if not self._requests:
            self._idle.set()

    def _snapshot(self) -> Snapshot:
        identity = self._identity
        return Snapshot(
            instance=identity.instance, generation=identity.generation, sequence=self._events.sequence, device=[]
        )

    def _load_report(self) -> LoadReport:
        return LoadReport(
            instance=self._identity.instance,
            generation=self._identity.generation,
            load=self.load(),
            draining=self.refuses_new,
        )


def frames(pooled: Sequence[Pooled]) -> list[Sequence[Pooled]]:
    """Divide the results of one router, in order, into groups whose vectors have at most `MAX_BATCH_BYTES` together, so
    that each group fits into one message.
    """
    groups: list[list[Pooled]] = []
    size = 0
    for answer in pooled:
        if not groups or size + len(answer.data) > MAX_BATCH_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(answer)
        size += len(answer.data)
    return list(groups)


def _too_large(request: _Request, output: PooledOutput) -> Failed:
    message = (
        f"the result of input {output.index} has {len(output.data)} bytes, but an instance sends at most "
        f"{MAX_RESULT_BYTES}: send a shorter input, or ask for one vector instead of one for each token"
    )
    return Failed(request_id=request.request_id, code="too_long", message=message)


def _pooled(request: _Request, output: PooledOutput) -> Pooled:
    return Pooled(request_id=request.request_id, index=output.index, shape=output.shape, data=output.data)
