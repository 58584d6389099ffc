"""Baton runs from any folder: packages of the user's with generic names neither break it nor are broken by it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from baton_serve.bench.ports import free_port
from tests.e2e.cluster import ROOT, environment, wait_until

DECOYS = ("bench", "contracts", "engine", "kvtransfer", "services")
MODEL = ROOT / "services" / "local" / "demo_model"
OFFLINE = f"""
import {", ".join(DECOYS)}
from baton_serve import LLM, SamplingParams

with LLM({str(MODEL)!r}, device="cpu") as llm:
    answer = llm.generate(["Hello"], SamplingParams(temperature=0.0, max_tokens=4))[0].outputs[0]
print([module.OWNER for module in ({", ".join(DECOYS)})], len(answer.token_ids))
"""
MESSAGES = [{"role": "user", "content": "What is 2 plus 3?"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of a user whose own packages have the names of folders of this repository."""
    for name in DECOYS:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text('OWNER = "user"\n')
    (tmp_path / "program.py").write_text(OFFLINE)
    return tmp_path


def test_a_program_with_packages_of_the_same_names_uses_the_engine_offline(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=folder, env=environment(), capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split("\n")[-2] == f"{['user'] * len(DECOYS)} 4", done.stderr


def test_a_cluster_started_in_such_a_folder_answers(folder: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "baton_serve", "serve", "--port", str(port), "--device", "cpu"]
    with (folder / "log").open("w+") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment(), stdout=log, stderr=log)
        try:
            wait_until(lambda: _is_ready(process, port), timeout_s=120, what="the cluster")
            body = {"model": "baton-demo", "messages": MESSAGES, "temperature": 0}
            answer = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body, timeout=60)
            assert answer.status_code == 200, answer.text
            assert "5" in answer.json()["choices"][0]["message"]["content"]
            process.terminate()
            assert process.wait(30) == 0
        finally:
            process.kill()
            process.wait()


def test_the_doctor_finds_torch_in_such_a_folder(folder: Path) -> None:
    command = [sys.executable, "-m", "baton_serve", "doctor"]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=120)
    assert "torch cannot use this machine" not in done.stdout + done.stderr


def test_importing_the_package_loads_no_torch_and_takes_no_generic_name(folder: Path) -> None:
    code = f"import json, sys, baton_serve; print(json.dumps([n for n in {(*DECOYS, 'torch')!r} if n in sys.modules]))"
    environ = environment() | {"PYTHONPATH": os.pathsep.join((str(folder), environment()["PYTHONPATH"]))}
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=environ, capture_output=True, check=True)
    assert json.loads(done.stdout) == []


def _is_ready(process: "subprocess.Popen[bytes]", port: int) -> bool:
    assert process.poll() is None, f"baton serve ended with status {process.returncode}"
    try:
        health = httpx.get(f"http://127.0.0.1:{port}/health").json()
    except (httpx.TransportError, ValueError):
        return False
    return bool(health.get("status") == "ok")
