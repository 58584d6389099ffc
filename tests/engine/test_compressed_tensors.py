"""compressed-tensors checkpoints: their answers are transformers' own on the numbers that their codes stand for."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from baton_serve.engine import UnsupportedModelError
from tests.engine.conftest import greedy_answer
from tests.engine.driving import make_engine, make_work, run
from tests.quantized_checkpoints import Writer, Written, add_to_config, pack_words, round_unsigned, write_checkpoint

PROMPT = [(7 * place + 3) % 256 for place in range(40)]


def packed(bits: int, group: int = 32, *, sym: bool = True, order: bool = False) -> Writer:
    def write(weight: Tensor) -> Written:
        inputs = weight.shape[1]
        size = inputs if group == -1 else group
        index = torch.arange(inputs) // size
        if order:
            index = index[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]
        made = round_unsigned(weight, bits, size, is_symmetric=sym, scale_dtype=torch.bfloat16, group_of_input=index)
        parts = {
            ".weight_packed": pack_words(made.codes, bits),
            ".weight_scale": made.scales,
            ".weight_shape": torch.tensor(weight.shape),
        }
        if not sym:
            parts[".weight_zero_point"] = pack_words(made.zeros.T, bits).T
        if order:
            parts[".weight_g_idx"] = index.int()
        return Written(parts, made.numbers)

    return write


def integers(weight: Tensor) -> Written:
    scales = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scales).round()
    return Written({".weight": codes.to(torch.int8), ".weight_scale": scales}, codes * scales)


def floats(*, per_channel: bool) -> Writer:
    def write(weight: Tensor) -> Written:
        largest = weight.abs().amax(1, keepdim=True) if per_channel else weight.abs().max().reshape(1)
        scales = (largest / 448).to(torch.bfloat16)
        codes = (weight / scales.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
        parts = {".weight": codes, ".weight_scale": scales, ".input_scale": torch.ones(1)}
        return Written(parts, codes.float() * scales.float())

    return write


def float_groups(weight: Tensor) -> Written:
    scales = weight.view(len(weight), -1, 32).abs().amax(2) / 448
    spread = scales.repeat_interleave(32, dim=1)
    codes = (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
    return Written({".weight": codes, ".weight_scale": scales}, codes.float() * spread)


def stated(form: str, bits: int, strategy: str, **weights: Any) -> dict[str, Any]:
    kind = "float" if form == "float-quantized" else "int"
    inside = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, **weights}
    dynamic = {"num_bits": 8, "type": kind, "dynamic": True, "strategy": "token"}
    group = {"targets": ["Linear"], "weights": inside, "input_activations": None if bits == 4 else dynamic}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


CASES = {
    "W4A16": (packed(4), stated("pack-quantized", 4, "group", group_size=32)),
    "W4A16, zeros": (packed(4, sym=False), stated("pack-quantized", 4, "group", group_size=32, symmetric=False)),
    "W4A16, order": (packed(4, order=True), stated("pack-quantized", 4, "group", group_size=32, actorder="group")),
    "W8A16": (packed(8, -1), stated("pack-quantized", 8, "channel")),
    "W8A16, groups": (packed(8), stated("pack-quantized", 8, "group", group_size=32)),
    "W8A8": (integers, stated("int-quantized", 8, "channel")),
    "FP8 per channel": (floats(per_channel=True), stated("float-quantized", 8, "channel")),
    "FP8 groups": (float_groups, stated("float-quantized", 8, "group", group_size=32)),
    "FP8 per tensor": (floats(per_channel=False), stated("float-quantized", 8, "tensor")),
}


@pytest.mark.parametrize("name", CASES)
def test_answers_are_those_of_the_dequantized_weights(tmp_path: Path, name: str) -> None:
    write, config = CASES[name]
    model = write_checkpoint(tmp_path / "model", write, config)
    with make_engine(tmp_path / "model", quantization="compressed-tensors") as engine:
        engine.add(make_work(engine, "a", PROMPT))
        assert run(engine)["a", 0] == greedy_answer(model, PROMPT)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (stated("nvfp4-pack-quantized", 4, "group"), "format 'nvfp4-pack-quantized'; supported: 'pack-quantized'"),
        (stated("pack-quantized", 2, "channel"), "num_bits 2; supported: 4, 8"),
        ({**CASES["W8A8"][1], "sparsity_config": {"format": "sparse-24-bitmask"}}, "with a sparsity_config"),
        ({"quant_method": "compressed-tensors"}, "without config_groups"),
    ],
)
def test_other_schemes_are_refused(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    write_checkpoint(tmp_path / "model", *CASES["W8A8"])
    add_to_config(tmp_path / "model", config)
    with pytest.raises(UnsupportedModelError, match=message):
        make_engine(tmp_path / "model")
