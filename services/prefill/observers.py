"""What the engine reports of a prompt, turned into the verbs of its handoff; it waits for nothing.

Blocks are handed on as steps complete them, the first tokens with the last.
"""

import asyncio
import logging
from collections.abc import Callable

from baton_serve.contracts.messages import ErrorCode, Ticket
from baton_serve.engine.core.outputs import CompletedBlocks, SequenceOutput
from baton_serve.kvtransfer.errors import LocalTransferError
from baton_serve.services.instance.errors import RequestFailed
from baton_serve.services.instance.first_tokens import FirstToken, encode_first_tokens
from baton_serve.services.instance.ports import SourcePort

logger = logging.getLogger(__name__)


class PrefillObserver:
    """`Progress` of a prompt. `end` is done when it is computed, or failed when the engine gave it up."""

    def __init__(self) -> None:
        self.end: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def is_held(self) -> bool:
        return self.end.done() and not self.end.cancelled() and self.end.exception() is None

    def completed(self, blocks: CompletedBlocks) -> None:
        """Without a ticket nobody wants them."""

    def completed_layer_groups(self, blocks: CompletedBlocks, parts: range) -> None:
        """As `completed`."""

    def token(self, output: SequenceOutput) -> None:
        """The router has it already."""

    def held(self, at: float) -> None:
        if not self.end.done():
            self.end.set_result(None)

    def ended(self) -> None:
        """A sequence that ends with its first token changes nothing: the prompt's blocks are held all the same."""

    def failed(self, code: ErrorCode, message: str) -> None:
        if not self.end.done():
            self.end.set_exception(RequestFailed(code, message))


class HandoffObserver(PrefillObserver):
    """A prompt whose blocks go to the sink of a ticket. `is_open` ends when nothing may be handed on any more."""

    def __init__(self, transfer: SourcePort, ticket: Ticket, clock: Callable[[], float]) -> None:
        super().__init__()
        self.ticket = ticket
        self._transfer = transfer
        self._ticket = ticket.ticket
        self._request_id = ticket.request_id
        self._clock = clock
        self._first: list[FirstToken] = []
        self.is_open = True

    def completed(self, blocks: CompletedBlocks) -> None:
        if self.is_open:
            try:
                self._transfer.publish(self._ticket, blocks.blocks)
            except LocalTransferError as exc:
                self._given_up(exc)

    def completed_layer_groups(self, blocks: CompletedBlocks, parts: range) -> None:
        if self.is_open:
            try:
                self._transfer.publish_parts(self._ticket, blocks.blocks, parts)
            except LocalTransferError as exc:
                self._given_up(exc)

    def token(self, output: SequenceOutput) -> None:
        is_finished = output.finish_reason is not None
        self._first.append(FirstToken(output.sequence, output.token_ids[-1], is_finished))

    def held(self, at: float) -> None:
        if self.is_open:
            payload = encode_first_tokens(self._first, since_end_s=max(0.0, self._clock() - at))
            try:
                self._transfer.finish(self._ticket, payload)
            except LocalTransferError as exc:
                self._given_up(exc)
        super().held(at)

    def _given_up(self, exc: LocalTransferError) -> None:
        """The ticket has ended a moment ago; whoever waits for its release is about to hear of it."""
        logger.debug("ticket %s: %s", self._ticket, exc, extra={"request_id": self._request_id})
        self.is_open = False
