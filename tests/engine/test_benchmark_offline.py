"""`baton-bench latency`, `throughput` and `accuracy` with the bundled model, and the flags that they share."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from baton_serve.bench.offline import accuracy, latency, throughput
from baton_serve.bench.offline.engine_flags import add_engine_flags, engine_arguments
from baton_serve.bench.offline.tasks import AccuracyTask, allowed_mistakes, exact_match, make_tasks
from baton_serve.bench.report import Row
from baton_serve.engine import ConfigError

SMALL = ["--device", "cpu", "--dtype", "float32", "--kv-cache-bytes", str(24 << 20), "--max-num-seqs", "8"]


def arguments_of(*flags: str) -> dict[str, Any]:
    made = argparse.ArgumentParser()
    add_engine_flags(made)
    return engine_arguments(made.parse_args(flags))


def test_flags_become_the_arguments_of_llm_and_unset_ones_none() -> None:
    assert arguments_of() == {}
    assert arguments_of("-tp", "2", "--dtype", "half", "--gpu-memory-util", "0.8", "--no-enable-prefix-caching") == {
        "tensor_parallel_size": 2,
        "dtype": "half",
        "gpu_memory_utilization": 0.8,
        "enable_prefix_caching": False,
    }
    assert arguments_of("--load-in-low-bit", "fp8", "--swap-space", "4", "--trust-remote-code", "-q", "AWQ") == {
        "load_in_low_bit": "fp8",
        "swap_space": 4.0,
        "trust_remote_code": True,
        "quantization": "AWQ",
    }
    assert arguments_of("--quantization-skip", "a", "b") == {"quantization_skip": ("a", "b")}


def test_latency_has_the_output_of_vllm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new" / "latency.json"
    flags = ["--input_len", "9", "--output-len", "3", "--batch-size", "2", "--n", "2", "--num-iters-warmup", "0"]
    latency.run([*SMALL, *flags, "--num-iters", "3", "--output-json", str(path)])
    printed = capsys.readouterr().out
    assert "Avg latency: " in printed and "99% percentile latency: " in printed
    found = json.loads(path.read_text())
    assert set(found) == {"avg_latency", "std_latency", "latencies", "percentiles"}
    assert len(found["latencies"]) == 3 and list(found["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert min(found["latencies"]) <= found["percentiles"]["50"] <= max(found["latencies"])


def test_latency_may_search_with_beams(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--input-len", "5", "--output-len", "2", "--batch-size", "1", "--n", "2", "--num-iters-warmup", "0"]
    latency.run([*SMALL, *flags, "--num-iters", "1", "--use-beam-search"])
    assert "Avg latency: " in capsys.readouterr().out


@pytest.mark.parametrize("backend", ["vllm", "vllm-chat"])
def test_throughput_counts_the_tokens_of_prompts_and_answers(
    backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "throughput.json"
    flags = ["--dataset-name", "random", "--input-len", "12", "--output-len", "3", "--num-prompts", "4", "--n", "2"]
    throughput.run([*SMALL, *flags, "--backend", backend, "--output-json", str(path)])
    printed = capsys.readouterr().out
    assert "Throughput: " in printed and "Total num output tokens:  24" in printed
    found = json.loads(path.read_text())
    assert found["num_requests"] == 4 and found["total_num_tokens"] >= 4 * 12 + 24
    assert found["requests_per_second"] == pytest.approx(4 / found["elapsed_time"])


def test_throughput_reads_sharegpt_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "share.json"
    turns = [{"value": "What is the code of the blue box?"}, {"value": "I cannot find it in the text."}]
    path.write_text(json.dumps([{"conversations": turns}]))
    throughput.run([*SMALL, "--dataset", str(path), "--num-prompts", "2", "--output-len", "5"])
    assert "Total num output tokens:  10" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--dataset-name", "sharegpt"], "needs --dataset FILE"),
        (["--dataset-name", "random", "--dataset", "x"], "has no file"),
        (["--num-prompts", "0"], "must be at least 1"),
    ],
)
def test_throughput_refuses_flags_that_contradict_each_other(
    flags: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        throughput.run(flags)
    assert reason in capsys.readouterr().err


def test_an_argument_that_the_engine_does_not_support_is_an_error() -> None:
    with pytest.raises(ConfigError, match="data_parallel_size=2 is not supported"):
        latency.run([*SMALL, "-dp", "2"])


def test_tasks_are_the_same_every_time_and_state_their_answers() -> None:
    tasks = make_tasks(40, seed=1)
    assert tasks == make_tasks(40, seed=1) != make_tasks(40, seed=2)
    assert len({task.question for task in tasks}) == 40
    assert all(task.answer in task.question for task in tasks[::2])
    for task in tasks[1::2]:
        first, second = task.question.removeprefix("What is ").removesuffix("?").split(" + ")
        assert int(first) + int(second) == int(task.answer)


def test_the_last_number_of_an_answer_counts() -> None:
    task = AccuracyTask("What is 20 + 22?", "42")
    answers = ["20 + 22 = 42.", "42", "20 + 22 = 43.", "no number"]
    assert [exact_match([task], [answer]) for answer in answers] == [1.0, 1.0, 0.0, 0.0]


def test_the_gate_allows_what_chance_explains_and_no_more() -> None:
    assert 1 <= allowed_mistakes(200, 1.0) <= 6
    assert 20 < allowed_mistakes(200, 0.9) < 40
    assert allowed_mistakes(10, 0.0) == 10
    assert accuracy.is_enough(Row("accuracy", "x", 0.985, "", limit=1.0), 200)
    assert not accuracy.is_enough(Row("accuracy", "x", 0.95, "", limit=1.0), 200)


def test_each_format_of_the_bundled_model_has_a_reference() -> None:
    assert set(accuracy.REFERENCES) == set(accuracy.FORMATS)
    assert accuracy.REFERENCES["float32"] > 0.98


@pytest.mark.parametrize("name", ["float32", "fp8", "kv fp8_e4m3"])
def test_answers_of_the_bundled_model_pass_the_gate(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    accuracy.run(["--device", "cpu", "--tasks", "12", "--formats", name, "--json"])
    row = json.loads(capsys.readouterr().out)
    assert (row["bench"], row["case"]) == ("accuracy", name) and row["value"] >= 0.8


def test_a_model_below_its_reference_ends_with_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(tasks: list[AccuracyTask], *_: object) -> list[str]:
        return ["The code is 0." for _ in tasks]

    monkeypatch.setattr(accuracy, "ask_model", wrong)
    with pytest.raises(SystemExit, match=r"float32 has 0\.000, the reference is"):
        accuracy.run(["--tasks", "20", "--formats", "float32"])
    capsys.readouterr()


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--base-url", "http://127.0.0.1:1"], "--reference is needed"),
        (["--model", "/other"], "--reference is needed"),
        (["--base-url", "http://127.0.0.1:1", "--reference", "0.9", "--formats", "fp8"], "exclude each other"),
        (["--reference", "1.5"], "from 0 to 1"),
    ],
)
def test_accuracy_refuses_flags_that_contradict_each_other(
    flags: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        accuracy.run(flags)
    assert reason in capsys.readouterr().err
