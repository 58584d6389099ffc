"""`baton doctor --kernels`: a table of all operations, and an exit status that says whether one is wrong."""

import json
import sys
from pathlib import Path

import msgspec
import pytest

from baton_serve.contracts.instance import KernelVerdict
from baton_serve.services.doctor import main as doctor
from baton_serve.services.doctor.model_kernel_table import as_table, prove_kernels

GOOD = KernelVerdict("norm", "hidden size 64", "C++", is_right=True, is_chosen=True, difference=0.001, time_s=2e-6)
WRONG = KernelVerdict("gate", "width 128", "C++", is_right=False, difference=0.5)


def prints(*verdicts: KernelVerdict, then: str = "pass") -> tuple[str, ...]:
    line = msgspec.json.encode(verdicts).decode()
    return (
        sys.executable,
        "-c",
        f"import os, sys, time\nprint('a line of the driver')\nprint({line!r}, flush=True)\n{then}",
    )


def test_right_kernels_are_rows_of_a_table_with_difference_and_time() -> None:
    report = prove_kernels("", 20, prints(GOOD))
    header, row, end = as_table(report).splitlines()
    assert report.healthy and header.split() == [
        "operation",
        "shape",
        "kernel",
        "verdict",
        "difference",
        "time",
        "chosen",
    ]
    assert row.split("  ")[0] == "norm" and "right" in row and "0.10%" in row and "2 µs" in row and row.endswith("yes")
    assert end == "all kernels are right"


def test_a_wrong_kernel_is_a_problem_that_names_it() -> None:
    report = prove_kernels("", 20, prints(GOOD, WRONG))
    assert not report.healthy
    text = as_table(report)
    assert "WRONG" in text and "PROBLEM  kernel gate: C++ is wrong" in text and "50.00%" in text


@pytest.mark.parametrize(
    ("then", "timeout_s", "said"),
    [
        ("os.kill(os.getpid(), 11)", 20, "signal 11"),
        ("time.sleep(60)", 0.5, "0.5 s"),
        ("sys.exit('no driver')", 20, "no driver"),
    ],
)
def test_a_process_that_hangs_or_ends_is_a_problem(then: str, timeout_s: float, said: str) -> None:
    report = prove_kernels("", timeout_s, prints(GOOD, then=then))
    assert not report.healthy and said in as_table(report)


def test_the_kernels_of_this_machine_are_right_for_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shapes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320}
    (tmp_path / "config.json").write_text(json.dumps({**shapes, "sliding_window": 24}))
    assert doctor.main(["--json", "--kernels", str(tmp_path)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["healthy"] and all(verdict["is_right"] for verdict in report["kernels"])


def test_a_folder_without_a_config_is_a_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--kernels", str(tmp_path)]) == 1
    assert "cannot be read: FileNotFoundError" in capsys.readouterr().out


def test_a_model_without_the_option_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        doctor.main(["some-folder"])
    assert "baton doctor --kernels MODEL" in capsys.readouterr().err
