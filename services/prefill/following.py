"""Reads a prompt behind another instance that reads its first blocks: both compute at the same time.

The other one's blocks are fetched while it computes them, its last ones layer by layer; the engine follows as far as
they are here. What comes is handed on at once. Whatever becomes of that one, the prompt is read: what does not come is
computed.

Where two take turns, this instance computes an earlier part of the same prompt first, the *lead*. Its blocks are not
reserved, but shared; if it ends without them, what is missing of them is computed too.
"""

import asyncio
import logging
from typing import Literal

import msgspec

from contracts.identity import BlockName, RequestId
from contracts.layout import KVLayout
from contracts.messages import Front
from engine.front import Gate
from engine.outputs import CompletedBlocks
from kvtransfer.errors import TransferError
from services.common.rpc import RouterId
from services.instance.engine_thread import EngineCalls
from services.instance.errors import RequestFailed
from services.instance.ports import EnginePort, HandoffCounter, NamedBlock, Place, Reservation, SinkPort
from services.instance.requests import Request
from services.instance.room import Room

logger = logging.getLogger(__name__)

GRACE_S = 5.0
"""The engine waits for a layer so much longer than the fetch that brings it: that should have told of its end."""


class Lead:
    """A prompt that is read here, as the next part of it sees it. `request_id` is the engine's."""

    def __init__(self, request: Request) -> None:
        self.request_id = request.work.request_id
        self.request = request
        self.place: Place | None = None
        """In the engine's queue; the parts after it keep it."""
        self.is_asked = asyncio.Event()
        """The engine has been asked to take it, or never will be."""
        self.is_over = asyncio.Event()
        """It is computed, or will not be."""

    def placed(self, place: Place) -> None:
        self.place = place

    def end(self) -> None:
        self.is_asked.set()
        self.is_over.set()


class Leads:
    """Prompts that are being read here."""

    def __init__(self) -> None:
        self._leads: dict[tuple[RouterId, RequestId], Lead] = {}

    def __len__(self) -> int:
        return len(self._leads)

    def add(self, request: Request) -> Lead:
        lead = self._leads[request.router, request.request_id] = Lead(request)
        return lead

    def find(self, router: RouterId, request_id: RequestId | None) -> Lead | None:
        """None: it is not here, or not any more."""
        return self._leads.get((router, request_id)) if request_id is not None else None

    def remove(self, request: Request, lead: Lead) -> None:
        """A new attempt may have its id by now."""
        lead.end()
        if self._leads.get((request.router, request.request_id)) is lead:
            del self._leads[request.router, request.request_id]


def complete(request: Request, front: Front, lead: Lead | None) -> None:
    """Takes the first tokens from the lead. Raises `RequestFailed` if it is not here, or has not so many."""
    known = front.known_tokens
    if not known:
        return
    has = lead.request.work.token_ids if lead is not None else []
    is_known = 0 < known <= len(has)
    # Without its beginning a prompt is none, for the part after it either.
    whole = has[:known] + request.work.token_ids if is_known else []
    request.work = msgspec.structs.replace(request.work, token_ids=whole)
    if not is_known:
        raise RequestFailed("handoff_failed", f"the part before it, which has its first {known} tokens, is not here")


class Fronts:
    """What an instance needs to follow others. `hands_on`: transports read the blocks where they have come to."""

    def __init__(
        self,
        engine: EngineCalls,
        transfer: SinkPort,
        *,
        layout: KVLayout,
        counter: HandoffCounter,
        hands_on: bool = True,
    ) -> None:
        self.engine = engine
        self.transfer = transfer
        self.layout = layout
        self.counter = counter
        self.hands_on = hands_on
        self.room: Room[Literal[True]] = Room(engine)


class Following:
    """One prompt's. `begin` it, and `end` it before its blocks are freed."""

    def __init__(
        self, fronts: Fronts, request: Request, front: Front, *, own: Lead, lead: Lead | None, room_within_s: float
    ) -> None:
        """`own`: what the part after it sees; `lead`: the part before it on this instance. `room_within_s`: so long it
        waits for memory to read alone."""
        self._fronts = fronts
        self._request = request
        self._front = front
        self._ticket = front.ticket
        self._own, self._lead = own, lead
        self._room_within_s = room_within_s
        self._num_blocks = 0
        self._has_begun: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._fetch: asyncio.Task[None] | None = None
        self._wanted: list[NamedBlock] = []
        self._arrived_early: set[BlockName] = set()
        self._num_handed_on = 0
        self._gate = Gate(fronts.layout.num_layers, patience_s=front.ticket.timeout_s + GRACE_S)
        self._lacks_nothing = False
        """The engine has all blocks before those that are fetched."""

    async def begin(self) -> None:
        """Returns when the engine has the request: behind the front, once that is at its last step and the lead is
        computed; or alone. Raises `engine.errors.RequestError`, or `RequestFailed` where a part lacks its first tokens.
        """
        complete(self._request, self._front, self._lead)
        engine, work = self._fronts.engine, self._request.work
        # The last token is computed here at least.
        num_full = (len(work.token_ids) - 1) // self._fronts.layout.block_tokens
        self._num_blocks = min(self._front.num_blocks, num_full)
        reservation = await self._reserve()
        if reservation is not None:
            self._hand_on(reservation.cached)
            first = len(reservation.names) - len(reservation.missing)
            self._wanted = reservation.missing[: max(0, self._num_blocks - first)]
            self._lacks_nothing = first == reservation.reused
        # Also for nothing: the front waits to be asked.
        self._fetch = asyncio.get_running_loop().create_task(self._bring())
        if reservation is None:
            await engine.call(lambda engine: engine.add(work, mode="prefill", place=self._own.place))
        elif not await self._follow():
            await self._read_alone()

    async def end(self) -> None:
        """Nothing writes to the request's blocks any more."""
        if self._fetch is not None:
            self._fetch.cancel()
            await asyncio.wait([self._fetch])

    async def _reserve(self) -> Reservation | None:
        """None: no room, or the prompt must be read from its start."""
        engine, work, lead = self._fronts.engine, self._request.work, self._lead
        if work.sampling.prompt_logprobs is not None:
            self._own.is_asked.set()
            return None
        if lead is not None:
            reservation = await self._reserve_after(lead)
            self._own.place = lead.place  # the engine was asked for the lead before, and has answered
            if reservation is not None:
                return reservation
            await lead.is_over.wait()
        reserved = engine.call(lambda engine: engine.reserve(work, mode="prefill", place=self._own.place))
        self._own.is_asked.set()
        return await reserved

    async def _reserve_after(self, lead: Lead) -> Reservation | None:
        """None: no room, or the lead is computed already."""
        work, after = self._request.work, lead.request_id
        await lead.is_asked.wait()
        if lead.is_over.is_set():
            return None
        reserved = self._fronts.engine.call(lambda engine: engine.reserve(work, mode="prefill", after=after))
        self._own.is_asked.set()
        return await reserved

    async def _follow(self) -> bool:
        """False: nothing comes, or the lead ended without its blocks."""
        if not self._wanted or not await asyncio.shield(self._has_begun):
            return False
        is_following = await self._fronts.engine.call(self._follow_in)
        if not is_following and self._lead is not None:
            await self._lead.is_over.wait()
            is_following = await self._fronts.engine.call(self._follow_in)
        if is_following:
            self._lacks_nothing = True
            self._hand_on_arrived()
        return is_following

    def _follow_in(self, engine: EnginePort) -> bool:
        """In the engine's thread."""
        num_tokens = self._num_blocks * self._fronts.layout.block_tokens
        return engine.follow(self._request.work.request_id, num_tokens, self._gate)

    async def _read_alone(self) -> None:
        """Once the lead is over: two would compute the same otherwise. Raises `RequestFailed` without room."""
        work = self._request.work
        if self._lead is not None:
            await self._lead.is_over.wait()
        if self._wanted:
            await self.end()
        await self._fronts.room.get(
            lambda engine: engine.read_alone(work.request_id) or None,
            priority=work.priority,
            within_s=self._room_within_s,
        )

    async def _bring(self) -> None:
        fronts, ticket, reason = self._fronts, self._ticket, "it is not wanted any more"
        try:
            with self._request.span.child("follow") as span:
                span.set({"baton.source": ticket.source, "baton.ticket": ticket.ticket})
                await fronts.transfer.fetch(ticket, self._wanted, on_blocks=self._arrived, on_parts=self._reached)
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
        self._arrived_early.update(names)
        self._hand_on_arrived()

    def _hand_on_arrived(self) -> None:
        """Those that stay as they are, whoever reads the rest: nothing lacks before them."""
        if not self._lacks_nothing or not self._fronts.hands_on:
            return
        come: list[NamedBlock] = []
        for named in self._wanted[self._num_handed_on :]:
            if named.name not in self._arrived_early:
                break
            come.append(named)
        self._num_handed_on += len(come)
        self._hand_on(come)

    def _hand_on(self, blocks: list[NamedBlock]) -> None:
        if blocks and self._request.progress is not None:
            self._request.progress.completed(CompletedBlocks(self._request.work.request_id, blocks))

    def _reached(self, groups: int, of: int) -> None:
        self._gate.reached(groups, of)
        if not self._has_begun.done():
            self._has_begun.set_result(True)
