"""Serves an encode instance: encodes images, videos and audio for instances that compute prompts, and which fetch the
embeddings.

A router sends `Encode` to this instance and the prompt to another one at the same time, with the same ticket. That
instance fetches the blocks; if they do not come, it encodes the files itself. So nothing is answered to the router.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from baton_serve.contracts.identity import BlockHash, RequestId, TicketId
from baton_serve.contracts.instance import Load
from baton_serve.contracts.messages import (
    Decode,
    Encode,
    ErrorCode,
    Failed,
    Generate,
    Heartbeat,
    LoadReport,
    Pool,
    Prefill,
    Snapshot,
    SnapshotRequest,
    Ticket,
    ToInstance,
)
from baton_serve.contracts.vision.media_text import EmbeddingShape
from baton_serve.engine.core.outputs import NamedBlock
from baton_serve.engine.errors import RequestError
from baton_serve.engine.model.vision.image_types import ImageReader, Pixels
from baton_serve.kvtransfer.errors import TransferError
from baton_serve.services.common.rpc.instance_link import RouterId
from baton_serve.services.instance.drain.drainable_server import DrainableServer
from baton_serve.services.instance.engine_thread import EncoderCalls, TimedStepResult
from baton_serve.services.instance.errors import RequestFailed
from baton_serve.services.instance.interfaces import EngineStats, EventsPort, RouterPort, SourcePort
from baton_serve.services.instance.kv_sharing.file_decoding import FileDecoding
from baton_serve.services.instance.request_server import Identity, await_uncancelled, load_of

logger = logging.getLogger(__name__)

MAX_DECODED = 16
"""Largest number of requests whose images are decoded before their turn. Pixels take tens of times the memory of the
files, so the others wait as files."""


@dataclass(eq=False, slots=True)
class _Encoding:
    """The embeddings of a request that exist already. `held` is resolved when all do; it raises `RequestFailed` if the
    engine failed the request."""

    ticket: TicketId
    held: asyncio.Future[None]
    shapes: list[EmbeddingShape] = field(default_factory=list)


class EncodingServer(DrainableServer):
    """Serves one image encoder; implements `services.instance.role_interface.InstanceService`. Runs on the event
    loop."""

    def __init__(
        self,
        identity: Identity,
        *,
        engine: EncoderCalls,
        reader: ImageReader,
        stats: EngineStats,
        router: RouterPort,
        events: EventsPort,
        transfer: SourcePort,
    ) -> None:
        super().__init__(router)
        self._identity = identity
        self._engine = engine
        self._reader = reader
        self._events = events
        self._transfer = transfer
        self._tasks: dict[asyncio.Task[None], Ticket] = {}
        self._encodings: dict[RequestId, _Encoding] = {}
        self._files = FileDecoding()
        self._decoding = asyncio.Semaphore(MAX_DECODED)
        self._num_queued = 0
        """Requests that wait until their files may be decoded."""
        self.stats = stats

    @property
    def num_requests(self) -> int:
        """Return the number of requests whose embeddings are computed or not fetched yet."""
        return len(self._tasks)

    def load(self) -> Load:
        """Return the current load for routers and registry. Its tokens are rows of embeddings."""
        return load_of(self.stats, num_queued=self._num_queued)

    def on_message(self, router: RouterId, message: ToInstance) -> None:
        """Handle one message of a router."""
        match message:
            case Encode():
                self._accept(message)
            case Heartbeat():
                self._router.send(router, self._load_report())
            case SnapshotRequest():
                taken = self._engine.call(
                    lambda engine: engine.cached_block_hashes(), then=partial(self._send_snapshot, router)
                )
                # A stopped engine has been reported already. Reading the exception keeps asyncio from logging it.
                taken.add_done_callback(lambda done: done.cancelled() or done.exception())
            case Prefill() | Decode() | Generate():
                self._refuse(router, message.work.request_id)
            case Pool():
                self._refuse(router, message.request_id)

    def on_router_lost(self, router: RouterId) -> None:
        """Do nothing: the instances that fetch the embeddings end their requests themselves."""

    def on_stats(self, stats: EngineStats) -> None:
        self.stats = stats

    def on_step_result(self, step: TimedStepResult) -> None:
        """Publish the images that are encoded, continue the requests whose images all are, and publish what the cache
        has stored and removed."""
        for request_id, shape, blocks in step.result.encoded:
            if (encoding := self._encodings.get(request_id)) is not None:
                self._publish(encoding, shape, blocks)
        for request_id in step.result.held:
            if (encoding := self._encodings.get(request_id)) is not None and not encoding.held.done():
                encoding.held.set_result(None)
        for request_id, message, code in step.result.failed:
            if (encoding := self._encodings.get(request_id)) is not None and not encoding.held.done():
                encoding.held.set_exception(RequestFailed(code, message))
        self._events.publish(step.result.events)

    def _end_all(self, code: ErrorCode, reason: str) -> None:
        for task, ticket in self._tasks.items():
            self._transfer.fail(ticket.ticket, reason)
            task.cancel()

    def _accept(self, message: Encode) -> None:
        """Start a task for a request, or fail its ticket."""
        ticket = message.ticket
        try:
            self._transfer.open(ticket)
        except TransferError as exc:
            logger.debug("cannot serve ticket %s: %s", ticket.ticket, exc)
            return
        refused = self._refused(ticket.request_id)
        is_whole = len(message.spans) == len(message.images)
        if refused is not None or not is_whole or ticket.source_layout != self._reader.embedding_layout:
            reason = "this instance computes other embeddings" if refused is None else refused.message
            self._transfer.fail(ticket.ticket, reason)
            return
        task = asyncio.get_running_loop().create_task(self._serve(message), name=f"encode-{ticket.ticket}")
        self._tasks[task] = ticket
        self._idle.clear()
        task.add_done_callback(self._end)

    def _end(self, task: "asyncio.Task[None]") -> None:
        del self._tasks[task]
        if not self._tasks:
            self._idle.set()

    async def _serve(self, message: Encode) -> None:
        """Encode the images of a request, and keep the embeddings until they are fetched."""
        ticket, name = message.ticket, message.ticket.ticket
        inner = RequestId(f"encode:{name}")
        released = asyncio.ensure_future(self._transfer.released(name))
        encoding = asyncio.ensure_future(self._encode(inner, message))
        try:
            # The other instance may give up first, for example because its client has gone.
            await asyncio.wait([encoding, released], return_when=asyncio.FIRST_COMPLETED)
            if encoding.done():
                shapes = await encoding
                self._transfer.finish(name, msgspec.msgpack.encode(shapes))
                await asyncio.wait([released])
        except Exception as exc:  # noqa: BLE001 - the other instance gets the reason and encodes the images
            logger.warning("images were not encoded: %s", exc, extra={"request_id": ticket.request_id})
            self._transfer.fail(name, f"{type(exc).__name__}: {exc}")
        finally:
            encoding.cancel()
            await await_uncancelled(self._release(inner, name, released, encoding))

    async def _encode(self, inner: RequestId, message: Encode) -> list[EmbeddingShape]:
        """Compute the embeddings that are not cached, publish each as soon as it exists, and return their shapes."""
        ticket = message.ticket
        files = {digest: file for file, own in zip(message.images, message.spans, strict=True) for digest in own}
        encoding = _Encoding(ticket.ticket, asyncio.get_running_loop().create_future())
        self._encodings[inner] = encoding
        lacking, cached = await self._engine.call(
            lambda engine: (engine.claim(inner, ticket.source_root, list(files)), engine.blocks_of(inner))
        )
        for shape, blocks in cached:
            self._publish(encoding, shape, blocks)
        if lacking:
            # Each file once: a video may have many spans.
            await self._compute(inner, encoding, list(dict.fromkeys(files[digest] for digest in lacking)), set(lacking))
        return encoding.shapes

    def _publish(self, encoding: _Encoding, shape: EmbeddingShape, blocks: Sequence[NamedBlock]) -> None:
        """Offer the embeddings of one image to the instance that waits for them."""
        encoding.shapes.append(shape)
        self._transfer.publish(encoding.ticket, blocks)

    async def _compute(
        self, inner: RequestId, encoding: _Encoding, files: Sequence[bytes], lacking: set[bytes]
    ) -> None:
        """Decode files in worker threads, and wait until the engine has encoded their spans `lacking`, by digest. A
        request with videos keeps its turn for that long: the engine encodes one after the other."""
        if not all(files):
            # Its embeddings were reported as cached, and are evicted: the other instance has the file.
            raise RequestError("overloaded", "an embedding was evicted, and its file was not sent")
        self._num_queued += 1
        is_queued, found = True, set[bytes]()

        async def add(read: Pixels) -> None:
            pixels = {digest: picture for digest, picture in read.items() if digest in lacking}
            found.update(pixels)
            await self._engine.call(lambda engine: engine.add(inner, pixels))

        try:
            async with self._files.turn(files) as turn, self._decoding:
                self._num_queued -= 1
                is_queued = False
                await turn.decode(files, lambda file: self._reader.read([file]), add)
                if found != lacking:
                    raise RequestError("invalid", "a file does not have the digest by which it was sent")
                await encoding.held
        finally:
            self._num_queued -= is_queued

    async def _release(
        self,
        inner: RequestId,
        name: TicketId,
        released: "asyncio.Future[str]",
        encoding: "asyncio.Future[list[EmbeddingShape]]",
    ) -> None:
        """Wait until no copy reads the blocks any more, then free them."""
        await asyncio.gather(encoding, return_exceptions=True)
        self._encodings.pop(inner, None)
        if not released.done():
            self._transfer.cancel(name)
        await asyncio.wait([released])
        self._engine.post(lambda engine: engine.release(inner))

    def _refuse(self, router: RouterId, request_id: RequestId) -> None:
        text = "an encode instance encodes files only: it computes no prompts"
        self._router.send(router, Failed(request_id=request_id, code="invalid", message=text))

    def _send_snapshot(self, router: RouterId, names: list[BlockHash]) -> None:
        identity = self._identity
        snapshot = Snapshot(
            instance=identity.instance,
            generation=identity.generation,
            sequence=self._events.sequence,
            device=names,
        )
        self._router.send(router, snapshot)

    def _load_report(self) -> LoadReport:
        return LoadReport(
            instance=self._identity.instance,
            generation=self._identity.generation,
            load=self.load(),
            draining=self.refuses_new,
        )
