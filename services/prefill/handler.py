"""What a prefill instance does with a request: read the prompt, hand its blocks on, keep them until they are fetched.

Blocks are freed only when the transfer says that no copy reads them any more, however the request ended.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from contracts.messages import Prefill
from engine.vision.given import ImageReader
from kvtransfer.errors import TransferError
from services.instance.engine_thread import EngineCalls
from services.instance.errors import RequestFailed
from services.instance.images import pixels_of
from services.instance.parts import Parts
from services.instance.ports import EngineStats, HandoffCounter, SourcePort
from services.instance.pulling import PullPort
from services.instance.requests import Request
from services.instance.serving import Assignment, to_the_end
from services.prefill.following import Following, Fronts, Lead, Leads
from services.prefill.reading import HandedReading, Reading

logger = logging.getLogger(__name__)

Beginning = Callable[[], Coroutine[object, object, None]]


def prefill_handler(parts: Parts) -> "PrefillHandler":
    fronts = Fronts(
        parts.engine, parts.transfer, layout=parts.layout, counter=parts.counter, hands_on=parts.reads_behind
    )
    return PrefillHandler(
        parts.engine,
        parts.transfer,
        parts.puller,
        fronts,
        counter=parts.counter,
        clock=time.monotonic,
        reader=parts.image_reader,
    )


class PrefillHandler:
    """`services.instance.serving.RoleHandler`."""

    def __init__(
        self,
        engine: EngineCalls,
        transfer: SourcePort,
        puller: PullPort,
        fronts: Fronts,
        *,
        counter: HandoffCounter,
        clock: Callable[[], float],
        reader: ImageReader | None = None,
    ) -> None:
        self._reader = reader
        self._engine = engine
        self._transfer = transfer
        self._puller = puller
        self._fronts = fronts
        self._counter = counter
        self._clock = clock
        self.leads = Leads()

    def can_serve(self, message: Assignment) -> bool:
        return isinstance(message, Prefill)

    def refused(self, message: Assignment, reason: str) -> None:
        """Who was to fetch its blocks, decode or the reader of the prompt's next part, need not wait for them."""
        if isinstance(message, Prefill) and message.ticket is not None:
            try:
                self._transfer.open(message.ticket)
            except TransferError as exc:
                logger.info("ticket %s: %s", message.ticket.ticket, exc)
            else:
                self._transfer.fail(message.ticket.ticket, reason)

    async def serve(self, request: Request, message: Assignment) -> None:
        assert isinstance(message, Prefill)
        own, following = self.leads.add(request), None
        if (front := message.front) is not None:
            lead, ticket = self.leads.find(request.router, front.after), message.ticket or front.ticket
            following = Following(self._fronts, request, front, own=own, lead=lead, room_within_s=ticket.timeout_s)
        reading = Reading() if message.ticket is None else HandedReading(self._transfer, message.ticket, self._clock)
        request.progress = reading
        reading.end.add_done_callback(lambda _: own.end())
        try:
            beginning = partial(self._begin, request, message, following, own)
            if isinstance(reading, HandedReading):
                await self._hand_off(request, reading, beginning, following)
            else:
                await self._read(request, reading, beginning, following)
        finally:
            self.leads.remove(request, own)

    def on_stats(self, stats: EngineStats) -> None:
        self._fronts.room.on_free_blocks(stats.free_blocks)

    def num_queued(self) -> int:
        """None: what waits for room is in the engine."""
        return 0

    async def _begin(self, request: Request, message: Prefill, following: Following | None, own: Lead) -> None:
        if following is not None:
            await following.begin()
        else:
            await self._puller.pull(request, message.pull)
            pixels = await pixels_of(message.images, self._reader)
            added = self._engine.call(
                lambda engine: engine.add(request.work, mode="prefill", pixels=pixels), then=own.placed
            )
            own.is_asked.set()
            await added

    async def _read(
        self, request: Request, reading: Reading, beginning: Beginning, following: Following | None
    ) -> None:
        try:
            await beginning()
            await reading.end
        finally:
            await to_the_end(self._end(request, reading, following))

    async def _hand_off(
        self, request: Request, reading: HandedReading, beginning: Beginning, following: Following | None
    ) -> None:
        ticket = reading.ticket
        self._transfer.open(ticket)
        released = asyncio.ensure_future(self._transfer.released(ticket.ticket))
        computing = asyncio.ensure_future(_to_its_end(beginning, reading))
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
            await to_the_end(self._let_go(request, reading, released, computing, following))

    async def _let_go(
        self,
        request: Request,
        reading: HandedReading,
        released: "asyncio.Future[str]",
        computing: "asyncio.Future[None]",
        following: Following | None,
    ) -> None:
        ticket = reading.ticket
        await asyncio.gather(computing, return_exceptions=True)
        if not released.done():
            self._transfer.cancel(ticket.ticket)
        try:
            reason = await released
        finally:
            await self._end(request, reading, following)
        if reason not in ("received", "cancelled"):
            self._counter.handoff_failed(reason)
            extra = {"request_id": request.request_id}
            logger.warning("handoff to %s ended: %s", ticket.sink, reason, extra=extra)

    async def _end(self, request: Request, reading: Reading, following: Following | None) -> None:
        """Frees its blocks as soon as nothing writes to them."""
        if following is not None:
            await following.end()
        inner = request.work.request_id
        if reading.is_held:
            self._engine.post(lambda engine: engine.release(inner))
        else:
            self._engine.post(lambda engine: engine.cancel(inner))


async def _to_its_end(beginning: Beginning, reading: Reading) -> None:
    await beginning()
    await asyncio.shield(reading.end)  # whether the engine holds the blocks is told by it to the last
