"""An ASGI app inside a running loop."""

import asyncio
from pathlib import Path

import httpx
import pytest

from baton_serve.services.common.errors import ConfigurationError
from baton_serve.services.common.http.server import AsgiApp, HttpServer


async def app(scope: object, receive: object, send: AsgiApp) -> None:
    assert callable(send)
    await send({"type": "http.response.start", "status": 200, "headers": []})  # type: ignore[call-arg]
    await send({"type": "http.response.body", "body": b"here"})  # type: ignore[call-arg]


def test_it_serves_from_start_to_close() -> None:
    async def whole() -> None:
        server = HttpServer(app, host="127.0.0.1", port=0)
        await server.start()
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"http://127.0.0.1:{server.port}/")).text == "here"
        await server.close()
        assert server.port != 0

    asyncio.run(whole())


def test_a_port_in_use_is_named() -> None:
    async def whole() -> None:
        first = HttpServer(app, host="127.0.0.1", port=0)
        await first.start()
        second = HttpServer(app, host="127.0.0.1", port=first.port)
        with pytest.raises(ConfigurationError, match=f"127.0.0.1:{first.port}: Address already in use"):
            await second.start()
        await first.close()

    asyncio.run(whole())


def test_a_certificate_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "tls.crt"
    broken.write_text("no certificate")
    for keyfile, certfile, reason in (
        ("/no/key", None, "--ssl-keyfile needs --ssl-certfile"),
        (None, "/no/cert", "--ssl-certfile /no/cert cannot be used: No such file or directory"),
        ("/no/key", str(broken), f"{broken} with --ssl-keyfile /no/key cannot be used: "),
        (None, str(broken), f"{broken} cannot be used: "),
    ):
        with pytest.raises(ConfigurationError, match=reason):
            HttpServer(app, host="127.0.0.1", port=0, ssl_keyfile=keyfile, ssl_certfile=certfile)


def test_a_root_path_is_put_before_what_a_proxy_left() -> None:
    asked: list[tuple[str, str]] = []

    async def noted(scope: dict[str, str], receive: object, send: AsgiApp) -> None:
        asked.append((scope["root_path"], scope["path"]))
        await app(scope, receive, send)

    async def whole() -> None:
        server = HttpServer(noted, host="127.0.0.1", port=0, root_path="/llm/baton")
        await server.start()
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"http://127.0.0.1:{server.port}/health")).text == "here"
        await server.close()

    asyncio.run(whole())
    assert asked == [("/llm/baton", "/llm/baton/health")]
