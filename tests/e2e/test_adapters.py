"""Adapters through real processes: each answers as transformers does with it merged, in one batch with the others."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.adapters import merged, write_adapter
from tests.e2e.cluster import Cluster
from tests.e2e.test_equality import expected_tokens, greedy, prompt_of

pytestmark = pytest.mark.slow

PROMPT = prompt_of(90)
FLAGS = ("--dtype", "float32", "--disaggregation-min-tokens", "0", "--enable-lora", "--max-loras", "2")


@pytest.fixture(scope="module")
def adapters(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(folder / name, llama, rank=rank, seed=rank) for name, rank in (("one", 4), ("two", 16))}


@pytest.fixture(scope="module")
def cluster(llama: Path, adapters: dict[str, Path]) -> Iterator[Cluster]:
    modules = [f"{name}={folder}" for name, folder in adapters.items()]
    with Cluster(llama, args=(*FLAGS, "--lora-modules", *modules)) as running:
        yield running


def answer_of(cluster: Cluster, model: str | None, count: int = 16) -> dict[str, Any]:
    body = {"model": model, "max_tokens": count, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    return cluster.complete(PROMPT, **body, return_tokens_as_token_ids=True)


def tokens_of(answer: dict[str, Any]) -> list[int]:
    return [int(token.removeprefix("token_id:")) for token in answer["choices"][0]["logprobs"]["tokens"]]


def test_adapters_and_the_base_model_answer_at_once(cluster: Cluster, llama: Path, adapters: dict[str, Path]) -> None:
    expected: dict[str | None, list[int]] = {
        name: greedy(merged(llama, folder), PROMPT, 16) for name, folder in adapters.items()
    }
    expected[None] = expected_tokens(llama, PROMPT, 16)
    assert len({tuple(tokens) for tokens in expected.values()}) == 3
    names = [*expected] * 2  # the second time prefixes are cached, each under its own name
    with ThreadPoolExecutor(len(names)) as threads:
        answers = list(threads.map(lambda name: answer_of(cluster, name), names))
    assert [tokens_of(answer) for answer in answers] == [expected[name] for name in names]
    assert [answer["model"] for answer in answers[:2]] == ["one", "two"]
    assert cluster.metrics()["baton:replays_total"] == 0


def test_each_adapter_is_a_model(cluster: Cluster, llama: Path, adapters: dict[str, Path]) -> None:
    cards = cluster.client.get("/v1/models").json()["data"]
    assert {card["id"]: card["parent"] for card in cards if card["parent"]} == dict.fromkeys(adapters, cards[0]["id"])
    unknown = cluster.client.post("/v1/completions", json={"model": "three", "prompt": "a"})
    assert unknown.status_code == 404
    assert "one" in unknown.json()["error"]["message"]
