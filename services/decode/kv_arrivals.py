"""What a decode instance tells its engine of the blocks that a fetch brings, and when its first step began."""

import asyncio
import time
from collections.abc import Callable
from functools import partial

from baton_serve.contracts.identity import BlockHash
from baton_serve.contracts.messages import HandoffReport
from baton_serve.contracts.wire import WireError
from baton_serve.services.instance.attempt_table import AttemptEntry
from baton_serve.services.instance.engine_thread import EngineCalls
from baton_serve.services.instance.errors import RequestFailed
from baton_serve.services.instance.first_tokens import FirstTokens, decode_first_tokens
from baton_serve.services.instance.ports import CompletedFetch, EnginePort, Reservation

MIN_BLOCKS_PER_REPORT = 64
"""Only when so many more blocks of a prompt have arrived can others find them in the cache."""


class ArrivedBlocks:
    """Tells the engine of blocks that have arrived: many at once, since each word to it wakes its thread."""

    def __init__(self, engine: EngineCalls, request: AttemptEntry) -> None:
        self._engine = engine
        self._request_id = request.work.request_id
        self._names: list[BlockHash] = []

    def add(self, names: list[BlockHash]) -> None:
        self._names += names
        if len(self._names) >= MIN_BLOCKS_PER_REPORT:
            self.flush()

    def take(self) -> list[BlockHash]:
        """Those that the engine does not know of yet."""
        names, self._names = self._names, []
        return names

    def flush(self) -> None:
        if names := self.take():
            self._engine.post(lambda engine: engine.mark_received(self._request_id, names))


class HandoffAdmission:
    """The end of a fetch: the engine is told in the same turn of the loop; the request's own task hears of it later."""

    def __init__(
        self,
        request: AttemptEntry,
        reservation: Reservation,
        arrivals: ArrivedBlocks,
        engine: EngineCalls,
        report: Callable[[HandoffReport], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.reservation = reservation
        self.arrivals = arrivals
        self._request = request
        self._engine = engine
        self._report = report
        self._clock = clock
        self._failure: RequestFailed | None = None
        self._admitted: asyncio.Future[float] | None = None

    def begin(self, fetched: CompletedFetch) -> None:
        """All blocks are here: the sequences that go on join the batch. The router hears of it once the engine has
        begun, which should not wait for this thread, and before any token that it writes."""
        try:
            first = decode_first_tokens(fetched.payload)
        except WireError as exc:
            self._failure = RequestFailed("handoff_failed", f"first tokens: {exc}")
            self._failure.__cause__ = exc
            return
        request = self._request
        going = {token.sequence: token.token_id for token in first.tokens if not token.is_finished}
        going = {sequence: token for sequence, token in going.items() if sequence in request.live}
        if going:
            request.is_admitted = True
            inner, names = request.work.request_id, self.arrivals.take()

            def admit(engine: EnginePort) -> float:
                engine.mark_received(inner, names)
                engine.admit(inner, going)
                return self._clock()  # a step begins as soon as all commands have run

            self._admitted = self._engine.call(admit, then=partial(self._begun, fetched, first))
        else:
            self._begun(fetched, first, None)
        for sequence in request.live - set(going):
            request.end_sequence(sequence)

    async def wait(self) -> None:
        """Until the engine has begun. Raises `RequestFailed`, or what the engine raised."""
        if self._failure is not None:
            raise self._failure
        if self._admitted is not None:
            await self._admitted

    def _begun(self, fetched: CompletedFetch, first: FirstTokens, step_at: float | None) -> None:
        exposed_s = min(fetched.seconds, fetched.exposed_s + first.since_end_s)
        self._report(
            HandoffReport(
                request_id=self._request.request_id,
                transport=fetched.transport,
                handoff_s=fetched.seconds,
                exposed_s=exposed_s,
                transferred_blocks=fetched.num_blocks,
                reused_blocks=self.reservation.reused,
                transferred_bytes=fetched.num_bytes,
                to_step_s=0.0 if step_at is None else exposed_s + max(0.0, step_at - fetched.ended_at),
            )
        )
