"""Publishes a prompt's KV blocks and first tokens to its handoff as steps complete them.

Blocks are published as the steps complete them, and the first tokens are sent with the last block.
"""

import asyncio
import logging
from collections.abc import Callable

from baton_serve.contracts.messages import ErrorCode, Ticket
from baton_serve.engine.core.outputs import CompletedBlocks, SequenceOutput
from baton_serve.kvtransfer.errors import LocalTransferError
from baton_serve.services.instance.errors import RequestFailed
from baton_serve.services.instance.first_tokens import FirstToken, encode_first_tokens
from baton_serve.services.instance.interfaces import SourcePort

logger = logging.getLogger(__name__)


class PrefillObserver:
    """Follows a request whose prompt is computed without a handoff, only to learn of its end. Implements
    `RequestObserver`.
    """

    def __init__(self) -> None:
        self.end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Resolved when the prompt is computed; it raises `RequestFailed` if the engine failed the request."""

    @property
    def is_held(self) -> bool:
        """Return whether the engine has computed the prompt and keeps its blocks until they are released."""
        return self.end.done() and not self.end.cancelled() and self.end.exception() is None

    def completed(self, blocks: CompletedBlocks) -> None:
        """Do nothing: without a ticket no instance fetches the blocks."""

    def completed_layer_groups(self, blocks: CompletedBlocks, parts: range) -> None:
        """Do nothing: without a ticket no instance fetches layer groups."""

    def token(self, output: SequenceOutput) -> None:
        """Do nothing: the first tokens are sent to the router elsewhere (`AttemptTable.apply`)."""

    def held(self, at: float) -> None:
        """Resolve the future `end`, on which the handler waits, because the prompt is computed and the engine keeps its
        blocks.
        """
        if not self.end.done():
            self.end.set_result(None)

    def ended(self) -> None:
        """Do nothing: the prompt's blocks are kept even if every sequence has ended with its first token."""

    def failed(self, code: ErrorCode, message: str) -> None:
        """Let the future `end`, on which the handler waits, raise `RequestFailed`, because the engine failed the
        request.
        """
        if not self.end.done():
            self.end.set_exception(RequestFailed(code, message))


class HandoffObserver(PrefillObserver):
    """Follows a request in the engine, and offers the blocks of its prompt to the decode instance that the ticket
    names, as they are computed. The owner sets `is_open` to False when the handoff is over; later blocks are not
    offered.
    """

    def __init__(self, transfer: SourcePort, ticket: Ticket, clock: Callable[[], float]) -> None:
        super().__init__()
        self.ticket = ticket
        self._transfer = transfer
        self._ticket = ticket.ticket
        self._request_id = ticket.request_id
        self._clock = clock
        self._first: list[FirstToken] = []
        self.is_open = True
        self.sends_parts = False
        """Whether each rank sends its part of the blocks: until the decode instance fetches whole ones."""

    def completed(self, blocks: CompletedBlocks) -> None:
        """Publish these computed blocks for the request's ticket, so that the decode instance can fetch them."""
        if self.is_open:
            try:
                self._transfer.publish(self._ticket, blocks.blocks)
            except LocalTransferError as exc:
                self._stop_publishing(exc)

    def completed_layer_groups(self, blocks: CompletedBlocks, parts: range) -> None:
        """Publish the layer groups with the numbers `parts` of these blocks for the request's ticket, so that the
        decode instance can fetch them.
        """
        if self.is_open:
            try:
                self._transfer.publish_parts(self._ticket, blocks.blocks, parts)
            except LocalTransferError as exc:
                self._stop_publishing(exc)

    def token(self, output: SequenceOutput) -> None:
        """Remember the first token of a sequence; it is sent to the decode instance behind the last block."""
        # A sequence that ends with its first token is not started by the decode instance.
        is_finished = output.finish_reason is not None
        self._first.append(FirstToken(output.sequence, output.token_ids[-1], is_finished))

    def held(self, at: float) -> None:
        """Finish the handoff, because all blocks of the prompt are published: send the first tokens. `at` is the end of
        the last step (`time.monotonic()`).
        """
        if self.is_open:
            payload = encode_first_tokens(self._first, since_end_s=max(0.0, self._clock() - at))
            try:
                self._transfer.finish(self._ticket, payload)
            except LocalTransferError as exc:
                self._stop_publishing(exc)
        super().held(at)

    def _stop_publishing(self, exc: LocalTransferError) -> None:
        """Publish nothing more for the ticket, because it has just ended (`exc`). The task that waits for the release
        of its blocks will report the reason.
        """
        logger.debug(
            "stopped publishing KV blocks for ticket %s: %s", self._ticket, exc, extra={"request_id": self._request_id}
        )
        self.is_open = False
