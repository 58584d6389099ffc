"""Adapters through real processes: each answers as transformers does with it merged, in one batch with the others."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.adapters import merged, write_adapter
from tests.e2e.cluster import Cluster
from tests.e2e.test_equality import expected_tokens, greedy, prompt_of

pytestmark = pytest.mark.slow

PROMPT = prompt_of(90)
FLAGS = ("--dtype", "float32", "--disaggregation-min-tokens", "0", "--enable-lora", "--max-loras", "2")
RUN_TIME = ("--allow-runtime-lora-updating", "--api-key", "secret")
KEY = {"authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def adapters(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(folder / name, llama, rank=rank, seed=rank) for name, rank in (("one", 4), ("two", 16))}


@pytest.fixture(scope="module")
def cluster(llama: Path, adapters: dict[str, Path]) -> Iterator[Cluster]:
    modules = [
        f"one={adapters['one']}",
        json.dumps({"name": "two", "path": str(adapters["two"]), "base_model_name": "b"}),
    ]
    with Cluster(llama, args=(*FLAGS, *RUN_TIME, "--lora-modules", *modules)) as running:
        running.client.headers.update(KEY)
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
    assert {card["id"]: card["parent"] for card in cards if card["parent"]} == {"one": cards[0]["id"], "two": "b"}
    unknown = cluster.client.post("/v1/completions", json={"model": "three", "prompt": "a"})
    assert unknown.status_code == 404
    assert "one" in unknown.json()["error"]["message"]


def change(
    cluster: Cluster, path: str, name: str, folder: str | Path = "", *, in_place: bool = False, **options: Any
) -> httpx.Response:
    body = {"lora_name": name} | ({"lora_path": str(folder)} if folder else {})
    return cluster.client.post(
        f"/v1/{path}_lora_adapter", json=body | ({"load_inplace": True} if in_place else {}), **options
    )


def test_load_inplace_serves_what_a_folder_contains_now(cluster: Cluster, llama: Path, tmp_path: Path) -> None:
    answers = []
    for seed in (7, 8):
        folder = write_adapter(tmp_path / "trained", llama, rank=4, seed=seed)
        assert change(cluster, "load", "trained", folder, in_place=True).status_code == 200
        answers.append(tokens_of(answer_of(cluster, "trained")))
        assert answers[-1] == greedy(merged(llama, folder), PROMPT, 16)
    assert answers[0] != answers[1]
    assert change(cluster, "unload", "trained").status_code == 200


def test_an_adapter_comes_and_goes_while_a_stream_has_it(cluster: Cluster, llama: Path, tmp_path: Path) -> None:
    def ask(path: str, name: str, folder: str | Path = "", **options: Any) -> httpx.Response:
        return change(cluster, path, name, folder, **options)

    late = write_adapter(tmp_path / "late", llama, rank=5, seed=5)
    assert ask("load", "late", late, headers={"authorization": "Bearer wrong"}).status_code == 401
    assert ask("load", "late", late).status_code == 200
    assert "late" in [card["id"] for card in cluster.client.get("/v1/models").json()["data"]]
    expected = greedy(merged(llama, late), PROMPT, 300)
    assert tokens_of(answer_of(cluster, "late")) == expected[:16]
    body = {"model": "late", "prompt": PROMPT, "max_tokens": 300, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    stream = cluster.stream("/v1/completions", {**body, "return_tokens_as_token_ids": True})
    written = tokens_of(next(stream))
    assert ask("unload", "late").status_code == 200
    for chunk in stream:
        written += tokens_of(chunk)
    assert written == expected
    assert cluster.client.post("/v1/completions", json={"model": "late", "prompt": "a"}).status_code == 404
    for answer, status, word in (
        (ask("load", "one", late), 400, "in use"),
        (ask("load", "huge", write_adapter(tmp_path / "huge", llama, rank=17)), 400, "rank 17, the limit is 16"),
        (ask("load", "none", tmp_path / "none"), 404, "adapter_config.json"),
        (ask("unload", "late"), 404, "late"),
    ):
        assert (answer.status_code, word in answer.text) == (status, True), answer.text


def test_more_adapters_of_a_folder_than_there_is_room_for_are_served_in_turn(llama: Path, tmp_path: Path) -> None:
    names = [f"adapter-{seed}" for seed in range(4)]
    expected = {
        name: greedy(merged(llama, write_adapter(tmp_path / name, llama, rank=4, seed=seed)), PROMPT, 8)
        for seed, name in enumerate(names)
    }
    flags = ("--dtype", "float32", "--disaggregation-min-tokens", "0", "--enable-lora", "--max-cpu-loras", "1")
    with Cluster(llama, args=(*flags, "--lora-resolver-folder", str(tmp_path))) as running:
        for name in (*names, *names):
            assert tokens_of(answer_of(running, name, 8)) == expected[name]
        with ThreadPoolExecutor(8) as threads:
            answers = list(threads.map(lambda name: answer_of(running, name, 8), names * 3))
        assert [tokens_of(answer) for answer in answers] == [expected[name] for name in names] * 3
        cards = running.client.get("/v1/models").json()["data"]
        assert sorted(card["id"] for card in cards if card["parent"]) == names
        assert running.metrics()["baton:replays_total"] == 0
