"""What a prefill instance does with a request: read the prompt, hand its blocks on, keep them until they are fetched.

Blocks are freed only when the transfer says that no copy reads them any more, however the request ended.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from baton_serve.contracts.messages import Prefill
from baton_serve.engine.model.vision.placeholders import ImageReader
from baton_serve.kvtransfer.errors import TransferError
from baton_serve.services.instance.attempt_table import Request
from baton_serve.services.instance.components import Parts
from baton_serve.services.instance.engine_thread import EngineCalls
from baton_serve.services.instance.errors import RequestFailed
from baton_serve.services.instance.image_loading import pixels_of
from baton_serve.services.instance.kv_sharing.pulling import PullPort
from baton_serve.services.instance.ports import EngineStats, HandoffCounter, SourcePort
from baton_serve.services.instance.request_server import Assignment, to_the_end
from baton_serve.services.prefill.prompt_progress import HandedReading, Reading

logger = logging.getLogger(__name__)


def prefill_handler(parts: Parts) -> "PrefillHandler":
    return PrefillHandler(
        parts.engine,
        parts.transfer,
        parts.puller,
        counter=parts.counter,
        clock=time.monotonic,
        reader=parts.image_reader,
    )


class PrefillHandler:
    """`services.instance.request_server.RoleHandler`."""

    def __init__(
        self,
        engine: EngineCalls,
        transfer: SourcePort,
        puller: PullPort,
        *,
        counter: HandoffCounter,
        clock: Callable[[], float],
        reader: ImageReader | None = None,
    ) -> None:
        self._reader = reader
        self._engine = engine
        self._transfer = transfer
        self._puller = puller
        self._counter = counter
        self._clock = clock

    def can_serve(self, message: Assignment) -> bool:
        return isinstance(message, Prefill)

    def refused(self, message: Assignment, reason: str) -> None:
        """Who was to fetch its blocks need not wait for them."""
        if isinstance(message, Prefill) and message.ticket is not None:
            try:
                self._transfer.open(message.ticket)
            except TransferError as exc:
                logger.info("ticket %s: %s", message.ticket.ticket, exc)
            else:
                self._transfer.fail(message.ticket.ticket, reason)

    async def serve(self, request: Request, message: Assignment) -> None:
        assert isinstance(message, Prefill)
        reading = Reading() if message.ticket is None else HandedReading(self._transfer, message.ticket, self._clock)
        request.progress = reading
        if isinstance(reading, HandedReading):
            await self._hand_off(request, message, reading)
        else:
            await self._read(request, message, reading)

    def on_stats(self, stats: EngineStats) -> None:
        """Nothing waits for it."""

    def num_queued(self) -> int:
        """None: what waits for room is in the engine."""
        return 0

    async def _begin(self, request: Request, message: Prefill) -> None:
        await self._puller.pull(request, message.pull)
        pixels = await pixels_of(message.images, self._reader)
        await self._engine.call(lambda engine: engine.add(request.work, mode="prefill", pixels=pixels))

    async def _compute(self, request: Request, message: Prefill, reading: HandedReading) -> None:
        await self._begin(request, message)
        await asyncio.shield(reading.end)  # whether the engine holds the blocks is told by it to the last

    async def _read(self, request: Request, message: Prefill, reading: Reading) -> None:
        try:
            await self._begin(request, message)
            await reading.end
        finally:
            self._free(request, reading)

    async def _hand_off(self, request: Request, message: Prefill, reading: HandedReading) -> None:
        ticket = reading.ticket
        self._transfer.open(ticket)
        released = asyncio.ensure_future(self._transfer.released(ticket.ticket))
        computing = asyncio.ensure_future(self._compute(request, message, reading))
        try:
            ends: list[asyncio.Future[Any]] = [computing, released]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not computing.done() and not reading.end.done():
                reason = released.result()
                if reason == "cancelled":
                    return  # the sink was told to, or has told the router why
                lost = ticket.sink if reason == "lost" else None
                raise RequestFailed("handoff_failed", f"{ticket.sink} does not take the blocks: {reason}", lost=lost)
            await computing
            with request.span.child("lease"):
                await asyncio.wait([released])
        except Exception as exc:
            self._transfer.fail(ticket.ticket, str(exc))
            raise
        finally:
            reading.is_open = False
            computing.cancel()
            await to_the_end(self._let_go(request, reading, released, computing))

    async def _let_go(
        self,
        request: Request,
        reading: HandedReading,
        released: "asyncio.Future[str]",
        computing: "asyncio.Future[None]",
    ) -> None:
        ticket = reading.ticket
        await asyncio.gather(computing, return_exceptions=True)
        if not released.done():
            self._transfer.cancel(ticket.ticket)
        try:
            reason = await released
        finally:
            self._free(request, reading)
        if reason not in ("received", "cancelled"):
            self._counter.handoff_failed(reason)
            extra = {"request_id": request.request_id}
            logger.warning("handoff to %s ended: %s", ticket.sink, reason, extra=extra)

    def _free(self, request: Request, reading: Reading) -> None:
        inner = request.work.request_id
        if reading.is_held:
            self._engine.post(lambda engine: engine.release(inner))
        else:
            self._engine.post(lambda engine: engine.cancel(inner))
