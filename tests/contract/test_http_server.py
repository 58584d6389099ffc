"""An ASGI app inside a running loop."""

import asyncio
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest

from baton_serve.services.common.errors import ConfigurationError
from baton_serve.services.common.http.server import AsgiApp, HttpServer, TlsFiles


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
            HttpServer(app, host="127.0.0.1", port=0, tls=TlsFiles(keyfile, certfile))


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


def test_clients_need_a_certificate_if_the_server_requires_one(tmp_path: Path) -> None:
    authority, own = certificate(tmp_path / "authority"), certificate(tmp_path / "server")
    stranger = certificate(tmp_path / "stranger")

    async def asked(cert_reqs: int, client: TlsFiles | None) -> bool:
        tls = TlsFiles(own.keyfile, own.certfile, authority.certfile, cert_reqs)
        server = HttpServer(app, host="127.0.0.1", port=0, tls=tls)
        await server.start()
        trusted = ssl.create_default_context(cafile=own.certfile)
        if client is not None:
            trusted.load_cert_chain(str(client.certfile), client.keyfile)
        try:
            async with httpx.AsyncClient(verify=trusted) as http:
                return (await http.get(f"https://127.0.0.1:{server.port}/")).status_code == 200
        except httpx.TransportError:
            return False
        finally:
            await server.close(grace_s=0.1)

    # A certificate that signs itself stands for one that its authority has signed.
    expected = {(1, None): True, (1, authority): True, (1, stranger): False}
    expected |= {(2, None): False, (2, authority): True, (2, stranger): False}
    for (cert_reqs, client), may in expected.items():
        assert asyncio.run(asked(cert_reqs, client)) == may, (cert_reqs, client)


def test_certificates_of_clients_need_authorities_and_a_server_with_tls(tmp_path: Path) -> None:
    own, broken = certificate(tmp_path / "server"), tmp_path / "broken"
    broken.write_text("x")
    for tls, message in (
        (TlsFiles(own.keyfile, own.certfile, None, 2), "--ssl-cert-reqs 2 needs --ssl-ca-certs"),
        (TlsFiles(None, None, own.certfile, 2), "--ssl-ca-certs needs --ssl-certfile"),
        (TlsFiles(own.keyfile, own.certfile, own.certfile), "has no effect without --ssl-cert-reqs"),
        (TlsFiles(own.keyfile, own.certfile, str(broken), 2), "broken cannot be used"),
        (TlsFiles(own.keyfile, own.certfile, str(tmp_path / "none"), 2), "No such file"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            HttpServer(app, host="127.0.0.1", port=0, tls=tls)


def certificate(folder: Path) -> TlsFiles:
    """Write a key and a certificate that signs itself."""
    folder.mkdir()
    key, written = folder / "tls.key", folder / "tls.crt"
    subject = ["-subj", f"/CN={folder.name}", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2", "-nodes"]
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-keyout", str(key), "-out", str(written), *subject]
    subprocess.run(made, check=True, capture_output=True)
    return TlsFiles(str(key), str(written))
