"""Weights in GGUF files, written by the format's own package: answers are transformers' own on their numbers."""

import importlib.util
from pathlib import Path
from typing import cast

import gguf
import pytest
import torch

from baton_serve.engine import ConfigError, EngineConfig, ModelError, UnsupportedModelError
from baton_serve.engine.kernels import QuantizedWeight
from baton_serve.engine.kernels.quantized_weights import code_bits, dequantize
from baton_serve.engine.loading.gguf_weights import gguf_file
from baton_serve.engine.loading.quantization.checkpoints.gguf import Gguf
from baton_serve.engine.loading.transformers_loader import load_model
from baton_serve.engine.model.fused_layers import fits
from baton_serve.engine.model.quantized.modules import QuantizedEmbedding, QuantizedLinear
from tests.engine.conftest import greedy_answer
from tests.engine.driving import make_engine, make_work, run
from tests.gguf_files import Kind, blocks, projections, write_gguf
from tests.tiny_models import write_tiny_model

PROMPT = [(7 * place + 3) % 256 for place in range(40)]
EXACT = [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0]
FACTORED = [Kind.Q4_K, Kind.Q5_K]
ROUNDED = [Kind.Q2_K, Kind.Q3_K, Kind.Q6_K, Kind.IQ4_NL, Kind.IQ4_XS]


def as_q4_k_m(name: str) -> Kind:
    """Return the format of a tensor in llama.cpp's Q4_K_M: four bits, and six for the most sensitive tensors."""
    return Kind.Q6_K if any(part in name for part in ("v_proj", "down_proj", "embed_tokens", "lm_head")) else Kind.Q4_K


def read_blocks(kind: Kind) -> tuple[QuantizedWeight, torch.Tensor]:
    rows = blocks(kind, (16, 512))
    weight = Gguf().read({f".{kind.name}": torch.from_numpy(rows)}).weight
    assert isinstance(weight, QuantizedWeight)
    return weight, torch.from_numpy(gguf.quants.dequantize(rows, kind))


@pytest.mark.parametrize("kind", EXACT, ids=lambda kind: str(kind.name))
def test_codes_of_blocks_of_32_stand_for_the_same_numbers(kind: Kind) -> None:
    weight, meant = read_blocks(kind)
    assert weight.group == 32
    assert (kind == Kind.Q8_0) == (code_bits(weight.codebook) == 8)
    torch.testing.assert_close(dequantize(weight), meant, rtol=0, atol=0 if weight.zeros is None else 4e-4)


@pytest.mark.parametrize("kind", FACTORED, ids=lambda kind: str(kind.name))
def test_k_quants_change_less_than_bfloat16_would(kind: Kind) -> None:
    weight, meant = read_blocks(kind)
    assert code_bits(weight.codebook) < 8
    error, allowed = (dequantize(weight) - meant).abs(), (meant.to(torch.bfloat16).float() - meant).abs()
    assert error.max() < allowed.max() and error.mean() < allowed.mean()


@pytest.mark.parametrize("kind", ROUNDED, ids=lambda kind: str(kind.name))
def test_other_types_are_rounded_to_a_254th_of_a_groups_largest(kind: Kind) -> None:
    weight, meant = read_blocks(kind)
    assert weight.codebook == "int8"
    largest = meant.view(len(meant), -1, 32).abs().amax(dim=2, keepdim=True)
    assert ((dequantize(weight) - meant).view(len(meant), -1, 32).abs() <= largest / 254 * 1.01 + 1e-7).all()


def test_a_group_without_steps_is_its_lowest_number() -> None:
    rows = blocks(Kind.Q4_1, (4, 64))
    rows[:, :2] = 0
    weight = Gguf().read({".Q4_1": torch.from_numpy(rows)}).weight
    assert isinstance(weight, QuantizedWeight)
    meant = torch.from_numpy(gguf.quants.dequantize(rows, Kind.Q4_1))
    torch.testing.assert_close(dequantize(weight)[:, :32], meant[:, :32], rtol=1e-3, atol=0)


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0], ids=lambda kind: str(kind.name))
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_answers_are_those_of_the_dequantized_weights(family: str, kind: Kind, tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "model", projections(kind), family)
    for name in (tmp_path / "model", tmp_path / "model" / "model.gguf"):
        with make_engine(name, quantization="gguf") as engine:
            engine.add(make_work(engine, "a", PROMPT))
            assert run(engine)["a", 0] == greedy_answer(model, PROMPT)


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_mixed_file_stays_in_few_bits_and_its_layers_are_fused(is_tied: bool, tmp_path: Path) -> None:
    meant = write_gguf(tmp_path / "model", as_q4_k_m, tie_word_embeddings=is_tied)
    config = EngineConfig(model=str(tmp_path / "model"), device="cpu", dtype="float32")
    loaded = load_model(config, torch.device("cpu"), lambda *_: None)
    books = {
        name.rpartition(".")[2]: part.weight.codebook
        for name, part in loaded.module.named_modules()
        if isinstance(part, QuantizedLinear) and isinstance(part.weight, QuantizedWeight)
    }
    assert books == {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj", "down_proj", "lm_head"), "int8"),
        **dict.fromkeys(("o_proj", "gate_proj", "up_proj"), "uint4"),
    }
    assert fits(loaded.module)
    assert isinstance(loaded.module.get_submodule("model.embed_tokens"), QuantizedEmbedding) == is_tied
    for name, part in loaded.module.named_modules():
        if isinstance(part, QuantizedLinear) and isinstance(part.weight, QuantizedWeight):
            numbers = cast(torch.Tensor, meant.get_submodule(name).weight)
            assert (dequantize(part.weight) - numbers).abs().max() < numbers.abs().max() / 200


def test_numbers_of_a_file_are_rounded_again_where_a_format_is_asked_for(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model", projections(Kind.Q8_0))
    config = EngineConfig(model=str(tmp_path / "model"), device="cpu", dtype="float32", quantization="int8")
    model = load_model(config, torch.device("cpu"), lambda *_: None)
    layers = [part.weight for part in model.module.modules() if isinstance(part, QuantizedLinear)]
    assert {cast(QuantizedWeight, weight).codebook for weight in layers} == {"int8"}


def test_a_folder_without_or_with_several_files_is_an_error(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model")
    assert gguf_file(EngineConfig(model=str(folder))) is None
    with pytest.raises(ModelError, match="has 0 GGUF files"):
        make_engine(folder, load_format="gguf")
    (folder / "a.gguf").write_bytes(b"GGUF")
    (folder / "b.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"has 2 GGUF files \(a.gguf, b.gguf\); name one"):
        make_engine(folder, load_format="gguf")
    with pytest.raises(ModelError, match=r"the weights in .*a.gguf cannot be loaded"):
        make_engine(folder / "a.gguf")
    with pytest.raises(ConfigError, match=r"weights in .* are not quantized"):
        make_engine(folder, quantization="gguf")


def test_without_the_package_the_error_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_tiny_model(tmp_path / "model")
    (folder / "a.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedModelError, match=r"pip install 'baton-serve\[gguf\]'"):
        gguf_file(EngineConfig(model=str(folder), load_format="gguf"))
