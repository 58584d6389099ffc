"""Judging the kernels of the engine by the numbers that the throw-away process prints, and by how it ends."""

import sys

import msgspec
import pytest

from baton_serve.services.doctor.findings import Finding
from baton_serve.services.doctor.kernel_findings import KERNELS, KernelFacts, check_kernels, kernel_finding


def prints(*facts: KernelFacts, then: str = "pass") -> tuple[str, ...]:
    lines = [msgspec.json.encode(one).decode() for one in facts]
    program = f"import os, sys, time\nprint('a line of the driver')\nprint('\\n'.join({lines!r}), flush=True)\n{then}"
    return (sys.executable, "-c", program)


def good(kernel: str) -> KernelFacts:
    return KernelFacts(kernel, "triton", 0.004)


def found(*facts: KernelFacts, then: str = "pass", timeout_s: float = 20) -> list[Finding]:
    return list(check_kernels(timeout_s, prints(*facts, then=then)))


def test_kernels_that_equal_their_twins_are_ok_with_their_backend() -> None:
    findings = found(*map(good, KERNELS))
    assert [finding.check for finding in findings] == [f"kernel {kernel}" for kernel in KERNELS]
    assert {finding.message for finding in findings} == {"Triton, largest difference from plain torch on the CPU 0.40%"}


@pytest.mark.parametrize(
    ("facts", "status", "said"),
    [
        (KernelFacts("norm", "triton", 0.9), "problem", "90.00%: the result is wrong"),
        (KernelFacts("norm", "triton", None), "problem", "NaN or infinity"),
        (KernelFacts("norm", "triton", error="CompilationError: fp64"), "problem", "Triton failed: CompilationError"),
        (KernelFacts("norm", "reference", 0.0), "note", "no faster kernel is available"),
    ],
)
def test_a_kernel_is_judged_by_its_difference(facts: KernelFacts, status: str, said: str) -> None:
    finding = kernel_finding(facts)
    assert finding.status == status and said in finding.message and finding.remedy


def test_a_kernel_that_crashes_the_process_is_named_beside_the_results_before_it() -> None:
    findings = found(good("store"), then="os.kill(os.getpid(), 11)")
    assert [(finding.check, finding.status) for finding in findings] == [
        ("kernel store", "ok"),
        ("kernel decode attention", "problem"),
    ]
    assert "signal 11" in findings[1].message


def test_a_kernel_that_hangs_is_named_and_does_not_hang_the_doctor() -> None:
    findings = found(good("store"), then="time.sleep(60)", timeout_s=0.5)
    assert findings[-1].check.startswith("kernel") and "0.5 s" in findings[-1].message


def test_infinity_travels_as_null_and_is_a_problem() -> None:
    encoded = msgspec.json.encode(KernelFacts("norm", "triton", float("inf")))
    assert kernel_finding(msgspec.json.decode(encoded, type=KernelFacts)).status == "problem"


def test_the_kernels_of_this_machine_equal_their_twins() -> None:
    findings = list(check_kernels(300))
    assert len(findings) == len(KERNELS)
    assert {finding.status for finding in findings} <= {"ok", "note"}, findings
