"""Decides whether an instance with several ranks sends blocks rank by rank (equal division at both ends) or whole.

Each rank has a node for its part of the blocks in its own memory. One more node, that of rank 0, serves and fetches
whole blocks in memory that the ranks share: the mirror.
"""

import asyncio
import dataclasses
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec

from baton_serve.contracts.identity import BlockHash, TicketId
from baton_serve.contracts.instance import LinkStatus
from baton_serve.contracts.messages import Ticket
from baton_serve.kvtransfer.consumer.fetching import FetchResult, OnBlocks, OnEnd
from baton_serve.kvtransfer.conversion.plan import Translation
from baton_serve.kvtransfer.errors import LocalTransferError, RemoteTransferError, SourceFailed
from baton_serve.kvtransfer.node import TransferNode
from baton_serve.kvtransfer.producer.producer_side import FetchHandler
from baton_serve.kvtransfer.ranks.rank_decisions import RankAction, RankRoutes, may_fetch_whole, next_action
from baton_serve.kvtransfer.ranks.rank_port import NamedBlocks, RankPort
from baton_serve.kvtransfer.session.steps import ReleaseReason

logger = logging.getLogger(__name__)

T = TypeVar("T")

Mirror = Callable[[], Awaitable[None]]
"""Makes the blocks of a request whole in the memory that ranks share: those computed until now, and later ones."""

FETCH_WAIT_S = 10.0
"""Seconds for which a producer waits for a fetch of whole blocks after the consumer has reported a failure."""
RETRY_S = 30.0
"""Seconds for which blocks of a source are fetched whole after a failure of a rank; doubled by each further one."""
MAX_ENDED_TICKETS = 4096
"""Number of ended tickets whose outcome is remembered."""


class RankHandoff:
    """One ticket of which each rank serves its part, until all parts and the whole blocks have ended."""

    def __init__(self, ticket: Ticket, mirror: Mirror | None) -> None:
        self.ticket = ticket
        self.mirror = mirror
        self.blocks: list[tuple[BlockHash, int]] = []
        """The blocks that were published until now."""
        self.payload: bytes | None = None
        self.is_demoted = False
        self.is_mirrored = False
        """True when all of `blocks` are whole in the memory that the ranks share."""
        self.has_ended = False
        self.end: asyncio.Task[ReleaseReason] | None = None


class RankedTransferNode:
    """Sends and receives the blocks of an instance, as `TransferNode` does. With `ranks`, rank 0 first, each rank moves
    its part itself if the ticket names as many ranks of the source; without, all calls go to the node `whole`.

    It owns the ranks' nodes and `whole`, which is started. All methods belong to one event loop.
    """

    def __init__(
        self,
        whole: TransferNode,
        ranks: Sequence[RankPort] = (),
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._whole = whole
        self._ranks = ranks
        self._clock = clock
        self._routes = RankRoutes(RETRY_S)
        self._handoffs: OrderedDict[TicketId, RankHandoff] = OrderedDict()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._trying: set[asyncio.Task[bool]] = set()

    @property
    def address(self) -> str:
        """Return the address at which peers reach the node of whole blocks."""
        return self._whole.address

    @property
    def rank_addresses(self) -> list[str]:
        """Return the addresses at which the same ranks of other instances reach these ones; empty if whole blocks are
        sent only.
        """
        return [rank.address for rank in self._ranks]

    def open(self, ticket: Ticket) -> None:
        """Start serving a ticket; see `TransferNode.open`."""
        self.open_handoff(ticket, None)

    def open_handoff(self, ticket: Ticket, mirror: Mirror | None) -> bool:
        """Start serving a ticket, and return whether each rank sends its part of the blocks. Then `mirror` is called
        if the consumer fetches whole blocks nevertheless; None: such a fetch fails.

        Raises the errors of `TransferNode.open`.
        """
        if not self._is_divided(ticket):
            self._whole.open(ticket)
            return False
        handoff = RankHandoff(ticket, mirror)
        self._whole.open(ticket, partial(self._demote, handoff))
        outcomes = [rank.open(ticket) for rank in self._ranks]
        handoff.end = self._spawn(self._follow(handoff, outcomes))
        self._handoffs[ticket.ticket] = handoff
        self._forget_ended()
        return True

    def publish(self, ticket: TicketId, blocks: NamedBlocks) -> None:
        """Offer computed blocks; see `TransferNode.publish`."""
        handoff = self._handoffs.get(ticket)
        if handoff is None or handoff.is_mirrored or handoff.has_ended:
            # Ignored there if the ticket has ended.
            self._whole.publish(ticket, blocks)
            return
        # While they are copied to the mirror they only wait here.
        handoff.blocks += blocks
        if not handoff.is_demoted:
            for rank in self._ranks:
                rank.publish(ticket, blocks)

    def publish_parts(self, ticket: TicketId, blocks: NamedBlocks, parts: range) -> None:
        """Offer layer groups of blocks; see `TransferNode.publish_parts`. Instances of several ranks have none."""
        self._whole.publish_parts(ticket, blocks, parts)

    def finish(self, ticket: TicketId, payload: bytes) -> None:
        """Declare that nothing more will be published; see `TransferNode.finish`."""
        handoff = self._handoffs.get(ticket)
        if handoff is None or handoff.is_mirrored or handoff.has_ended:
            self._whole.finish(ticket, payload)
            return
        handoff.payload = payload
        if not handoff.is_demoted:
            # The payload travels once, with the part of rank 0.
            for rank, own in zip(self._ranks, [payload, *[b""] * (len(self._ranks) - 1)], strict=True):
                rank.finish(ticket, own)

    def fail(self, ticket: TicketId, reason: str) -> None:
        """Stop serving a ticket that was opened here: the consumer's fetch raises `SourceFailed(reason)`."""
        # First the whole blocks: a consumer whose part fails may fetch them at once.
        self._whole.fail(ticket, reason)
        if ticket in self._handoffs:
            for rank in self._ranks:
                rank.fail(ticket, reason)

    def cancel(self, ticket: TicketId) -> None:
        """Cancel a ticket that is served or fetched here, at any time; see `TransferNode.cancel`."""
        self._whole.cancel(ticket)
        for rank in self._ranks:
            rank.cancel(ticket)

    async def released(self, ticket: TicketId) -> ReleaseReason:
        """Wait until nothing reads the blocks of a ticket any more, on any rank, and return why."""
        handoff = self._handoffs.get(ticket)
        if handoff is None or handoff.end is None:
            return await self._whole.released(ticket)
        return await asyncio.shield(handoff.end)

    async def fetch(
        self,
        ticket: Ticket,
        wanted: NamedBlocks,
        *,
        on_blocks: OnBlocks | None = None,
        on_rank_blocks: OnBlocks | None = None,
        on_end: OnEnd | None = None,
        partial: bool = False,
        translation: Translation | None = None,
    ) -> FetchResult:
        """Fetch the blocks `wanted`, as `TransferNode.fetch` does. If each rank fetches its part, `on_rank_blocks` is
        called with the hashes of blocks that all ranks have received; `on_blocks` is called for whole blocks. Without
        `on_rank_blocks` all blocks are fetched whole.

        Ranks fetch only after they were connected to those of the source, which the first fetch starts. If a rank
        fails, the rest is fetched whole within the ticket's time.
        """
        source = (ticket.source, ticket.source_generation)
        is_divided = self._is_divided(ticket) and translation is None and not partial
        if is_divided and self._routes.begins(source, self._clock()):
            self._trying.add(trying := self._spawn(self._try_ranks(ticket)))
            trying.add_done_callback(self._trying.discard)
        if not is_divided or on_rank_blocks is None or not self._routes.is_open(source):
            return await self._whole.fetch(
                ticket, wanted, on_blocks=on_blocks, on_end=on_end, partial=partial, translation=translation
            )
        deadline, arrivals = self._clock() + ticket.timeout_s, RankArrivals(len(self._ranks), on_rank_blocks)
        try:
            result = await self._fetch_by_ranks(ticket, wanted, arrivals)
        except Exception as exc:
            remaining_s = deadline - self._clock()
            if not may_fetch_whole(exc, remaining_s=remaining_s):
                raise
            failure = exc
        else:
            self._routes.carried(source)
            _call_end(on_end, result)
            return result
        logger.warning("peer=%s a rank's part failed, whole blocks are fetched: %s", ticket.source, failure)
        self._routes.failed(source, self._clock())
        missing = [named for named in wanted if named[0] not in arrivals.complete]
        rest = msgspec.structs.replace(ticket, timeout_s=remaining_s)
        try:
            return await self._whole.fetch(rest, missing, on_blocks=on_blocks, on_end=on_end)
        except RemoteTransferError as exc:
            if isinstance(failure, SourceFailed):
                # The source has given the ticket up, on all ranks: its own reason says more.
                self._routes.carried(source)
                raise failure from exc
            raise

    async def connect_ranks(self, ticket: Ticket) -> bool:
        """Connect each rank to the same rank of the ticket's source, and return whether all are connected. Fetches from
        this source use the ranks afterwards. A fetch does this in the background, and is itself of whole blocks.
        """
        source = (ticket.source, ticket.source_generation)
        return not self._routes.begins(source, self._clock()) or await self._try_ranks(ticket)

    def on_fetch(self, handler: FetchHandler) -> None:
        """Set the function that serves pulls, which are of whole blocks; see `TransferNode.on_fetch`."""
        self._whole.on_fetch(handler)

    def links(self) -> list[LinkStatus]:
        """Return the state of each connection to a producer. If ranks fetch their parts, it is that of rank 0, with
        the speed of all ranks together.
        """
        count, open_sources = len(self._ranks), self._routes.open_sources()
        by_ranks = {
            link.peer: msgspec.structs.replace(
                link,
                bytes_per_second=count * link.bytes_per_second,
                probed_bytes_per_second=count * link.probed_bytes_per_second,
                reason=f"by {count} ranks; {link.reason}",
            )
            for rank in self._ranks
            for link in rank.links()
            if link.peer in open_sources
        }
        return [*(link for link in self._whole.links() if link.peer not in by_ranks), *by_ranks.values()]

    async def close(self) -> None:
        """End all transfers, on all ranks, and close the nodes."""
        for trying in self._trying:
            trying.cancel()
        await self._whole.close()
        for rank in self._ranks:
            await rank.close()
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _is_divided(self, ticket: Ticket) -> bool:
        return bool(self._ranks) and len(ticket.source_ranks) == len(self._ranks)

    async def _try_ranks(self, ticket: Ticket) -> bool:
        """Connect all ranks to those of the ticket's source, and record whether that worked."""
        source, clock = (ticket.source, ticket.source_generation), self._clock
        ends = await asyncio.gather(
            *(rank.connect(address) for rank, address in zip(self._ranks, ticket.source_ranks, strict=True)),
            return_exceptions=True,
        )
        if failure := next((end for end in ends if end is not None), None):
            logger.warning("peer=%s its ranks are not reached, whole blocks are fetched: %s", ticket.source, failure)
            self._routes.failed(source, clock())
            return False
        logger.info("peer=%s each of %d ranks fetches its part of blocks", ticket.source, len(self._ranks))
        self._routes.worked(source)
        return True

    def _spawn(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _forget_ended(self) -> None:
        while len(self._handoffs) > MAX_ENDED_TICKETS and next(iter(self._handoffs.values())).has_ended:
            self._handoffs.popitem(last=False)

    async def _follow(self, handoff: RankHandoff, outcomes: "Sequence[asyncio.Future[ReleaseReason]]") -> ReleaseReason:
        """Serve a ticket until nothing reads its blocks on any rank, and return why it has ended."""
        ticket = handoff.ticket.ticket
        whole = asyncio.ensure_future(self._whole.released(ticket))
        has_waited = False
        try:
            while True:
                verdict = next_action(
                    [_result(one) for one in outcomes],
                    _result(whole),
                    is_demoted=handoff.is_demoted,
                    has_waited=has_waited,
                )
                match verdict.action:
                    case RankAction.END:
                        return verdict.reason
                    case RankAction.END_WHOLE:
                        self._whole.cancel(ticket)
                    case RankAction.END_RANKS:
                        for rank in self._ranks:
                            rank.cancel(ticket)
                limit_s = FETCH_WAIT_S if verdict.action is RankAction.WAIT_FOR_FETCH else None
                running = [one for one in (*outcomes, whole) if not one.done()]
                # A fetch of whole blocks changes `is_demoted` only; its end is an outcome.
                done, _ = await asyncio.wait(running, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
                has_waited = has_waited or not done
        finally:
            handoff.has_ended, handoff.blocks = True, []

    def _demote(self, handoff: RankHandoff) -> None:
        """Serve whole blocks, because the consumer has fetched them, and stop serving the parts."""
        if handoff.is_demoted or handoff.has_ended:
            return
        handoff.is_demoted = True
        logger.info("peer=%s fetches whole blocks instead of parts of ranks", handoff.ticket.sink)
        for rank in self._ranks:
            rank.cancel(handoff.ticket.ticket)
        self._spawn(self._mirror(handoff))

    async def _mirror(self, handoff: RankHandoff) -> None:
        """Copy the blocks of a ticket to the mirror, then publish them as whole blocks."""
        ticket = handoff.ticket.ticket
        try:
            if handoff.mirror is None:
                raise LocalTransferError("this ticket has no whole blocks")
            await handoff.mirror()
        except Exception as exc:  # noqa: BLE001 - the consumer gets the reason and ends its fetch
            self._whole.fail(ticket, f"whole blocks: {type(exc).__name__}: {exc}")
            return
        # The steps that came while `mirror` ran have waited in `blocks`, and it has copied their blocks as well.
        handoff.is_mirrored = True
        self._whole.publish(ticket, handoff.blocks)
        if handoff.payload is not None:
            self._whole.finish(ticket, handoff.payload)

    async def _fetch_by_ranks(self, ticket: Ticket, wanted: NamedBlocks, arrivals: "RankArrivals") -> FetchResult:
        """Let each rank fetch its part of the blocks. Return the result of all, or raise the error of the first that
        fails. However it ends, no rank writes to the blocks any more.
        """
        fetches = [
            asyncio.ensure_future(
                rank.fetch(msgspec.structs.replace(ticket, source_address=address), wanted, arrivals.add)
            )
            for rank, address in zip(self._ranks, ticket.source_ranks, strict=True)
        ]
        try:
            await asyncio.wait(fetches, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            # Without a failure all have ended, and this does nothing. A rank's fetch that is cancelled ends when its
            # last copy has ended.
            failed = [one.exception() for one in fetches if one.done() and not one.cancelled()]
            for one in fetches:
                one.cancel()
            await _all_ended(fetches)
        if error := next((error for error in failed if error is not None), None):
            raise error
        results = [one.result() for one in fetches]
        return dataclasses.replace(
            results[0],
            seconds=max(one.seconds for one in results),
            exposed_s=max(one.exposed_s for one in results),
            num_bytes=sum(one.num_bytes for one in results),
            ended_at=max(one.ended_at for one in results),
        )


class RankArrivals:
    """Counts the ranks that have received each block of one fetch. `on_blocks` is called for a block when all `count`
    ranks have received and verified their parts.
    """

    def __init__(self, count: int, on_blocks: OnBlocks) -> None:
        self._count = count
        self._on_blocks = on_blocks
        self._parts: dict[BlockHash, int] = {}
        self.complete: set[BlockHash] = set()

    def add(self, names: Sequence[BlockHash]) -> None:
        """Record that one rank has received its part of these blocks."""
        whole: list[BlockHash] = []
        for name in names:
            self._parts[name] = self._parts.get(name, 0) + 1
            if self._parts[name] == self._count:
                whole.append(name)
        self.complete.update(whole)
        if whole:
            self._on_blocks(whole)


def _result(future: "asyncio.Future[ReleaseReason]") -> ReleaseReason | None:
    """Return the outcome of a part or of the whole blocks, or None while it is not known."""
    if not future.done():
        return None
    return "closed" if future.cancelled() or future.exception() is not None else future.result()


def _call_end(on_end: OnEnd | None, result: FetchResult) -> None:
    """Call the caller's `on_end`. Raises `LocalTransferError` if it raised."""
    if on_end is None:
        return
    try:
        on_end(result)
    except Exception as exc:
        logger.exception("on_end failed")
        raise LocalTransferError("on_end failed") from exc


async def _all_ended(fetches: "Sequence[asyncio.Future[FetchResult]]") -> None:
    """Wait until all these have ended, even if this task is cancelled meanwhile: the caller may free the blocks only
    then. Each rank bounds the wait.
    """
    is_cancelled = False
    while running := [one for one in fetches if not one.done()]:
        try:
            await asyncio.wait(running)
        except asyncio.CancelledError:
            is_cancelled = True
    for one in fetches:
        if not one.cancelled():
            one.exception()  # marks it as read: asyncio logs exceptions that nobody has read
    if is_cancelled:
        raise asyncio.CancelledError
