"""Weights in every format give the same tokens on several ranks as transformers does on their numbers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton_serve.engine import Engine
from baton_serve.engine.config import Quantization
from tests.engine import (
    test_awq,
    test_bitsandbytes,
    test_compressed_tensors,
    test_fp8_checkpoints,
    test_gptq,
    test_mxfp4_checkpoints,
)
from tests.engine.conftest import References, greedy_answer
from tests.engine.driving import make_engine, make_work, run
from tests.engine.rank_threads import use_threads
from tests.gguf_files import Kind, projections, write_gguf
from tests.quantized_checkpoints import write_checkpoint

pytestmark = pytest.mark.slow

PROMPT = [(7 * place + 3) % 256 for place in range(40)]
ROUNDED: list[Quantization] = ["fp8", "int8", "sym_int4", "asym_int4", "fp6", "mxfp4", "bitsandbytes"]
MIXED = ["gpt_oss", "qwen2_moe", "phi3", "olmo2"]

Make = Callable[[Path], Any]


def _stored(write: Any, config: dict[str, Any], **settings: Any) -> Make:
    return lambda folder: write_checkpoint(folder, write, config, **settings)


CHECKPOINTS: dict[str, Make] = {
    **{f"gptq, {name}": _stored(*case) for name, case in test_gptq.CASES.items()},
    "awq": _stored(test_awq.writer(), test_awq.stated()),
    "fp8, blocks": _stored(test_fp8_checkpoints.blocks, test_fp8_checkpoints.STATED, **test_fp8_checkpoints.SIZES),
    **{f"compressed, {name}": _stored(*case) for name, case in test_compressed_tensors.CASES.items()},
    "mxfp4": test_mxfp4_checkpoints.make,
    "bitsandbytes": _stored(test_bitsandbytes.writer("nf4"), test_bitsandbytes.stated("nf4")),
    "gguf": lambda folder: write_gguf(folder, projections(Kind.Q4_0), "llama"),
    "gptq, experts": _stored(test_gptq.writer(), test_gptq.stated(), family="qwen3_moe", moe_intermediate_size=64),
}


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    use_threads(monkeypatch)


def answer(engine: Engine, prompt: list[int]) -> list[int]:
    engine.add(make_work(engine, "a", prompt))
    return run(engine)["a", 0]


@pytest.mark.parametrize("name", ROUNDED)
def test_rounded_weights_are_those_of_one_rank(name: Quantization, references: References) -> None:
    folder = references("llama").folder
    with (
        make_engine(folder, quantization=name) as one,
        make_engine(folder, quantization=name, tensor_parallel_size=2) as two,
    ):
        assert one.layout == two.layout
        assert answer(two, PROMPT) == answer(one, PROMPT)


@pytest.mark.parametrize("family", MIXED)
@pytest.mark.parametrize("name", ["fp8", "sym_int4"])
def test_rounded_weights_of_other_families(name: Quantization, family: str, references: References) -> None:
    folder = references(family).folder
    with (
        make_engine(folder, quantization=name) as one,
        make_engine(folder, quantization=name, tensor_parallel_size=2) as two,
    ):
        assert answer(two, PROMPT) == answer(one, PROMPT)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_quantized_checkpoints(name: str, tmp_path: Path) -> None:
    model = CHECKPOINTS[name](tmp_path / "model")
    kind = "gguf" if name == "gguf" else None
    with make_engine(tmp_path / "model", tensor_parallel_size=2, quantization=kind) as engine:
        assert answer(engine, PROMPT) == greedy_answer(model, PROMPT)
