"""Entry point of `baton doctor`: runs all checks, prints their findings, and decides the exit status."""

import asyncio
import getpass
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from baton_serve.services.common.settings.configuration import environment, load_settings
from baton_serve.services.common.version import VERSION
from baton_serve.services.doctor.cards import check_cards, check_visible
from baton_serve.services.doctor.device_findings import check_transports, device_findings, probe_devices
from baton_serve.services.doctor.device_probe import ProbeFacts
from baton_serve.services.doctor.findings import DoctorReport, Finding
from baton_serve.services.doctor.kernel_findings import check_kernels
from baton_serve.services.doctor.limits import check_limits
from baton_serve.services.doctor.model_kernel_table import as_table, prove_kernels
from baton_serve.services.doctor.network import check_network
from baton_serve.services.doctor.report import STATUS_MARKS, Redaction, as_issue_text
from baton_serve.services.doctor.settings import DoctorSettings


def main(argv: Sequence[str]) -> int:
    """Run `baton doctor` with these arguments. Return the exit status: 0 without problems, 1 with at
    least one problem.
    """
    settings = load_settings(
        DoctorSettings,
        argv,
        prefix="BATON__DOCTOR__",
        program="baton doctor",
        description="Check whether this machine can serve models: driver, cards, torch, memory, limits, network.",
    )
    if settings.kernels:
        report = prove_kernels(settings.model, settings.probe_timeout_s)
        sys.stdout.write(msgspec.json.encode(report).decode() + "\n" if settings.json else as_table(report))
        return 0 if report.healthy else 1
    findings = asyncio.run(run_checks(settings, Path("/")))
    report = DoctorReport(VERSION, all(finding.status != "problem" for finding in findings), findings)
    sys.stdout.write(_shown(report, settings))
    return 0 if report.healthy else 1


def _shown(report: DoctorReport, settings: DoctorSettings) -> str:
    if settings.json:
        return msgspec.json.encode(report).decode() + "\n"
    if settings.report:
        return as_issue_text(report, Path("/"), environment(), Redaction(socket.gethostname(), _user()))
    return as_text(report)


def _user() -> str:
    """Return the name of the user who runs this process, or "" in a container that has no name for the
    user's number.
    """
    # The name is looked up by number, unless a variable such as USER holds it.
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""


async def run_checks(settings: DoctorSettings, root: Path) -> list[Finding]:
    """Run the checks that `settings` ask for, and return their findings in a fixed order. `root` is the folder with
    `sys`, `proc` and `dev`.
    """
    findings = [*check_cards(root), *check_visible(root, environment()), *check_limits(root)]
    facts: ProbeFacts | Finding | None = None
    if settings.device:
        # The probe waits for a child process, so it must not run on the event loop.
        facts = await asyncio.to_thread(probe_devices, settings.probe_timeout_s)
        findings += [facts] if isinstance(facts, Finding) else device_findings(facts)
    if settings.probe or settings.report:
        found = facts if isinstance(facts, ProbeFacts) else None
        findings += [finding async for finding in check_transports(found, settings.probe_timeout_s)]
        # Without torch, with --no-device or with a driver that hangs, kernels cannot or must not run.
        if found is not None:
            findings += await asyncio.to_thread(lambda: list(check_kernels(settings.probe_timeout_s)))
    findings += [finding async for finding in check_network(settings.registry, settings.peer)]
    return findings


def as_text(report: DoctorReport) -> str:
    """Return the report for a terminal: one line per finding, its remedy below it, and the number of problems."""
    lines = []
    for finding in report.findings:
        lines.append(f"{STATUS_MARKS[finding.status]}  {finding.check}: {finding.message}")
        if finding.remedy:
            lines.append(f"{'':9}→ {finding.remedy}")
    problems = sum(finding.status == "problem" for finding in report.findings)
    lines.append("no problems" if not problems else f"{problems} problem(s)")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
