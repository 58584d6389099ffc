"""Bad input gets a clear error that names the cause, and the process lives; at start it exits with one line."""

import json
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cluster import ROOT, Cluster, baton, environment, run_baton

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model_name(cluster: Cluster) -> str:
    return str(cluster.client.get("/v1/models").json()["data"][0]["id"])


@pytest.mark.parametrize(
    ("body", "status", "named"),
    [
        pytest.param("{not json", 400, "JSON", id="malformed JSON"),
        pytest.param([1, 2], 400, "", id="not an object"),
        pytest.param({"prompt": 5}, 400, "prompt", id="wrong type"),
        pytest.param({"prompt": "a", "max_tokens": -1}, 400, "max_tokens", id="negative max_tokens"),
        pytest.param({"prompt": "a", "temperature": "hot"}, 400, "temperature", id="wrong type of a number"),
        pytest.param({"prompt": "a", "temperature": -1}, 400, "temperature", id="out of range"),
        pytest.param({"prompt": "a", "top_p": 0}, 400, "top_p", id="top_p of zero"),
        pytest.param({"prompt": "a", "n": 0}, 400, "n", id="no sequence"),
        pytest.param({"prompt": "a", "model": "other"}, 404, "other", id="unknown model"),
        pytest.param({"prompt": "a", "suffix": "b"}, 400, "suffix", id="unsupported parameter"),
        pytest.param({"prompt": [9_999_999]}, 400, "9999999", id="a token that the vocabulary lacks"),
        pytest.param({"prompt": "word " * 20_000}, 400, "tokens", id="longer than the context"),
        pytest.param({"prompt": "x" * 10_000_000}, 413, "bytes", id="ten megabytes"),
    ],
)
def test_a_bad_request_is_answered_clearly(cluster: Cluster, body: Any, status: int, named: str) -> None:
    content = body if isinstance(body, str) else json.dumps(body)
    answer = cluster.client.post(
        "/v1/completions", content=content.encode(), headers={"content-type": "application/json"}
    )
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert named in error["message"]
    assert {"message", "type", "param", "code"} <= error.keys()
    assert "Traceback" not in answer.text


HUGE = 10**30
UNSENDABLE: list[tuple[str, dict[str, Any]]] = [
    *[
        ("/v1/completions", {"prompt": "a", name: HUGE})
        for name in ("priority", "top_k", "seed", "truncate_prompt_tokens")
    ],
    *[("/v1/completions", {"prompt": "a", "priority": -HUGE, "stream": True}) for _ in range(3)],
    ("/v1/completions", {"prompt": "a", "logit_bias": {5000 * "9": 1}}),
    ("/v1/completions", {"prompt": [HUGE]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "priority": HUGE}),
    ("/v1/responses", {"input": "a", "priority": HUGE}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4, "top_k": HUGE}),
]


def test_integers_that_no_message_can_carry_leave_the_router_as_it_was(cluster: Cluster, model_name: str) -> None:
    """Three of them once held their share of an instance for ever, and kept others from being notified."""
    prompt: dict[str, Any] = {"prompt": "hello", "model": model_name, "max_tokens": 6, "ignore_eos": True}
    expected = cluster.complete(**prompt, seed=1)["choices"][0]["text"]
    for path, body in UNSENDABLE:
        answer = cluster.client.post(path, json=body)
        assert answer.status_code == 400 and "server_error" not in answer.text, f"{path} {body}: {answer.text}"
    health = cluster.health()
    assert health["status"] == "ok" and health["requests_in_flight"] == 0 and not health["unreached"]
    for _ in range(4):
        events = list(cluster.stream("/v1/completions", {**prompt, "seed": 1}))
        assert "".join(event["choices"][0]["text"] for event in events if event["choices"]) == expected
    cluster.wait_idle()
    assert "Traceback" not in cluster.log()


def test_the_cluster_still_serves_after_all_of_it(cluster: Cluster, model_name: str) -> None:
    assert cluster.complete("hello", model=model_name, max_tokens=3, ignore_eos=True)["usage"]["completion_tokens"] == 3


def fails_at_start(*args: str) -> str:
    """Runs until it ends by itself; returns what it said on stderr."""
    ended = run_baton(*args, timeout_s=90.0)
    assert ended.returncode != 0
    assert "Traceback" not in ended.stderr, ended.stderr
    return ended.stderr.strip()


def test_an_unknown_flag_is_named_with_the_nearest(llama: Path) -> None:
    said = fails_at_start("prefill", "--model", str(llama), "--max-num-seq5", "4")
    assert "--max-num-seq5" in said and "--max-num-seqs" in said and len(said.splitlines()) == 1


def test_a_bad_value_is_named(llama: Path) -> None:
    said = fails_at_start("serve", str(llama), "--device", "tpu")
    assert "tpu" in said and "xpu" in said and len(said.splitlines()) == 1


@pytest.mark.parametrize("command", [["serve"], ["decode", "--model", "MODEL"], ["prefill", "--model", "MODEL"]])
def test_a_transport_that_cannot_join_two_processes_is_refused_at_start(command: list[str], llama: Path) -> None:
    command = [str(llama) if word == "MODEL" else word for word in command]
    said = fails_at_start(*command, "--kv-transport", "memory")
    assert "memory" in said and "usm" in said and "unified" in said and len(said.splitlines()) == 1


def test_an_unknown_variable_is_named(llama: Path) -> None:
    ended = subprocess.run(
        baton("router", "--model", str(llama)),
        cwd=ROOT,
        env=environment() | {"BATON__ROUTER__PROT": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode != 0
    assert "BATON__ROUTER__PROT" in ended.stderr and len(ended.stderr.strip().splitlines()) == 1


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    said = fails_at_start("serve", str(tmp_path), "--device", "cpu", "--port", "0")
    assert "config.json" in said or str(tmp_path) in said


def test_a_broken_model_folder_is_named(tmp_path: Path, llama: Path) -> None:
    for file in llama.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes()[: 2000 if file.suffix == ".safetensors" else None])
    said = fails_at_start("serve", str(tmp_path), "--device", "cpu", "--port", "0")
    assert "model.safetensors" in said


def test_a_port_in_use_is_named(llama: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert port in fails_at_start("serve", str(llama), "--device", "cpu", "--port", port)


def test_a_context_that_cannot_fit_names_the_largest_that_would(llama: Path) -> None:
    said = fails_at_start(
        "serve",
        str(llama),
        "--device",
        "cpu",
        "--port",
        "0",
        "--num-gpu-blocks-override",
        "4",
        "--max-model-len",
        "512",
    )
    assert "64" in said and "512" in said
