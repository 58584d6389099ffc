"""Checkpoints of float8 in blocks: their answers are transformers' own on the numbers that their codes stand for."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from baton_serve.engine import ConfigError, ModelError, UnsupportedModelError
from tests.engine.conftest import greedy_answer
from tests.engine.driving import make_engine, make_work, run
from tests.quantized_checkpoints import Written, add_to_config, write_checkpoint

PROMPT = [(7 * place + 3) % 256 for place in range(40)]
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 320, "num_hidden_layers": 2}  # 2 and 2.5 blocks
STATED: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def blocks(weight: Tensor) -> Written:
    outputs, inputs = weight.shape
    scales = torch.empty(-(-outputs // 128), -(-inputs // 128))
    codes, numbers = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(weight.shape)
    for row in range(len(scales)):
        for column in range(scales.shape[1]):
            place = (slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128))
            scales[row, column] = weight[place].abs().max() / 448
            codes[place] = (weight[place] / scales[row, column]).to(torch.float8_e4m3fn)
            numbers[place] = codes[place].float() * scales[row, column]
    return Written({".weight": codes, ".weight_scale_inv": scales}, numbers)


def whole(weight: Tensor) -> Written:
    scale = weight.abs().max() / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    parts = {".weight": codes, ".weight_scale": scale, ".input_scale": torch.ones(())}
    return Written(parts, codes.float() * scale)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_answers_are_those_of_the_dequantized_weights(tmp_path: Path, family: str) -> None:
    model = write_checkpoint(tmp_path / "model", blocks, STATED, family=family, **SIZES)
    with make_engine(tmp_path / "model", quantization="fp8") as engine:
        engine.add(make_work(engine, "a", PROMPT))
        assert run(engine)["a", 0] == greedy_answer(model, PROMPT)


def test_one_scale_for_all(tmp_path: Path) -> None:
    stated = {"quant_method": "fp8", "activation_scheme": "static"}
    model = write_checkpoint(tmp_path / "model", whole, stated)
    with make_engine(tmp_path / "model") as engine:
        engine.add(make_work(engine, "a", PROMPT))
        assert run(engine)["a", 0] == greedy_answer(model, PROMPT)


def with_kv_scales(weight: Tensor) -> Written:
    written = whole(weight)
    return Written({**written.parts, ".k_scale": torch.tensor(0.5), ".v_scale": torch.tensor(0.25)}, written.numbers)


def test_scales_of_a_kv_cache_are_replaced_by_one_for_each_token(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    stated = {"quant_method": "fp8", "activation_scheme": "static", "kv_cache_scheme": "static"}
    write_checkpoint(tmp_path / "plain", whole, stated)
    model = write_checkpoint(tmp_path / "scaled", with_kv_scales, stated)
    answers: list[list[int]] = []
    for name in ("plain", "scaled"):
        with make_engine(tmp_path / name, kv_cache_dtype="fp8") as engine:
            engine.add(make_work(engine, "a", PROMPT))
            answers.append(run(engine)["a", 0])
            assert ("scales of a KV cache in the checkpoint are not used" in caplog.text) == (name == "scaled")
    assert answers[0] == answers[1]
    assert answers[0][0] == greedy_answer(model, PROMPT)[0]


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", blocks, STATED, **SIZES)
    with pytest.raises(ConfigError, match="quantized already by fp8"):
        make_engine(tmp_path / "model", quantization="int8")
    add_to_config(tmp_path / "model", {**STATED, "weight_block_size": [64, 64]})
    with pytest.raises(ModelError, match=r"is not stored as fp8 in blocks of 64 x 64 says: scales of shape \["):
        make_engine(tmp_path / "model")
    add_to_config(tmp_path / "model", {**STATED, "weight_block_size": 128})
    with pytest.raises(UnsupportedModelError, match="in blocks of 128; they must be two"):
        make_engine(tmp_path / "model")
