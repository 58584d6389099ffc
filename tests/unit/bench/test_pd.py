"""Good requests, the best goodput of each layout, and the output of `baton-bench pd`."""

from pathlib import Path

import pytest

from baton_serve.bench.serving.load_client import RequestOutcome
from baton_serve.bench.serving.pd import parser, rows_of, run, setups
from baton_serve.bench.serving.pd_results import (
    APART,
    OBJECTIVES_MS,
    UNIFIED,
    Measured,
    PdSetup,
    curve,
    line_of,
    lines,
    losses,
    read_runs,
)


def outcome(ttft_s: float, gaps_ms: list[float], error: str | None = None) -> RequestOutcome:
    return RequestOutcome(ttft_s=ttft_s, itls_s=[gap / 1e3 for gap in gaps_ms], error=error)


def measured(layout: str, rate: float, outcomes: list[RequestOutcome]) -> Measured:
    return Measured(PdSetup(layout, 512, ()), rate, 2.0, outcomes)


def test_a_request_is_good_when_both_objectives_hold_and_failed_ones_never_are() -> None:
    outcomes = [
        outcome(0.5, [10, 11]),
        outcome(1.5, [10, 11]),
        outcome(0.5, [10, 40]),
        outcome(0.5, [], error="503"),
        outcome(0.5, []),
    ]
    found = measured(APART, 1.0, outcomes)
    assert found.goodput(1.0, 0.012) == 1.0
    assert found.goodput(2.0, 0.012) == 1.5
    assert found.goodput(1.0, 0.1) == 1.5


def test_each_request_that_is_not_good_has_one_cause() -> None:
    found = measured(
        APART,
        1.0,
        [
            outcome(0.5, [30, 10, 10]),
            outcome(0.5, [30, 10, 20]),
            outcome(0.5, [10, 20]),
            outcome(0.5, [20]),
            outcome(1.5, [30]),
            outcome(0.5, [], error="503"),
            outcome(0.5, [10, 11]),
        ],
    )
    causes = found.causes(1.0, 0.012)
    assert (causes.failed, causes.first_token, causes.first_gap, causes.later_gaps) == (1, 1, 2, 2)
    assert sum(causes) == len(found.outcomes) - found.goodput(1.0, 0.012) * found.span_s
    assert found.first_gap_s(50) == pytest.approx(0.025)


def test_the_curve_takes_each_layout_s_best_rate() -> None:
    found = [
        measured(APART, 1.0, [outcome(0.1, [7])] * 2),
        measured(APART, 4.0, [outcome(0.1, [13])] * 8),
        measured(UNIFIED, 4.0, [outcome(0.1, [5])] * 2 + [outcome(0.1, [60])] * 6),
    ]
    values = curve(found, 1.0)
    assert values[6] == (0.0, 1.0)
    assert values[12] == (1.0, 1.0)
    assert values[15] == (4.0, 1.0)
    assert values[75] == (4.0, 4.0)


def test_equal_loads_stand_beside_each_other() -> None:
    found = [measured(APART, 4.0, [outcome(0.2, [10])]), measured(UNIFIED, 4.0, [outcome(0.1, [40])])]
    options = parser().parse_args(["--trace", "t.csv"])
    rows = {row.case: row for row in rows_of(found, options)}
    assert rows["4/s: p99 ITL of 1P1D"].ratio == 4.0
    assert rows["4/s: mean TTFT of 1P1D"].ratio == 0.5


def test_setups_are_the_same_but_for_roles_and_chunks() -> None:
    options = parser().parse_args(["--trace", "t.csv", "--chunks", "256", "512", "--pd-chunks", "8192"])
    assert [setup.name for setup in setups(options)] == [
        "1P1D, chunk 8192",
        "2 unified, chunk 256",
        "2 unified, chunk 512",
    ]


def test_an_slo_is_part_of_the_name_of_a_setup() -> None:
    plain, with_slo = PdSetup(APART, 512, ()), PdSetup(APART, 512, (), 12.0)
    assert with_slo.name == "1P1D, chunk 512, ITL SLO 12 ms"
    found = [
        Measured(plain, 1.0, 2.0, [outcome(0.1, [7])] * 2),
        Measured(with_slo, 1.0, 2.0, [outcome(0.1, [11])] * 2),
        Measured(with_slo, 4.0, 2.0, [outcome(0.1, [11])] * 8),
    ]
    drawn = lines(found, 1.0)
    at = OBJECTIVES_MS.index
    assert [drawn[plain.name][at(ms)] for ms in (6, 8, 12)] == [0.0, 1.0, 1.0]
    assert [drawn[with_slo.name][at(ms)] for ms in (6, 8, 12)] == [0.0, 0.0, 4.0]


def test_an_earlier_run_gives_the_same_curve_and_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = [
        measured(APART, 4.0, [outcome(0.2, [7, 13.21]), outcome(0.1, [], error="503")]),
        measured(UNIFIED, 4.0, [outcome(0.1, [40, 5])]),
        Measured(PdSetup(APART, 512, (), 12.0), 4.0, 2.0, [outcome(0.2, [7, 13])]),
    ]
    kept, plot = tmp_path / "runs.jsonl", tmp_path / "curve.png"
    kept.write_text("".join(line_of(one) + "\n" for one in found))
    assert curve(read_runs([kept]), 1.0) == curve(found, 1.0)
    assert lines(read_runs([kept]), 1.0) == lines(found, 1.0)
    run(["--from", str(kept)])
    assert "mean TTFT at 4/s: 200 against 100 ms" in capsys.readouterr().out
    pytest.importorskip("matplotlib")
    run(["--from", str(kept), "--plot", str(plot)])
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_the_output_lists_where_separate_prefill_is_worse() -> None:
    found = [measured(APART, 1.0, [outcome(0.1, [7])]), measured(UNIFIED, 1.0, [outcome(0.2, [60])] * 2)]
    assert list(losses(found, 1.0)) == [
        f"goodput at p99 ITL <= {at} ms, TTFT <= 1000 ms: 0.5 against 1 req/s" for at in (75, 100, 150, 200)
    ]
