"""The checks and ratios of `baton-bench batch`."""

import json

import pytest

from baton_serve.bench.serving.batch import LINE_TOKENS, BatchReport, LiveOutcomes, num_wrong, rows
from baton_serve.bench.serving.load_client import RequestOutcome


def line(number: int, tokens: int = LINE_TOKENS) -> bytes:
    body = {"usage": {"completion_tokens": tokens}} if tokens else {"error": {}}
    return json.dumps({"custom_id": f"line-{number}", "response": {"body": body}}).encode() + b"\n"


def test_a_line_counts_once_answered_and_complete() -> None:
    assert num_wrong(line(1) + line(0), 2) == 0
    assert num_wrong(line(0), 2) == 1
    assert num_wrong(line(0) + line(0) + line(1), 2) == 1
    assert num_wrong(line(0) + line(1, tokens=3), 2) == 1
    assert num_wrong(line(0, tokens=0), 1) == 1


def outcome(ttft_s: float, error: str | None = None) -> RequestOutcome:
    return RequestOutcome(ttft_s=ttft_s, itls_s=[0.01, 0.02], error=error)


def test_times_beside_a_batch_stand_beside_those_without() -> None:
    live = LiveOutcomes([outcome(0.1)] * 9, [outcome(0.1)] * 8 + [outcome(0.3)])
    found = {row.case: row for row in rows(live, BatchReport(0, 7.5), BatchReport(2))}
    slowest = found["live p99 TTFT beside a batch"]
    assert slowest.peer_value == pytest.approx(100) and slowest.ratio == pytest.approx(2.84)
    assert slowest.limit == pytest.approx(110)
    assert found["live median TTFT beside a batch"].ratio == pytest.approx(1)
    assert found["lines of the batch beside live clients"].value == 7.5
    assert found["the same, decode worker and router killed"].value == 2


def test_a_failed_live_request_ends_the_measurement() -> None:
    live = LiveOutcomes([outcome(0.1)], [outcome(0.0, error="503")])
    with pytest.raises(SystemExit, match="a live request failed: 503"):
        list(rows(live, BatchReport(0), None))
