"""Bodies that come slowly or never, at the real server with the real application: none keeps a connection."""

import asyncio

import pytest

from baton_serve.services.common.http.server import HttpServer
from baton_serve.services.common.http.slots import HttpLimits
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
