"""One running fetch, and what it returns."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from contracts.identity import BlockName
from contracts.messages import Ticket
from kvtransfer.consumer_link import ConsumerLink
from kvtransfer.copying import StopFlag
from kvtransfer.session.consumer import ConsumerSession
from kvtransfer.transports.port import Inlet

OnBlocks = Callable[[list[BlockName]], None]


@dataclass(frozen=True, slots=True)
class FetchResult:
    """`names` are the blocks that travelled. `exposed_s` runs from the producer's `finish` to the end of the fetch."""

    payload: bytes
    transport: str
    seconds: float
    exposed_s: float
    num_bytes: int
    num_blocks: int
    names: Sequence[BlockName]


class Fetching:
    """One running fetch."""

    def __init__(
        self, session: ConsumerSession, future: "asyncio.Future[FetchResult]", on_blocks: OnBlocks | None, began: float
    ) -> None:
        self.session = session
        self.future = future
        self.on_blocks = on_blocks
        self.began = began
        self.link: ConsumerLink | None = None
        self.inlet: Inlet | None = None
        """Of this attempt: the connection may have changed to another transport since."""
        self.is_buffered = False
        self.connecting: asyncio.Task[None] | None = None
        self.stop = StopFlag()
        self.is_damaged = False
        self.error: Exception | None = None
        self.done_at = began

    @property
    def ticket(self) -> Ticket:
        return self.session.ticket

    @property
    def log_fields(self) -> dict[str, str]:
        """Callbacks of sockets and timers run outside the request's own task."""
        return {"request_id": self.ticket.request_id, "ticket": self.ticket.ticket}
