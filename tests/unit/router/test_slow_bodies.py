"""Bodies that come or are received slowly or never, at the real server with the real application: none keeps a
connection, and answers keep little memory.
"""

import asyncio
import random
from array import array

import psutil
import pytest

from baton_serve.contracts.messages import Pool, Pooled
from baton_serve.contracts.pooling import PoolingProfile
from baton_serve.services.common.http.connection_slots import HttpLimits
from baton_serve.services.common.http.server import HttpServer
from tests.unit.router import fakes
from tests.unit.router.conftest import Router, Serve

LIMITS = HttpLimits(body_timeout_s=0.1, lingering_timeout_s=0.1, lingering_time_s=0.3)
KEY = "authorization: Bearer sk-1\r\n"


@pytest.mark.parametrize(
    ("path", "fields", "begin", "status"),
    [
        ("/v1/completions", "", "", 401),
        ("/v1/completions", "", '{"pro', 401),
        ("/nowhere", KEY, '{"pro', 404),
        ("/v1/models", KEY, '{"pro', 405),
        ("/v1/completions", KEY, "", 408),
        ("/v1/completions", KEY, '{"pro', 408),
        ("/v1/completions", KEY + "content-type: text/plain\r\n", '{"pro', 415),
    ],
)
@pytest.mark.parametrize("goes_on", [False, True], ids=["stops", "trickles"])
def test_a_slow_body_keeps_no_connection(
    serve: Serve, path: str, fields: str, begin: str, status: int, goes_on: bool
) -> None:
    async def test(router: Router) -> None:
        server = HttpServer(router.app, host="127.0.0.1", port=0, limits=LIMITS)
        await server.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        kind = "" if "content-type" in fields else "content-type: application/json\r\n"
        writer.write(f"POST {path} HTTP/1.1\r\nhost: a\r\n{kind}{fields}content-length: 5000\r\n\r\n{begin}".encode())
        found = b""
        while True:
            try:
                found += await asyncio.wait_for(reader.read(65536), 0.05)
            except TimeoutError:
                if goes_on:
                    writer.write(b" ")
                continue
            except ConnectionError:
                break
            if reader.at_eof():
                break
        assert found.startswith(b"HTTP/1.1 %d" % status)
        writer.close()
        await server.close()

    serve(test, keys=["sk-1"], slow_client_s=0.3)


def test_clients_that_do_not_read_50_mb_of_embeddings_keep_little_memory_and_lose_their_connections(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six answers of 50 MB, and the parts from which they were made, would be 600 MB."""
    numbers = array("f", (random.random() for _ in range(250_000))).tobytes()

    def pooled(message: Pool, index: int, classes: object) -> Pooled:
        return Pooled(request_id=message.request_id, index=index, shape=[250_000], data=numbers)

    monkeypatch.setattr(fakes, "pooled", pooled)
    limits = HttpLimits(send_timeout_s=1.0, max_kept_bytes=130_000_000)
    process = psutil.Process()

    async def test(router: Router) -> None:
        server = HttpServer(router.app, host="127.0.0.1", port=0, limits=limits)
        await server.start()
        body = b'{"input": [%s], "encoding_format": "base64"}' % b", ".join([b'"a"'] * 40)
        head = b"POST /v1/embeddings HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"

        async def ask() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            return reader, writer

        before = process.memory_info().rss
        clients = []
        for _ in range(6):
            clients.append(await ask())
        assert process.memory_info().rss - before < 250_000_000
        for reader, writer in clients:
            try:
                received = b""
                await asyncio.sleep(0.3)
                while data := await reader.read(1 << 20):
                    received = data[-1:]
            except ConnectionError:
                pass
            assert received != b"}", "the answer was complete, so the router has kept it for a client that did not read"
            writer.close()
        await server.close()
        assert process.memory_info().rss - before < 100_000_000

    serve(test, pooling=PoolingProfile(tasks=["embed"], dimensions=250_000), prefill=1, decode=0)
