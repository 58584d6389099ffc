"""Instances are taken out of service and restarted while clients stream, without any effect on the clients."""

import secrets
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.cluster import Cluster, run_baton, wait_until
from tests.e2e.test_faults import BODY, FLAGS, stream_in_thread, text_of, wait_for_a_writer

pytestmark = pytest.mark.slow


def test_rotating_all_pools_fails_no_request(llama: Path, tmp_path: Path) -> None:
    """Traffic between processes is encrypted."""
    (tmp_path / "key").write_text(secrets.token_hex(32))
    flags = (
        *FLAGS,
        "--kv-transport",
        "zeromq",
        "--kv-zeromq-connections",
        "2",
        "--cluster-key-file",
        str(tmp_path / "key"),
    )
    with Cluster(llama, prefill=2, decode=2, args=flags) as cluster:
        expected = cluster.complete(**BODY)["choices"][0]["text"]
        before = {i["instance"]: i["generation"] for i in cluster.instances()}
        answers: list[str] = []
        over = threading.Event()

        def keep_asking() -> None:
            with httpx.Client(base_url=cluster.url, timeout=120.0) as client:
                while not over.is_set():
                    answer = client.post("/v1/completions", json=BODY)
                    answers.append(answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.text)

        threads = [threading.Thread(target=keep_asking) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            rotated = run_baton("rotate", "all", "--url", cluster.url)
        finally:
            over.set()
            for thread in threads:
                thread.join(60)
        assert rotated.returncode == 0, rotated.stderr
        assert "4 instances were replaced" in rotated.stdout
        after = {i["instance"]: i["generation"] for i in cluster.instances()}
        assert after.keys() == before.keys()
        assert not set(after.values()) & set(before.values())
        assert len(answers) > 3 and set(answers) == {expected}
        cluster.wait_idle()


def test_a_stream_that_outlives_the_drain_is_handed_over(llama: Path) -> None:
    with Cluster(llama, decode=2, args=(*FLAGS, "--drain-timeout-s", "0.2")) as cluster:
        body: dict[str, Any] = BODY | {"max_tokens": 2500}
        undisturbed = text_of(list(cluster.stream("/v1/completions", body)))
        thread, chunks, errors = stream_in_thread(cluster, body)
        writer = cluster.instances("decode")[wait_for_a_writer(cluster, thread, chunks)]
        drained = run_baton("drain", writer["http_address"], "--no-exit")
        assert drained.returncode == 0, drained.stderr
        assert httpx.get(f"http://{writer['http_address']}/health").json()["status"] == "drained"
        thread.join(60)
        assert not thread.is_alive() and not errors
        assert text_of(chunks) == undisturbed
        seen = {i["instance"]: i["draining"] for i in cluster.instances("decode")}
        assert seen[writer["instance"]] and sum(seen.values()) == 1
        assert run_baton("drain", writer["http_address"]).returncode == 0

        def is_back() -> bool:
            return [i["draining"] for i in cluster.instances("decode")] == [False, False]

        wait_until(is_back, timeout_s=60, what="the restarted instance")


def test_a_pool_of_one_keeps_requests_waiting_while_it_restarts(llama: Path) -> None:
    with Cluster(llama, args=(*FLAGS, "--instance-wait-s", "60", "--decode-fallback", "fail")) as cluster:
        expected = cluster.complete(**BODY)["choices"][0]["text"]
        (decode,) = cluster.instances("decode")
        assert run_baton("drain", decode["http_address"]).returncode == 0
        assert cluster.complete(**BODY)["choices"][0]["text"] == expected


def test_only_an_instance_can_be_drained_and_errors_are_one_line(llama: Path) -> None:
    refused = run_baton("drain", "127.0.0.1:1")
    assert refused.returncode == 1
    assert refused.stderr.count("\n") == 1 and "does not answer" in refused.stderr
    wrong = run_baton("rotate", "decode", "--registry", "memory://127.0.0.1:1")
    assert wrong.returncode == 2 and "give the router as --url" in wrong.stderr


def test_an_instance_that_leaves_hands_its_hot_blocks_on(llama: Path) -> None:
    """To another one of its pool, which then finds the prefix in its own cache."""
    prompt = [7 + (13 * i) % 200 for i in range(300)]
    with Cluster(llama, prefill=2, args=(*FLAGS, "--kv-pull", "never")) as cluster:

        def ask() -> dict[str, Any]:
            body = {"prompt": prompt, "max_tokens": 8, "temperature": 0}
            answer = cluster.client.post("/v1/completions", json=body, headers={"x-baton-explain": "1"}).json()
            return {**answer["baton"], "text": answer["choices"][0]["text"]}

        first = ask()
        before = {i["instance"]: i["http_address"] for i in cluster.instances("prefill")}
        httpx.post(f"http://{before.pop(first['prefill'])}/admin/drain?exit=0").raise_for_status()
        ((heir, address),) = before.items()
        wait_until(lambda: "fetched KV blocks of a draining instance" in cluster.log(), timeout_s=20, what="an heir")
        assert cluster.metrics(address)["baton:kv_bytes_total"] > 0
        again = ask()
        assert (again["prefill"], again["text"]) == (heir, first["text"])
        assert again["cached_tokens"]["device"] >= 288
