"""A slow schema must not delay other requests of the same router."""

import asyncio
from collections.abc import Iterator

import pytest

from baton_serve.services.router.text.grammar import Vocabulary
from baton_serve.services.router.text.grammar.compiling.checker import GrammarChecker
from baton_serve.services.router.text.grammar.compiling.fair_slots import QueueLimits
from baton_serve.services.router.text.grammar.compiling.limited_compiler import CompileLimits
from baton_serve.services.router.text.served_model import ServedModel
from tests import grammar_bombs as bombs
from tests.unit.router.conftest import Router, Serve
from tests.unit.router.test_structured import TOKENIZER

pytestmark = pytest.mark.slow
VOCABULARY = Vocabulary(TOKENIZER)


@pytest.fixture(autouse=True)
def own_compiler(model: ServedModel, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A schema may take 0.15 s; two are compiled at a time and six wait."""
    limits, queue = CompileLimits(cpu_s=0.15), QueueLimits(max_running=2, max_waiting=6)
    checker = GrammarChecker(VOCABULARY.source, limits=limits, queue=queue)
    monkeypatch.setattr(model, "compiling", checker)
    yield
    checker.close()


@pytest.mark.parametrize("form", ["slow", "properties"])
def test_a_long_prompt_is_tokenized_while_schemas_take_all_they_may(serve: Serve, form: str) -> None:
    schemas = [bombs.slow(number) for number in bombs.SLOW_NUMBERS]
    if form == "properties":
        schemas = [bombs.properties(10_000 + i) for i in range(8)]

    async def scenario(router: Router) -> None:
        ask = router.http.post
        await ask("/v1/completions", json={"prompt": "a", "guided_regex": "a", "max_tokens": 1})
        slow = [
            asyncio.ensure_future(ask("/v1/completions", json={"prompt": "a", "guided_json": schema, "max_tokens": 1}))
            for schema in schemas
        ]
        prompt = asyncio.ensure_future(ask("/tokenize", json={"prompt": "word " * 2_000}))
        if form == "slow":
            await asyncio.wait([prompt, *slow], return_when=asyncio.FIRST_COMPLETED)
            assert prompt.done(), "the prompt waits for no schema"
        assert (await prompt).status_code == 200
        for answer in await asyncio.gather(*slow):
            assert answer.status_code == 400, answer.text

    serve(scenario)


def test_an_api_answers_429_when_too_many_schemas_wait(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        numbers = [*bombs.SLOW_NUMBERS, 999_907 - 24, 999_863, 999_853]
        bodies = [{"prompt": "a", "guided_json": bombs.slow(number)} for number in numbers]
        answers = await asyncio.gather(*(router.http.post("/v1/completions", json=body) for body in bodies))
        assert sorted(answer.status_code for answer in answers) == [400] * 8 + [429] * 3
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert refused.headers["retry-after"] == "1" and "wait to be compiled" in refused.json()["error"]["message"]

    serve(scenario)
