"""Requests that a web page can make a browser send to a router on the same machine."""

from typing import Any

import httpx
import pytest

from baton_serve.services.router.http.hosts import is_allowed, with_allowed_hosts
from tests.unit.router.conftest import Router, Serve

BODY = b'{"prompt": "a", "max_tokens": 1}'


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("application/json", 200),
        ("Application/JSON; charset=utf-8", 200),
        ("application/vnd.api+json", 200),
        ("text/plain", 415),
        ("text/plain; a=application/json", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=a", 415),
        ("text/json+json", 415),
        ("application/jsonp", 415),
        ("", 415),
        (None, 415),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/invocations"])
def test_a_body_must_say_that_it_is_json(serve: Serve, path: str, content_type: str | None, status: int) -> None:
    async def test(router: Router) -> None:
        headers = {} if content_type is None else {"content-type": content_type}
        answer = await router.http.post(path, content=BODY, headers=headers)
        assert answer.status_code == status
        if status == 415:
            error = answer.json()["error"]
            assert error["code"] == "unsupported_media_type" and "application/json" in error["message"]

    serve(test)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost", True),
        ("LOCALHOST:8000", True),
        ("localhost.", True),
        ("a.localhost:80", True),
        ("127.0.0.1:8000", True),
        ("10.1.2.3", True),
        ("[::1]:8000", True),
        ("[fe80::1]", True),
        ("llm.example.com", True),
        ("LLM.example.com:443", True),
        ("a.b.corp", True),
        ("corp", False),
        ("evilcorp", False),
        ("evil.example", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("evil.example:127.0.0.1", False),
        ("llm.example.com.evil.example", False),
        ("", False),
    ],
)
def test_a_host_is_an_address_or_a_name_of_the_list(host: str, expected: bool) -> None:
    assert is_allowed(host, ("llm.example.com", "*.corp", "localhost", "*.localhost")) == expected


@pytest.mark.parametrize(
    ("bound_to", "allowed", "host", "status"),
    [
        ("127.0.0.1", [], "evil.example:8000", 403),
        ("::1", [], "evil.example", 403),
        ("localhost", [], "evil.example", 403),
        ("127.0.0.1", [], "localhost:8000", 200),
        ("127.0.0.1", ["llm.example.com"], "llm.example.com", 200),
        ("127.0.0.1", ["*"], "evil.example", 200),
        ("0.0.0.0", [], "llm.example.com", 200),
        ("0.0.0.0", ["llm.example.com"], "evil.example", 403),
        ("0.0.0.0", ["llm.example.com"], "10.0.0.7:8000", 200),
        ("node-7", ["llm.example.com"], "node-7", 200),
    ],
)
def test_a_page_whose_name_leads_here_is_refused(
    serve: Serve, bound_to: str, allowed: list[str], host: str, status: int
) -> None:
    async def test(router: Router) -> None:
        app: Any = with_allowed_hosts(router.app, allowed, bound_to=bound_to)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://router") as http:
            answer = await http.get("/version", headers={"host": host})
            assert answer.status_code == status
            if status == 403:
                assert "--allowed-hosts" in answer.json()["error"]["message"]

    serve(test)
