"""The kernels of mixers, latents and experts compile for a GPU: the interpreter alone does not show that."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.kernels import compile_for_gpu

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    program = [sys.executable, "-m", compile_for_gpu.__name__]
    done = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.split()) == len(compile_for_gpu.KERNELS)
