"""The bytes between routers and instances without a connection. With one: tests/contract/test_rpc.py."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_serve.contracts.wire import MAX_FRAME_BYTES
from baton_serve.services.common.rpc.framing import LENGTH, PREAMBLE, FrameReader, ProtocolError, frame


@given(messages=st.lists(st.binary(max_size=600), max_size=8), cuts=st.lists(st.integers(1, 700), max_size=40))
def test_messages_are_read_wherever_the_stream_is_cut(messages: list[bytes], cuts: list[int]) -> None:
    stream = PREAMBLE + b"".join(map(frame, messages))
    reader, read = FrameReader(), []
    for cut in [*cuts, len(stream)]:
        read += list(reader.feed(stream[:cut]))
        stream = stream[cut:]
    assert read == messages and reader.is_ready


def test_a_long_message_is_put_together_once() -> None:
    reader = FrameReader()
    framed = frame(bytes(1_000_000))
    assert list(reader.feed(PREAMBLE + framed[:5])) == []
    parts = [framed[start : start + 1000] for start in range(5, len(framed), 1000)]
    assert [message for part in parts for message in reader.feed(part)] == [bytes(1_000_000)]


@pytest.mark.parametrize(
    ("stream", "cause"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n", "no Baton process of this version"),
        (b"BATON/2\n", "no Baton process of this version"),
        (b"\xff" + bytes(8) + b"\x7f\x03", "no Baton process of this version"),
        (b"\x16\x03\x01\x02\x00", "--cluster-key-file"),
        (PREAMBLE + LENGTH.pack(MAX_FRAME_BYTES + 1), "the limit is"),
    ],
)
def test_bytes_of_another_protocol_are_refused_with_the_cause(stream: bytes, cause: str) -> None:
    with pytest.raises(ProtocolError, match=cause):
        list(FrameReader().feed(stream))


def test_the_longest_message_is_accepted() -> None:
    reader = FrameReader()
    assert list(reader.feed(PREAMBLE + LENGTH.pack(MAX_FRAME_BYTES))) == []
    assert [len(message) for message in reader.feed(bytes(MAX_FRAME_BYTES))] == [MAX_FRAME_BYTES]


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    for stream in (data, PREAMBLE + data):
        reader = FrameReader()
        try:
            list(reader.feed(stream))
        except ProtocolError:
            continue
