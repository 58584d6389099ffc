"""One running fetch, and what it returns."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from baton_serve.contracts.identity import BlockHash
from baton_serve.contracts.layout import KVLayout
from baton_serve.contracts.messages import Ticket
from baton_serve.kvtransfer import errors
from baton_serve.kvtransfer.consumer.copying import StopFlag
from baton_serve.kvtransfer.consumer.link import ConsumerLink
from baton_serve.kvtransfer.conversion.plan import Translation
from baton_serve.kvtransfer.conversion.staging_buffers import StagedFetch
from baton_serve.kvtransfer.session.consumer import ConsumerSession
from baton_serve.kvtransfer.session.steps import Arrived, Fault, Succeed
from baton_serve.kvtransfer.transports.port import Receiver

logger = logging.getLogger(__name__)

OnBlocks = Callable[[list[BlockHash]], None]
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
    names: Sequence[BlockHash]
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
        landing: StagedFetch | None,
    ) -> None:
        self.session = session
        self.future = future
        self.layout = layout
        self.landing = landing
        self._on_blocks = options.on_blocks
        self._on_end = options.on_end
        self.began = began
        self.link: ConsumerLink | None = None
        self.receiver: Receiver | None = None
        """Of this attempt: the connection may have changed to another transport since."""
        self.is_buffered = False
        self.block_bytes = 0
        """Of a whole block as it travels in this attempt."""
        self.connecting: asyncio.Task[None] | None = None
        self.stop = StopFlag()
        self.is_damaged = False
        self._error: errors.LocalTransferError | None = None
        self.done_at = began

    @property
    def ticket(self) -> Ticket:
        return self.session.ticket

    def tell(self, step: Arrived) -> bool:
        """False: the caller's own callback raised, which is to end its fetch, not the node."""
        names = list(step.names) if self.landing is None else self.landing.arrived(step.names)
        return self._on_blocks is None or not names or self._call("on_blocks", partial(self._on_blocks, names))

    def result(self, step: Succeed, now: float) -> FetchResult:
        session = self.session
        is_one_clock = self.link is not None and self.link.is_same_host()
        finished_at = step.finished_at if is_one_clock else self.done_at
        return FetchResult(
            payload=step.payload,
            transport=session.transport,
            seconds=now - self.began,
            exposed_s=min(max(now - finished_at, 0.0), now - self.began),
            num_bytes=len(session.received) * self.block_bytes,
            num_blocks=len(session.received),
            names=self.received,
            ended_at=now,
        )

    def succeed(self, result: FetchResult) -> None:
        if self._on_end is not None and self._error is None:
            self._call("on_end", partial(self._on_end, result))
        if self._error is None:
            self.future.set_result(result)
        else:
            self.future.set_exception(self._error)

    def fail(self, fault: Fault, reason: str) -> None:
        self.future.set_exception(self._error or ERROR_OF[fault](reason))

    @property
    def received(self) -> Sequence[BlockHash]:
        """Blocks of this node that are here and verified."""
        return self.session.received if self.landing is None else self.landing.received

    @property
    def log_fields(self) -> dict[str, str]:
        """Callbacks of sockets and timers run outside the request's own task."""
        return {"request_id": self.ticket.request_id, "ticket": self.ticket.ticket}

    def _call(self, name: str, callback: Callable[[], None]) -> bool:
        """Callbacks are not called again after one that raised."""
        if self._error is not None:
            return True
        try:
            callback()
        except Exception as exc:
            logger.exception("%s failed", name, extra=self.log_fields)
            self._error = errors.LocalTransferError(f"{name} failed")
            self._error.__cause__ = exc
        return self._error is None
