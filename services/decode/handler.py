"""Serves a handoff on a decode worker: reserves blocks, fetches missing ones; decides what a failed fetch means
(`--handoff-fallback`).

Blocks are freed only when the fetch is over: until then a copy may write to them.
"""

import asyncio
import logging
import time
from functools import partial
from typing import Literal

from baton_serve.contracts.block_hash import checkpoint_hashes, hash_blocks
from baton_serve.contracts.messages import Decode, Generate, Ticket, Work
from baton_serve.kvtransfer import Translation
from baton_serve.kvtransfer.errors import (
    Corrupt,
    LocalTransferError,
    PeerLost,
    RemoteTransferError,
    SourceFailed,
    TransferTimeout,
)
from baton_serve.services.common.tracing import Attributes
from baton_serve.services.decode.block_queue import BlockQueue
from baton_serve.services.decode.kv_arrivals import ArrivedBlocks, HandoffAdmission
from baton_serve.services.instance.attempt_table import AttemptEntry
from baton_serve.services.instance.engine_thread import EngineCalls
from baton_serve.services.instance.errors import RequestFailed
from baton_serve.services.instance.interfaces import (
    CompletedFetch,
    EngineStats,
    HandoffCounter,
    HandoffSinkPort,
    Reservation,
    RouterPort,
)
from baton_serve.services.instance.kv_sharing.pulling import PullPort
from baton_serve.services.instance.local_generation import GenerationObserver, await_grammar, generate
from baton_serve.services.instance.request_server import RoleMessage

logger = logging.getLogger(__name__)

PEER_FAULTS = (PeerLost, TransferTimeout, Corrupt)
"""Errors that mean that the prefill instance is dead, frozen or broken. An instance that refuses or fails a single
request is alive and has reported the reason to its router."""

SOURCE_REPORT_S = 1.0
"""Seconds for which this instance leaves it to a prefill instance that gave a request up to report that."""


class DecodeHandler:
    """Serves the requests of a decode instance: fetches the KV blocks of prompts and generates the answers. Implements
    `services.instance.request_server.RoleHandler`. Use it only on the event loop.
    """

    def __init__(
        self,
        engine: EngineCalls,
        transfer: HandoffSinkPort,
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
        """Do nothing when a request is refused: no other instance waits for a decode instance."""

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
        """Serve a request whose prompt the prefill instance of `ticket` computes: reserve blocks, fetch the missing
        ones, and generate all sequences.
        """
        generation = GenerationObserver()
        request.progress = generation
        inner = request.work.request_id
        arrivals = ArrivedBlocks(self._engine, request)
        try:
            await await_grammar(self._engine, request)
            with request.span.child("reserve"):
                reservation = await self._block_queue.reserve(request.work, within_s=ticket.timeout_s)
            report = partial(self._router.send, request.router)
            admission = HandoffAdmission(request, reservation, arrivals, self._engine, report)
            fetched = await self._fetch(request, ticket, admission)
            begun_at = time.monotonic() if fetched is None else fetched.ended_at
            if fetched is None:
                logger.warning(
                    "handoff failed, computing the prompt on this decode instance (--handoff-fallback local)",
                    extra={"request_id": request.request_id},
                )
                request.is_admitted = True
                # Blocks that did arrive become prefix cache hits, so only the rest is computed.
                arrivals.flush()
                await self._engine.call(lambda engine: engine.admit_locally(inner))
            else:
                await admission.wait()
            with request.span.child("write", at=begun_at) as write:
                write.over(await generation.wait())
        finally:
            # The fetch is over here, so no copy writes to the blocks any more and they may be freed.
            if not (generation.is_over and request.is_admitted):
                arrivals.flush()
                self._engine.post(lambda engine: engine.cancel(inner))

    async def _fetch(
        self, request: AttemptEntry, ticket: Ticket, admission: "HandoffAdmission"
    ) -> CompletedFetch | None:
        """Fetch the blocks of the prompt that this instance lacks from the prefill instance. `admission` starts the
        decoding when they have arrived. Return None if the fetch failed and this instance must compute the rest of the
        prompt.

        Raises `RequestFailed` if the fetch failed and `--handoff-fallback` is `fail`, or if this instance is at fault.
        """
        reservation = admission.reservation
        try:
            with request.span.child("transfer") as transfer:
                fetched = await self._transfer.fetch(
                    ticket,
                    reservation.missing,
                    on_blocks=admission.arrivals.add,
                    on_rank_blocks=admission.arrivals.add_in_parts,
                    on_end=admission.begin,
                    translation=make_translation(ticket, request.work, reservation),
                )
                transfer.set(_transfer_attributes(ticket, reservation, fetched))
                transfer.over(fetched.ended_at)
                return fetched
        except RemoteTransferError as exc:
            if self._fallback == "fail" and isinstance(exc, SourceFailed):
                # The prefill instance reports the cause, such as a broken image, and the router then cancels this
                # request, which counts as no failure here. If this report came first, the router would blame this
                # instance and use up a retry.
                await asyncio.sleep(SOURCE_REPORT_S)
            self._counter.handoff_failed(type(exc).__name__)
            if self._fallback == "fail":
                # With `lost` the router chooses another prefill instance for the replay.
                lost = ticket.source if isinstance(exc, PEER_FAULTS) else None
                raise RequestFailed("handoff_failed", _error_text(exc), lost=lost) from exc
            logger.warning("handoff from prefill instance %s failed: %s", ticket.source, _error_text(exc))
            return None
        except LocalTransferError as exc:
            self._counter.handoff_failed(type(exc).__name__)
            raise RequestFailed("handoff_failed", _error_text(exc)) from exc


def make_translation(ticket: Ticket, work: Work, reservation: Reservation) -> Translation | None:
    """Return how to convert blocks from the KV layout of the prefill instance to that of this one; None if both are
    equal. The prefill instance hashes the prompt with its own block size and root, so its block hashes are computed
    here from the tokens.
    """
    layout = ticket.source_layout
    if layout is None:
        return None
    names = hash_blocks(ticket.source_root, work.token_ids, layout.block_tokens, media=work.media)
    names += checkpoint_hashes(names[-1], layout.state_blocks)
    return Translation(layout, names, first_block=reservation.reused, num_tokens=len(work.token_ids))


def _transfer_attributes(ticket: Ticket, reservation: Reservation, fetched: CompletedFetch) -> Attributes:
    """Return the attributes of the trace span of a handoff: its source, ticket, transport, bytes and blocks."""
    return {
        "baton.source": ticket.source,
        "baton.ticket": ticket.ticket,
        "baton.transport": fetched.transport,
        "baton.transferred_bytes": fetched.num_bytes,
        "baton.transferred_blocks": fetched.num_blocks,
        "baton.reused_blocks": reservation.reused,
    }


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
