"""Resolve the published requirements as pip does on a new machine, with an empty configuration of pip.

Wheels with metadata alone stand for the builds of torch on PyTorch's index, so that index need not be reachable.
Everything else is resolved from the ordinary package index; without one the tests are skipped.
"""

import json
import os
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.helm.chart import ROOT
from tools.install_torch import wrong_packages

pytestmark = pytest.mark.slow

TORCH = "torch==2.13.0"
REQUIRES = ("filelock", "typing-extensions>=4.10.0", "sympy>=1.13.3", "networkx>=2.5.1", "jinja2", "fsspec>=0.8.5")
"""Requirements of torch's CPU wheels. The XPU wheels add Intel's run-time libraries and Intel's Triton."""
CONFIGURATION = ("PIP_", "UV_")


def project() -> dict[str, list[str]]:
    """Return the requirements for serving and those of the tests, as pyproject.toml publishes them."""
    read = tomllib.loads((ROOT / "pyproject.toml").read_text())
    serving = [*read["project"]["dependencies"], *read["project"]["optional-dependencies"]["worker"]]
    return {"serving": serving, "tests": [*serving, *read["dependency-groups"]["dev"]]}


def write_wheel(folder: Path, name: str, version: str, requires: tuple[str, ...] = ()) -> None:
    """Write a wheel that has metadata only."""
    folder.mkdir(exist_ok=True)
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    with ZipFile(folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl", "w") as wheel:
        lines = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}", *(f"Requires-Dist: {r}" for r in requires)]
        wheel.writestr(f"{info}/METADATA", "\n".join(lines) + "\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@cache
def index_answers() -> bool:
    """Return whether the ordinary package index can be reached without any configuration of pip."""
    return run_pip(["xxhash", "--no-deps"], timeout_s=30).returncode == 0


def run_pip(arguments: list[str], *, timeout_s: float = 240) -> "subprocess.CompletedProcess[str]":
    """Run a resolution that installs nothing, with an empty configuration; the report is its standard output."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(CONFIGURATION)}
    # Certificates say how to reach the network, not what to install.
    environ |= {name: os.environ[name] for name in ("PIP_CERT",) if name in os.environ}
    environ["PIP_CONFIG_FILE"] = os.devnull
    options = ["--dry-run", "--quiet", "--ignore-installed", "--retries", "0", "--timeout", "20", "--report", "-"]
    command = [sys.executable, "-m", "pip", "install", *options, *arguments]
    try:
        return subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=timeout_s, check=False, cwd=ROOT
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", "pip took too long")


def resolve(requirements: list[str], wheels: Path | None = None) -> tuple[str, dict[str, str]]:
    """Return pip's report, and the version of each package in it."""
    if not index_answers():
        pytest.skip("the ordinary package index cannot be reached")
    found = run_pip([*requirements, *(["--find-links", str(wheels)] if wheels else [])])
    assert found.returncode == 0, found.stderr[-2000:]
    packages = [package["metadata"] for package in json.loads(found.stdout)["install"]]
    return found.stdout, {package["name"].lower(): package["version"] for package in packages}


@pytest.mark.parametrize("kind", ["serving", "tests"])
def test_beside_the_cpu_build_nothing_brings_cuda(kind: str, tmp_path: Path) -> None:
    write_wheel(tmp_path, "torch", "2.13.0+cpu", REQUIRES)
    report, versions = resolve([TORCH, *project()[kind]], tmp_path)
    assert versions["torch"] == "2.13.0+cpu", "pip must prefer PyTorch's wheel to the CUDA build of PyPI"
    assert wrong_packages(report, "CPU") == []


def test_beside_the_xpu_build_nothing_brings_nvidias_triton(tmp_path: Path) -> None:
    write_wheel(tmp_path, "triton-xpu", "3.7.1")
    write_wheel(tmp_path, "torch", "2.13.0+xpu", (*REQUIRES, "triton-xpu==3.7.1"))
    report, versions = resolve([TORCH, *project()["tests"]], tmp_path)
    assert versions["torch"] == "2.13.0+xpu"
    assert wrong_packages(report, "XPU") == []


def test_with_the_cuda_build_torch_keeps_its_version_and_its_own_triton() -> None:
    _, versions = resolve([TORCH, *project()["tests"]])
    assert versions["torch"].split("+")[0] == "2.13.0"
    assert versions["triton"].startswith("3.7.")
