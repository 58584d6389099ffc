#!/usr/bin/env python3
"""Write requirements/router.txt and requirements/worker.txt: exact versions of all packages that an image installs.

pip resolves them for the Python version of the images, without installing them. torch is left out, because its build
depends on the device: the Dockerfile names its version, and the index is a build argument.
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
    """Return the requirements of pyproject.toml by image."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    router = [*project["dependencies"], *extras["otel"], *extras["audio"], *extras["video"]]
    worker = [line for line in extras["worker"] if name_of(line) != "torch"]
    return {"router": router, "worker": [*router, *worker]}


def name_of(requirement: str) -> str:
    """Return the name of a requirement, normalized by PEP 503."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found, requirement
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def resolve(requirements: list[str]) -> list[str]:
    """Return exact versions of these requirements and all their dependencies."""
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
