"""Pulls a cached prefix from another instance before a prompt is computed, and decides which of its blocks.

A failure is not an error: blocks that have arrived are found in the cache, and the engine computes the others.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec import UNSET

from baton_serve.contracts.block_hash import checkpoint_hashes, hash_blocks, window_hashes
from baton_serve.contracts.block_layout import KVLayout, first_seen_block
from baton_serve.contracts.identity import BlockHash, RequestId
from baton_serve.contracts.messages import Pull, Ticket
from baton_serve.kvtransfer.errors import TransferError
from baton_serve.services.common.tracing import NO_SPAN, Span
from baton_serve.services.instance.attempt_table import AttemptEntry, PulledPrefix
from baton_serve.services.instance.engine_thread import EngineCalls
from baton_serve.services.instance.interfaces import EnginePort, HandoffCounter, SinkPort

logger = logging.getLogger(__name__)


class PullPort(Protocol):
    """The interface of `Puller`: fetches the cached prefix of a prompt from another instance before the prompt is
    computed.
    """

    async def pull(self, request: AttemptEntry, pull: Pull | None) -> None: ...


class Puller:
    """Fetches cached KV blocks from other instances into the cache of this one: prefixes of prompts (`PullPort`) and
    the blocks of draining instances. Use it only on the event loop.
    """

    def __init__(
        self,
        engine: EngineCalls,
        transfer: SinkPort,
        *,
        layout: KVLayout,
        counter: HandoffCounter,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._transfer = transfer
        self._layout = layout
        self._counter = counter
        self._clock = clock

    async def pull(self, request: AttemptEntry, pull: Pull | None) -> None:
        """Fetch the prefix of the request's prompt that the router's `pull` names, and return when the engine knows the
        blocks that have arrived. Do nothing if `pull` is None.

        Raises only `CancelledError`: after a failure the engine computes the missing blocks.
        """
        # Prompt logprobs need the logits of every prompt token, so a cached prefix could not be used.
        if pull is None or request.work.sampling.prompt_logprobs is not None:
            return
        work, size, began = request.work, self._layout.block_tokens, self._clock()
        # At least the last token is computed here, because its logits give the first token.
        num_full = min(pull.num_blocks, (len(work.token_ids) - 1) // size)
        names = hash_blocks(work.root, work.token_ids[: num_full * size], size, media=work.media)
        # Last, because the source sends the cached blocks before the first one that it does not have: KV of full
        # attention is of no use without them, and they are of none without that.
        others = self._hashes_beside(names) if names else []
        arrived = await self.fetch_blocks(pull.ticket, names + others, span=request.span, is_whole=bool(others))
        num_tokens = max(0, arrived - len(others)) * size
        request.pulled = PulledPrefix(pull.ticket.source, num_tokens, self._clock() - began)

    def _hashes_beside(self, names: Sequence[BlockHash]) -> list[BlockHash]:
        """Return the hashes of the blocks that the token after the blocks `names` needs beside these: recurrent states,
        or the KV of layers with a sliding window.
        """
        layout = self._layout
        if layout.window is UNSET:
            return checkpoint_hashes(names[-1], layout.state_blocks)
        size = layout.block_tokens
        first = first_seen_block(len(names) * size, layout.window.tokens, size)
        return [beside for name in names[first:] for beside in window_hashes(name, layout.window.num_groups)]

    async def fetch_blocks(
        self,
        ticket: Ticket,
        names: Sequence[BlockHash],
        *,
        span: Span = NO_SPAN,
        is_awaited: bool = False,
        is_whole: bool = False,
    ) -> int:
        """Fetch those of the blocks `names` that this instance does not have, and return how many have arrived. `span`
        is the trace span of the request. With `is_awaited` the source waits for a fetch, so one is sent even if no
        block is missing. With `is_whole` nothing is fetched unless there is room for all. Raises only `CancelledError`.
        """
        import_id = RequestId(f"import:{ticket.ticket}")
        wanted = await self._begin(import_id, names)
        if is_whole and wanted and wanted[-1][0] != names[-1]:
            self._engine.post(lambda engine: _undo(engine, import_id))
            return 0
        if not wanted and not is_awaited:
            return 0
        arrived: list[BlockHash] = []
        try:
            with span.child("pull") as pulling:
                fetched = await self._transfer.fetch(ticket, wanted, on_blocks=arrived.extend, partial=True)
                pulling.set({"baton.source": ticket.source, "baton.transferred_blocks": fetched.num_blocks})
        except TransferError as exc:
            self._counter.handoff_failed(type(exc).__name__)
            logger.warning(
                "fetched only %d of %d KV blocks from the cache of %s, the others will be computed: %s: %s",
                len(arrived),
                len(wanted),
                ticket.source,
                type(exc).__name__,
                exc,
                extra={"request_id": ticket.request_id},
            )
        finally:
            # The fetch is over here, so no copy writes to the blocks any more: the engine may free the others.
            self._engine.post(lambda engine: engine.end_import(import_id, arrived))
        return len(arrived)

    async def _begin(self, import_id: RequestId, names: Sequence[BlockHash]) -> Sequence[tuple[BlockHash, int]]:
        """Let the engine allocate blocks for those of `names` that it does not have, under the id `import_id`, and
        return them as (hash, block number). If this call is cancelled while it waits, undo the allocation.
        """
        begun = self._engine.call(lambda engine: engine.begin_import(import_id, names))
        try:
            return await begun
        except asyncio.CancelledError:
            self._engine.post(lambda engine: _undo(engine, import_id))
            raise


def _undo(engine: EnginePort, import_id: RequestId) -> None:
    engine.end_import(import_id, [])
