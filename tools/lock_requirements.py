#!/usr/bin/env python3
"""Writes requirements/router.txt and requirements/worker.txt: exact versions of everything an image installs.

pip resolves them for the images' Python, without installing. torch is not among them: which build it is depends on the
device, so the Dockerfile names its version and the index comes as a build argument.
"""

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "requirements"
PYTHON_VERSION = "3.12"
HEAD = f"# Made by tools/lock_requirements.py for Python {PYTHON_VERSION} on Linux; torch is named in the Dockerfile.\n"


def wanted() -> dict[str, list[str]]:
    """Requirements of pyproject.toml by image."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    router = [*project["dependencies"], *project["optional-dependencies"]["otel"]]
    worker = [line for line in project["optional-dependencies"]["worker"] if name_of(line) != "torch"]
    return {"router": router, "worker": [*router, *worker]}


def name_of(requirement: str) -> str:
    """Normalised as PEP 503 says."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found, requirement
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def resolve(requirements: list[str]) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        options = ["--dry-run", "--quiet", "--ignore-installed", "--only-binary=:all:", "--report", "-"]
        options += ["--python-version", PYTHON_VERSION, "--target", folder]
        done = subprocess.run(
            [sys.executable, "-m", "pip", "install", *options, *requirements],
            capture_output=True,
            text=True,
            check=True,
        )
    packages = [package["metadata"] for package in json.loads(done.stdout)["install"]]
    return sorted(f"{name_of(package['name'])}=={package['version']}" for package in packages)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for image, requirements in wanted().items():
        (FOLDER / f"{image}.txt").write_text(HEAD + "\n".join(resolve(requirements)) + "\n")


if __name__ == "__main__":
    main()
