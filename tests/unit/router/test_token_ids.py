"""`return_token_ids`: what was read and written as token ids, named and placed as vLLM does."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from baton_serve.services.router.settings import RouterSettings
from baton_serve.services.router.text.served_model import ServedModel
from tests.unit.router.conftest import Router, Serve
from tests.unit.router.fakes import FakeCluster, record

HELLO = [{"role": "user", "content": "hello"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


async def ask(router: Router, path: str, **body: Any) -> dict[str, Any]:
    answer = await router.http.post(path, json={"seed": 0, **body})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def choices_of(chunks: list[dict[str, Any]], index: int) -> list[dict[str, Any]]:
    return [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]


def test_completions_return_token_ids_of_each_choice(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        body: dict[str, Any] = {"prompt": ["hello", "you there"], "n": 2, "max_tokens": 5, "return_token_ids": True}
        whole = (await ask(router, COMPLETIONS, **body))["choices"]
        tokenizer = router.service.model.tokenizer
        prompts = [tokenizer.encode(prompt, add_special_tokens=True) for prompt in body["prompt"]]
        assert [choice["prompt_token_ids"] for choice in whole] == [prompts[0], prompts[0], prompts[1], prompts[1]]
        for choice in whole:
            assert len(choice["token_ids"]) == 5
            assert router.service.model.detokenizer.text(choice["token_ids"]) == choice["text"]
        chunks = await router.stream(COMPLETIONS, **body)
        for index, choice in enumerate(whole):
            first, *rest = choices_of(chunks, index)
            assert first["prompt_token_ids"] == choice["prompt_token_ids"]
            assert {one["prompt_token_ids"] for one in rest} == {None}
            assert [token for one in (first, *rest) for token in one["token_ids"]] == choice["token_ids"]

    serve(scenario)


def test_chats_return_the_token_ids_of_the_prompt_once(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        body: dict[str, Any] = {"messages": HELLO, "n": 2, "max_tokens": 5, "return_token_ids": True}
        whole = await ask(router, CHAT, **body)
        prompt = (await router.http.post("/tokenize", json={"messages": HELLO})).json()["tokens"]
        assert whole["prompt_token_ids"] == prompt
        chunks = await router.stream(CHAT, **body)
        assert [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk] == [prompt] * 2
        assert all("prompt_token_ids" in chunk for chunk in chunks if "role" in chunk["choices"][0]["delta"])
        for choice in whole["choices"]:
            assert router.service.model.detokenizer.text(choice["token_ids"]) == choice["message"]["content"]
            mine = choices_of(chunks, choice["index"])
            assert [token for one in mine for token in one.get("token_ids", [])] == choice["token_ids"]

    serve(scenario)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_they_are_whole_where_text_is_held_back(serve: Serve, path: str) -> None:
    """Until a stop string cannot come any more, or a parser knows what it is."""

    async def scenario(router: Router) -> None:
        given: dict[str, Any] = {"messages": HELLO} if path == CHAT else {"prompt": "hello"}
        body = {**given, "max_tokens": 9, "stop": ["hovcj!"], "return_token_ids": True}
        (choice,) = (await ask(router, path, **body))["choices"]
        assert len(choice["token_ids"]) == 9
        chunks = await router.stream(path, **body)
        reported = [one["token_ids"] for one in choices_of(chunks, 0) if one.get("token_ids")]
        assert len(reported) > 5, "each as it comes"
        assert [token for one in reported for token in one] == choice["token_ids"]

    serve(scenario, reasoning_parser="deepseek_r1")


def test_an_echoed_prompt_is_returned_as_tokens_alone(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        body = {"prompt": "hello", "echo": True, "max_tokens": 3, "return_token_ids": True}
        (choice,) = (await ask(router, COMPLETIONS, **body))["choices"]
        assert router.service.model.detokenizer.text(choice["token_ids"]) == choice["text"]
        assert router.service.model.detokenizer.text(choice["prompt_token_ids"]) == "hello"
        streamed = choices_of(await router.stream(COMPLETIONS, **body), 0)
        assert "".join(one["text"] for one in streamed) == choice["text"]
        assert [one["prompt_token_ids"] for one in streamed if one["prompt_token_ids"]] == [choice["prompt_token_ids"]]
        (choice,) = (await ask(router, COMPLETIONS, **body | {"max_tokens": 0}))["choices"]
        assert (choice["text"], choice["token_ids"]) == ("", [])

    serve(scenario)


def test_token_ids_are_returned_only_on_request(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        for path, given in ((CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "hello"})):
            whole = await router.http.post(path, json={**given, "max_tokens": 3, "return_token_ids": False})
            streamed = await router.http.post(path, json={**given, "max_tokens": 3, "stream": True})
            assert "token_ids" not in whole.text + streamed.text

    serve(scenario)


def test_a_router_without_a_tokenizer_takes_and_returns_token_ids(model_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "tiny")
    for file in folder.glob("tokenizer*"):
        file.unlink()
    fakes = FakeCluster()
    fakes.add(record("unified-0", "unified"))
    settings = RouterSettings(model=str(folder), skip_tokenizer_init=True, instance_wait_s=0.05)
    router = Router(fakes, settings, ServedModel.from_settings(settings), [])

    async def refused(path: str, word: str, **body: Any) -> None:
        answer = await router.http.post(path, json={"max_tokens": 4, **body})
        assert answer.status_code == 400 and word in answer.json()["error"]["message"], answer.text

    async def scenario() -> None:
        await router.start()
        try:
            body: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 4, "return_token_ids": True, "logprobs": 1}
            [choice] = (await ask(router, COMPLETIONS, **body))["choices"]
            assert (choice["text"], len(choice["token_ids"]), choice["prompt_token_ids"]) == ("", 4, [5, 6, 7])
            assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
            streamed = [chunk["choices"][0] for chunk in await router.stream(COMPLETIONS, **body)]
            assert [token for one in streamed for token in one["token_ids"] or []] == choice["token_ids"]
            await refused(COMPLETIONS, "--skip-tokenizer-init", prompt="hello")
            await refused(CHAT, "chat template", messages=HELLO)
            await refused("/tokenize", "--skip-tokenizer-init", prompt="hello")
            await refused(COMPLETIONS, "stop_token_ids", prompt=[5], stop=["x"])
            await refused(COMPLETIONS, "--skip-tokenizer-init", prompt=[5], bad_words=["x"])
            await refused(COMPLETIONS, "structured output", prompt=[5], guided_regex="a+")
            router.check_idle()
        finally:
            await router.close()

    asyncio.run(scenario())
