"""Install the built wheel with its extra `worker` in an empty environment, as `make setup` does: it answers."""

import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.helm.chart import ROOT
from tests.helm.test_image_install import clean, run

pytestmark = pytest.mark.slow

MAX_INSTALLED_BYTES = 1.0e9
PROGRAM = """
from pathlib import Path
import baton_serve
from baton_serve import LLM, SamplingParams

folder = Path(baton_serve.__file__).parent / "services" / "local" / "demo_model"
with LLM(str(folder), device="cpu") as llm:
    messages = [{"role": "user", "content": "What is 17 + 25?"}]
    print(llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=16))[0].outputs[0].text)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run([sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "--wheel-dir", str(folder), str(ROOT)])
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of the environment."""
    folder = tmp_path_factory.mktemp("worker") / "venv"
    run([sys.executable, "-m", "venv", str(folder)])
    program = folder / "bin" / "python"
    run([str(program), str(ROOT / "tools" / "install_torch.py"), "--requirement", "torch==2.13.0"])
    run([str(program), "-m", "pip", "install", "--quiet", "--no-compile", f"{wheel}[worker]"])
    return program


def test_serving_needs_a_gigabyte_and_no_cuda(python: Path) -> None:
    files = [path for path in python.parents[1].rglob("*") if path.is_file() and not path.is_symlink()]
    assert not [path for path in files if "/nvidia/" in str(path)]
    # pip and setuptools belong to Python's venv (here 3.11), and so do the files that `ensurepip` compiled.
    files = [path for path in files if not any(f"/site-packages/{own}/" in str(path) for own in ("pip", "setuptools"))]
    assert sum(path.stat().st_size for path in files if path.suffix != ".pyc") <= MAX_INSTALLED_BYTES


def test_the_installed_wheel_answers_offline_in_any_folder(python: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [str(python), "-c", PROGRAM],
        cwd=tmp_path,
        env=clean(),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "42" in done.stdout


def test_the_wheel_carries_its_licence(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = [archive.read(name).decode() for name in names if name.endswith(".dist-info/METADATA")]
    assert {name.rpartition("/")[2] for name in names if "/licenses/" in name} == {"LICENSE", "NOTICE"}
    assert "License-Expression: Apache-2.0" in metadata
