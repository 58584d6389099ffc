"""What a decode instance does with a request: reserve blocks, fetch the missing ones, write the answer.

Blocks are freed only when the fetch is over: until then a copy may write to them.
"""

import logging
import time
from functools import partial
from typing import Literal

from baton_serve.contracts.block_hash import hash_blocks
from baton_serve.contracts.messages import Decode, Generate, Ticket, Work
from baton_serve.kvtransfer import Translation
from baton_serve.kvtransfer.errors import Corrupt, LocalTransferError, PeerLost, RemoteTransferError, TransferTimeout
from baton_serve.services.common.tracing import Attributes
from baton_serve.services.decode.block_queue import BlockQueue
from baton_serve.services.decode.kv_arrivals import ArrivedBlocks, HandoffAdmission
from baton_serve.services.instance.attempt_table import AttemptEntry
from baton_serve.services.instance.engine_thread import EngineCalls
from baton_serve.services.instance.errors import RequestFailed
from baton_serve.services.instance.kv_sharing.pulling import PullPort
from baton_serve.services.instance.local_generation import GenerationObserver, generate
from baton_serve.services.instance.ports import (
    CompletedFetch,
    EngineStats,
    HandoffCounter,
    Reservation,
    RouterPort,
    SinkPort,
)
from baton_serve.services.instance.request_server import RoleMessage

logger = logging.getLogger(__name__)

PEER_FAULTS = (PeerLost, TransferTimeout, Corrupt)
"""The source is dead, frozen or broken. One that refuses, or gives a request up, is alive and told its router why."""


class DecodeHandler:
    """`services.instance.request_server.RoleHandler`."""

    def __init__(
        self,
        engine: EngineCalls,
        transfer: SinkPort,
        router: RouterPort,
        puller: PullPort,
        *,
        counter: HandoffCounter,
        fallback: Literal["fail", "local"],
        block_queue: BlockQueue,
    ) -> None:
        self._engine = engine
        self._transfer = transfer
        self._router = router
        self._puller = puller
        self._counter = counter
        self._fallback = fallback
        self._block_queue = block_queue

    def can_serve(self, message: RoleMessage) -> bool:
        return isinstance(message, Decode | Generate)

    def refused(self, message: RoleMessage, reason: str) -> None:
        """Nobody waits for it."""

    async def serve(self, request: AttemptEntry, message: RoleMessage) -> None:
        if isinstance(message, Decode):
            await self._decode(request, message.ticket)
        else:
            assert isinstance(message, Generate)
            await generate(self._engine, request, self._puller, message)

    def on_stats(self, stats: EngineStats) -> None:
        self._block_queue.on_free_blocks(stats.free_blocks)

    def num_queued(self) -> int:
        return len(self._block_queue)

    async def _decode(self, request: AttemptEntry, ticket: Ticket) -> None:
        writing = GenerationObserver()
        request.progress = writing
        inner = request.work.request_id
        arrivals = ArrivedBlocks(self._engine, request)
        try:
            with request.span.child("reserve"):
                reservation = await self._block_queue.reserve(request.work, within_s=ticket.timeout_s)
            report = partial(self._router.send, request.router)
            admission = HandoffAdmission(request, reservation, arrivals, self._engine, report)
            fetched = await self._fetch(request, ticket, admission)
            begun_at = time.monotonic() if fetched is None else fetched.ended_at
            if fetched is None:
                logger.warning("the prompt is computed here", extra={"request_id": request.request_id})
                request.is_admitted = True
                arrivals.flush()
                await self._engine.call(lambda engine: engine.admit_locally(inner))
            else:
                await admission.wait()
            with request.span.child("write", at=begun_at) as write:
                write.over(await writing.wait())
        finally:
            if not (writing.is_over and request.is_admitted):
                arrivals.flush()
                self._engine.post(lambda engine: engine.cancel(inner))

    async def _fetch(
        self, request: AttemptEntry, ticket: Ticket, admission: "HandoffAdmission"
    ) -> CompletedFetch | None:
        """None: the handoff failed and this instance computes what is missing itself."""
        reservation = admission.reservation
        try:
            with request.span.child("transfer") as transfer:
                fetched = await self._transfer.fetch(
                    ticket,
                    reservation.missing,
                    on_blocks=admission.arrivals.add,
                    on_end=admission.begin,
                    translation=make_translation(ticket, request.work, reservation),
                )
                transfer.set(_described(ticket, reservation, fetched))
                transfer.over(fetched.ended_at)
                return fetched
        except RemoteTransferError as exc:
            self._counter.handoff_failed(type(exc).__name__)
            if self._fallback == "fail":
                lost = ticket.source if isinstance(exc, PEER_FAULTS) else None
                raise RequestFailed("handoff_failed", _describe(exc), lost=lost) from exc
            logger.warning("handoff from %s failed: %s", ticket.source, _describe(exc))
            return None
        except LocalTransferError as exc:
            self._counter.handoff_failed(type(exc).__name__)
            raise RequestFailed("handoff_failed", _describe(exc)) from exc


def make_translation(ticket: Ticket, work: Work, reservation: Reservation) -> Translation | None:
    """How the source names the blocks of the prompt, where its layout is another one."""
    layout = ticket.source_layout
    if layout is None:
        return None
    names = hash_blocks(ticket.source_root, work.token_ids, layout.block_tokens, media=work.media)
    return Translation(layout, names, first_block=reservation.reused, num_tokens=len(work.token_ids))


def _described(ticket: Ticket, reservation: Reservation, fetched: CompletedFetch) -> Attributes:
    return {
        "baton.source": ticket.source,
        "baton.ticket": ticket.ticket,
        "baton.transport": fetched.transport,
        "baton.transferred_bytes": fetched.num_bytes,
        "baton.transferred_blocks": fetched.num_blocks,
        "baton.reused_blocks": reservation.reused,
    }


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
