"""`baton chat MODEL`: a cluster of its own, started for the conversation and stopped after it."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.cluster import environment

pytestmark = pytest.mark.slow

MODEL = Path(__file__).resolve().parents[2] / "services" / "local" / "demo_model"


def run(*argv: str, text: str = "") -> "subprocess.CompletedProcess[str]":
    """Run `baton` with `text` as its input. It returns when all processes that inherited its pipes have ended."""
    command = [sys.executable, "-m", "baton_serve", *argv]
    return subprocess.run(command, env=environment(), input=text, capture_output=True, text=True, timeout=120)


def test_a_model_is_started_answers_a_pipe_and_is_stopped() -> None:
    done = run("chat", str(MODEL), "--temperature", "0", "--", "--device", "cpu", text="What is 17 + 25?\n")
    assert done.returncode == 0, done.stderr
    assert "42" in done.stdout and done.stdout.count("\n") == 1
    assert "press Ctrl-C" in done.stderr, "the cluster was stopped"


def test_a_model_that_cannot_be_started_is_reported_once() -> None:
    done = run("complete", "/no/such/model", "-q", "Hi")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.splitlines() == [
        "baton serve: MODEL /no/such/model does not exist: give the folder of a Hugging Face model, a GGUF file, or"
        " ORG/NAME",
        "baton complete: baton serve did not start; the reason is above",
    ]
