"""The output of benchmarks: tables and JSON."""

import pytest

from baton_serve.bench.report import Row, show


def test_quartiles_have_a_column_where_there_are_any(capsys: pytest.CaptureFixture[str]) -> None:
    plain = Row("engine", "start", 1.0, "s")
    show([plain], as_json=False)
    assert "quartiles" not in capsys.readouterr().out
    show([plain, Row("engine", "prefill", 2.0, "tok/s", 4.0, 0.5, quartiles=(0.4, 0.6))], as_json=False)
    header, first, second = capsys.readouterr().out.splitlines()
    assert header.endswith("quartiles of the ratio") and first.endswith("s") and second.endswith("0.4 to 0.6")
