"""Every family through router, prefill, transfer and decode: greedy tokens equal `transformers.generate`."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from baton_serve.contracts.model_path import is_lone_gguf
from baton_serve.services.common.local_model import unpack_gguf
from baton_serve.services.local.settings import DEMO_MODEL
from tests.e2e.in_process import served
from tests.e2e.test_equality import PROMPTS, greedy, reference_model
from tests.families import FAMILIES, MAX_POSITIONS
from tests.gguf_files import Kind, write_lone_gguf
from tests.references import References
from tools.model_verdicts import generating_families
from tools.tiny_families import write_family

pytestmark = pytest.mark.slow

NEW_TOKENS = 8
TRANSPORTS = ("zeromq", "usm")
TEXT = "The bridge is closed because the river rose, so we walk around it and come home late."


@pytest.mark.parametrize("number", range(len(FAMILIES)), ids=list(FAMILIES))
def test_tokens_equal_transformers(number: int, references: References) -> None:
    reference, transport = references(list(FAMILIES)[number]), TRANSPORTS[number % len(TRANSPORTS)]
    (short, block, _, long, _), (*_, beginning, _) = reference.prompts, reference.unended
    begun = len(beginning) - NEW_TOKENS
    prompts = {
        "shorter than a block": short,
        "exactly a block": block,
        "many blocks": long,
        "the same again: its prefix is cached on both sides": long,
        "a cached prefix and something new": [*long, *beginning[:begun]],
    }
    expected = [answer[:NEW_TOKENS] for answer in (*reference.unended[:2], beginning, beginning)]
    answers = list(asyncio.run(ask(reference.folder, transport, prompts)).values())
    assert [tokens_of(answer) for answer in answers] == [*expected, beginning[begun:]]
    routes = [answer["baton"] for answer in answers]
    assert {(route["decision"], route["transport"]) for route in routes} == {("disaggregated", transport)}
    assert all(route["reused_blocks"] for route in routes[-2:]) and routes[2]["transferred_blocks"]


def test_a_gguf_file_is_served_as_the_numbers_it_stands_for(tmp_path: Path) -> None:
    """Alone: config and tokenizer are within it. Its codes stay codes in both instances."""
    file = write_lone_gguf(tmp_path / "model", Kind.Q4_0, DEMO_MODEL)
    assert is_lone_gguf(str(file))
    served_file = Path(unpack_gguf(file, {"XDG_CACHE_HOME": str(tmp_path / "cache")}))
    model = reference_model(tmp_path / "plain")
    ids = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json")).encode(TEXT).ids
    expected = {case: greedy(model, prompt, NEW_TOKENS) for case, prompt in {**PROMPTS, TEXT: ids}.items()}
    answers = asyncio.run(ask(served_file, "usm", {**PROMPTS, TEXT: TEXT}))
    assert {case: tokens_of(answer) for case, answer in answers.items()} == expected
    assert {answer["baton"]["decision"] for answer in answers.values()} == {"disaggregated"}


@pytest.mark.parametrize("model_type", ["gemma3", "mistral3", "qwen2_5_vl"])
def test_the_text_of_a_multimodal_model_is_served_and_its_images_are_refused(model_type: str, tmp_path: Path) -> None:
    model = write_family(model_type, generating_families()[model_type], tmp_path)
    shorten_context(tmp_path / "config.json")
    expected = {case: greedy(model, prompt, NEW_TOKENS) for case, prompt in PROMPTS.items()}
    answers, refusal = asyncio.run(ask_with_image(tmp_path))
    assert {case: tokens_of(answer) for case, answer in answers.items()} == expected
    assert refusal.status_code == 400
    assert "image" in refusal.json()["error"]["message"]


def shorten_context(config: Path) -> None:
    """The defaults of these families are longer than a small KV cache."""
    stated = json.loads(config.read_text())
    stated["text_config"]["max_position_embeddings"] = MAX_POSITIONS
    config.write_text(json.dumps(stated))


async def ask_with_image(model: Path) -> tuple[dict[str, dict[str, Any]], httpx.Response]:
    """The answers to text, and the response to a conversation with an image."""
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, picture]}]
    async with asyncio.timeout(60), served(model, transport="usm") as client:
        await until_ready(client)
        answers = {case: await complete(client, prompt) for case, prompt in PROMPTS.items()}
        return answers, await client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 4})


async def ask(
    model: Path, transport: str, prompts: Mapping[str, list[int] | str] = PROMPTS
) -> dict[str, dict[str, Any]]:
    async with asyncio.timeout(60), served(model, transport=transport) as client:
        await until_ready(client)
        return {case: await complete(client, prompt) for case, prompt in prompts.items()}


async def until_ready(client: httpx.AsyncClient, count: int = 2) -> None:
    while len((await client.get("/health")).json()["instances"]) < count:  # noqa: ASYNC110 - a fact of another part
        await asyncio.sleep(0.01)


async def complete(client: httpx.AsyncClient, prompt: list[int] | str) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
    body |= {"logprobs": 0, "return_tokens_as_token_ids": True}
    answer = await client.post("/v1/completions", json=body, headers={"x-baton-explain": "1"})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def tokens_of(answer: dict[str, Any]) -> list[int]:
    return [int(token.removeprefix("token_id:")) for token in answer["choices"][0]["logprobs"]["tokens"]]
