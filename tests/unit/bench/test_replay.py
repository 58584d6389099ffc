"""Requests of `baton-bench replay`, and its report of the answers."""

from pathlib import Path

import pytest

from baton_serve.bench.serving.load_client import RequestOutcome
from baton_serve.bench.serving.replay import hit_rate_of, parse_counters, run
from baton_serve.bench.serving.traces import Trace, TraceRequest
from baton_serve.bench.serving.workload import trace_requests
from tests.unit.bench.tiny_trace import conversations, write_conversations


def shared(left: list[int] | str, right: list[int] | str) -> int:
    return next((n for n, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


@pytest.mark.parametrize("scale", [1.0, 0.1])
def test_prompts_share_prefixes_as_the_hashes_do(tmp_path: Path, scale: float) -> None:
    trace = conversations(tmp_path, length_scale=scale)
    assert trace.hash_tokens is not None
    as_ids = [r.prompt for r in trace_requests(trace, seed=1, token_ids=(1000, 9000))]
    as_words = [str(r.prompt).split() for r in trace_requests(trace, seed=1)]
    for prompts in (as_ids, as_words):
        assert [len(p) for p in prompts] == [r.prompt_tokens for r in trace.requests]
        for request, prompt in zip(trace.requests[1:], prompts[1:], strict=True):
            whole = shared(list(request.hashes), list(trace.requests[0].hashes)) * trace.hash_tokens
            equal = shared(prompt, prompts[0])  # type: ignore[arg-type]
            assert whole <= equal < whole + 6 or equal == min(len(prompt), len(prompts[0]))
    assert all(1000 <= token < 9000 for prompt in as_ids for token in prompt)  # type: ignore[operator]


def test_prompts_are_the_same_every_time_and_another_seed_gives_others() -> None:
    trace = Trace("two", [TraceRequest(0.0, 100, 5), TraceRequest(1.0, 100, 5)], 1.0, 1.0)
    first, second = trace_requests(trace, seed=1)
    assert first.prompt != second.prompt
    assert trace_requests(trace, seed=1)[1].prompt == second.prompt
    assert trace_requests(trace, seed=2)[1].prompt != second.prompt


def test_the_hit_rate_is_the_one_that_the_server_reports() -> None:
    reported = [RequestOutcome(prompt_tokens=100, cached_tokens=40), RequestOutcome(prompt_tokens=100, cached_tokens=0)]
    assert hit_rate_of(reported, {}, {}) == 0.2
    silent = [RequestOutcome(prompt_tokens=100)]
    before = parse_counters(
        '# HELP x\nvllm:prefix_cache_hits_total{engine="0"} 5.0\nvllm:prefix_cache_queries_total 10'
    )
    after = parse_counters(
        'vllm:prefix_cache_hits_total{engine="0"} 10.0\nvllm:prefix_cache_hits_total{engine="1"} 5.0\n'
        "vllm:prefix_cache_queries_total 50"
    )
    assert hit_rate_of(silent, before, after) == 0.25
    assert hit_rate_of(silent, {}, {}) is None


def test_simulated_instances_give_the_report_of_serve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_conversations(tmp_path / "trace.jsonl")
    run(["--trace", str(path), "--simulate", "--prefill", "1", "--decode", "1", "--length-scale", "0.5", "--json"])
    printed = capsys.readouterr().out
    for case in ("Time scale", "Length scale", "Mean TTFT", "P99 ITL", "Request goodput", "Prefix block hit rate"):
        assert f'"{case}"' in printed


def test_simulated_instances_need_pools(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_conversations(tmp_path / "trace.jsonl")
    with pytest.raises(SystemExit):
        run(["--trace", str(path), "--simulate"])
    assert "no instance could generate tokens" in capsys.readouterr().err
