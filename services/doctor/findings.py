"""What a check found. Values alone."""

from typing import Literal

import msgspec

Status = Literal["ok", "note", "warning", "problem"]


class Finding(msgspec.Struct, frozen=True, omit_defaults=True):
    """`note`: nothing to mend, but worth knowing. A `problem` keeps instances from serving, or from serving well."""

    check: str
    status: Status
    message: str
    remedy: str = ""


class DoctorReport(msgspec.Struct, frozen=True):
    version: str
    healthy: bool
    findings: list[Finding]


def ok(check: str, message: str) -> Finding:
    return Finding(check, "ok", message)


def note(check: str, message: str, remedy: str = "") -> Finding:
    return Finding(check, "note", message, remedy)


def warning(check: str, message: str, remedy: str) -> Finding:
    return Finding(check, "warning", message, remedy)


def problem(check: str, message: str, remedy: str) -> Finding:
    return Finding(check, "problem", message, remedy)
