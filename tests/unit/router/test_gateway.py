"""ASGI middleware by import path."""

from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from baton_serve.services.common.errors import ConfigurationError
from baton_serve.services.common.http.server import AsgiApp, HttpServer
from baton_serve.services.router.http.gateway import with_middleware
from baton_serve.services.router.protocol.asgi import Receive, Scope, Send
from tests.unit.router.conftest import Router, Serve, events_of

HERE = __name__
BODY: dict[str, Any] = {"prompt": "hello", "max_tokens": 9, "seed": 0}


class Counting:
    """Says how many messages an answer's body took."""

    counts: list[int] = []  # noqa: RUF012 - of the test that looks

    def __init__(self, app: AsgiApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        count = 0

        async def counted(message: Any) -> None:
            nonlocal count
            count += message["type"] == "http.response.body"
            await send(message)

        await self.app(scope, receive, counted)
        self.counts.append(count)


async def guarded(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
    if request.headers.get("x-blocked"):
        return PlainTextResponse("not you", status_code=403)
    response = await call_next(request)
    response.headers["x-seen"] = request.url.path
    return response


def test_a_class_and_a_function_are_around_all_requests(serve: Serve) -> None:
    async def test(router: Router) -> None:
        app = with_middleware(router.app, [f"{HERE}.Counting", f"{HERE}.guarded"])
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://router") as http:
            answer = await http.post("/v1/completions", json=BODY)
            assert answer.json()["choices"][0]["text"]
            assert answer.headers["x-seen"] == "/v1/completions" and answer.headers["x-request-id"]
            missing = await http.get("/nowhere")
            assert (missing.status_code, missing.headers["x-seen"]) == (404, "/nowhere")
            blocked = await http.post("/v1/completions", json=BODY, headers={"x-blocked": "1"})
            assert (blocked.status_code, blocked.text) == (403, "not you")

    serve(test)


def test_a_stream_passes_a_middleware_of_the_real_server_piece_by_piece(serve: Serve) -> None:
    async def test(router: Router) -> None:
        Counting.counts.clear()
        server = HttpServer(with_middleware(router.app, [f"{HERE}.Counting"]), host="127.0.0.1", port=0)
        await server.start()
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}") as http:
            answer = await http.post("/v1/completions", json={**BODY, "stream": True})
        await server.close()
        texts = [chunk["choices"][0]["text"] for chunk in events_of(answer.text)]
        assert len("".join(texts)) == 9
        assert Counting.counts[0] >= 3

    serve(test)


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("Counting", "import path"),
        ("no_such_module.Counting", "no_such_module"),
        (f"{HERE}.Nothing", "Nothing"),
        (f"{HERE}.HERE", "neither"),
    ],
)
def test_unusable_middleware_is_reported(path: str, why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        with_middleware(lambda scope, receive, send: None, [path])  # type: ignore[arg-type,return-value]
