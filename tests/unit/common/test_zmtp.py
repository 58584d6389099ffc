"""ZMTP's bytes without a connection. With one, and with the library at the other end: tests/contract/test_rpc.py."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_serve.contracts.wire import MAX_FRAME_BYTES
from baton_serve.services.common.zmq.zmtp import GREETING, ZmtpError, ZmtpReader, command, frame_message, handshake

HANDSHAKE = handshake(b"ROUTER")


@given(messages=st.lists(st.binary(max_size=600), max_size=8), cuts=st.lists(st.integers(1, 700), max_size=40))
def test_messages_are_read_wherever_the_stream_is_cut(messages: list[bytes], cuts: list[int]) -> None:
    stream = HANDSHAKE + b"".join(map(frame_message, messages))
    reader, read = ZmtpReader(), []
    for cut in [*cuts, len(stream)]:
        read += list(reader.feed(stream[:cut]))
        stream = stream[cut:]
    assert read == messages and reader.is_ready


def test_of_several_frames_the_last_is_the_message_and_commands_are_none() -> None:
    reader = ZmtpReader()
    more = b"\x01" + frame_message(b"first")[1:]
    assert list(reader.feed(HANDSHAKE + more + command(b"\x04PING") + frame_message(b"last"))) == [b"last"]


def test_a_ping_is_answered_with_its_context() -> None:
    reader = ZmtpReader()
    assert list(reader.feed(HANDSHAKE + command(b"\x04PING\x00\x0acontext"))) == []
    assert reader.pong == command(b"\x04PONGcontext")


def test_a_long_frame_is_put_together_once() -> None:
    reader = ZmtpReader()
    frame = frame_message(bytes(1_000_000))
    assert list(reader.feed(HANDSHAKE + frame[:5])) == []
    parts = [frame[start : start + 1000] for start in range(5, len(frame), 1000)]
    assert [message for part in parts for message in reader.feed(part)] == [bytes(1_000_000)]


@pytest.mark.parametrize(
    "stream",
    [
        b"HTTP/1.1 400 Bad Request\r\n".ljust(64),
        GREETING.replace(b"NULL", b"CURVE", 1)[:64],
        GREETING + frame_message(b"before the handshake's end"),
        GREETING + command(b"\x05ERROR\x03no!"),
        HANDSHAKE + b"\x02" + (MAX_FRAME_BYTES + 1).to_bytes(8, "big"),
    ],
)
def test_what_is_no_peer_is_refused(stream: bytes) -> None:
    with pytest.raises(ZmtpError):
        list(ZmtpReader().feed(stream))


@given(st.binary(max_size=200))
def test_a_strangers_bytes_are_read_or_refused(data: bytes) -> None:
    for stream in (data, GREETING + data, HANDSHAKE + data):
        reader = ZmtpReader()
        try:
            list(reader.feed(stream))
        except ZmtpError:
            continue
