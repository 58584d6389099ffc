"""Serves a request on a prefill worker: computes the prompt, opens the handoff, keeps blocks until fetched.

While no decode or unified instance is ready, routers send `Generate`, and the instance generates the whole answer. Such
sequences share `--max-num-seqs` and the KV cache with the prompts, as on a unified instance.

However the request ends, its blocks are freed only when the transfer reports that no copy reads them any more.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from baton_serve.contracts.messages import Generate, Prefill
from baton_serve.engine.errors import RequestError
from baton_serve.kvtransfer.errors import TransferError
from baton_serve.services.instance.attempt_table import AttemptEntry
from baton_serve.services.instance.engine_thread import EngineCalls
from baton_serve.services.instance.errors import RequestFailed
from baton_serve.services.instance.interfaces import EngineStats, HandoffCounter, HandoffSourcePort
from baton_serve.services.instance.kv_sharing.prompt_image_source import PromptImageSource
from baton_serve.services.instance.kv_sharing.pulling import PullPort
from baton_serve.services.instance.local_generation import await_grammar, generate
from baton_serve.services.instance.request_server import RoleMessage, await_uncancelled
from baton_serve.services.instance.role_interface import RoleDependencies
from baton_serve.services.prefill.observers import HandoffObserver, PrefillObserver

logger = logging.getLogger(__name__)


def prefill_handler(parts: RoleDependencies) -> "PrefillHandler":
    """Return the request handler of a prefill instance. `parts` are the parts of the instance process that it uses."""
    return PrefillHandler(
        parts.engine,
        parts.transfer,
        parts.puller,
        counter=parts.counter,
        clock=time.monotonic,
        images=parts.images,
    )


class PrefillHandler:
    """Serves the requests of a prefill instance: computes prompts and hands their KV blocks off. Implements
    `services.instance.request_server.RoleHandler`. Use it only on the event loop.
    """

    def __init__(
        self,
        engine: EngineCalls,
        transfer: HandoffSourcePort,
        puller: PullPort,
        *,
        counter: HandoffCounter,
        clock: Callable[[], float],
        images: PromptImageSource | None = None,
    ) -> None:
        self._images = images or PromptImageSource()
        self._engine = engine
        self._transfer = transfer
        self._puller = puller
        self._counter = counter
        self._clock = clock

    def can_serve(self, message: RoleMessage) -> bool:
        return isinstance(message, Prefill | Generate)

    def refused(self, message: RoleMessage, reason: str) -> None:
        """Fail the ticket of a refused request with `reason`, so that its decode instance does not wait
        for the blocks.
        """
        if isinstance(message, Prefill) and message.ticket is not None:
            try:
                # A transfer must be opened before it can fail; opening raises, for example, if the ticket is used
                # already.
                self._transfer.open(message.ticket)
            except TransferError as exc:
                logger.info("cannot fail ticket %s of a refused request: %s", message.ticket.ticket, exc)
            else:
                self._transfer.fail(message.ticket.ticket, reason)

    async def serve(self, request: AttemptEntry, message: RoleMessage) -> None:
        if isinstance(message, Generate):
            # Without a ticket no instance fetches the blocks, so they are freed with the last token.
            await generate(self._engine, request, self._puller, message, self._images)
            return
        assert isinstance(message, Prefill)
        observer = (
            PrefillObserver()
            if message.ticket is None
            else HandoffObserver(self._transfer, message.ticket, self._clock)
        )
        request.progress = observer
        if isinstance(observer, HandoffObserver):
            await self._hand_off(request, message, observer)
        else:
            await self._prefill(request, message, observer)

    def on_stats(self, stats: EngineStats) -> None:
        """Do nothing: on a prefill instance no request waits outside the engine."""

    def num_queued(self) -> int:
        """Return 0: requests that wait for free blocks are in the engine already."""
        return 0

    async def _begin(self, request: AttemptEntry, message: Prefill, handoff: HandoffObserver | None = None) -> None:
        """Prepare a request and add it to the engine: compile its grammar, fetch the cached prefix from another
        instance, and get its images. `handoff` says whether each rank sends its part of the blocks.
        """
        await await_grammar(self._engine, request)
        await self._puller.pull(request, message.pull)
        # Asked when the engine gets the request, since the images may take long.
        await self._images.add(
            self._engine,
            request,
            message,
            mode="prefill",
            sends_parts=lambda: handoff is not None and handoff.sends_parts,
        )

    async def _compute(self, request: AttemptEntry, message: Prefill, observer: HandoffObserver) -> None:
        """Compute the prompt of a request; return when the engine keeps its blocks for the decode instance. `observer`
        sends the blocks as they are computed.
        """
        await self._begin(request, message, observer)
        # Shielded: the engine sets this future even after a cancellation, and `_free` must know whether the engine
        # still holds the blocks.
        await asyncio.shield(observer.end)

    async def _prefill(self, request: AttemptEntry, message: Prefill, observer: PrefillObserver) -> None:
        """Serve a request without a handoff: compute its prompt and first token, then free its blocks."""
        try:
            await self._begin(request, message)
            await observer.end
        finally:
            self._free(request, observer)

    async def _hand_off(self, request: AttemptEntry, message: Prefill, observer: HandoffObserver) -> None:
        """Serve a request with a handoff: compute the prompt while its blocks are sent, and wait until the decode
        instance has received all of them. Raises `RequestFailed` if the decode instance gave up.
        """
        ticket, inner = observer.ticket, request.work.request_id

        async def mirror() -> None:
            # If the engine does not have the request yet, for example because a cached prefix is fetched, it gets it
            # without parts.
            observer.sends_parts = False
            await self._engine.call(lambda engine: engine.mirror(inner))

        observer.sends_parts = self._transfer.open_handoff(ticket, mirror)
        released = asyncio.ensure_future(self._transfer.released(ticket.ticket))
        computing = asyncio.ensure_future(self._compute(request, message, observer))
        try:
            ends: list[asyncio.Future[Any]] = [computing, released]
            # The decode instance may give up before the prompt is computed: then stop computing.
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not computing.done() and not observer.end.done():
                reason = released.result()
                if reason == "cancelled":
                    # The decode instance was cancelled by the router, or has reported its failure to the router.
                    return
                lost = ticket.sink if reason == "lost" else None
                raise RequestFailed(
                    "handoff_failed", f"decode instance {ticket.sink} does not fetch the blocks: {reason}", lost=lost
                )
            await computing
            # The blocks must stay until they are fetched or the lease expires; either ends `released`.
            with request.span.child("lease"):
                await asyncio.wait([released])
        except Exception as exc:
            # Report the failure to the decode instance before the blocks are freed, so that it does not wait for its
            # timeout.
            self._transfer.fail(ticket.ticket, str(exc))
            raise
        finally:
            # Later results of the engine must not be published on the ended ticket.
            observer.is_open = False
            computing.cancel()
            await await_uncancelled(self._release(request, observer, released, computing))

    async def _release(
        self,
        request: AttemptEntry,
        observer: HandoffObserver,
        released: "asyncio.Future[str]",
        computing: "asyncio.Future[None]",
    ) -> None:
        """Wait until the task `computing` has ended and no copy reads the request's blocks any more (`released`), then
        free the blocks. If the handoff failed, count and log that, unless the prompt itself is at fault.
        """
        ticket = observer.ticket
        (error,) = await asyncio.gather(computing, return_exceptions=True)
        if not released.done():
            self._transfer.cancel(ticket.ticket)
        try:
            reason = await released
        finally:
            self._free(request, observer)
        is_refused = isinstance(error, RequestError) and error.code in ("invalid", "too_long")
        if reason not in ("received", "cancelled") and not is_refused:
            self._counter.handoff_failed(reason)
            extra = {"request_id": request.request_id}
            logger.warning("handoff to decode instance %s failed: %s", ticket.sink, reason, extra=extra)

    def _free(self, request: AttemptEntry, observer: PrefillObserver) -> None:
        """Free the request's blocks in the engine, whether its prompt is computed or not."""
        inner = request.work.request_id
        # `release` ends a request whose blocks are held; `cancel` ends one that is still computed.
        if observer.is_held:
            self._engine.post(lambda engine: engine.release(inner))
        else:
            self._engine.post(lambda engine: engine.cancel(inner))
