"""bitsandbytes checkpoints: their answers are transformers' own on the numbers that their codes stand for."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from baton_serve.engine import ModelError
from baton_serve.engine.kernels.quantized_weights import code_values
from tests.engine.conftest import greedy_answer
from tests.engine.driving import make_engine, make_work, run
from tests.quantized_checkpoints import Writer, Written, write_checkpoint

PROMPT = [(7 * place + 3) % 256 for place in range(40)]
NESTED_BLOCK = 256


def writer(kind: str, *, is_double: bool = False, block: int = 32) -> Writer:
    table = torch.tensor(code_values("nf4" if kind == "nf4" else "bnb_fp4"))

    def write(weight: Tensor) -> Written:
        flat = torch.nn.functional.pad(weight.flatten(), (0, -weight.numel() % block)).view(-1, block)
        scales = flat.abs().amax(1)
        state: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": "float32", "shape": weight.shape}
        parts = {".weight.quant_map": table.clone(), ".weight.absmax": scales}
        if is_double:
            offset, places = float(scales.mean()), torch.linspace(-1, 1, 256)
            outer = torch.stack([(run - offset).abs().max() for run in torch.split(scales, NESTED_BLOCK)])
            spread = outer.repeat_interleave(NESTED_BLOCK)[: len(scales)]
            bytes_ = ((scales - offset) / spread).sub(places[:, None]).abs().argmin(0)
            scales = places[bytes_] * spread + offset
            state |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": offset}
            parts |= {
                ".weight.absmax": bytes_.to(torch.uint8),
                ".weight.nested_absmax": outer,
                ".weight.nested_quant_map": places.clone(),
            }
        codes = (flat / scales[:, None]).unsqueeze(2).sub(table).abs().argmin(2)
        numbers = (table[codes] * scales[:, None]).flatten()[: weight.numel()].view(weight.shape)
        pairs = codes.flatten()[: weight.numel()].view(-1, 2)
        parts[".weight"] = (pairs[:, :1] << 4 | pairs[:, 1:]).to(torch.uint8)
        text = json.dumps({**state, "shape": list(weight.shape)}).encode()
        parts[f".weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(list(text), dtype=torch.uint8)
        return Written(parts, numbers)

    return write


def stated(kind: str, **others: Any) -> dict[str, Any]:
    return {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind, **others}


@pytest.mark.parametrize(
    ("write", "kind"),
    [
        (writer("nf4"), "nf4"),
        (writer("fp4"), "fp4"),
        (writer("nf4", is_double=True), "nf4"),
        (writer("nf4", block=64), "nf4"),
    ],
    ids=["nf4", "fp4", "double", "blocks across rows"],
)
def test_answers_are_those_of_the_dequantized_weights(tmp_path: Path, write: Writer, kind: str) -> None:
    model = write_checkpoint(tmp_path / "model", write, stated(kind))
    with make_engine(tmp_path / "model", quantization="bitsandbytes") as engine:
        engine.add(make_work(engine, "a", PROMPT))
        assert run(engine)["a", 0] == greedy_answer(model, PROMPT)


EIGHT: dict[str, Any] = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0}


def eight_bits(weight: Tensor, *, order: int = 0) -> Written:
    largest = weight.abs().amax(1)
    codes = (weight * 127 / largest[:, None]).round()
    parts = {".weight": codes.to(torch.int8), ".SCB": largest, ".weight_format": torch.tensor(order, dtype=torch.uint8)}
    return Written(parts, codes * largest[:, None] / 127)


def test_answers_in_eight_bits_are_those_of_the_dequantized_weights(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", eight_bits, EIGHT)
    with make_engine(tmp_path / "model", quantization="bitsandbytes") as engine:
        engine.add(make_work(engine, "a", PROMPT))
        assert run(engine)["a", 0] == greedy_answer(model, PROMPT)


def test_an_order_of_codes_for_one_gpu_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", partial(eight_bits, order=2), EIGHT)
    with pytest.raises(ModelError, match="by rows"):
        make_engine(tmp_path / "model")
