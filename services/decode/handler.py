"""What a decode instance does with a request: reserve blocks, fetch the missing ones, write the answer.

Blocks are freed only when the fetch is over: until then a copy may write to them.
"""

import asyncio
import logging
from typing import Literal

from contracts.identity import BlockName
from contracts.messages import Decode, Generate, HandoffReport, Ticket, Work
from contracts.naming import block_names
from contracts.wire import WireError
from kvtransfer import Translation
from kvtransfer.errors import Corrupt, LocalTransferError, PeerLost, RemoteTransferError, TransferTimeout
from services.common.tracing import Attributes
from services.decode.reservations import Reservations
from services.instance.engine_thread import EngineCalls
from services.instance.errors import RequestFailed
from services.instance.first_tokens import FirstTokens, decode_first_tokens
from services.instance.generation import Writing, generate
from services.instance.ports import (
    EnginePort,
    EngineStats,
    FetchResult,
    HandoffCounter,
    Reservation,
    RouterPort,
    SinkPort,
)
from services.instance.pulling import PullPort
from services.instance.requests import Request
from services.instance.serving import Assignment

logger = logging.getLogger(__name__)

BLAMED = (PeerLost, TransferTimeout, Corrupt)
"""The source is dead, frozen or broken. One that refuses, or gives a request up, is alive and told its router why."""

BLOCKS_PER_WORD = 64
"""Only when so many more blocks of a prompt have arrived can others find them in the cache."""


class DecodeHandler:
    """`services.instance.serving.RoleHandler`."""

    def __init__(
        self,
        engine: EngineCalls,
        transfer: SinkPort,
        router: RouterPort,
        puller: PullPort,
        *,
        counter: HandoffCounter,
        fallback: Literal["fail", "local"],
        max_waiting: int,
    ) -> None:
        self._engine = engine
        self._transfer = transfer
        self._router = router
        self._puller = puller
        self._counter = counter
        self._fallback = fallback
        self._reservations = Reservations(engine, max_waiting=max_waiting)

    def can_serve(self, message: Assignment) -> bool:
        return isinstance(message, Decode | Generate)

    async def serve(self, request: Request, message: Assignment) -> None:
        if isinstance(message, Decode):
            await self._decode(request, message.ticket)
        else:
            assert isinstance(message, Generate)
            await generate(self._engine, request, self._puller, message.pull)

    def on_turn(self, stats: EngineStats) -> None:
        self._reservations.on_free_blocks(stats.free_blocks)

    def num_queued(self) -> int:
        return len(self._reservations)

    async def _decode(self, request: Request, ticket: Ticket) -> None:
        writing = Writing()
        request.progress = writing
        inner = request.work.request_id
        arrivals = Arrivals(self._engine, request)
        try:
            with request.span.child("reserve"):
                reservation = await self._reserve(request, ticket)
            fetched = await self._fetch(request, ticket, reservation, arrivals)
            if fetched is None:
                logger.warning("the prompt is computed here", extra={"request_id": request.request_id})
                request.is_admitted = True
                arrivals.tell()
                await self._engine.call(lambda engine: engine.admit_locally(inner))
            else:
                await self._admit(request, reservation, fetched, arrivals)
            with request.span.child("write"):
                await writing.wait()
        finally:
            if not (writing.is_over and request.is_admitted):
                arrivals.tell()
                self._engine.post(lambda engine: engine.cancel(inner))

    async def _reserve(self, request: Request, ticket: Ticket) -> Reservation:
        try:
            async with asyncio.timeout(ticket.timeout_s):
                return await self._reservations.reserve(request.work)
        except TimeoutError:
            raise RequestFailed("overloaded", f"no room for the prompt within {ticket.timeout_s:g} s") from None

    async def _fetch(
        self, request: Request, ticket: Ticket, reservation: Reservation, arrivals: "Arrivals"
    ) -> FetchResult | None:
        """None: the handoff failed and this instance computes what is missing itself."""
        try:
            with request.span.child("transfer") as transfer:
                fetched = await self._transfer.fetch(
                    ticket,
                    reservation.missing,
                    on_blocks=arrivals.add,
                    translation=translation_of(ticket, request.work, reservation),
                )
                transfer.set(_described(ticket, reservation, fetched))
                return fetched
        except RemoteTransferError as exc:
            self._counter.handoff_failed(type(exc).__name__)
            if self._fallback == "fail":
                lost = ticket.source if isinstance(exc, BLAMED) else None
                raise RequestFailed("handoff_failed", _describe(exc), lost=lost) from exc
            logger.warning("handoff from %s failed: %s", ticket.source, _describe(exc))
            return None
        except LocalTransferError as exc:
            self._counter.handoff_failed(type(exc).__name__)
            raise RequestFailed("handoff_failed", _describe(exc)) from exc

    async def _admit(
        self, request: Request, reservation: Reservation, fetched: FetchResult, arrivals: "Arrivals"
    ) -> None:
        try:
            first = decode_first_tokens(fetched.payload)
        except WireError as exc:
            raise RequestFailed("handoff_failed", f"first tokens: {exc}") from exc
        inner = request.work.request_id
        going = {token.sequence: token.token_id for token in first.tokens if not token.is_finished}
        going = {sequence: token for sequence, token in going.items() if sequence in request.live}
        for sequence in request.live - set(going):
            request.end_sequence(sequence)
        report = _report(request, reservation, fetched, first)
        if not going:
            self._router.send(request.router, report)
            return
        request.is_admitted = True
        names = arrivals.take()

        def admit(engine: EnginePort) -> None:
            engine.mark_received(inner, names)
            engine.admit(inner, going)

        admitted = self._engine.call(admit)
        self._router.send(request.router, report)  # while the engine begins
        await admitted


def translation_of(ticket: Ticket, work: Work, reservation: Reservation) -> Translation | None:
    """How the source names the blocks of the prompt, where its layout is another one."""
    layout = ticket.source_layout
    if layout is None:
        return None
    names = block_names(ticket.source_root, work.token_ids, layout.block_tokens)
    return Translation(layout, names, first_block=reservation.reused, num_tokens=len(work.token_ids))


class Arrivals:
    """Tells the engine of blocks that have arrived: many at once, since each word to it wakes its thread."""

    def __init__(self, engine: EngineCalls, request: Request) -> None:
        self._engine = engine
        self._request_id = request.work.request_id
        self._names: list[BlockName] = []

    def add(self, names: list[BlockName]) -> None:
        self._names += names
        if len(self._names) >= BLOCKS_PER_WORD:
            self.tell()

    def take(self) -> list[BlockName]:
        """Those that the engine does not know of yet."""
        names, self._names = self._names, []
        return names

    def tell(self) -> None:
        if names := self.take():
            self._engine.post(lambda engine: engine.mark_received(self._request_id, names))


def _described(ticket: Ticket, reservation: Reservation, fetched: FetchResult) -> Attributes:
    return {
        "baton.source": ticket.source,
        "baton.ticket": ticket.ticket,
        "baton.transport": fetched.transport,
        "baton.transferred_bytes": fetched.num_bytes,
        "baton.transferred_blocks": fetched.num_blocks,
        "baton.reused_blocks": reservation.reused,
    }


def _report(request: Request, reservation: Reservation, fetched: FetchResult, first: FirstTokens) -> HandoffReport:
    return HandoffReport(
        request_id=request.request_id,
        transport=fetched.transport,
        handoff_s=fetched.seconds,
        exposed_s=min(fetched.seconds, fetched.exposed_s + first.since_end_s),
        transferred_blocks=fetched.num_blocks,
        reused_blocks=reservation.reused,
        transferred_bytes=fetched.num_bytes,
    )


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
