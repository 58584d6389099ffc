"""AWQ checkpoints: their answers are transformers' own on the numbers that their codes stand for."""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from baton_serve.engine import UnsupportedModelError
from tests.engine.conftest import greedy_answer
from tests.engine.driving import make_engine, make_work, run
from tests.quantized_checkpoints import Writer, Written, add_to_config, pack_words, round_unsigned, write_checkpoint

PROMPT = [(7 * place + 3) % 256 for place in range(40)]
ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def writer(group: int = 32, *, zeros: bool = True) -> Writer:
    """As AutoAWQ's GEMM packs: along outputs, eight of them interleaved."""

    def write(weight: Tensor) -> Written:
        size = weight.shape[1] if group == -1 else group
        made = round_unsigned(weight, 4, size, is_symmetric=not zeros)
        parts = {".qweight": pack_words(made.codes.T, 4, ORDER), ".scales": made.scales.T}
        if zeros:
            parts[".qzeros"] = pack_words(made.zeros.T, 4, ORDER)
        return Written(parts, made.numbers)

    return write


def stated(group: int = 32, **others: Any) -> dict[str, Any]:
    base = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return {**base, **others}


@pytest.mark.parametrize(
    ("write", "config"),
    [(writer(), stated()), (writer(-1), stated(-1, version="GEMM")), (writer(zeros=False), stated(zero_point=False))],
    ids=["groups", "rows", "no zeros"],
)
def test_answers_are_those_of_the_dequantized_weights(tmp_path: Path, write: Writer, config: dict[str, Any]) -> None:
    model = write_checkpoint(tmp_path / "model", write, config, family="qwen3")
    with make_engine(tmp_path / "model") as engine:
        engine.add(make_work(engine, "a", PROMPT))
        assert run(engine)["a", 0] == greedy_answer(model, PROMPT)


@pytest.mark.parametrize(
    ("config", "message"),
    [(stated(version="gemv"), "version 'gemv'; supported: 'gemm'"), (stated(bits=8), "bits 8; supported: 4")],
)
def test_other_layouts_are_refused(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    write_checkpoint(tmp_path / "model", writer(), stated())
    add_to_config(tmp_path / "model", config)
    with pytest.raises(UnsupportedModelError, match=message):
        make_engine(tmp_path / "model")
