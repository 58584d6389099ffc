"""docs/performance.md shows the results in baton_serve/bench/results, and their commands can be run."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from baton_serve.bench.cli import BENCHES
from tools import performance_page
from tools.performance_page import RESULTS, Row

BENCH = performance_page.ROOT / "baton_serve" / "bench"


def result(**changes: Any) -> dict[str, Any]:
    row = {"case": "batch 1", "value": 4.0, "unit": "ms", "limit": 3.0, "peer": 5.0, "peer_name": "another engine"}
    return {
        "question": "engine_gpu",
        "title": "A model",
        "date": "2026-11-23",
        "commit": "0123abc",
        "machine": "one card",
        "command": "baton-bench engine",
        "rows": [{**row, **changes.pop("row", {})}],
        **changes,
    }


def write(folder: Path, content: dict[str, Any]) -> Path:
    path = folder / "engine-gpu-card.json"
    path.write_text(json.dumps(content))
    return folder


def test_the_page_is_what_the_results_make_of_it() -> None:
    made = performance_page.build(performance_page.load(RESULTS))
    assert performance_page.PAGE.read_text() == made, "run python -m tools.performance_page"


def test_every_question_has_a_result() -> None:
    assert {found.question for found in performance_page.load(RESULTS)} == set(performance_page.QUESTIONS)


def test_every_command_calls_a_benchmark_with_flags_that_exist() -> None:
    sources = "".join(path.read_text() for path in BENCH.rglob("*.py"))
    known = set(re.findall(r'"--([a-z][a-z0-9-]*)"', sources))
    for found in performance_page.load(RESULTS):
        program, name, *_ = found.command.split()
        assert (program, name in BENCHES) == ("baton-bench", True), found.command
        own = re.sub(r'"[^"]*"', "", found.command).partition("--baton-args ")[0]  # without flags of other programs
        assert set(re.findall(r"(?<= --)[a-z][a-z0-9-]*", own)) <= known, found.command


@pytest.mark.parametrize(
    ("unit", "of_limit", "times_peer"), [("ms", "0.75", "1.25"), ("tok/s", "1.33", "0.80")], ids=["time", "rate"]
)
def test_less_time_and_a_higher_rate_count_as_better(unit: str, of_limit: str, times_peer: str) -> None:
    row = Row("batch 1", 4.0, unit, limit=3.0, peer=5.0, peer_name="another engine")
    assert (performance_page.share(row), performance_page.times(row)) == (of_limit, times_peer)


def test_a_recorded_ratio_replaces_value_by_limit() -> None:
    assert performance_page.share(Row("batch 1", 4.0, "ms", limit=3.0, ratio=0.7)) == "0.70"


def test_cases_that_the_page_leaves_out_are_not_shown(tmp_path: Path) -> None:
    shown = result()
    hidden = {"case": "batch 2", "value": 4.5, "unit": "ms", "page": False}
    page = performance_page.build(performance_page.load(write(tmp_path, {**shown, "rows": [*shown["rows"], hidden]})))
    assert "|batch 1|4 ms|3|0.75|5|1.25|" in page
    assert "batch 2" not in page


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (result(question="speed"), "question 'speed' is unknown"),
        (result(date="23.11.2026"), "not YYYY-MM-DD"),
        (result(commit="newest"), "not a hash"),
        (result(row={"unit": "furlongs"}), "unit 'furlongs'"),
        (result(row={"peer_name": None}), "needs both a peer and its name"),
        (result(row={"page": False}), "no row for the page"),
        (result(colour="blue"), "unknown field `colour`"),
    ],
    ids=["question", "date", "commit", "unit", "peer", "page", "field"],
)
def test_a_wrong_result_is_refused_by_its_file_name(tmp_path: Path, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"engine-gpu-card\.json: .*{message}"):
        performance_page.load(write(tmp_path, wrong))
