"""The next turn of a conversation finds the answer's blocks at the decode instance that wrote it; evicted blocks come
back from host memory. Real processes; tokens equal those of a prompt that nobody has cached.
"""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.cluster import Cluster, wait_until

pytestmark = pytest.mark.slow
# 40 blocks a card: an answer evicts what came two conversations before it.
SMALL = ("--block-size", "16", "--num-gpu-blocks-override", "40", "--max-model-len", "600", "--host-kv-gb", "0.01")
FLAGS = ("--dtype", "float32", "--disaggregation-min-tokens", "0", "--kv-pull", "always", *SMALL)
TRIES = 5
"""Of conversations: events may reach the router after a client has asked again, or some of them."""
ANSWERED = 48
"""Tokens of an answer in full blocks, which prefill has never seen."""


@pytest.fixture(scope="module")
def serving(llama: Path) -> Iterator[Cluster]:
    with Cluster(llama, prefill=1, decode=2, args=FLAGS) as cluster:
        yield cluster


def prompt_of(number: int, length: int = 150) -> list[int]:
    return [7 + (13 * i + 31 * number * i + number) % 200 for i in range(length)]


def ask(cluster: Cluster, prompt: list[int], **params: Any) -> tuple[list[int], dict[str, Any]]:
    """Tokens of the answer, and what became of the request."""
    body = {
        "prompt": prompt,
        "max_tokens": 60,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 0,
        "return_tokens_as_token_ids": True,
        **params,
    }
    answer = cluster.client.post("/v1/completions", json=body, headers={"x-baton-explain": "1"})
    assert answer.status_code == 200, answer.text
    found = answer.json()
    tokens = [int(token.removeprefix("token_id:")) for token in found["choices"][0]["logprobs"]["tokens"]]
    return tokens, {**found["baton"], "usage": found["usage"]}


def next_turn(number: int, answer: list[int]) -> list[int]:
    return prompt_of(number) + answer + prompt_of(number + 50, 40)


def test_the_next_turn_fetches_the_answer_from_decode(serving: Cluster) -> None:
    pulled: list[dict[str, Any]] = []
    for number in range(TRIES):
        answer, _ = ask(serving, prompt_of(number))
        again, reported = ask(serving, next_turn(number, answer))
        assert again == ask(serving, next_turn(number, answer), cache_salt="somebody else's")[0]
        if reported.get("pulled_tokens", 0) >= ANSWERED:
            pulled.append(reported)
            break
    assert pulled, "no turn found the answer of the one before"
    assert pulled[0]["pulled_from"].startswith("decode-")
    assert pulled[0]["usage"]["prompt_tokens_details"]["cached_tokens"] > len(prompt_of(0)) + 32
    serving.wait_idle()


def test_an_evicted_prefix_comes_back_from_host_memory(serving: Cluster) -> None:
    """The explanation, health and metrics report the tier, too."""
    tiers: list[dict[str, int]] = []
    for number in range(100, 100 + TRIES):
        # Nobody else has the prefix any more, nor is asked for it: host memory is the nearest.
        first, _ = ask(serving, prompt_of(number, 300), max_tokens=2)
        for other in range(3):
            ask(serving, prompt_of(number + 1000 + other, 300), max_tokens=2)
        again, reported = ask(serving, prompt_of(number, 300), max_tokens=2)
        assert again == first
        tiers.append(reported["cached_tokens"])
        if tiers[-1].get("host", 0) > 100:
            break
    assert tiers[-1].get("host", 0) > 100, tiers
    wait_until(
        lambda: serving.instances("prefill")[0]["host_used_blocks"] > 0, timeout_s=20, what="a report of its load"
    )
    (prefill,) = serving.instances("prefill")
    assert prefill["host_used_blocks"] <= prefill["host_total_blocks"]
    metrics: dict[str, float] = {}

    def has_loaded() -> bool:
        metrics.update(serving.metrics(prefill["http_address"]))
        return metrics["baton:host_loaded_blocks_total"] > 0

    wait_until(has_loaded, timeout_s=20, what="a count of the blocks that came back")
    assert 0 < metrics["vllm:cpu_cache_usage_perc"] <= 1
    serving.wait_idle()


def test_a_source_that_is_killed_while_it_is_asked_fails_nothing(serving: Cluster) -> None:
    """It is frozen first, so that the fetch cannot have ended."""
    (prefill,) = serving.instances("prefill")
    for number in range(200, 200 + TRIES):
        expected, _ = ask(serving, prompt_of(number), cache_salt="s")
        undisturbed, _ = ask(serving, next_turn(number, expected), cache_salt="t")
        _, reported = ask(serving, prompt_of(number))
        found: list[list[int]] = []
        turn = next_turn(number, expected)
        asking = threading.Thread(target=lambda turn=turn, found=found: found.append(ask(serving, turn)[0]))
        pid = next(serving.pid("decode", n) for n, d in enumerate(serving.instances("decode")) if _is(d, reported))
        os.kill(pid, signal.SIGSTOP)
        asking.start()
        try:
            wait_until(
                lambda found=found: found or _requests(prefill["http_address"]) > 0,  # type: ignore[misc]
                timeout_s=20,
                what="a prefill at work",
            )
        finally:
            os.kill(pid, signal.SIGKILL)
        asking.join(60)
        assert found == [undisturbed]
        serving.wait_idle()
        if serving.metrics(prefill["http_address"]).get("baton:transfer_errors_total"):
            return
        wait_until(lambda: len(serving.instances("decode")) == 2, timeout_s=60, what="its successor")
    raise AssertionError("nobody asked the instance that was killed")


def _is(instance: dict[str, Any], reported: dict[str, Any]) -> bool:
    return bool(instance["instance"] == reported["decode"])


def _requests(address: str) -> int:
    return int(httpx.get(f"http://{address}/health").json()["requests"])
