"""Streams that are read with the kernel's stamps."""

import asyncio
import time

import pytest

from baton_serve.bench.router import stamped
from baton_serve.bench.router.http_load import HttpError

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
Read = tuple[bytes, int, int]


def read(pieces: list[bytes], *, blocks_s: float = 0.0) -> list[Read]:
    """Return the reads of an answer that a server writes in `pieces`; after each piece the event loop is blocked for
    `blocks_s`."""
    reads: list[Read] = []

    async def scenario() -> None:
        has_served = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"ask")
            for piece in pieces:
                writer.write(piece)
                time.sleep(blocks_s)  # noqa: ASYNC251 - so that the reader is late
                await asyncio.sleep(0.02)
            writer.close()
            await writer.wait_closed()
            has_served.set()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with asyncio.timeout(10), server:
            try:
                await stamped.stream(port, b"ask", lambda *one: reads.append(one))
            finally:
                await has_served.wait()

    asyncio.run(scenario())
    return reads


def test_the_body_comes_as_it_was_written_head_or_no_head() -> None:
    reads = read([HEAD[:20], HEAD[20:] + b"1\r\na\r\n", b"1\r\nb\r\n", b"0\r\n\r\n"])
    assert [data for data, _, _ in reads] == [b"1\r\na\r\n", b"1\r\nb\r\n", b"0\r\n\r\n"]


def test_a_late_read_does_not_change_the_time_stamp() -> None:
    clock = stamped.ClockWatch()
    reads = read([HEAD + b"1\r\na\r\n", b"1\r\nb\r\n", b"0\r\n\r\n"], blocks_s=0.05)
    clock.check()
    assert all(came_ns <= read_ns for _, came_ns, read_ns in reads)
    assert [read_ns - came_ns > 40_000_000 for _, came_ns, read_ns in reads[1:]] == [True, True]


@pytest.mark.parametrize(
    ("pieces", "reason"), [([b"HTTP/1.1 503 No\r\n\r\n"], "503"), ([HEAD, b"1\r\na\r\n"], "the connection broke")]
)
def test_an_invalid_answer_is_reported(pieces: list[bytes], reason: str) -> None:
    with pytest.raises(HttpError, match=reason):
        read(pieces)
