"""Reports received KV blocks to the engine, and starts decoding when all have arrived; failures are decided in
`handler.py`.
"""

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
from baton_serve.services.instance.interfaces import CompletedFetch, EnginePort, Reservation

MIN_BLOCKS_PER_REPORT = 64
"""Number of arrived blocks that are reported to the engine together. A larger number delays their reuse by other
prompts, a smaller one wakes the engine thread more often."""


class ArrivedBlocks:
    """Collects the hashes of blocks that have arrived for one request, and reports them to the engine in batches.

    Each report wakes the engine thread, which competes with the event loop for the GIL.
    """

    def __init__(self, engine: EngineCalls, request: AttemptEntry) -> None:
        self._engine = engine
        self._request_id = request.work.request_id
        self._names: list[BlockHash] = []
        self._in_parts: list[BlockHash] = []

    def add(self, names: list[BlockHash]) -> None:
        """Add the hashes of whole blocks that have just arrived. Report all collected ones to the engine once there are
        `MIN_BLOCKS_PER_REPORT`.
        """
        self._names += names
        if len(self._names) >= MIN_BLOCKS_PER_REPORT:
            self.flush()

    def add_in_parts(self, names: list[BlockHash]) -> None:
        """Add the hashes of blocks whose parts have just arrived on all ranks; otherwise as `add`."""
        self._in_parts += names
        if len(self._in_parts) >= MIN_BLOCKS_PER_REPORT:
            self.flush()

    def take(self) -> Callable[[EnginePort], None] | None:
        """Return the report of the blocks that were collected and not reported yet, for the engine's thread, and forget
        them; None if there are none.
        """
        names, self._names = self._names, []
        in_parts, self._in_parts = self._in_parts, []
        request_id = self._request_id

        def report(engine: EnginePort) -> None:
            if names:
                engine.mark_received(request_id, names)
            if in_parts:
                engine.mark_received(request_id, in_parts, in_parts=True)

        return report if names or in_parts else None

    def flush(self) -> None:
        """Report the blocks that were collected and not reported yet to the engine now."""
        if report := self.take():
            self._engine.post(report)


class HandoffAdmission:
    """Starts to decode one request as soon as all blocks of its prompt have been fetched. The fetch calls `begin`
    directly, in the same iteration of the event loop: to wait until the request's task runs would delay the second
    token.
    """

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
        """Start decoding the request's sequences that neither ended with their first token nor were cancelled. The
        fetch calls this when all blocks have arrived.

        The router gets its `HandoffReport` before the first token that is decoded here.
        """
        try:
            first = decode_first_tokens(fetched.payload)
        except WireError as exc:
            self._failure = RequestFailed("handoff_failed", f"first tokens: {exc}")
            # This is a callback of the transfer: the error is kept for `wait`, which raises it in the request's task.
            self._failure.__cause__ = exc
            return
        request = self._request
        continuing = {token.sequence: token.token_id for token in first.tokens if not token.is_finished}
        # Sequences that were cancelled while the blocks arrived are not started.
        continuing = {sequence: token for sequence, token in continuing.items() if sequence in request.live}
        if continuing:
            request.is_admitted = True
            inner, report = request.work.request_id, self.arrivals.take()

            def admit(engine: EnginePort) -> float:
                if report is not None:
                    report(engine)
                engine.admit(inner, continuing)
                # The next step starts as soon as all queued commands have run, so this time is close to its start.
                return self._clock()

            self._admitted = self._engine.call(admit, then=partial(self._send_report, fetched, first))
        else:
            self._send_report(fetched, first, None)
        # These ended with their first token, which the prefill instance has sent: the router expects no more from here.
        for sequence in request.live - set(continuing):
            request.end_sequence(sequence)

    async def wait(self) -> None:
        """Wait until the engine has started the sequences. Raises `RequestFailed` if the first tokens cannot be read,
        or the engine's error.
        """
        if self._failure is not None:
            raise self._failure
        if self._admitted is not None:
            await self._admitted

    def _send_report(self, fetched: CompletedFetch, first: FirstTokens, step_at: float | None) -> None:
        """Send the router the `HandoffReport` of this request. `step_at` is the time at which the engine took the
        request up (`time.monotonic()`); None if no sequence is left to decode.
        """
        # Each term is a duration that was measured on one host, because clocks of two hosts differ.
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
