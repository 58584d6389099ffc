"""Defines how rank 0 commands the transfers of one rank's part of blocks."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Protocol

from baton_serve.contracts.block_layout import KVLayout
from baton_serve.contracts.identity import BlockHash, TicketId
from baton_serve.contracts.instance import LinkStatus
from baton_serve.contracts.messages import Ticket
from baton_serve.kvtransfer.consumer.fetching import FetchResult, OnBlocks
from baton_serve.kvtransfer.errors import LocalTransferError, UnknownTicket
from baton_serve.kvtransfer.node import TransferNode
from baton_serve.kvtransfer.session.steps import ReleaseReason

NamedBlocks = Sequence[tuple[BlockHash, int]]
"""Pairs of a block's hash and its number, which is the same in the memory of all ranks."""


class RankPort(Protocol):
    """Sends and receives one rank's part of blocks. Rank 0's is a `LocalRank`; those of the others pass the calls on to
    their processes. Use it only on rank 0's event loop.
    """

    @property
    def address(self) -> str:
        """Return the address at which the same rank of another instance reaches this rank's node."""
        ...

    def open(self, ticket: Ticket) -> "asyncio.Future[ReleaseReason]":
        """Start to serve the part of a ticket. Return a future of the reason for which nothing reads the part any
        more; it never raises.
        """
        ...

    def publish(self, ticket: TicketId, blocks: NamedBlocks) -> None:
        """Offer this rank's part of computed blocks. Ignored if the ticket has ended or was never opened."""
        ...

    def finish(self, ticket: TicketId, payload: bytes) -> None:
        """Declare that nothing more will be published. Ignored if the ticket has ended or was never opened."""
        ...

    def fail(self, ticket: TicketId, reason: str) -> None:
        """Stop serving the ticket because of `reason`, which the consumer gets."""
        ...

    def cancel(self, ticket: TicketId) -> None:
        """Stop serving or fetching the ticket, at any time."""
        ...

    def fetch(self, ticket: Ticket, wanted: NamedBlocks, on_blocks: OnBlocks) -> Awaitable[FetchResult]:
        """Fetch this rank's part of the blocks `wanted` from `ticket.source_address`, as `TransferNode.fetch` does."""
        ...

    async def connect(self, address: str) -> None:
        """Connect this rank's node to that of another instance, as `TransferNode.connect` does."""
        ...

    def links(self) -> list[LinkStatus]:
        """Return the state of the connections of this rank's node to producers, if they are known here."""
        ...

    async def close(self) -> None:
        """End all transfers of this rank."""
        ...


class LocalRank:
    """The rank of this process. Implements `RankPort` by the started node of its part, which it owns.

    `mark` is called with block numbers before transports read or write them: it records the work on the device for
    which the transports then wait.
    """

    def __init__(self, node: TransferNode, mark: Callable[[Sequence[int]], None]) -> None:
        self._node = node
        self._mark = mark

    @property
    def address(self) -> str:
        return self._node.address

    def open(self, ticket: Ticket) -> "asyncio.Future[ReleaseReason]":
        try:
            self._node.open(ticket)
        except LocalTransferError:
            refused: asyncio.Future[ReleaseReason] = asyncio.get_running_loop().create_future()
            refused.set_result("failed")
            return refused
        return asyncio.ensure_future(self._node.released(ticket.ticket))

    def publish(self, ticket: TicketId, blocks: NamedBlocks) -> None:
        self._mark([block for _, block in blocks])
        with suppress(UnknownTicket):
            self._node.publish(ticket, blocks)

    def finish(self, ticket: TicketId, payload: bytes) -> None:
        with suppress(UnknownTicket):
            self._node.finish(ticket, payload)

    def fail(self, ticket: TicketId, reason: str) -> None:
        with suppress(UnknownTicket):
            self._node.fail(ticket, reason)

    def cancel(self, ticket: TicketId) -> None:
        self._node.cancel(ticket)

    async def fetch(self, ticket: Ticket, wanted: NamedBlocks, on_blocks: OnBlocks) -> FetchResult:
        self._mark([block for _, block in wanted])
        return await self._node.fetch(ticket, wanted, on_blocks=on_blocks)

    async def connect(self, address: str) -> None:
        await self._node.connect(address)

    def links(self) -> list[LinkStatus]:
        return self._node.links()

    async def close(self) -> None:
        await self._node.close()


def part_layout(division: str, block_bytes: int) -> KVLayout:
    """Return the layout of one rank's part of blocks: `block_bytes` bytes, which must be even. Nodes connect only if
    their layouts are equal, so `division` must differ for every rank and for every way to divide blocks.
    """
    return KVLayout(
        fingerprint=f"part:{division}",
        num_layers=1,
        num_kv_heads=1,
        block_tokens=1,
        head_dim=block_bytes // 2,
        dtype="float16",
        num_planes=1,
    )
