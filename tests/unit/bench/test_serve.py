"""`baton-bench serve`: the flags of `vllm bench serve`, its report and its result file, against a fake server."""

import base64
import json
from collections import Counter
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from baton_serve.bench.offline import accuracy
from baton_serve.bench.serving import serve_options
from baton_serve.bench.serving.load_client import percentile
from baton_serve.bench.serving.serve import run
from tests.unit.bench.completions_server import serving

SHORT = ["--random-input-len", "5", "--random-output-len", "3", "--num-prompts", "6"]


def test_the_commands_of_intels_documents_are_parsed() -> None:
    first = (
        "--model /llm/models/Qwen --dataset-name random --trust_remote_code --ignore-eos --num-prompt 10 "
        "--random-input-len=1024 --random-output-len=512 --request-rate inf --backend vllm --host 0.0.0.0 --port 8005"
    )
    second = "--ready-check-timeout-sec 1 --max-concurrency 16 --num-prompt 1 --disable-tqdm --percentile-metrics ttft"
    options = serve_options.parse(first.split())
    assert (options.num_prompts, options.random_output_len, options.backend) == (10, 512, "vllm")
    assert options.base_url == "http://0.0.0.0:8005"
    options = serve_options.parse(second.split())
    assert (options.ready_check_timeout_sec, options.max_concurrency, options.num_prompts) == (1, 16, 1)
    assert options.percentile_metrics == ("ttft",)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--dataset-name", "sonnet"], "sonnet is not available; convert it to JSON lines"),
        (["--dataset-name", "alpaca"], "alpaca is unknown; choose from random"),
        (["--dataset-name", "sharegpt"], "needs --dataset-path"),
        (["--dataset-path", "x.json"], "random has no file"),
        (["--dataset-name", "random-mm"], "add --backend openai-chat"),
        (["--random-mm-bucket-config", "{(9, 9, 16): 1}"], "must name images (1 frame)"),
        (["--random-mm-bucket-config", "{(9, 9): 1}"], "has not the form"),
        (["--endpoint", "/v1/completions", "--backend", "openai-chat"], "does not fit --backend openai-chat"),
        (["--goodput", "itl:5"], "choose ttft, tpot or e2el"),
        (["--goodput", "ttft"], "METRIC:MILLISECONDS"),
        (["--percentile-metrics", "ttft,foo"], "unknown metric 'foo'"),
        (["--metric-percentiles", "50,101"], "outside 0 to 100"),
        (["--max-concurrency", "0"], "at least 1"),
        (["--request-rate", "0"], "above 0"),
        (["--extra-body", "[1]"], "not a JSON object"),
        (["--header", "novalue"], "KEY=VALUE"),
        (["--ramp-up-strategy", "linear"], "needs --ramp-up-start-rps"),
    ],
)
def test_a_wrong_flag_is_refused_with_its_remedy(
    flags: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        serve_options.parse(flags)
    assert stopped.value.code == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("backend", "path"),
    [("vllm", "/v1/completions"), ("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")],
)
def test_the_report_has_the_lines_of_vllm(backend: str, path: str, capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as server:
        host, port = server.url.removeprefix("http://").split(":")
        run(["--backend", backend, "--host", host, "--port", port, "--max-concurrency", "2", *SHORT])
    printed = capsys.readouterr().out
    assert set(server.paths) == {path}
    lines = {line.partition(":")[0]: line.partition(":")[2].strip() for line in printed.splitlines()}
    assert lines["Successful requests"] == "6" and lines["Failed requests"] == "0"
    assert lines["Total input tokens"] == "42" and lines["Total generated tokens"] == "18"
    assert lines["Maximum request concurrency"] == "2"
    for case in (
        "Benchmark duration (s)",
        "Request throughput (req/s)",
        "Output token throughput (tok/s)",
        "Peak output token throughput (tok/s)",
        "Total token throughput (tok/s)",
        *(f"{name} {metric} (ms)" for name in ("Mean", "Median", "P99") for metric in ("TTFT", "TPOT", "ITL")),
    ):
        assert float(lines[case]) >= 0, case
    assert "Serving Benchmark Result" in printed and "Time per Output Token (excl. 1st token)" in printed
    assert "E2EL" not in printed and "goodput" not in printed


def test_each_request_has_what_the_flags_say(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--top-p", "0.9", "--extra-body", '{"min_tokens": 2}', "--header", "x-a=b", "--request-id-prefix", "r-"]
    flags += ["--api-key", "secret", "--logprobs", "1", "--lora-modules", "first", "second", "--seed", "3"]
    with serving() as server:
        run(["--base-url", server.url, "--backend", "openai-chat", *SHORT, *flags])
    capsys.readouterr()
    bodies, heads = server.load(), server.headers[-6:]
    assert len(bodies) == 6
    for body in bodies:
        assert (body["top_p"], body["min_tokens"], body["top_logprobs"], body["temperature"]) == (0.9, 2, 1, 0.0)
        assert body["max_completion_tokens"] == 3 and body["ignore_eos"] is True
    assert Counter(body["model"] for body in bodies) == {"first": 3, "second": 3}
    assert sorted(head["x-request-id"] for head in heads) == [f"r-{number}" for number in range(6)]
    assert all(head["authorization"] == "Bearer secret" and head["x-a"] == "b" for head in heads)


def test_chats_show_images_of_the_sizes_and_numbers_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    """Each is another one, so that no cache has it."""
    flags = ["--dataset-name", "random-mm", "--random-mm-base-items-per-request", "3"]
    flags += ["--random-mm-bucket-config", "{(48, 64, 1): 1.0, (9, 9, 16): 0}"]
    with serving() as server:
        run(["--base-url", server.url, "--backend", "openai-chat", *SHORT, *flags])
    assert "Mean TPOT (ms):" in capsys.readouterr().out
    shown: list[str] = []
    for body in server.load():
        (message,) = body["messages"]
        assert [part["type"] for part in message["content"]] == ["text", *["image_url"] * 3]
        assert body["ignore_eos"] is True
        shown += [part["image_url"]["url"] for part in message["content"][1:]]
    assert len(set(shown)) == len(shown) == 18
    with Image.open(BytesIO(base64.b64decode(shown[0].removeprefix("data:image/jpeg;base64,")))) as image:
        assert (image.width, image.height, image.format) == (64, 48, "JPEG")


def test_embeddings_have_only_the_latency_of_whole_requests(capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as server:
        run(["--base-url", server.url, "--backend", "openai-embeddings", *SHORT])
    printed = capsys.readouterr().out
    assert set(server.paths) == {"/v1/embeddings"} and "input" in server.bodies[0]
    assert "Mean E2EL (ms):" in printed and "TTFT" not in printed


def test_the_result_file_has_the_fields_of_vllm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--save-result", "--result-dir", str(tmp_path / "new"), "--result-filename", "r.json"]
    flags += ["--goodput", "ttft:60000", "tpot:60000", "--metadata", "card=B60", "--metric-percentiles", "50,99.9"]
    with serving() as server:
        run(["--base-url", server.url, *SHORT, *flags])
        run(["--base-url", server.url, *SHORT, *flags, "--append-result", "--save-detailed"])
    plain, detailed = [json.loads(line) for line in (tmp_path / "new" / "r.json").read_text().splitlines()]
    assert "Request goodput (req/s):" in capsys.readouterr().out
    assert plain["request_goodput"] == plain["request_throughput"] > 0
    expected: dict[str, Any] = {
        "backend": "openai",
        "model_id": "served",
        "num_prompts": 6,
        "request_rate": "inf",
        "burstiness": 1.0,
        "max_concurrency": None,
        "card": "B60",
        "completed": 6,
        "failed": 0,
        "total_input_tokens": 42,
        "total_output_tokens": 18,
    }
    assert {name: plain[name] for name in expected} == expected
    assert {"duration", "output_throughput", "total_token_throughput", "std_itl_ms", "p99.9_ttft_ms"} <= set(plain)
    assert "ttfts" not in plain
    assert detailed["generated_texts"] == ["one two three"] * 6 and detailed["output_lens"] == [3] * 6
    assert [len(gaps) for gaps in detailed["itls"]] == [2] * 6


def test_a_server_that_refuses_ends_the_run_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(refuse=503) as server, pytest.raises(SystemExit, match=r"no request succeeded.*503.*refused"):
        run(["--base-url", server.url, *SHORT])
    with serving(refuse=400) as server, pytest.raises(SystemExit, match=r"refused the first request: 400"):
        run(["--base-url", server.url, "--model", "m", "--ready-check-timeout-sec", "60", *SHORT])
    capsys.readouterr()


def test_a_missing_server_ends_the_run_with_the_remedy() -> None:
    with serving() as server:
        closed = server.url
    with pytest.raises(SystemExit, match=r"does not answer .*--ready-check-timeout-sec"):
        run(["--base-url", closed, *SHORT])
    with pytest.raises(SystemExit, match=r"answered no request within 1 s"):
        run(["--base-url", closed, "--ready-check-timeout-sec", "1", *SHORT])


def test_percentiles_are_those_of_numpy() -> None:
    values = [4.0, 1.0, 3.0, 2.0]
    assert [percentile(values, percent) for percent in (0, 50, 99, 100)] == [1.0, 2.5, pytest.approx(3.97), 4.0]
    assert percentile([5.0], 99) == 5.0


def test_accuracy_asks_a_server_for_greedy_chats(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--tasks", "4", "--json"]
    with serving() as server:
        accuracy.run(["--base-url", server.url, "--reference", "0", *flags])
        with pytest.raises(SystemExit, match=r"has 0\.000, the reference is 0\.900"):
            accuracy.run(["--base-url", server.url, "--reference", "0.9", "--tasks", "20"])
    assert json.loads(capsys.readouterr().out.splitlines()[0])["value"] == 0.0
    assert set(server.paths) == {"/v1/chat/completions"}
    assert all(body["temperature"] == 0.0 and "ignore_eos" not in body for body in server.bodies)
    with serving(refuse=500) as server, pytest.raises(SystemExit, match="4 requests failed; the first error was 500"):
        accuracy.run(["--base-url", server.url, "--reference", "0", *flags])
