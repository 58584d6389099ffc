"""Frames are bounded MessagePack that any decoder reads."""

import msgpack
import pytest

from baton_serve.contracts.identity import BlockHash, Generation, InstanceId, TicketId
from baton_serve.contracts.wire import WireError, encode
from baton_serve.kvtransfer.control_messages import (
    MAX_BLOCKS,
    MAX_CONTROL_BYTES,
    MAX_PAYLOAD_BYTES,
    Again,
    Blocks,
    Done,
    Fetch,
    Got,
    Hello,
    Host,
    Piece,
    Release,
    consumer_decoder,
    producer_decoder,
)
from tests.unit.kvtransfer.samples import LAYOUT, TICKET

HELLO = Hello(
    protocol=2,
    instance=InstanceId("decode-0"),
    generation=Generation(2**53),
    layout=LAYOUT,
    host=Host("boot", "pid:[1]", 4),
    transports=["usm"],
)


def fetch(**changes: object) -> Fetch:
    fields: dict[str, object] = {
        "ticket": TICKET.ticket,
        "attempt": 1,
        "source_generation": Generation(1),
        "transport": "usm",
        "names": [BlockHash(b"n" * 16)],
        "timeout_s": 1.0,
    }
    return Fetch(**{**fields, **changes})  # type: ignore[arg-type]


def test_any_messagepack_decoder_reads_our_frames() -> None:
    read = msgpack.unpackb(encode(HELLO))
    assert read["type"] == "hello"
    assert read["layout"]["head_dim"] == LAYOUT.head_dim
    blocks = Blocks(TICKET.ticket, 1, [Piece(0, 7, 2**64 - 1), Piece(1, 8, None)])
    assert msgpack.unpackb(encode(blocks))["pieces"] == [[0, 7, 2**64 - 1], [1, 8, None]]


def test_frames_survive_the_wire() -> None:
    for asked in (HELLO, fetch(), Got(5), Again(TICKET.ticket, 1, [3]), Release(TICKET.ticket, 1, "received")):
        assert producer_decoder.decode(encode(asked)) == asked
    done = Done(ticket=TICKET.ticket, attempt=1, num_blocks=2, payload=b"\0\1", finished_at=0.5)
    assert consumer_decoder.decode(encode(done)) == done


@pytest.mark.parametrize(
    "bad",
    [
        fetch(names=[BlockHash(b"short")]),
        fetch(ticket=TicketId("")),
        fetch(ticket=TicketId("t" * 300)),
        fetch(attempt=-1),
        fetch(timeout_s=0.0),
        fetch(names=[BlockHash(b"n" * 16)] * (MAX_BLOCKS + 1)),
        Got(-1),
        Again(TICKET.ticket, 1, []),
        Release(TICKET.ticket, 1, "whatever"),  # type: ignore[arg-type]
    ],
)
def test_values_out_of_bounds_are_refused(bad: Fetch | Got | Again | Release) -> None:
    with pytest.raises(WireError):
        producer_decoder.decode(encode(bad))


def test_a_payload_or_frame_that_is_too_long_is_refused() -> None:
    payload = bytes(MAX_PAYLOAD_BYTES + 1)
    with pytest.raises(WireError):
        consumer_decoder.decode(
            encode(Done(ticket=TICKET.ticket, attempt=1, num_blocks=0, payload=payload, finished_at=0))
        )
    with pytest.raises(WireError, match="exceeds"):
        consumer_decoder.decode(bytes(MAX_CONTROL_BYTES + 1))


def test_neither_side_takes_the_other_sides_messages() -> None:
    with pytest.raises(WireError):
        consumer_decoder.decode(encode(HELLO))
    with pytest.raises(WireError):
        producer_decoder.decode(msgpack.packb({"type": "refuse", "reason": "x"}))
    for garbage in (b"", b"\xc1", b"\x93\x01\x02", msgpack.packb({"type": "nothing"})):
        with pytest.raises(WireError):
            producer_decoder.decode(garbage)
