"""A process whose step hangs ends by itself, with the stacks of its threads."""

import subprocess

import pytest

from baton_serve.child_command import module_command
from baton_serve.services.common.process_lifecycle import EXIT_FAILURE, EXIT_HUNG

pytestmark = pytest.mark.slow
TIMEOUT_S = 60.0
"""Time that the process has, with its imports; a hang that is not noticed exceeds it."""


def run_hanging(kind: str) -> "subprocess.CompletedProcess[str]":
    command = module_command("tests.contract.hanging", kind)
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def test_a_hung_step_is_reported_and_ends_the_process_with_all_stacks() -> None:
    ended = run_hanging("waits")
    assert ended.returncode == EXIT_HUNG, ended.stderr
    lines = ended.stderr.splitlines()
    message = "the engine has hung on device 1 (fake): a step of 1 sequences with 3 tokens has run for "
    assert lines[0].startswith(message)
    assert lines[1] == "the event loop has reported the hang"
    assert lines[-2] == "the ranks are killed"
    assert lines[-1].startswith(f"baton decode: {message}")
    stacks = "\n".join(lines[2:-2])
    assert "(most recent call first)" in stacks and "hanging.py" in stacks and "in step\n" in stacks


def test_a_step_that_holds_the_gil_ends_the_process_too() -> None:
    ended = run_hanging("holds-gil")
    assert ended.returncode == EXIT_FAILURE, ended.stderr
    assert ended.stderr.startswith("Timeout (0:00:01")
    assert "hanging.py" in ended.stderr and "in step\n" in ended.stderr
