"""Traces, as they are recorded and scaled."""

from pathlib import Path

import pytest

from baton_serve.bench.serving.traces import TraceError, load_trace
from baton_serve.bench.simulation.run import prompt_tokens
from tests.unit.bench.tiny_trace import conversations

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.6805900,396,109
"""


def shared(left: list[int], right: list[int]) -> int:
    return next((n for n, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def test_azure_lengths_and_times_are_scaled(tmp_path: Path) -> None:
    (tmp_path / "azure.csv").write_text(AZURE)
    trace = load_trace(tmp_path / "azure.csv", length_scale=0.5, time_scale=2.0)
    assert [(r.at_s, r.prompt_tokens, r.output_tokens) for r in trace.requests] == [(0, 187, 22), (8, 198, 54)]
    assert "lengths x 0.5, times x 2" in trace.description()
    assert shared(*(prompt_tokens(trace, n, r) for n, r in enumerate(trace.requests))) == 0


def test_rounded_times_are_spread_and_always_alike(tmp_path: Path) -> None:
    (tmp_path / "azure.csv").write_text(AZURE.replace(":50.", ":46."))
    first, second = load_trace(tmp_path / "azure.csv", spread_s=3.0, time_scale=2.0).requests
    assert 0 <= first.at_s < second.at_s <= 6.0
    assert load_trace(tmp_path / "azure.csv", spread_s=3.0, time_scale=2.0).requests == [first, second]
    assert {r.at_s for r in load_trace(tmp_path / "azure.csv").requests} == {0.0}
    assert "each by up to 3 s" in load_trace(tmp_path / "azure.csv", spread_s=3.0).description()


@pytest.mark.parametrize("scale", [1.0, 0.1])
def test_prompts_share_as_many_tokens_as_hashes(tmp_path: Path, scale: float) -> None:
    trace = conversations(tmp_path, length_scale=scale)
    assert trace.hash_tokens == round(512 * scale)
    prompts = [(r.hashes, prompt_tokens(trace, n, r)) for n, r in enumerate(trace.requests)]
    assert all(len(tokens) == r.prompt_tokens for (_, tokens), r in zip(prompts, trace.requests, strict=True))
    first_hashes, first = prompts[0]
    for hashes, tokens in prompts[1:]:
        equal = shared(list(first_hashes), list(hashes)) * trace.hash_tokens
        assert shared(first, tokens) == min(equal, len(first), len(tokens))


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1, 2]}\n')
    with pytest.raises(TraceError, match=r"bad.jsonl:1: 2 hashes cannot name 5 tokens"):
        load_trace(tmp_path / "bad.jsonl")
    (tmp_path / "bad.csv").write_text("a,b\n1,2\n")
    with pytest.raises(TraceError, match=r"bad.csv:2: expected TIMESTAMP"):
        load_trace(tmp_path / "bad.csv")
    with pytest.raises(TraceError, match="cannot read"):
        load_trace(tmp_path / "none.csv")
