"""Defines the control messages between a consumer (ZeroMQ DEALER) and a producer (ZeroMQ ROUTER).

Each message is one MessagePack frame, encoded by `contracts.wire`. If a transport sends the bytes of blocks over the
same connection, they follow a `Blocks` or `Bytes` message as further frames of its multipart message. Every length is
bounded before memory is allocated. This module does no I/O.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from baton_serve.contracts.block_layout import KVLayout
from baton_serve.contracts.identity import BlockHash, Generation, InstanceId, TicketId
from baton_serve.contracts.wire import Decoder
from baton_serve.kvtransfer.ladder import ProbeOutcome, Rung
from baton_serve.kvtransfer.settings import MAX_CONNECTIONS

PROTOCOL = 5
"""Version of this protocol. A producer refuses a consumer of another version. Increase it with every incompatible
change.
"""
MAX_BLOCKS = 65_536
"""Largest number of blocks, or parts of blocks, in one message."""
MAX_PAYLOAD_BYTES = 256 * 1024
"""Largest payload in bytes that `TransferNode.finish` hands to the consumer."""
MAX_CONTROL_BYTES = 4 * 1024 * 1024
"""Largest control message in bytes that is decoded."""

Text = Annotated[str, Meta(max_length=4096)]
Id = Annotated[str, Meta(min_length=1, max_length=256)]
TicketField = Annotated[TicketId, Meta(min_length=1, max_length=256)]
InstanceField = Annotated[InstanceId, Meta(min_length=1, max_length=256)]
GenerationField = Annotated[Generation, Meta(ge=0, le=2**53)]
Name = Annotated[BlockHash, Meta(min_length=16, max_length=16)]
Natural = Annotated[int, Meta(ge=0, le=2**53)]
Checksum = Annotated[int, Meta(ge=0)]
PartCount = Annotated[int, Meta(ge=1, le=4096)]
Connections = Annotated[int, Meta(ge=1, le=MAX_CONNECTIONS)]

FailCode = Literal["failed", "cancelled", "unknown", "busy", "wrong_peer", "expired", "closed"]
Outcome = Literal["received", "cancelled", "failed", "unknown"]


class Offer(msgspec.Struct, frozen=True):
    """The data that a producer sends so that a consumer can use one of its transports, such as an
    address and a secret.
    """

    name: Id
    address: Annotated[bytes, Meta(max_length=512)] = b""
    secret: Annotated[bytes, Meta(max_length=4096)] = b""
    dialect: Annotated[str, Meta(max_length=256)] = ""
    """The variant of the transport that the producer chose, or empty if the transport has only one."""


class Host(msgspec.Struct, frozen=True):
    """Identifies the machine and the process of a peer.

    Processes with equal boot ids run under one kernel and can share memory. If their pid namespaces are equal too,
    `pid` denotes the same process for both.
    """

    boot_id: Text
    pid_namespace: Text
    pid: Natural


# A boot id alone is not enough for `pidfd_open`: containers of one machine share it, but number their processes
# separately.
class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """The first message of a consumer on a connection. The producer answers with `Welcome` or `Refuse`."""

    protocol: Natural
    instance: InstanceField
    generation: GenerationField
    layout: KVLayout
    host: Host
    transports: Annotated[list[Id], Meta(max_length=16)]
    connections: Connections = 1
    """Number of connections that the consumer wants to make, including this one."""


class Join(msgspec.Struct, frozen=True, tag="join"):
    """The first message on each further connection of a consumer that is connected already. `secret` is from the
    `Welcome` of its first connection and proves that both belong together.
    """

    secret: Annotated[bytes, Meta(min_length=16, max_length=64)]


class Attach(msgspec.Struct, frozen=True, kw_only=True, tag="attach"):
    """Ask the producer to prepare `transport` for this connection. The producer answers with `Attached`.

    `epoch` is the number of this attempt on the connection; the answer repeats it. `dialects` are the variants of the
    transport that the consumer supports, best first.
    """

    transport: Id
    epoch: Natural
    dialects: Annotated[list[Id], Meta(max_length=16)]


class Detach(msgspec.Struct, frozen=True, tag="detach"):
    """Report that the consumer stops using a transport that the attempt number `epoch` attached. The producer frees the
    resources that it holds for it.
    """

    transport: Id
    epoch: Natural


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome"):
    """Accept a consumer and describe the producer.

    The producer's layout may differ from the consumer's if blocks can be converted. A block can travel as `parts` parts
    of equal size: the block numbers in `Done` and `Again` then count parts.
    """

    instance: InstanceField
    generation: GenerationField
    layout: KVLayout
    parts: PartCount = 1
    host: Host
    num_blocks: Natural
    transports: Annotated[list[Id], Meta(max_length=16)]
    connections: Connections = 1
    """Number of connections that the consumer may make, including this one; it opens each other one with `Join`."""
    secret: Annotated[bytes, Meta(max_length=64)] = b""


class Attached(msgspec.Struct, frozen=True, kw_only=True, tag="attached"):
    """Answer `Attach`. `offer` contains what the consumer needs to reach the transport; if it is None, the transport
    cannot be used and `reason` states why.
    """

    transport: Id
    epoch: Natural
    offer: Offer | None = None
    reason: Text = ""


class Detached(msgspec.Struct, frozen=True, tag="detached"):
    """Report that the producer's end of a transport, attached by the attempt number `epoch`, broke. Blocks that were
    announced over it may never arrive.
    """

    transport: Id
    epoch: Natural
    reason: Text


class Refuse(msgspec.Struct, frozen=True, tag="refuse"):
    """Reject a connection. The producer sends it instead of `Welcome`, or if the first message is neither `Hello` nor a
    valid `Join`. `reason` contains both layouts if they differ.
    """

    reason: Text


class Fetch(msgspec.Struct, frozen=True, kw_only=True, tag="fetch"):
    """Ask the producer of a ticket for blocks by their hashes (`names`); each is sent as soon as it is computed. A
    higher `attempt` replaces lower ones.

    With `partial` the producer sends only the blocks that it has. Without it, the fetch fails if the producer finishes
    before all these blocks are published.
    """

    ticket: TicketField
    attempt: Natural
    source_generation: GenerationField
    transport: Id
    names: Annotated[list[Name], Meta(max_length=MAX_BLOCKS)]
    timeout_s: Annotated[float, Meta(gt=0, le=86_400)]
    partial: bool = False


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Report to the consumer that its fetch is accepted and that its lease runs. `is_open` is False while the instance
    that computes the blocks has not opened the ticket yet.
    """

    ticket: TicketField
    attempt: Natural
    is_open: bool


# `array_like` keeps a piece small: a long prompt announces thousands of them in one message.
class Piece(msgspec.Struct, frozen=True, array_like=True):
    """A block, or a part of one: its number in the fetch, its number in the producer's memory, and the xxh3_64 of its
    bytes.

    `index` is `i * parts + p` for part `p` of the block at position `i` of `Fetch.names`, with `parts` of the message
    `Blocks` that holds the piece. `source` is `s * parts + p` if the block is number `s` in the producer's memory.
    `checksum` is None if the piece is not checked.
    """

    index: Natural
    source: Natural
    checksum: Checksum | None


class Blocks(msgspec.Struct, frozen=True, tag="blocks"):
    """Announce blocks (`parts` is 1) or parts of blocks. The blocks exist, and do not move until the consumer releases
    them.

    A transport that uses this connection for the bytes sends them in order: a few bytes as frames of this message, more
    of them in `Bytes` messages that name the `parcel`, on the same connection. If `epoch` is set, the bytes come over
    the separate channel of that attachment, in the order of these messages. The consumer must then read the bytes even
    if it no longer wants the blocks, because the channel has no other way to skip them.
    """

    ticket: TicketField
    attempt: Natural
    pieces: Annotated[list[Piece], Meta(min_length=1, max_length=MAX_BLOCKS)]
    parcel: Natural = 0
    epoch: Natural = 0
    parts: PartCount = 1
    """Number of parts of each block that the pieces count in: 1, or the number in `Welcome`."""


class Bytes(msgspec.Struct, frozen=True, tag="bytes"):
    """Carry the next bytes of the parcel with the number `parcel`, which a `Blocks` message on this connection
    announced. The bytes are the further frames of this multipart message; `offset` is their position in the parcel.
    """

    parcel: Natural
    offset: Natural


class Got(msgspec.Struct, frozen=True, tag="got"):
    """Return credit: the consumer has read `num_bytes` from this connection, whether it used or discarded them, so the
    producer may send as many more. If `parcel` is set, the consumer no longer reads that parcel from the producer's
    staging memory.
    """

    num_bytes: Natural
    parcel: Natural = 0


class Again(msgspec.Struct, frozen=True, tag="again"):
    """Ask the producer to send blocks, or parts of blocks, again because their bytes did not match their checksums.
    `indexes` are the numbers (`Piece.index`) under which they were announced.
    """

    ticket: TicketField
    attempt: Natural
    indexes: Annotated[list[Natural], Meta(min_length=1, max_length=MAX_BLOCKS)]


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """Report that the producer has sent or announced everything that it has for a ticket: `num_blocks` of the wanted
    blocks, counted in parts. `payload` is what it passed to `TransferNode.finish`.

    This message may arrive before the last `Blocks`. `finished_at` is a time of the producer's monotonic clock, so only
    a consumer on the same host can use it.
    """

    ticket: TicketField
    attempt: Natural
    num_blocks: Natural
    payload: Annotated[bytes, Meta(max_length=MAX_PAYLOAD_BYTES)]
    finished_at: float


class Fail(msgspec.Struct, frozen=True, tag="fail"):
    """Report that the producer gives a ticket up. A consumer that is still copying blocks answers with `Release` when
    its copies have stopped.
    """

    ticket: TicketField
    attempt: Natural
    code: FailCode
    reason: Text


class Renew(msgspec.Struct, frozen=True, tag="renew"):
    """Renew the leases of the consumer's `tickets` at this producer, which answers with `Renewed`. `sequence` is the
    number of this message.
    """

    sequence: Natural
    tickets: Annotated[list[TicketField], Meta(max_length=MAX_BLOCKS)]


class Renewed(msgspec.Struct, frozen=True, tag="renewed"):
    """Confirm the `Renew` message with the same `sequence`. `unknown` lists those of its tickets that the producer does
    not serve any more; their leases are not renewed.
    """

    sequence: Natural
    unknown: Annotated[list[TicketField], Meta(max_length=MAX_BLOCKS)]


class Release(msgspec.Struct, frozen=True, tag="release"):
    """Report that the consumer has ended the fetch of a ticket: it reads no block of it any more and wants no more.
    `outcome` says how it ended.
    """

    ticket: TicketField
    attempt: Natural
    outcome: Outcome


class Probe(msgspec.Struct, frozen=True, tag="probe"):
    """Ask the producer to start a separate, short-lived process that serves known bytes over the transports `rungs`, so
    that the consumer can test them. `number` identifies the probe.
    """

    number: Natural
    rungs: Annotated[list[Rung], Meta(min_length=1, max_length=16)]


class Probing(msgspec.Struct, frozen=True, kw_only=True, tag="probing"):
    """Answer `Probe`: the address of the process that serves the bytes and the seed from which they were generated, or
    the `outcome` and `reason` if it does not run.
    """

    number: Natural
    address: Annotated[str, Meta(max_length=512)] = ""
    seed: Natural = 0
    outcome: ProbeOutcome = "skipped"
    reason: Text = ""


class Probed(msgspec.Struct, frozen=True, tag="probed"):
    """Report that the consumer has finished the probe with this `number`, so that the producer can end the process that
    serves it.
    """

    number: Natural


ToProducer = Hello | Join | Attach | Detach | Fetch | Got | Again | Renew | Release | Probe | Probed
ToConsumer = Welcome | Refuse | Attached | Detached | Ready | Blocks | Bytes | Done | Fail | Renewed | Probing

producer_decoder = Decoder[ToProducer](ToProducer, max_bytes=MAX_CONTROL_BYTES)
consumer_decoder = Decoder[ToConsumer](ToConsumer, max_bytes=MAX_CONTROL_BYTES)


def peer_of(message: Hello | Welcome) -> tuple[InstanceId, Generation]:
    """Return the instance id and the generation of the node that sent `message`, the first message of a connection."""
    return message.instance, message.generation
