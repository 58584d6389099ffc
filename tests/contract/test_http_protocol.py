"""Clients that are slow, or send heads without end."""

import asyncio
import gc
from typing import Any

from baton_serve.services.common.http.connection_slots import HttpLimits
from baton_serve.services.common.http.server import HttpServer
from tests.contract.raw_http import talk

REQUEST = b"GET /x HTTP/1.1\r\nhost: a\r\n\r\n"


async def app(scope: Any, receive: Any, send: Any) -> None:
    headers = [(b"content-length", b"4")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"do", "more_body": True})
    await send({"type": "http.response.body", "body": b"ne"})


def test_requests_follow_each_other_on_one_connection() -> None:
    async def body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(3):
            writer.write(REQUEST[:10])
            await writer.drain()
            await asyncio.sleep(0)
            writer.write(REQUEST[10:])
            assert (await reader.readuntil(b"done")).startswith(b"HTTP/1.1 200")
        writer.write(REQUEST * 2)
        for _ in range(2):
            assert (await reader.readuntil(b"done")).startswith(b"HTTP/1.1 200")

    talk(app, body)


def test_a_head_without_end_is_cut_off() -> None:
    async def body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"GET / HTTP/1.1\r\n" + b"x-a: b\r\n" * 1000)
        assert (await reader.read()).startswith(b"HTTP/1.1 431")

    talk(app, body, HttpLimits(max_head_bytes=1000))


def test_a_head_that_takes_for_ever_is_not_waited_for() -> None:
    async def body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"GET / HTTP/1.1\r\nhost:")
        assert (await reader.read()).startswith(b"HTTP/1.1 408")

    talk(app, body, HttpLimits(head_timeout_s=0.05))


def test_an_answer_may_take_as_long_as_it_likes() -> None:
    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for word in (b"do", b"ne"):
            await asyncio.sleep(0.4)
            await send({"type": "http.response.body", "body": word, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\nab")
        assert b"408" not in await reader.readuntil(b"0\r\n\r\n")

    talk(slow, body, HttpLimits(head_timeout_s=0.3))


def test_a_body_is_no_head_and_an_answer_to_it_may_take_its_time() -> None:
    async def slow(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["more_body"]:
            pass
        await asyncio.sleep(0.4)
        await app(scope, receive, send)

    async def body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):
            writer.write(b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: 9000\r\n\r\n")
            for _ in range(3):
                await writer.drain()
                await asyncio.sleep(0.01)
                writer.write(bytes(3000))
            assert (await reader.readuntil(b"done")).startswith(b"HTTP/1.1 200")

    talk(slow, body, HttpLimits(max_head_bytes=1000, head_timeout_s=0.3))


def test_a_next_head_that_takes_for_ever_is_not_waited_for() -> None:
    async def body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(REQUEST)
        await reader.readuntil(b"done")
        writer.write(b"GET / HTTP/1.1\r\nhost:")
        assert (await reader.read()).startswith(b"HTTP/1.1 408")

    talk(app, body, HttpLimits(head_timeout_s=0.3))


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the method and the body."""
    body = scope["method"].encode() + b" "
    while True:
        message = await receive()
        body += message["body"]
        if not message["more_body"]:
            break
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def test_who_asks_for_another_protocol_is_answered_in_this_one() -> None:
    """As Java's client does with each first request; its body follows at once, and later requests may."""
    wish = b"connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEA\r\n"
    head = b"POST /x HTTP/1.1\r\nhost: a\r\n" + wish
    plain = head + b"content-length: 3\r\n\r\nabc"
    chunked = head + b"transfer-encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n"

    async def body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(plain + chunked + plain)
        for _ in range(3):
            assert (await reader.readuntil(b"POST abc")).startswith(b"HTTP/1.1 200")
        for number in range(len(plain)):
            writer.write(plain[number : number + 1])
            await writer.drain()
            await asyncio.sleep(0)
        assert (await reader.readuntil(b"POST abc")).startswith(b"HTTP/1.1 200")
        writer.write(head.replace(b"POST", b"GET") + b"\r\n" + REQUEST)
        for _ in range(2):
            assert (await reader.readuntil(b"GET ")).startswith(b"HTTP/1.1 200")
        writer.write(b"CONNECT a:1 HTTP/1.1\r\nhost: a\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 400")

    talk(echo, body)


def test_heads_without_end_are_cut_off_whatever_they_ask_for() -> None:
    async def body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"GET / HTTP/1.1\r\nconnection: upgrade\r\nupgrade: h2c\r\n" + b"x-a: b\r\n" * 1000)
        assert (await reader.read()).startswith(b"HTTP/1.1 431")

    talk(app, body, HttpLimits(max_head_bytes=1000))


def test_an_ended_connection_is_freed_without_the_garbage_collector() -> None:
    """The collector would stop the event loop for all streams whenever enough connections have ended."""

    async def scenario() -> None:
        server = HttpServer(app, host="127.0.0.1", port=0)
        await server.start()
        await converse(server.port)
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            await converse(server.port)
            gc.collect()
            in_cycles = {type(one).__name__ for one in gc.garbage if type(one).__module__.startswith("baton_serve.")}
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
        await server.close()
        assert in_cycles == set()

    async def converse(port: int) -> None:
        """Let the server answer one request and close the connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(REQUEST.replace(b"host", b"connection: close\r\nhost"))
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
        writer.close()
        await writer.wait_closed()
        await asyncio.sleep(0)  # the server's end of the connection is lost in the next turn of the event loop

    asyncio.run(asyncio.wait_for(scenario(), 10))
