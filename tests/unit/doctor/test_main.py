"""The report: for people and for programs, with an exit status."""

import json

import pytest

from baton_serve.bench.ports import free_port
from baton_serve.services.doctor.findings import DoctorReport, note, ok, problem
from baton_serve.services.doctor.main import as_text, main


def test_the_text_has_a_line_for_each_finding_and_its_remedy() -> None:
    report = DoctorReport("1", False, [ok("cards", "one"), problem("rebar", "off", "turn it on"), note("x", "y")])
    lines = as_text(report).splitlines()
    assert lines[0].startswith("ok ") and lines[1].startswith("PROBLEM  rebar: off")
    assert lines[2].strip() == "→ turn it on"
    assert lines[-1] == "1 problem(s)"


def test_json_is_one_object_and_the_status_says_whether_there_is_a_problem(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json", "--no-device"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["healthy"] is True
    assert {"check", "status", "message"} <= set(report["findings"][0])
    assert main(["--json", "--no-device", "--peer", f"127.0.0.1:{free_port()}"]) == 1
    assert json.loads(capsys.readouterr().out)["healthy"] is False
