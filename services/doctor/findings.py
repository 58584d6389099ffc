"""Defines the kinds of findings (ok, note, warning, problem); which one a check returns, is decided in the file of that
check.
"""

from typing import Literal

import msgspec

from baton_serve.contracts.instance import KernelVerdict

Status = Literal["ok", "note", "warning", "problem"]


class Finding(msgspec.Struct, frozen=True, omit_defaults=True):
    """One result of one check of `baton doctor`.

    A `problem` prevents instances from serving, or makes them slow or wrong. A `warning` may do so under load or with
    larger models. A `note` needs no repair on a machine that does not use what the note is about.
    """

    check: str
    status: Status
    message: str
    remedy: str = ""


class DoctorReport(msgspec.Struct, frozen=True):
    """The output of `baton doctor --json`. `healthy` means that no finding is a problem."""

    version: str
    healthy: bool
    findings: list[Finding]
    kernels: list[KernelVerdict] = []
    """The results of `--kernels`."""


def ok(check: str, message: str) -> Finding:
    """Return the finding of the check `check`, which has passed."""
    return Finding(check, "ok", message)


def note(check: str, message: str, remedy: str = "") -> Finding:
    """Return a finding of the check `check` that only informs; `remedy` is advice for machines on which it matters."""
    return Finding(check, "note", message, remedy)


def warning(check: str, message: str, remedy: str) -> Finding:
    """Return a finding of the check `check` about something that may fail or be slow; `remedy` says what to do."""
    return Finding(check, "warning", message, remedy)


def problem(check: str, message: str, remedy: str) -> Finding:
    """Return a finding of the check `check` about something that must be repaired; `remedy` says how. It makes the exit
    status of `baton doctor` 1.
    """
    return Finding(check, "problem", message, remedy)
