"""`kill -9` where it hurts: the request ends within its deadline, nothing leaks, the next request is served."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from baton_serve.services.local.cluster_supervisor import MODULE
from baton_serve.services.local.launches import ProgramLauncher
from tests.e2e.cluster import Api, Cluster, wait_until

pytestmark = pytest.mark.slow
FLAGS = ("--dtype", "float32", "--disaggregation-min-tokens", "0")
LONG = [7 + (13 * i) % 200 for i in range(400)]
VERY_LONG = [7 + (13 * i + i * i) % 200 for i in range(3500)]
BODY: dict[str, Any] = {"prompt": LONG, "max_tokens": 60, "temperature": 0, "ignore_eos": True}


def text_of(chunks: list[dict[str, Any]]) -> str:
    return "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk.get("choices"))


def stream_in_thread(cluster: Api, body: dict[str, Any]) -> tuple[threading.Thread, list[dict[str, Any]], list[str]]:
    chunks: list[dict[str, Any]] = []
    errors: list[str] = []

    def read() -> None:
        try:
            chunks.extend(cluster.stream("/v1/completions", body))
        except AssertionError as error:
            errors.append(str(error))

    thread = threading.Thread(target=read)
    thread.start()
    return thread, chunks, errors


def wait_for_a_writer(cluster: Cluster, thread: threading.Thread, chunks: list[dict[str, Any]]) -> int:
    """Index of the decode instance that writes the stream which `thread` reads."""
    addresses = [i["http_address"] for i in cluster.instances("decode")]
    running: list[int] = []

    def one_writes() -> bool:
        running[:] = [n for n, a in enumerate(addresses) if cluster.metrics(a)["vllm:num_requests_running"]]
        return bool(running and chunks) or not thread.is_alive()

    wait_until(one_writes, timeout_s=20, what="a decode that writes")
    assert running, "the stream ended before its decode instance could be disturbed"
    return running[0]


@pytest.mark.parametrize("transport", ["usm", "zeromq"])
def test_prefill_killed_during_a_handoff(llama: Path, transport: str) -> None:
    """Chunks of 16 tokens make the handoff long; prefill dies in the middle of it."""
    flags = (*FLAGS, "--kv-transport", transport, "--max-num-batched-tokens", "16")
    with Cluster(llama, prefill=2, args=flags) as cluster:
        body = BODY | {"prompt": VERY_LONG}
        pids = {i["instance"]: cluster.pid("prefill", n) for n, i in enumerate(cluster.instances("prefill"))}
        addresses = {i["instance"]: i["http_address"] for i in cluster.instances("prefill")}
        thread, chunks, errors = stream_in_thread(cluster, body)
        busy: list[str] = []

        def one_is_busy() -> bool:
            busy[:] = [n for n, a in addresses.items() if cluster.metrics(a)["vllm:num_requests_running"]]
            return bool(busy) or not thread.is_alive()

        wait_until(one_is_busy, timeout_s=20, what="a prefill that computes")
        assert busy, f"the request ended before prefill could be killed: {errors}"
        os.kill(pids[busy[0]], signal.SIGKILL)
        thread.join(60)
        assert not thread.is_alive()
        assert not errors
        assert text_of(chunks) == text_of(list(cluster.stream("/v1/completions", body)))
        cluster.wait_idle()


def test_decode_killed_mid_stream_is_replayed(llama: Path) -> None:
    """The client sees one unbroken stream, equal to the undisturbed one, at temperature 1 as well."""
    with Cluster(llama, decode=2, args=FLAGS) as cluster:
        body = BODY | {"temperature": 1.0, "seed": 5, "max_tokens": 800}
        undisturbed = text_of(list(cluster.stream("/v1/completions", body)))
        pids = [cluster.pid("decode", n) for n in range(2)]
        thread, chunks, errors = stream_in_thread(cluster, body)
        os.kill(pids[wait_for_a_writer(cluster, thread, chunks)], signal.SIGKILL)
        thread.join(60)
        assert not thread.is_alive() and not errors
        assert text_of(chunks) == undisturbed
        cluster.wait_idle()
        assert cluster.metrics()["baton:replays_total"] >= 1


def test_the_only_prefill_dies_and_comes_back(llama: Path) -> None:
    """With only one prefill instance, the request either ends with a clear error or is served elsewhere; the instance
    is restarted."""
    with Cluster(llama, args=(*FLAGS, "--max-num-batched-tokens", "16")) as cluster:
        (before,) = cluster.instances("prefill")
        os.kill(cluster.pid("prefill"), signal.SIGKILL)
        started = time.monotonic()
        answer = cluster.client.post("/v1/completions", json=BODY)
        assert time.monotonic() - started < 60
        assert answer.status_code in (200, 503), answer.text

        def restarted() -> bool:
            return any(i["generation"] != before["generation"] for i in cluster.instances("prefill"))

        wait_until(restarted, timeout_s=60, what="a restarted prefill instance")
        assert len(cluster.complete(**BODY)["choices"][0]["text"]) > 0
        cluster.wait_idle()


def test_a_frozen_decode_does_not_hold_a_stream_for_ever(llama: Path) -> None:
    with Cluster(llama, decode=2, args=FLAGS) as cluster:
        body = BODY | {"max_tokens": 800}
        undisturbed = text_of(list(cluster.stream("/v1/completions", body)))
        pids = [cluster.pid("decode", n) for n in range(2)]
        thread, chunks, errors = stream_in_thread(cluster, body)
        running = wait_for_a_writer(cluster, thread, chunks)
        os.kill(pids[running], signal.SIGSTOP)
        try:
            thread.join(60)
            assert not thread.is_alive() and not errors
            assert text_of(chunks) == undisturbed
        finally:
            os.kill(pids[running], signal.SIGCONT)
        cluster.wait_idle()


def test_ending_the_cluster_ends_every_process(llama: Path) -> None:
    """A cluster that is started by the command."""
    with Cluster(llama, args=FLAGS, launch=ProgramLauncher(MODULE)) as cluster:
        pids = [cluster.pid("prefill"), cluster.pid("decode")]
        assert cluster.stop() == 0
        assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
