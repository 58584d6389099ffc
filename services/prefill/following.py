"""Reads a prompt behind another instance that reads its first blocks: both compute at the same time.

The other one's blocks are fetched while it computes them, its last ones layer by layer; the engine follows as far as
they are here. Whatever becomes of that one, the prompt is read: what does not come is computed.
"""

import asyncio
import logging

from contracts.identity import BlockName
from contracts.layout import KVLayout
from contracts.messages import Front
from engine.front import Gate
from kvtransfer.errors import TransferError
from services.instance.engine_thread import EngineCalls
from services.instance.ports import HandoffCounter, NamedBlock, SinkPort
from services.instance.requests import Request

logger = logging.getLogger(__name__)


class Fronts:
    """What an instance needs to follow others."""

    def __init__(self, engine: EngineCalls, transfer: SinkPort, *, layout: KVLayout, counter: HandoffCounter) -> None:
        self.engine = engine
        self.transfer = transfer
        self.layout = layout
        self.counter = counter


class Following:
    """One prompt's. `begin` it, and `end` it before its blocks are freed."""

    def __init__(self, fronts: Fronts, request: Request, front: Front) -> None:
        self._fronts = fronts
        self._request = request
        self._ticket = front.ticket
        # The last token is computed here at least.
        num_full = (len(request.work.token_ids) - 1) // fronts.layout.block_tokens
        self._num_blocks = min(front.num_blocks, num_full)
        self._gate = Gate(fronts.layout.num_layers)
        self._has_begun: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._fetch: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Returns when the engine has the request: behind the front, once that is at its last step, or from the start.
        Raises `engine.errors.RequestError`."""
        engine, work = self._fronts.engine, self._request.work
        reservation = await engine.call(lambda engine: engine.reserve(work, mode="prefill"))
        wanted: list[NamedBlock] = []
        if reservation is not None:
            wanted = reservation.missing[: max(0, self._num_blocks - reservation.reused)]
        # Also for nothing: the front waits to be asked.
        self._fetch = asyncio.get_running_loop().create_task(self._bring(wanted))
        follows = await asyncio.shield(self._has_begun) if wanted else False
        if reservation is None:
            await engine.call(lambda engine: engine.add(work, mode="prefill"))
        elif follows:
            num_tokens = self._num_blocks * self._fronts.layout.block_tokens
            await engine.call(lambda engine: engine.follow(work.request_id, num_tokens, self._gate))
        else:
            await engine.call(lambda engine: engine.admit_locally(work.request_id))

    async def end(self) -> None:
        """Nothing writes to the request's blocks any more."""
        if self._fetch is not None:
            self._fetch.cancel()
            await asyncio.wait([self._fetch])

    async def _bring(self, wanted: list[NamedBlock]) -> None:
        fronts, ticket, reason = self._fronts, self._ticket, "it is not wanted any more"
        try:
            with self._request.span.child("follow") as span:
                span.set({"baton.source": ticket.source, "baton.ticket": ticket.ticket})
                await fronts.transfer.fetch(ticket, wanted, on_blocks=self._arrived, on_parts=self._reached)
        except TransferError as exc:
            reason = f"{type(exc).__name__}: {exc}"
            fronts.counter.handoff_failed(type(exc).__name__)
            extra = {"request_id": self._request.request_id}
            logger.warning("reading behind %s failed: %s", ticket.source, reason, extra=extra)
        finally:
            self._gate.lost(reason)
            if not self._has_begun.done():
                self._has_begun.set_result(False)

    def _arrived(self, names: list[BlockName]) -> None:
        inner = self._request.work.request_id
        self._fronts.engine.post(lambda engine: engine.mark_received(inner, names))

    def _reached(self, groups: int, of: int) -> None:
        self._gate.reached(groups, of)
        if not self._has_begun.done():
            self._has_begun.set_result(True)
