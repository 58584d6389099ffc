"""Shows for a model which kernels are right on this machine, as a table."""

import subprocess
from collections.abc import Iterator, Sequence

import msgspec

from baton_serve.child_command import module_command
from baton_serve.contracts.instance import KernelVerdict
from baton_serve.services.common.version import VERSION
from baton_serve.services.doctor.findings import DoctorReport, Finding, problem

PROOF = module_command("baton_serve.services.doctor.model_kernel_proof")
HEADER = ("operation", "shape", "kernel", "verdict", "difference", "time", "chosen")


def prove_kernels(model: str, timeout_s: float, command: Sequence[str] = PROOF) -> DoctorReport:
    """Prove all kernels of the engine (compare each with plain torch) in a child process, for at most `timeout_s`
    seconds. `model` is a folder whose config gives the shapes; if it is empty, they are those of an 8B model.

    The report is not healthy if a kernel is wrong, or if the child process gave no result.
    """
    try:
        done = subprocess.run([*command, model], capture_output=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return _report([], _failed(f"the kernels did not end within {timeout_s:g} s (--probe-timeout-s)"))
    # Drivers may print lines of their own.
    lines = [line for line in done.stdout.splitlines() if line.startswith(b'[{"operation":') or line == b"[]"]
    if done.returncode != 0 or not lines:
        return _report([], _failed(_fate(done)))
    return _report(msgspec.json.decode(lines[-1], type=list[KernelVerdict]))


def as_table(report: DoctorReport) -> str:
    """Return the verdicts about the kernels as a table, and below it the problems with their remedies."""
    rows = [HEADER, *map(_row, report.kernels)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if not report.kernels:
        lines = ["no kernels beside plain torch: install g++ on CPUs, Triton on other devices"]
    return "\n".join([*lines, *_remarks(report)]) + "\n"


def _remarks(report: DoctorReport) -> Iterator[str]:
    for finding in report.findings:
        yield f"PROBLEM  {finding.check}: {finding.message}"
        yield f"{'':9}→ {finding.remedy}"
    if report.healthy:
        yield "all kernels are right"


def _row(verdict: KernelVerdict) -> tuple[str, ...]:
    return (
        verdict.operation,
        verdict.shape,
        verdict.candidate,
        "right" if verdict.is_right else "WRONG",
        "" if verdict.difference is None else f"{verdict.difference:.2%}",
        "" if verdict.time_s is None else f"{verdict.time_s * 1e6:.0f} µs",
        "yes" if verdict.is_chosen else "no",
    )


def _report(verdicts: list[KernelVerdict], *failures: Finding) -> DoctorReport:
    wrong = [_wrong(verdict) for verdict in verdicts if not verdict.is_right]
    findings = [*failures, *wrong]
    return DoctorReport(VERSION, not findings, findings, verdicts)


def _wrong(verdict: KernelVerdict) -> Finding:
    message = f"{verdict.candidate} is wrong, so that instances do not use it: {verdict.describe()} ({verdict.shape})"
    return problem(f"kernel {verdict.operation}", message, "please report it: baton doctor --report")


def _failed(why: str) -> Finding:
    return problem("kernels", why, "see `dmesg`; run `python -m baton_serve.services.doctor.model_kernel_proof`")


def _fate(done: "subprocess.CompletedProcess[bytes]") -> str:
    # A negative status is the signal that ended the process: 11 for a crash in a driver.
    if done.returncode < 0:
        return f"the process that ran them was ended by signal {-done.returncode}"
    last = (done.stderr.decode(errors="replace").strip().splitlines() or ["no message"])[-1]
    return f"the process that ran them ended with status {done.returncode}: {last}"
