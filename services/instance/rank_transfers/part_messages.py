"""Defines the messages between rank 0 and the transfers of another rank.

Both ends are processes of one instance. Each message is its length in four bytes and one MessagePack frame.
"""

import asyncio
import struct
from typing import Literal

import msgspec

from baton_serve.contracts.identity import BlockHash, Generation, InstanceId, TicketId
from baton_serve.contracts.messages import Ticket
from baton_serve.contracts.wire import MAX_FRAME_BYTES, Decoder, WireError, encode
from baton_serve.kvtransfer import ReleaseReason, TransferSettings

LENGTH = struct.Struct("<I")


class StartPart(msgspec.Struct, frozen=True, tag=True):
    """The first message to a rank: start a node for its part. The rank answers with `PartStarted` or `PartRefused`."""

    instance: InstanceId
    generation: Generation
    settings: TransferSettings
    rank: int
    num_ranks: int
    layout: str
    """Describes the whole blocks, as `describe_part` wants it."""


class OpenPart(msgspec.Struct, frozen=True, tag=True):
    """Serve this rank's part of a ticket. The rank reports the end with `PartReleased`."""

    ticket: Ticket


class PublishPart(msgspec.Struct, frozen=True, tag=True):
    """Offer this rank's part of blocks, once it has executed the first `after` commands of the engine."""

    ticket: TicketId
    blocks: list[tuple[BlockHash, int]]
    after: int


class FinishPart(msgspec.Struct, frozen=True, tag=True):
    """Declare that nothing more will be published for a ticket."""

    ticket: TicketId
    payload: bytes


class FailPart(msgspec.Struct, frozen=True, tag=True):
    """Stop serving a ticket for a reason that the consumer gets."""

    ticket: TicketId
    reason: str


class CancelPart(msgspec.Struct, frozen=True, tag=True):
    """Stop serving or fetching a ticket. A fetch still reports its end."""

    ticket: TicketId


class FetchPart(msgspec.Struct, frozen=True, tag=True):
    """Fetch this rank's part of blocks, once it has executed the first `after` commands of the engine. The rank reports
    the end with `PartFetched` or `PartFailed`, when nothing writes to the blocks any more.
    """

    ticket: Ticket
    wanted: list[tuple[BlockHash, int]]
    after: int


class ConnectNode(msgspec.Struct, frozen=True, tag=True):
    """Connect the rank's node to that of another instance. The rank answers with `NodeConnected`."""

    address: str


class NodeConnected(msgspec.Struct, frozen=True, tag=True):
    """The rank's node is connected to the one at `address`, or is not, for the reason `failure`."""

    address: str
    failure: str = ""


class PartStarted(msgspec.Struct, frozen=True, tag=True):
    """The rank's node listens at `address`. `division` is a hash of what the rank holds of each block."""

    address: str
    division: str


class PartRefused(msgspec.Struct, frozen=True, tag=True):
    """The rank's node cannot be started."""

    reason: str


class PartReleased(msgspec.Struct, frozen=True, tag=True):
    """The rank reports that no copy reads its part of a ticket's blocks any more."""

    ticket: TicketId
    reason: ReleaseReason


class PartArrived(msgspec.Struct, frozen=True, tag=True):
    """The rank's part of these blocks has arrived and was verified."""

    ticket: TicketId
    names: list[BlockHash]


class PartFetched(msgspec.Struct, frozen=True, tag=True):
    """A fetch of the rank has succeeded; the fields are those of `FetchResult`."""

    ticket: TicketId
    payload: bytes
    transport: str
    seconds: float
    exposed_s: float
    num_bytes: int
    num_blocks: int
    ended_at: float


class PartFailed(msgspec.Struct, frozen=True, tag=True):
    """A fetch of the rank has failed with the error of this class in `kvtransfer.errors`."""

    ticket: TicketId
    error: str
    reason: str


class PartCounted(msgspec.Struct, frozen=True, tag=True):
    """An event of the rank's node to be counted: the method of `TransferObserver` and its arguments."""

    event: Literal["moved", "retried", "mismatched", "probed", "switched"]
    values: dict[str, str | int]


ToRank = StartPart | OpenPart | PublishPart | FinishPart | FailPart | CancelPart | FetchPart | ConnectNode
FromRank = (
    PartStarted | PartRefused | NodeConnected | PartReleased | PartArrived | PartFetched | PartFailed | PartCounted
)

rank_decoder = Decoder[ToRank](ToRank)
rank_zero_decoder = Decoder[FromRank](FromRank)


def send(writer: asyncio.StreamWriter, message: msgspec.Struct) -> None:
    """Send a message without waiting. Nothing happens if the connection has ended."""
    frame = encode(message)
    writer.write(LENGTH.pack(len(frame)) + frame)


async def receive(reader: asyncio.StreamReader) -> bytes:
    """Return the next message, encoded. Raises `EOFError` if the connection has ended or is broken."""
    try:
        (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        if length > MAX_FRAME_BYTES:
            raise EOFError(f"a message of {length} bytes")
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, OSError, WireError) as exc:
        raise EOFError("the other process has ended") from exc
