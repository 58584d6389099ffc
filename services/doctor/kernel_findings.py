"""Tests the engine's kernels in a child process, and decides what is a problem or a warning."""

import math
import subprocess
from collections.abc import Iterator, Sequence

import msgspec

from baton_serve.child_command import module_command
from baton_serve.services.doctor.findings import Finding, note, ok, problem

KERNELS = ("store", "decode attention", "prefill attention", "norm", "silu", "argmax", "int8 product", "int4 product")
"""The kernels in the order in which `kernel_probe` runs them."""
MAX_DIFFERENCE = 0.02
"""Largest difference that rounding to bfloat16 explains. A kernel that reads a wrong block differs by about 1."""
PROBE = module_command("baton_serve.services.doctor.kernel_probe")
BACKENDS = {"triton": "Triton", "cpu": "C++", "reference": "plain torch"}


class KernelFacts(msgspec.Struct, frozen=True):
    """The result of comparing one kernel with its twin, the same operation in plain torch."""

    kernel: str
    backend: str
    """A key of `BACKENDS`."""
    difference: float | None = None
    """Largest difference from the twin, as a fraction of the twin's largest number. None: it is not a number, which
    JSON cannot hold, or the kernel raised an exception."""
    error: str = ""
    """The exception that the kernel raised, if any."""


def check_kernels(timeout_s: float, command: Sequence[str] = PROBE) -> Iterator[Finding]:
    """Compare all kernels with plain torch in a child process (`command`), for at most `timeout_s` seconds in total,
    and yield a finding for each that has run.

    The kernel that was running when the process was ended, or ended by itself, is a problem.
    """
    try:
        done = subprocess.run(command, capture_output=True, timeout=timeout_s, check=False)
        output, fate = done.stdout, _fate(done)
    # The results that were printed before the deadline are still in the pipe.
    except subprocess.TimeoutExpired as exc:
        output, fate = exc.stdout or b"", f"it did not end within {timeout_s:g} s (--probe-timeout-s)"
    # Drivers may print lines of their own.
    lines = [line for line in output.splitlines() if line.startswith(b'{"kernel":')]
    for line in lines:
        yield kernel_finding(msgspec.json.decode(line, type=KernelFacts))
    if len(lines) < len(KERNELS):
        yield problem(
            f"kernel {KERNELS[len(lines)]}",
            f"{fate}; it and later kernels gave no result",
            "see `dmesg` for the driver's messages; run `python -m baton_serve.services.doctor.kernel_probe`",
        )


def kernel_finding(facts: KernelFacts) -> Finding:
    """Return the finding for the result of one kernel: a problem if its numbers are wrong or it did not run."""
    check, backend = f"kernel {facts.kernel}", BACKENDS.get(facts.backend, facts.backend)
    if facts.error:
        return problem(check, f"{backend} failed: {facts.error}", "please report it: baton doctor --report")
    if facts.difference is None or not math.isfinite(facts.difference):
        return problem(check, f"{backend} computes NaN or infinity", "please report it: baton doctor --report")
    text = f"{backend}, largest difference from plain torch on the CPU {facts.difference:.2%}"
    if facts.difference > MAX_DIFFERENCE:
        return problem(check, f"{text}: the result is wrong", "please report it: baton doctor --report")
    if facts.backend == "reference":
        return note(check, f"{text}; no faster kernel is available", "install g++ on CPUs, Triton on other devices")
    return ok(check, text)


def _fate(done: "subprocess.CompletedProcess[bytes]") -> str:
    # A negative status is the signal that ended the process: 11 for a crash in a driver.
    if done.returncode < 0:
        return f"its process was ended by signal {-done.returncode}"
    last = (done.stderr.decode(errors="replace").strip().splitlines() or ["no message"])[-1]
    return f"its process ended with status {done.returncode}: {last}"
