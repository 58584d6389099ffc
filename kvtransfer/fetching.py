"""One running fetch, and what it returns."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from contracts.identity import BlockName
from contracts.layout import KVLayout
from contracts.messages import Ticket
from kvtransfer import errors
from kvtransfer.consumer_link import ConsumerLink
from kvtransfer.conversion.landings import Landing
from kvtransfer.conversion.plan import Translation
from kvtransfer.copying import StopFlag
from kvtransfer.session.consumer import ConsumerSession
from kvtransfer.session.steps import Fault
from kvtransfer.transports.port import Inlet

logger = logging.getLogger(__name__)

OnBlocks = Callable[[list[BlockName]], None]
OnEnd = Callable[["FetchResult"], None]

ERROR_OF: dict[Fault, type[errors.TransferError]] = {
    Fault.LOST: errors.PeerLost,
    Fault.TIMEOUT: errors.TransferTimeout,
    Fault.REFUSED: errors.Refused,
    Fault.SOURCE_FAILED: errors.SourceFailed,
    Fault.INCOMPLETE: errors.Incomplete,
    Fault.CORRUPT: errors.Corrupt,
    Fault.CANCELLED: errors.TransferCancelled,
    Fault.CLOSED: errors.NodeClosed,
}


@dataclass(frozen=True, slots=True)
class FetchResult:
    """`names` are the blocks that have come; `num_blocks` with `num_bytes` travelled, as the producer counts them.

    `exposed_s` runs from the producer's `finish` to the end of the fetch, which was at `ended_at` of the node's clock.
    """

    payload: bytes
    transport: str
    seconds: float
    exposed_s: float
    num_bytes: int
    num_blocks: int
    names: Sequence[BlockName]
    ended_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchOptions:
    """As `TransferNode.fetch` explains them."""

    on_blocks: OnBlocks | None = None
    on_end: OnEnd | None = None
    partial: bool = False
    translation: Translation | None = None


class Fetching:
    """One running fetch. `landing`: the producer's layout is another one, `layout`."""

    def __init__(
        self,
        session: ConsumerSession,
        future: "asyncio.Future[FetchResult]",
        options: FetchOptions,
        began: float,
        *,
        layout: KVLayout,
        landing: Landing | None,
    ) -> None:
        self.session = session
        self.future = future
        self.layout = layout
        self.landing = landing
        self.on_blocks = options.on_blocks
        self.on_end = options.on_end
        self.began = began
        self.link: ConsumerLink | None = None
        self.inlet: Inlet | None = None
        """Of this attempt: the connection may have changed to another transport since."""
        self.is_buffered = False
        self.block_bytes = 0
        """Of a whole block as it travels in this attempt."""
        self.connecting: asyncio.Task[None] | None = None
        self.stop = StopFlag()
        self.is_damaged = False
        self.error: Exception | None = None
        self.done_at = began

    @property
    def ticket(self) -> Ticket:
        return self.session.ticket

    def succeed(self, result: FetchResult) -> None:
        """An error of the caller's own callback ends its fetch, not the node."""
        if self.on_end is not None:
            try:
                self.on_end(result)
            except Exception as exc:
                logger.exception("on_end failed", extra=self.log_fields)
                self.future.set_exception(_failed("on_end", exc))
                return
        self.future.set_result(result)

    def fail(self, fault: Fault, reason: str) -> None:
        self.future.set_exception(ERROR_OF[fault](reason) if self.error is None else _failed("on_blocks", self.error))

    @property
    def received(self) -> Sequence[BlockName]:
        """Blocks of this node that are here and verified."""
        return self.session.received if self.landing is None else self.landing.received

    @property
    def log_fields(self) -> dict[str, str]:
        """Callbacks of sockets and timers run outside the request's own task."""
        return {"request_id": self.ticket.request_id, "ticket": self.ticket.ticket}


def _failed(callback: str, cause: Exception) -> errors.LocalTransferError:
    error = errors.LocalTransferError(f"{callback} failed")
    error.__cause__ = cause
    return error
