"""Holds the state of one running fetch for its driver, and the result that a fetch returns."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from baton_serve.contracts.block_layout import KVLayout
from baton_serve.contracts.identity import BlockHash
from baton_serve.contracts.messages import Ticket
from baton_serve.kvtransfer import errors
from baton_serve.kvtransfer.consumer.copy_jobs import StopFlag
from baton_serve.kvtransfer.consumer.link import ConsumerLink
from baton_serve.kvtransfer.conversion.plan import Translation
from baton_serve.kvtransfer.conversion.staging_buffers import StagedFetch
from baton_serve.kvtransfer.session.consumer_session import ConsumerSession
from baton_serve.kvtransfer.session.steps import Arrived, Fault, Succeed
from baton_serve.kvtransfer.transports.port import Receiver

logger = logging.getLogger(__name__)

OnBlocks = Callable[[list[BlockHash]], None]
"""Callback that receives the hashes of blocks which have arrived."""
OnEnd = Callable[["FetchResult"], None]
"""Callback that receives the result of a successful fetch."""

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
"""The exception that a fetch raises, by the fault that ended it."""


@dataclass(frozen=True, slots=True)
class FetchResult:
    """The result of a successful fetch. `names` lists the hashes of the blocks that arrived, `payload` is what the
    producer passed to `finish`, and `seconds` is the duration of the whole fetch.

    `num_blocks` and `num_bytes` count the blocks as the producer sent them, which differs from `names` if the layouts
    differ. `exposed_s` is the part of the transfer that computation did not hide: the seconds from the producer's
    `finish` to the end of the fetch at `ended_at`, a time of the node's clock.
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
    """The optional arguments of `TransferNode.fetch`, whose docstring explains each of them."""

    on_blocks: OnBlocks | None = None
    on_end: OnEnd | None = None
    partial: bool = False
    translation: Translation | None = None


class Fetching:
    """One running fetch: its state machine (`session`), its connection and the caller's callbacks. Use it only on the
    event loop.

    `layout` is the layout of the blocks that the producer must have. If it differs from this node's, `staged` maps the
    producer's blocks to this node's; otherwise `staged` is None.
    """

    def __init__(
        self,
        session: ConsumerSession,
        future: "asyncio.Future[FetchResult]",
        options: FetchOptions,
        began: float,
        *,
        layout: KVLayout,
        staged: StagedFetch | None,
    ) -> None:
        self.session = session
        self.future = future
        self.layout = layout
        self.staged = staged
        self._on_blocks = options.on_blocks
        self._on_end = options.on_end
        self.began = began
        self.link: ConsumerLink | None = None
        self.receiver: Receiver | None = None
        """The receiver of this attempt. The connection may have changed to another transport since."""
        self.is_buffered = False
        self.block_bytes = 0
        """Size of one whole block in bytes, in the layout in which it is sent in this attempt."""
        self.connecting: asyncio.Task[None] | None = None
        self.stop = StopFlag()
        self.is_damaged = False
        """True after a block of this fetch did not match its checksum. If no transport is left, the fetch then raises
        `Corrupt`.
        """
        self._error: errors.LocalTransferError | None = None
        self.done_at = began

    @property
    def ticket(self) -> Ticket:
        return self.session.ticket

    def notify(self, step: Arrived) -> bool:
        """Pass the hashes of newly arrived blocks (`step`) to the caller's `on_blocks`. Return False if that callback
        raised: then this fetch must end, but the node goes on.
        """
        names = list(step.names) if self.staged is None else self.staged.arrived(step.names)
        return self._on_blocks is None or not names or self._call("on_blocks", partial(self._on_blocks, names))

    def result(self, step: Succeed, now: float) -> FetchResult:
        """Return the result that the caller gets from a fetch that ends successfully with `step`. `now` is a time of
        the node's clock.
        """
        session = self.session
        # CLOCK_MONOTONIC is common to all processes of a kernel. From another host, use the time when `Done` arrived
        # here.
        is_one_clock = self.link is not None and self.link.is_same_host()
        finished_at = step.finished_at if is_one_clock else self.done_at
        return FetchResult(
            payload=step.payload,
            transport=session.transport,
            seconds=now - self.began,
            # The two clocks may differ slightly, so keep the value between 0 and the duration of the fetch.
            exposed_s=min(max(now - finished_at, 0.0), now - self.began),
            num_bytes=len(session.received) * self.block_bytes,
            num_blocks=len(session.received),
            names=self.received,
            ended_at=now,
        )

    def succeed(self, result: FetchResult) -> None:
        """Call the caller's `on_end` with the result, then resolve the future that the caller awaits: with the result,
        or with an error if one of the caller's callbacks raised.
        """
        if self._on_end is not None and self._error is None:
            self._call("on_end", partial(self._on_end, result))
        if self._error is None:
            self.future.set_result(result)
        else:
            self.future.set_exception(self._error)

    def fail(self, fault: Fault, reason: str) -> None:
        """Let the future that the caller awaits raise the exception that belongs to `fault`, with the text `reason`. If
        a callback of the caller has raised before, its error is used instead.
        """
        self.future.set_exception(self._error or ERROR_OF[fault](reason))

    @property
    def received(self) -> Sequence[BlockHash]:
        """Return the hashes of the requested blocks that have arrived and match their checksums. If the layouts differ,
        these are hashes of this node's blocks, not the producer's.
        """
        return self.session.received if self.staged is None else self.staged.received

    @property
    def log_fields(self) -> dict[str, str]:
        """Return the log fields that identify the request: its request id and ticket.

        Callbacks of sockets and timers must pass them to the logger, because they run outside the request's task, in
        which the fields are set.
        """
        return {"request_id": self.ticket.request_id, "ticket": self.ticket.ticket}

    def _call(self, name: str, callback: Callable[[], None]) -> bool:
        """Call `callback`, which belongs to the caller of the fetch; `name` is for the log. Return False if it raised.
        After one callback that raised, no further one is called.
        """
        if self._error is not None:
            return True
        try:
            callback()
        except Exception as exc:
            logger.exception("%s failed", name, extra=self.log_fields)
            self._error = errors.LocalTransferError(f"{name} failed")
            self._error.__cause__ = exc
        return self._error is None
