"""An empty decode pool answers: prefill instances generate until a decode instance is back.

That all features give the same answer there is shown in test_features.py.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.adapters import merged, write_adapter
from tests.e2e.cluster import Cluster, wait_until
from tests.e2e.test_equality import expected_tokens, greedy, prompt_of
from tests.e2e.test_faults import FLAGS, stream_in_thread, text_of, wait_for_a_writer

pytestmark = pytest.mark.slow

PROMPT = prompt_of(90)
NUM_TOKENS = 24
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "logprobs": 0, "return_tokens_as_token_ids": True}
STREAM: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 800, "seed": 5, "top_k": 4, "ignore_eos": True}
"""Sums of floats differ in their last bits on the two instances. With few candidates this changes no sampled token."""


@pytest.fixture(scope="module")
def adapter(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(tmp_path_factory.mktemp("adapters") / "poet", llama, rank=4, seed=4)


@pytest.fixture(scope="module")
def running(llama: Path, adapter: Path) -> Iterator[Cluster]:
    flags = ("--enable-lora", "--lora-modules", f"poet={adapter}", "--max-num-seqs", "4")
    with Cluster(llama, args=(*FLAGS, *flags)) as cluster:
        yield cluster


def ask(cluster: Cluster, **body: Any) -> tuple[list[list[int]], dict[str, Any]]:
    """Return the tokens of each choice and the router's explanation."""
    request = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, **GREEDY, **body}
    answer = cluster.client.post("/v1/completions", json=request, headers={"x-baton-explain": "1"})
    assert answer.status_code == 200, answer.text
    chosen = [choice["logprobs"]["tokens"] for choice in answer.json()["choices"]]
    return [[int(t.removeprefix("token_id:")) for t in tokens] for tokens in chosen], answer.json()["baton"]


def steps_of_prefill(cluster: Cluster) -> float:
    (instance,) = cluster.instances("prefill")
    return cluster.metrics(instance["http_address"])["baton:engine_steps_total"]


def num_fallbacks(cluster: Cluster) -> float:
    lines = cluster.client.get("/metrics").text.splitlines()
    found = [line for line in lines if line.startswith("baton:placements_total{") and "prefill_fallback" in line]
    return sum(float(line.rpartition(" ")[2]) for line in found)


def wait_for_decode(cluster: Cluster, size: int) -> None:
    wait_until(lambda: cluster.health()["pools"]["decode"] == size, timeout_s=60, what=f"{size} decode instances")


def check_new_requests(cluster: Cluster, expected: dict[str | None, list[int]]) -> None:
    """Requests are answered by the prefill instance, which metrics and explanations say."""
    steps, placements = steps_of_prefill(cluster), num_fallbacks(cluster)
    assert placements == 1, "the stream that was replayed ended there"
    for model, tokens in expected.items():
        written, baton = ask(cluster, model=model)
        assert written == [tokens]
        assert (baton["decision"], baton["decode"]) == ("prefill_fallback", "prefill-0")
        assert baton.get("prefill") is None
    # More sequences than --max-num-seqs: the others wait on the instance.
    assert ask(cluster, prompt=[PROMPT] * 6)[0] == [expected[None]] * 6
    assert ask(cluster, n=5)[0] == [expected[None]] * 5
    assert steps_of_prefill(cluster) - steps >= 4 * NUM_TOKENS
    assert num_fallbacks(cluster) - placements == 2 + 6 + 1


def test_streams_and_new_requests_go_to_prefill_while_decode_is_away_and_back_after_it(
    running: Cluster, llama: Path, adapter: Path
) -> None:
    expected: dict[str | None, list[int]] = {None: expected_tokens(llama, PROMPT, NUM_TOKENS)}
    expected["poet"] = greedy(merged(llama, adapter), PROMPT, NUM_TOKENS)
    handed_off, baton = ask(running)
    assert handed_off == [expected[None]] and baton["decision"] == "disaggregated"
    undisturbed = text_of(list(running.stream("/v1/completions", STREAM)))
    thread, chunks, errors = stream_in_thread(running, STREAM)
    wait_for_a_writer(running, thread, chunks)
    decode = running.pid("decode")
    # A stopped process is lost after --instance-timeout-s, and it is away for as long as the test needs.
    os.kill(decode, signal.SIGSTOP)
    try:
        thread.join(60)
        assert not thread.is_alive() and not errors
        assert text_of(chunks) == undisturbed
        assert running.metrics()["baton:replays_total"] >= 1
        health = running.client.get("/health")
        assert health.status_code == 200 and health.json()["pools"] == {"prefill": 1, "decode": 0, "unified": 0}
        assert "prefill instances generate" in health.json()["warning"]

        check_new_requests(running, expected)
        with running.client.stream("POST", "/v1/completions", json=STREAM | {"stream": True}) as abandoned:
            next(abandoned.iter_bytes())
        wait_until(lambda: not running.busy(), timeout_s=20, what="blocks that are freed after the client is gone")

        thread, chunks, errors = stream_in_thread(running, STREAM)
        wait_until(lambda: bool(chunks), timeout_s=20, what="a stream on the prefill instance")
    finally:
        os.kill(decode, signal.SIGCONT)
    wait_for_decode(running, 1)
    written, baton = ask(running)
    assert written == [expected[None]]
    assert (baton["decision"], baton["prefill"], baton["decode"]) == ("disaggregated", "prefill-0", "decode-0")
    thread.join(60)
    assert not errors and text_of(chunks) == undisturbed
    assert running.health()["warning"] is None
    running.wait_idle()


def test_a_killed_decode_instance_costs_no_stream_and_its_successor_takes_new_requests(running: Cluster) -> None:
    undisturbed = text_of(list(running.stream("/v1/completions", STREAM)))
    thread, chunks, errors = stream_in_thread(running, STREAM)
    wait_for_a_writer(running, thread, chunks)
    (before,) = running.instances("decode")
    os.kill(running.pid("decode"), signal.SIGKILL)
    first, _ = ask(running)
    thread.join(60)
    assert not thread.is_alive() and not errors
    assert text_of(chunks) == undisturbed

    def is_back() -> bool:
        return any(i["generation"] != before["generation"] for i in running.instances("decode"))

    wait_until(is_back, timeout_s=60, what="a restarted decode instance")
    again, baton = ask(running)
    assert again == first and baton["decision"] == "disaggregated"
    running.wait_idle()
