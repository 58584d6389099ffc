"""Access, logged data, and clients that keep a connection busy."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton_serve.services.router.app import create_app
from baton_serve.services.router.main import with_cors
from baton_serve.services.router.protocol.asgi import EventStream
from baton_serve.services.router.protocol.errors import ClientGoneError
from baton_serve.services.router.quota.api_keys import ApiKeys
from baton_serve.services.router.quota.audit_log import AuditLog
from baton_serve.services.router.settings import RouterSettings
from tests.unit.router.conftest import Router, Serve

JSON = (b"content-type", b"application/json")
PAGE = {"origin": "https://chat.example.com"}


def test_pages_of_other_origins_are_let_in_only_where_it_is_set(serve: Serve) -> None:
    async def test(router: Router) -> None:
        asked = {**PAGE, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        for origins, is_allowed in (([], False), (["https://chat.example.com"], True), (["https://other"], False)):
            settings = RouterSettings(model="m", allowed_origins=origins)
            transport = httpx.ASGITransport(app=with_cors(router.app, settings))
            async with httpx.AsyncClient(transport=transport, base_url="http://router") as http:
                preflight = await http.options("/v1/completions", headers=asked)
                assert ("access-control-allow-origin" in preflight.headers) == is_allowed
                answer = await http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers=PAGE)
                assert answer.status_code == 200
                assert ("access-control-allow-origin" in answer.headers) == is_allowed

    serve(test)


def test_the_audit_log_names_the_caller_and_contains_no_text(serve: Serve, tmp_path: Path) -> None:
    async def test(router: Router) -> None:
        audit = AuditLog(str(tmp_path / "audit"))
        app = create_app(router.service, api_keys=ApiKeys(["sk-hush"]), audit=audit)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://router") as http:
            body = {"prompt": "whisper", "max_tokens": 1}
            for key, sent in (("sk-hush", body), ("sk-wrong", body), ("sk-hush", {})):
                headers = {"authorization": f"Bearer {key}", "x-request-id": "r1"}
                await http.post("/v1/completions", json=sent, headers=headers)
            await http.get("/health")
        audit.close()
        text = (tmp_path / "audit").read_text()
        lines = [json.loads(line) for line in text.splitlines()]
        assert [line["status"] for line in lines] == [200, 401, 400]
        assert lines[0]["caller"].startswith("key-") and lines[1]["caller"] is None
        assert {line["request_id"] for line in lines} == {"r1"}
        assert "whisper" not in text and "sk-" not in text

    serve(test)


def test_a_body_that_does_not_come_is_not_waited_for(serve: Serve) -> None:
    async def test(router: Router) -> None:
        sent: list[Any] = []
        parts = [{"type": "http.request", "body": b'{"prompt"', "more_body": True}]

        async def receive() -> Any:
            if parts:
                return parts.pop()
            await asyncio.get_running_loop().create_future()

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [JSON]}
        began = time.monotonic()
        await router.app(scope, receive, send)
        assert sent[0]["status"] == 408 and time.monotonic() - began < 5

    serve(test, slow_client_s=0.05)


def test_a_client_that_takes_nothing_is_given_up() -> None:
    async def scenario() -> None:
        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                await asyncio.get_running_loop().create_future()

        with pytest.raises(ClientGoneError):
            await EventStream(send, slow_client_s=0.05).write(b"data: x\n\n")

    asyncio.run(scenario())
