"""`/invocations` hands each request to the endpoint that it is for."""

import pytest

from baton_serve.services.router.http.invocations import path_of
from baton_serve.services.router.protocol.errors import BadRequestError
from tests.unit.router.conftest import Router, Serve
from tests.unit.router.test_pooling import EMBEDS, WORKERS


@pytest.mark.parametrize(
    ("body", "tasks", "path"),
    [
        (b'{"messages": []}', [], "/v1/chat/completions"),
        (b'{"prompt": "a", "messages": null}', [], "/v1/completions"),
        (b'{"input": "a"}', [], "/v1/embeddings"),
        (b'{"input": "a"}', ["embed", "token_embed"], "/v1/embeddings"),
        (b'{"messages": []}', ["embed"], "/v1/embeddings"),
        (b'{"input": "a"}', ["classify"], "/classify"),
        (b'{"input": "a", "task": "token_embed"}', ["embed"], "/pooling"),
        (b'{"query": "a", "documents": []}', ["classify"], "/rerank"),
        (b'{"text_1": "a", "text_2": "b"}', ["classify"], "/score"),
    ],
)
def test_a_request_is_known_by_what_it_has(body: bytes, tasks: list[str], path: str) -> None:
    assert path_of(body, lambda model: tasks) == path


def test_a_body_that_is_none_of_them_is_refused() -> None:
    for body in (b"{}", b"[]", b"no json", b"\xff", b'{"model": 3, "prompt": "a"}'):
        with pytest.raises(BadRequestError):
            path_of(body, lambda model: [])


def test_invocations_are_answered_as_at_their_own_paths(serve: Serve) -> None:
    async def writes_text(router: Router) -> None:
        bodies = [
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "seed": 1}),
            ("/v1/completions", {"prompt": "hi", "max_tokens": 4, "seed": 1}),
        ]
        for path, body in bodies:
            one = (await router.http.post(path, json=body)).json()
            other = (await router.http.post("/invocations", json=body)).json()
            assert one["choices"] == other["choices"]
        streamed = await router.stream("/invocations", prompt="hi", max_tokens=4)
        assert streamed[-1]["choices"][0]["finish_reason"] == "length"

    async def embeds(router: Router) -> None:
        answer = await router.http.post("/invocations", json={"input": "abc"})
        assert answer.json()["data"][0]["embedding"] == [3.0, 294.0, 0.0]

    serve(writes_text)
    serve(embeds, pooling=EMBEDS, **WORKERS)
