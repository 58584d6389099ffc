"""The install steps of the router's image, as the Dockerfile writes them, in a clean environment: it serves."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZipFile

import httpx
import pytest

from baton_serve.bench.ports import free_port
from tests.e2e.cluster import wait_until
from tests.helm.chart import ROOT
from tests.helm.test_images import stages

pytestmark = pytest.mark.slow

DEMO_MODEL = ROOT / "services" / "local" / "demo_model"
PAGE = ROOT / "services" / "router" / "http" / "page"
"""The pages for people and the files of Swagger UI."""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the environment's programs."""
    folder = tmp_path_factory.mktemp("image")
    programs = folder / "venv" / "bin"
    run([sys.executable, "-m", "venv", str(folder / "venv")])
    for step in steps("router"):
        words = [word.replace("/wheels", str(folder / "wheels")) for word in shlex.split(step)]
        words = [
            str(match) for word in words for match in (sorted(folder.glob("wheels/*.whl")) if "*" in word else [word])
        ]
        run([str(programs / words[0]), *words[1:]])
    return programs


def steps(target: str) -> list[str]:
    """Return the pip commands for the wheel and for the target; options of mounts and caches belong to Docker."""
    lines = [line for stage in ("sources", target) for line in stages()[stage]]
    return [command for line in lines for command in re.findall(r"pip (?:install|wheel) [^&]*", line)]


def run(command: list[str]) -> None:
    done = subprocess.run(command, cwd=ROOT, env=clean(), capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr


def clean() -> dict[str, str]:
    """Return an environment that contains nothing of this checkout."""
    unwanted = ("PYTHONPATH", "BATON__", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}


@pytest.fixture
def router(installed: Path, tmp_path: Path) -> Iterator[str]:
    port = free_port()
    flags = ["--model", str(DEMO_MODEL), "--port", str(port), "--registry", f"memory://127.0.0.1:{free_port()}"]
    flags += ["--otlp-traces-endpoint", "http://127.0.0.1:9"]  # refused at start if its packages are not in the image
    with (tmp_path / "log").open("w+") as log:
        process = subprocess.Popen(
            [str(installed / "baton"), "router", *flags], cwd=tmp_path, env=clean(), stdout=log, stderr=log
        )
        try:
            wait_until(lambda: answers(process, port), timeout_s=60, what="the router")
            yield f"http://127.0.0.1:{port}"
            process.terminate()
            assert process.wait(20) == 0
        finally:
            process.kill()


def answers(process: "subprocess.Popen[bytes]", port: int) -> bool:
    assert process.poll() is None, f"the router ended with status {process.returncode}"
    try:
        return httpx.get(f"http://127.0.0.1:{port}/metrics").status_code == 200
    except httpx.TransportError:
        return False


def test_what_the_image_installs_serves(router: str) -> None:
    tokens = httpx.post(f"{router}/tokenize", json={"prompt": "the owl and the ring"}).raise_for_status().json()
    assert tokens["count"] > 0
    assert httpx.get(f"{router}/health").json()["reason"], "no instance is there"


def test_it_has_no_torch(installed: Path) -> None:
    code = "import importlib.util as u; raise SystemExit(any(map(u.find_spec, ('torch', 'transformers'))))"
    assert subprocess.run([str(installed / "python"), "-c", code], env=clean(), cwd="/", check=False).returncode == 0


def test_the_wheel_owns_one_import_name(installed: Path) -> None:
    (wheel,) = installed.parents[1].glob("wheels/*.whl")
    with ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"baton_serve"}
    needed = {"py.typed", "services/cli.py", "kvtransfer/node.py", "engine/kernels/cpu/src/linear.cpp"}
    needed |= {"services/local/demo_model/config.json"}
    needed |= {f"services/router/http/page/{path.name}" for path in PAGE.iterdir() if path.is_file()}
    assert {f"baton_serve/{name}" for name in needed} <= names


def test_no_generic_name_can_be_imported_where_the_wheel_is_installed(installed: Path, tmp_path: Path) -> None:
    code = "import importlib.util as u; print([n for n in %r if u.find_spec(n)])"
    generic = ("bench", "contracts", "engine", "kvtransfer", "services")
    command = [str(installed / "python"), "-c", code % (generic,)]
    done = subprocess.run(command, cwd=tmp_path, env=clean(), capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
