"""Control messages between a consumer (ZeroMQ DEALER) and a producer (ZeroMQ ROUTER).

Each is one MessagePack frame of `contracts.wire`; the bytes of blocks, where a transport sends them here, follow
`Blocks` as further frames of the same multipart message. Every length is bounded. No I/O.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from baton_serve.contracts.identity import BlockHash, Generation, InstanceId, TicketId
from baton_serve.contracts.layout import KVLayout
from baton_serve.contracts.wire import Decoder
from baton_serve.kvtransfer.ladder import ProbeOutcome, Rung
from baton_serve.kvtransfer.settings import MAX_CONNECTIONS

PROTOCOL = 5
MAX_BLOCKS = 65_536
MAX_PAYLOAD_BYTES = 256 * 1024
MAX_CONTROL_BYTES = 4 * 1024 * 1024

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
    """What is needed to reach the producer by one transport. `dialect` is the way of it that the producer chose."""

    name: Id
    address: Annotated[bytes, Meta(max_length=512)] = b""
    secret: Annotated[bytes, Meta(max_length=4096)] = b""
    dialect: Annotated[str, Meta(max_length=256)] = ""


class Host(msgspec.Struct, frozen=True):
    """Where a process runs. Equal boot ids: one kernel. Equal pid namespaces too: `pid` means the same process."""

    boot_id: Text
    pid_namespace: Text
    pid: Natural


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """First message on a connection, from the consumer."""

    protocol: Natural
    instance: InstanceField
    generation: GenerationField
    layout: KVLayout
    host: Host
    transports: Annotated[list[Id], Meta(max_length=16)]
    connections: Connections = 1
    """That it would make, this one included."""


class Join(msgspec.Struct, frozen=True, tag="join"):
    """First message on a further connection: it belongs to the one whose `Welcome` said this secret."""

    secret: Annotated[bytes, Meta(min_length=16, max_length=64)]


class Attach(msgspec.Struct, frozen=True, kw_only=True, tag="attach"):
    """The consumer is about to use this transport. `dialects` are the ways of it that it knows, best first."""

    transport: Id
    epoch: Natural
    dialects: Annotated[list[Id], Meta(max_length=16)]


class Detach(msgspec.Struct, frozen=True, tag="detach"):
    """The consumer uses this transport no more: the producer frees what it holds for it."""

    transport: Id
    epoch: Natural


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome"):
    """The producer's layout need not be the consumer's, if blocks can be converted.

    A block can travel as `parts` equal ones: what `Done` and `Again` say of blocks by number is said of these.
    """

    instance: InstanceField
    generation: GenerationField
    layout: KVLayout
    parts: PartCount = 1
    host: Host
    num_blocks: Natural
    transports: Annotated[list[Id], Meta(max_length=16)]
    connections: Connections = 1
    """How many the consumer may make, this one included: each says `Join`, with the `secret`."""
    secret: Annotated[bytes, Meta(max_length=64)] = b""


class Attached(msgspec.Struct, frozen=True, kw_only=True, tag="attached"):
    """The answer to `Attach`. Without an offer the transport cannot be had, for this reason."""

    transport: Id
    epoch: Natural
    offer: Offer | None = None
    reason: Text = ""


class Detached(msgspec.Struct, frozen=True, tag="detached"):
    """The producer's end of this transport broke: what it announced by it may never come."""

    transport: Id
    epoch: Natural
    reason: Text


class Refuse(msgspec.Struct, frozen=True, tag="refuse"):
    """Instead of `Welcome`, or when a connection is used without one. `reason` prints both layouts if they differ."""

    reason: Text


class Fetch(msgspec.Struct, frozen=True, kw_only=True, tag="fetch"):
    """Send these blocks, by the producer's names, each as soon as it exists. A higher `attempt` replaces lower ones.

    With `partial` the producer serves what it has; otherwise to finish without a wanted block is an error.
    """

    ticket: TicketField
    attempt: Natural
    source_generation: GenerationField
    transport: Id
    names: Annotated[list[Name], Meta(max_length=MAX_BLOCKS)]
    timeout_s: Annotated[float, Meta(gt=0, le=86_400)]
    partial: bool = False


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The fetch is accepted and its lease runs. `is_open` is false while nobody here has opened the ticket yet."""

    ticket: TicketField
    attempt: Natural
    is_open: bool


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """A block, or a part of one: its number in the fetch, its number in the producer's memory, xxh3_64 of its bytes.

    Part `p` of the block that `Fetch.names` has at `i` is number `i * parts + p`, with the message's `parts`; in memory
    likewise.
    """

    index: Natural
    source: Natural
    checksum: Checksum | None


class Blocks(msgspec.Struct, frozen=True, tag="blocks"):
    """These blocks (`parts` is 1) or parts of blocks exist and do not move until the consumer lets go.

    A transport that sends bytes here sends them in order: as frames behind this message if they are few, else behind
    `Bytes` messages that name the `parcel`, on the same connection. With `epoch` they come over the pair of that
    epoch, in the order of these messages, and the consumer must take them out of it whether it still wants them or
    not.
    """

    ticket: TicketField
    attempt: Natural
    pieces: Annotated[list[Piece], Meta(min_length=1, max_length=MAX_BLOCKS)]
    parcel: Natural = 0
    epoch: Natural = 0
    parts: PartCount = 1
    """Each piece is one of so many of its block: 1, or as `Welcome` says."""


class Bytes(msgspec.Struct, frozen=True, tag="bytes"):
    """The frames behind this message are the next bytes of a parcel announced on this connection."""

    parcel: Natural
    offset: Natural


class Got(msgspec.Struct, frozen=True, tag="got"):
    """Credit: so many bytes that travelled on this connection were taken out of it (used or discarded).

    With `parcel`: nothing of that parcel is read any more where the producer staged it.
    """

    num_bytes: Natural
    parcel: Natural = 0


class Again(msgspec.Struct, frozen=True, tag="again"):
    """These blocks did not match their checksums."""

    ticket: TicketField
    attempt: Natural
    indexes: Annotated[list[Natural], Meta(min_length=1, max_length=MAX_BLOCKS)]


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """Nothing more will be published: `num_blocks` (parts of them) of the wanted were served. May overtake `Blocks`.

    `finished_at` is the producer's monotonic clock, of use on the same host only.
    """

    ticket: TicketField
    attempt: Natural
    num_blocks: Natural
    payload: Annotated[bytes, Meta(max_length=MAX_PAYLOAD_BYTES)]
    finished_at: float


class Fail(msgspec.Struct, frozen=True, tag="fail"):
    """The producer gives up. A consumer that still copies answers with `Release` once it has stopped."""

    ticket: TicketField
    attempt: Natural
    code: FailCode
    reason: Text


class Renew(msgspec.Struct, frozen=True, tag="renew"):
    """The consumer still wants these tickets: their leases start anew."""

    sequence: Natural
    tickets: Annotated[list[TicketField], Meta(max_length=MAX_BLOCKS)]


class Renewed(msgspec.Struct, frozen=True, tag="renewed"):
    sequence: Natural
    unknown: Annotated[list[TicketField], Meta(max_length=MAX_BLOCKS)]


class Release(msgspec.Struct, frozen=True, tag="release"):
    """The consumer lets go: it copies nothing any more and wants nothing more of this ticket."""

    ticket: TicketField
    attempt: Natural
    outcome: Outcome


class Probe(msgspec.Struct, frozen=True, tag="probe"):
    """Start a throw-away process that serves known bytes by these transports."""

    number: Natural
    rungs: Annotated[list[Rung], Meta(min_length=1, max_length=16)]


class Probing(msgspec.Struct, frozen=True, kw_only=True, tag="probing"):
    """The answer to `Probe`: where that process serves, and what its bytes are made of; or why there is none."""

    number: Natural
    address: Annotated[str, Meta(max_length=512)] = ""
    seed: Natural = 0
    outcome: ProbeOutcome = "skipped"
    reason: Text = ""


class Probed(msgspec.Struct, frozen=True, tag="probed"):
    """The process of this probe is needed no more."""

    number: Natural


ToProducer = Hello | Join | Attach | Detach | Fetch | Got | Again | Renew | Release | Probe | Probed
ToConsumer = Welcome | Refuse | Attached | Detached | Ready | Blocks | Bytes | Done | Fail | Renewed | Probing

producer_decoder = Decoder[ToProducer](ToProducer, max_bytes=MAX_CONTROL_BYTES)
consumer_decoder = Decoder[ToConsumer](ToConsumer, max_bytes=MAX_CONTROL_BYTES)


def peer_of(message: Hello | Welcome) -> tuple[InstanceId, Generation]:
    return message.instance, message.generation
