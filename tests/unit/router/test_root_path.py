"""Behind a proxy that strips a prefix: the server puts it back (`--root-path`), and every path is found as without."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from baton_serve.services.common.settings.configuration import load
from baton_serve.services.router.app import create_app
from baton_serve.services.router.quota.api_keys import ApiKeys
from baton_serve.services.router.quota.audit_log import AuditLog
from baton_serve.services.router.settings import RouterSettings
from tests.unit.router.conftest import Router, Serve

PREFIX = "/llm/baton"
KEY = {"authorization": "Bearer sk-hush"}
HELLO = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3, "seed": 0}


def behind_a_proxy(app: Any) -> httpx.AsyncClient:
    """Return a client with the scope that `HttpServer(root_path=PREFIX)` gives the app: see
    contract/test_http_server.py."""
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app=app, root_path=PREFIX), base_url=f"http://router{PREFIX}"
    )


def test_what_needs_no_key_needs_none_below_a_prefix(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        async with behind_a_proxy(router.app) as http:
            for path in ("/", "/health", "/ping", "/metrics", "/docs", "/docs/swagger-ui.js", "/openapi.json"):
                assert (await http.get(path)).status_code == 200, path
            for path in ("/v1/models", "/recent"):
                assert (await http.get(path)).status_code == 401, path
                assert (await http.get(path, headers=KEY)).status_code == 200, path
            assert (await http.post("/v1/chat/completions", json=HELLO)).status_code == 401

    serve(scenario, keys=["sk-hush"])


def test_a_path_that_only_begins_with_the_prefix_s_letters_is_not_below_it(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        open_path = "/health"
        for root_path, path, status in (
            ("/llm", f"/llm{open_path}", 200),
            ("/llm", "/llmfoo", 401),
            ("/he", open_path, 200),
            ("/h", f"/h{open_path}", 200),
            ("/llm", f"/llm{open_path[1:]}", 401),
        ):
            transport = httpx.ASGITransport(app=router.app, root_path=root_path)
            async with httpx.AsyncClient(transport=transport, base_url="http://router") as http:
                assert (await http.get(path)).status_code == status, path

    serve(scenario, keys=["sk-hush"])


def test_answers_below_a_prefix_are_those_without_one(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        async with behind_a_proxy(router.app) as http:
            for path, body in (
                ("/v1/chat/completions", HELLO),
                ("/v1/completions", {"prompt": "hello", "max_tokens": 3, "seed": 0}),
                ("/invocations", HELLO),
                ("/tokenize", {"prompt": "hello"}),
            ):
                answer, plain = await http.post(path, json=body), await router.http.post(path, json=body)
                assert (answer.status_code, _said(answer)) == (plain.status_code, _said(plain)), path
            for path in ("/v1/messages", "/v1/completions", "/v1/nothing"):  # errors are in each API's own shape
                answer, plain = await http.post(path, json={}), await router.http.post(path, json={})
                assert answer.status_code == plain.status_code >= 400
                assert answer.text.replace(PREFIX, "") == plain.text

    serve(scenario)


def test_no_way_through_the_framework_is_taken_below_a_prefix(serve: Serve, monkeypatch: Any) -> None:
    """The hot endpoints are called directly there too."""

    async def scenario(router: Router) -> None:
        async def nobody(scope: Any, receive: Any, send: Any) -> None:
            raise AssertionError(f"asked through the framework: {scope['path']}")

        monkeypatch.setattr(router.app, "_app", nobody)
        async with behind_a_proxy(router.app) as http:
            assert (await http.post("/v1/chat/completions", json=HELLO)).status_code == 200

    serve(scenario)


def test_the_documents_name_the_prefix(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        async with behind_a_proxy(router.app) as http:
            assert 'url: "openapi.json"' in (await http.get("/docs")).text  # relative to the page's own address
            document = (await http.get("/openapi.json")).json()
            assert document["servers"] == [{"url": PREFIX}]
            assert "/v1/chat/completions" in document["paths"]

    serve(scenario)


def test_the_audit_log_leaves_out_the_same_paths(serve: Serve, tmp_path: Path) -> None:
    async def scenario(router: Router) -> None:
        audit = AuditLog(str(tmp_path / "audit"))
        app = create_app(router.service, api_keys=ApiKeys([]), audit=audit)
        async with behind_a_proxy(app) as http:
            for path in ("/health", "/metrics", "/v1/models"):
                assert (await http.get(path)).status_code == 200
        audit.close()
        (line,) = (tmp_path / "audit").read_text().splitlines()
        assert '"/v1/models"' in line

    serve(scenario)


def test_a_start_lists_the_routes_in_the_words_of_vllm(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(router: Router) -> None:
        create_app(router.service, api_keys=ApiKeys([]))
        assert caplog.messages == []
        create_app(router.service, api_keys=ApiKeys([]), logs_routes=True)
        first, *routes = caplog.messages
        assert first == "Available routes are:"
        assert "Route: /v1/chat/completions, Methods: POST" in routes
        assert "Route: /v1/models, Methods: GET" in routes and "Route: /health, Methods: GET" in routes

    with caplog.at_level("INFO", logger="baton_serve.services.router.app"):
        serve(scenario)


@pytest.mark.parametrize("prefix", ["llm", "/a b", "/é", "//a"])
def test_a_prefix_that_cannot_be_is_refused(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--model", "m", "--root-path"]
    names = {"prefix": "BATON__ROUTER__", "program": "baton router", "description": ""}
    assert load(RouterSettings, [*argv, PREFIX], {}, **names).root_path == PREFIX
    with pytest.raises(SystemExit):
        load(RouterSettings, [*argv, prefix], {}, **names)
    assert "--root-path" in capsys.readouterr().err


def _said(answer: httpx.Response) -> Any:
    """Without what differs from request to request."""
    return {name: value for name, value in answer.json().items() if name not in ("id", "created")}
