"""GPTQ checkpoints: their answers are transformers' own on the numbers that their codes stand for."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from baton_serve.engine import ConfigError, EngineConfig, ModelError, UnsupportedModelError
from baton_serve.engine.loading.transformers_loader import load_model
from baton_serve.engine.model.quantized.modules import QuantizedLinear, ReorderedLinear
from baton_serve.engine.pooling.loader import load_pooling_model
from tests.engine.conftest import References, greedy_answer
from tests.engine.driving import make_engine, make_work, run
from tests.quantized_checkpoints import Writer, Written, add_to_config, pack_words, round_unsigned, write_checkpoint

PROMPT = [(7 * place + 3) % 256 for place in range(40)]


def writer(bits: int = 4, group: int = 32, *, sym: bool = True, order: bool = False, offset: int = 1) -> Writer:
    """As AutoGPTQ packs: along inputs, zeros along outputs less `offset`."""

    def write(weight: Tensor) -> Written:
        inputs = weight.shape[1]
        size = inputs if group == -1 else group
        index = torch.arange(inputs) // size
        if order:
            index = index[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]
        made = round_unsigned(weight, bits, size, is_symmetric=sym, group_of_input=index)
        parts = {
            ".qweight": pack_words(made.codes, bits).T,
            ".qzeros": pack_words((made.zeros.T - offset) & (2**bits - 1), bits),
            ".scales": made.scales.T,
            ".g_idx": index.int(),
        }
        return Written(parts, made.numbers)

    return write


def stated(bits: int = 4, group: int = 32, **others: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": True, "desc_act": False, **others}


CASES = {
    "4 bit": (writer(), stated()),
    "4 bit, zeros": (writer(sym=False), stated(sym=False)),
    "4 bit, rows": (writer(group=-1), stated(group=-1)),
    "4 bit, odd groups": (writer(group=16), stated(group=16)),
    "8 bit": (writer(bits=8), stated(bits=8)),
    "8 bit, zeros": (writer(bits=8, sym=False), stated(bits=8, sym=False)),
    "order": (writer(order=True), stated(desc_act=True)),
    "order, zeros": (writer(sym=False, order=True), stated(sym=False, desc_act=True)),
    "second version": (writer(sym=False, offset=0), stated(sym=False, checkpoint_format="gptq_v2")),
}


@pytest.mark.parametrize("name", CASES)
def test_answers_are_those_of_the_dequantized_weights(tmp_path: Path, name: str) -> None:
    write, config = CASES[name]
    model = write_checkpoint(tmp_path / "model", write, config)
    with make_engine(tmp_path / "model") as engine:
        engine.add(make_work(engine, "a", PROMPT))
        assert run(engine)["a", 0] == greedy_answer(model, PROMPT)


def test_experts_become_numbers_and_the_rest_stays_quantized(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", writer(), stated(), family="qwen3_moe", moe_intermediate_size=64)
    with make_engine(tmp_path / "model") as engine:
        engine.add(make_work(engine, "a", PROMPT))
        assert run(engine)["a", 0] == greedy_answer(model, PROMPT)


def test_a_tied_head_stays_the_embedding(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", writer(), stated(), family="qwen2", tie_word_embeddings=True)
    with make_engine(tmp_path / "model", quantization="gptq") as engine:
        engine.add(make_work(engine, "a", PROMPT))
        assert run(engine)["a", 0] == greedy_answer(model, PROMPT)


def test_the_flag_must_agree(tmp_path: Path, references: References) -> None:
    write_checkpoint(tmp_path / "model", writer(), stated())
    with pytest.raises(ConfigError, match="quantized already by gptq"):
        make_engine(tmp_path / "model", quantization="sym_int4")
    with pytest.raises(ConfigError, match="are not quantized"):
        make_engine(references("llama").folder, quantization="gptq")


def test_models_that_answer_with_vectors_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", writer(), stated())
    config = EngineConfig(model=str(tmp_path / "model"), device="cpu")
    with pytest.raises(UnsupportedModelError, match="pooling models"):
        load_pooling_model(config, "embed", torch.device("cpu"), lambda what, fraction: None)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (stated(bits=3), r"gptq with bits 3; supported: 4, 8"),
        (stated(checkpoint_format="marlin"), "checkpoint_format 'marlin'"),
        (stated(group=0), "group_size 0"),
        (stated(dynamic={"+:down": {"bits": 8}}), "settings of their own"),
        ({"quant_method": "aqlm"}, "quantized by 'aqlm', which is not supported; supported: .*gptq"),
        ({}, "quantized by None"),
    ],
)
def test_what_is_not_served_is_named(tmp_path: Path, references: References, config: Any, message: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in references("llama").folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    add_to_config(folder, config)
    with pytest.raises(UnsupportedModelError, match=message):
        make_engine(folder)


def test_a_statement_that_the_weights_do_not_keep_is_an_error(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", writer(), stated(group=64))
    with pytest.raises(ModelError, match="is not stored as gptq 4 bit, group 64 says: g_idx"):
        make_engine(tmp_path / "model")


def test_other_codes_have_another_fingerprint(tmp_path: Path, references: References) -> None:
    names = set()
    for number, name in enumerate(("4 bit", "4 bit, zeros", "8 bit")):
        write_checkpoint(tmp_path / str(number), *CASES[name])
        with make_engine(tmp_path / str(number)) as engine:
            names.add(engine.layout.fingerprint)
    with make_engine(references("llama").folder) as engine:
        names.add(engine.layout.fingerprint)
    assert len(names) == 4


def test_layers_stay_quantized(tmp_path: Path) -> None:
    for name, kind in (("4 bit, zeros", QuantizedLinear), ("order", ReorderedLinear)):
        write_checkpoint(tmp_path / name, *CASES[name])
        config = EngineConfig(model=str(tmp_path / name), device="cpu")
        module = load_model(config, torch.device("cpu"), lambda what, fraction: None).module
        assert sum(type(part) is kind for part in module.modules()) == 3 * 7
