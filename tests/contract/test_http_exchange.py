"""The HTTP server at its socket: requests of every kind and what is answered, byte for byte where it matters."""

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

from baton_serve.services.common.http.exchange import EXTENSION, Exchange
from tests.contract.raw_http import talk
from tests.recorded_connection import RecordedConnection


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the request: its target, and its body. Below `/stream` the answer's length is not said."""
    body, more = b"", True
    while more:
        message = await receive()
        assert message["type"] == "http.request"
        body, more = body + message["body"], message["more_body"]
    reported = b"%b %b?%b|%b" % (scope["method"].encode(), scope["path"].encode(), scope["query_string"], body)
    headers = [] if scope["path"].startswith("/stream") else [(b"Content-Length", str(len(reported)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": reported[:4], "more_body": True})
    await send({"type": "http.response.body", "body": reported[4:]})


async def refuse(scope: Any, receive: Any, send: Any) -> None:
    """Without a look at the body."""
    await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"no"})


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: dict[bytes, bytes]
    body: bytes


async def answer(reader: asyncio.StreamReader, *, is_head: bool = False) -> Answer:
    lines = (await reader.readuntil(b"\r\n\r\n"))[:-4].split(b"\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(b": ") for line in lines[1:])}
    body = b""
    if is_head:
        pass
    elif b"content-length" in headers:
        body = await reader.readexactly(int(headers[b"content-length"]))
    elif headers.get(b"transfer-encoding") == b"chunked":
        while size := int(await reader.readline(), 16):
            body += (await reader.readexactly(size + 2))[:-2]
        assert await reader.readline() == b"\r\n"
    else:
        body = await reader.read()
    return Answer(int(lines[0].split()[1]), headers, body)


def test_requests_sent_ahead_are_answered_in_their_order() -> None:
    async def body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for number in range(20):
            length = number * 10_000
            head = f"POST /{number}?n={number} HTTP/1.1\r\nhost: a\r\ncontent-length: {length}\r\n\r\n"
            writer.write(head.encode() + b"z" * length)
        for number in range(20):
            assert (await answer(reader)).body == f"POST /{number}?n={number}|".encode() + b"z" * (number * 10_000)

    talk(echo, body)


@pytest.mark.parametrize("path", ["/a", "/stream"])
def test_a_body_may_come_in_chunks(path: str) -> None:
    async def body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for trailer in (b"", b"x-sum: 1\r\n"):
            writer.write(f"POST {path} HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n".encode())
            for chunk in (b"3\r\nab", b"c\r\n2\r\nde\r\n", b"0\r\n" + trailer + b"\r\n"):
                await writer.drain()
                await asyncio.sleep(0.01)
                writer.write(chunk)
            assert (await answer(reader)).body == f"POST {path}?|abcde".encode()

    talk(echo, body)


def test_a_large_body_is_read_as_the_application_reads_it() -> None:
    async def body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        large = bytes(5_000_000)
        writer.write(b"POST /a HTTP/1.1\r\nhost: a\r\ncontent-length: 5000000\r\n\r\n" + large)
        assert (await answer(reader)).body == b"POST /a?|" + large

    talk(echo, body)


@pytest.mark.parametrize("path", ["/a", "/stream"])
def test_http_10_is_answered_without_chunks_and_the_connection_ends(path: str) -> None:
    async def body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(f"GET {path} HTTP/1.0\r\nconnection: keep-alive\r\n\r\n".encode())
        got = await answer(reader)
        assert (got.body, got.headers[b"connection"]) == (f"GET {path}?|".encode(), b"close")
        assert b"transfer-encoding" not in got.headers and await reader.read() == b""

    talk(echo, body)


@pytest.mark.parametrize("path", ["/a", "/stream"])
def test_head_is_answered_without_a_body(path: str) -> None:
    async def body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):
            writer.write(f"HEAD {path} HTTP/1.1\r\nhost: a\r\n\r\n".encode())
            got = await answer(reader, is_head=True)
            assert got.status == 200 and got.headers.get(b"content-length") == (b"9" if path == "/a" else None)
        writer.write(b"GET /b HTTP/1.1\r\nhost: a\r\n\r\n")
        assert (await answer(reader)).body == b"GET /b?|"

    talk(echo, body)


def test_a_client_that_expects_100_continue_is_asked_for_its_body() -> None:
    async def body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):
            writer.write(b"POST /a HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n")
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(b"ab")
            assert (await answer(reader)).body == b"POST /a?|ab"

    talk(echo, body)


def test_a_client_that_asks_first_and_is_refused_is_left() -> None:
    async def body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"POST /a HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n")
        got = await answer(reader)
        assert (got.status, got.headers[b"connection"], await reader.read()) == (401, b"close", b"")

    talk(refuse, body)


def test_a_body_that_nobody_read_is_no_next_request() -> None:
    async def body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(3):
            writer.write(b"POST /a HTTP/1.1\r\nhost: a\r\ncontent-length: 300000\r\n\r\n")
            assert (await answer(reader)).status == 401
            writer.write(bytes(300_000))

    talk(refuse, body)


def test_a_client_may_end_the_connection_with_its_request() -> None:
    async def body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"GET /a HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
        got = await answer(reader)
        assert (got.headers[b"connection"], await reader.read()) == (b"close", b"")

    talk(echo, body)


@pytest.mark.parametrize(
    "request_", [b"no HTTP at all\r\n\r\n", b"GET example.com:80 HTTP/1.1\r\n\r\n", b"GET /\xff HTTP/1.1\r\n\r\n"]
)
def test_what_is_no_request_is_refused(request_: bytes) -> None:
    async def body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(request_)
        assert ((await answer(reader)).status, await reader.read()) == (400, b"")

    talk(echo, body)


def test_what_is_no_request_is_not_answered_into_an_answer() -> None:
    async def body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"GET /stream HTTP/1.1\r\nhost: a\r\n\r\n")
        assert await reader.readuntil(b"4\r\ndone\r\n")
        writer.write(b"no HTTP at all\r\n\r\n")
        assert await reader.read() == b"4\r\nmore\r\n0\r\n\r\n"

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"done", "more_body": True})
        await asyncio.sleep(0.1)
        await send({"type": "http.response.body", "body": b"more"})

    talk(slow, body)


@pytest.mark.parametrize("begins", [False, True])
def test_an_application_that_fails_answers_500_or_breaks_off(begins: bool) -> None:
    async def failing(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x-a", b"b")]})
        if begins:
            await send({"type": "http.response.body", "body": b"some", "more_body": True})
        raise ZeroDivisionError

    async def body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"GET /a HTTP/1.1\r\nhost: a\r\n\r\n")
        got = await reader.read()
        if begins:
            assert got.endswith(b"\r\n\r\n4\r\nsome\r\n")
        else:
            assert got.startswith(b"HTTP/1.1 500") and got.endswith(b"\r\n\r\nInternal Server Error")

    talk(failing, body)


@pytest.mark.parametrize(
    "headers", [[(b"x-a", b"b\r\nx-c: d")], [(b"x-a\n", b"b")], [(b"x-a", b"b\0")], [(b"content-length", b"9")]]
)
def test_an_answer_that_is_none_does_not_leave(headers: list[tuple[bytes, bytes]]) -> None:
    async def wrong(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"some"})

    async def body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"GET /a HTTP/1.1\r\nhost: a\r\n\r\n")
        assert (await answer(reader)).status == 500

    talk(wrong, body)


def test_a_head_leaves_with_the_first_piece_of_its_body() -> None:
    async def scenario() -> None:
        connection = RecordedConnection()
        exchange = Exchange(connection, is_http_10=False, is_head=False, keeps_alive=True)
        exchange.on_received()
        await exchange.run(refuse, {})
        head = b"HTTP/1.1 401 Unauthorized\r\nserver: a\r\ncontent-length: 2\r\n\r\n"
        assert connection.written == [head + b"no"] and connection.completed_ones == [exchange]

    asyncio.run(scenario())


def test_a_client_that_goes_is_noticed_at_once() -> None:
    reported: list[str] = []
    is_over = asyncio.Event()

    async def waits(scope: Any, receive: Any, send: Any) -> None:
        exchange, gone = scope["extensions"][EXTENSION], asyncio.Event()
        assert isinstance(exchange, Exchange)
        await receive()
        exchange.watch(gone.set)
        await gone.wait()
        exchange.watch(lambda: reported.append("again"))
        reported.append((await receive())["type"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        reported.append(f"writable: {exchange.is_writable}")
        is_over.set()

    async def body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"GET /a HTTP/1.1\r\nhost: a\r\n\r\n")
        await asyncio.sleep(0.05)
        writer.close()
        await is_over.wait()
        assert reported == ["again", "http.disconnect", "writable: False"]

    talk(waits, body)


def test_a_stream_is_written_at_once_until_the_client_no_longer_takes_it() -> None:
    size, num_written = 50_000, 0

    async def writes(scope: Any, receive: Any, send: Any) -> None:
        nonlocal num_written
        exchange = scope["extensions"][EXTENSION]
        assert isinstance(exchange, Exchange) and not exchange.is_writable
        await send({"type": "http.response.start", "status": 200, "headers": []})
        assert not exchange.is_writable
        await send({"type": "http.response.body", "body": b"begin", "more_body": True})
        while exchange.is_writable:
            exchange.write(bytes(size))
            num_written += 1
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"end"})

    async def body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"GET /a HTTP/1.1\r\nhost: a\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        while num_written == 0 or (before := num_written) != await after_a_while():
            assert num_written * size < 100_000_000, "nobody reads, and there is no end"
        assert before == num_written
        chunks = b""
        while not chunks.endswith(b"3\r\nend\r\n0\r\n\r\n"):
            chunks = chunks[-20:] + await reader.read(1_000_000)

    async def after_a_while() -> int:
        await asyncio.sleep(0.1)
        return num_written

    talk(writes, body)


def test_a_client_that_takes_nothing_is_not_waited_for_when_its_answer_is_given_up() -> None:
    exchanges: list[Exchange] = []

    async def gives_up(scope: Any, receive: Any, send: Any) -> None:
        exchange = scope["extensions"][EXTENSION]
        exchanges.append(exchange)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"begin", "more_body": True})
        while exchange.is_writable:
            exchange.write(bytes(100_000))
            await asyncio.sleep(0)

    async def body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"GET /a HTTP/1.1\r\nhost: a\r\n\r\n")
        while not (exchanges and exchanges[0].is_gone):  # noqa: ASYNC110 - nothing notifies the test
            await asyncio.sleep(0.01)

    talk(gives_up, body)
