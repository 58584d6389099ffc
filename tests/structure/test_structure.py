"""Rules of CONTRIBUTING.md that no linter checks: sizes of files, words of the domain, isolation of devices."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from baton_serve.bench.cli import BENCHES
from tools.house import code_lines

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("baton_serve", "kvtransfer", "services")
MAX_CODE_LINES = 400
VAGUE = {"utils", "util", "helpers", "helper", "manager", "base", "misc", "common_utils"}


def source_files() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def test_no_file_has_more_than_400_lines_of_code() -> None:
    """Docstrings, comments and blank lines are not counted: explaining must cost nothing."""
    counts = {str(p.relative_to(ROOT)): code_lines(p.read_text()) for p in source_files()}
    assert not {path: count for path, count in counts.items() if count > MAX_CODE_LINES}


def test_every_module_says_what_it_is_for() -> None:
    silent = [
        str(p.relative_to(ROOT)) for p in source_files() if not p.read_text().lstrip().startswith(('"""', 'r"""'))
    ]
    assert not silent


def test_no_module_has_a_vague_name() -> None:
    assert not [str(p) for p in source_files() if p.stem in VAGUE]


def test_only_device_py_and_the_transports_name_a_device() -> None:
    device = re.compile(r"torch\.(cuda|xpu)\b")
    allowed = {ROOT / "baton_serve" / "engine" / "device.py"}
    found = [
        str(p.relative_to(ROOT))
        for p in source_files()
        if p not in allowed and "transports" not in p.parts and "bench" not in p.parts and device.search(p.read_text())
    ]
    assert not found


def test_no_file_holds_the_marks_of_an_unfinished_merge() -> None:
    marked = subprocess.run(
        ["git", "grep", "-l", "-E", "^(<{7}|>{7}) "], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert not marked.stdout


def test_no_pickle_anywhere() -> None:
    # An error's class unpickles nothing, and pickletools only lists instructions.
    pickle = re.compile(
        r"^\s*(import pickle\b|from pickle import (?!UnpicklingError$))|send_pyobj|recv_pyobj", re.MULTILINE
    )
    assert not [str(p.relative_to(ROOT)) for p in source_files() if pickle.search(p.read_text())]


def test_nobody_but_settings_reads_the_environment() -> None:
    reads = re.compile(r"os\.environ|os\.getenv|from os import .*environ")
    # A main also sets the variable that selects the visible cards of its device.
    mains = {f"services/{role}/main.py" for role in ("prefill", "decode", "unified", "encode")}
    forking = {"services/local/launches.py", "services/local/preload.py"}  # they set a new process's
    allowed = {
        "services/common/settings/configuration.py",
        *forking,
        *mains,
        "baton_serve/engine/offline/engine_args.py",  # `LLM` has no settings: HF_HOME, HF_TOKEN and HF_ENDPOINT
        # Compiled libraries and kept verdicts lie in VLLM_CACHE_ROOT also where no settings exist, as under `LLM`.
        "baton_serve/contracts/model_path.py",
    }  # a main also selects the visible cards
    found = {
        relative
        for p in source_files()
        if (relative := str(p.relative_to(ROOT))) not in allowed
        and "bench" not in p.parts
        and reads.search(p.read_text())
    }
    assert not found


@pytest.mark.parametrize(
    "module",
    [
        "baton_serve.services.router.main",
        "baton_serve",
        "baton_serve.engine.core.scheduler",
        "baton_serve.kvtransfer.session",
    ],
)
def test_what_decides_never_loads_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_every_benchmark_can_be_run_by_its_name() -> None:
    files = [ROOT / f"baton_serve/bench/{module.replace('.', '/')}.py" for module, _ in BENCHES.values()]
    assert not [str(file) for file in files if not re.search(r"^def run\(", file.read_text(), re.MULTILINE)]


def test_no_text_names_a_module_without_the_import_name() -> None:
    """Such a text would import another package, or nothing, where the wheel is installed."""
    bare = re.compile(r"import_module\(\s*f?[\"'](bench|contracts|engine|kvtransfer|services)\b")
    assert not [str(path) for path in source_files() if bare.search(path.read_text())]
