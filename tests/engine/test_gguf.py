"""Weights in GGUF files, written by the format's own package: answers are transformers' own on their numbers."""

import importlib.util
from pathlib import Path
from typing import cast

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engine import ConfigError, EngineConfig, ModelError, UnsupportedModelError
from engine.gguf import gguf_file
from engine.kernels import QuantizedWeight
from engine.model_loader import load_model
from engine.quantization.modules import QuantizedLinear
from tests.engine.conftest import greedy_answer
from tests.engine.driving import make_engine, make_work, run
from tests.tiny_models import write_tiny_model

PROMPT = [(7 * place + 3) % 256 for place in range(40)]
Q8_0, Q4_0, F32 = (getattr(gguf.GGMLQuantizationType, name) for name in ("Q8_0", "Q4_0", "F32"))
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_gguf(folder: Path, kind: gguf.GGMLQuantizationType) -> torch.nn.Module:
    """Makes `folder`, whose weights lie in a GGUF file; returns transformers' model of the numbers they stand for."""
    plain = write_tiny_model(folder.with_name("plain"), "qwen2", hidden_size=64, intermediate_size=96)
    write_tiny_model(folder, "qwen2", hidden_size=64, intermediate_size=96)
    (folder / "model.safetensors").unlink()
    writer = gguf.GGUFWriter(folder / "model.gguf", "qwen2")
    config = AutoModelForCausalLM.from_pretrained(plain).config
    writer.add_block_count(config.num_hidden_layers)
    numbers = load_file(plain / "model.safetensors")
    for name, tensor in numbers.items():
        stem, _, leaf = name.rpartition(".")
        layer = stem.split(".")[2] if stem.startswith("model.layers") else None
        short = NAMES[stem if layer is None else stem.removeprefix(f"model.layers.{layer}.")]
        stored = f"{short}.{leaf}" if layer is None else f"blk.{layer}.{short}.{leaf}"
        used = kind if name.endswith("_proj.weight") else F32
        codes = gguf.quants.quantize(tensor.numpy(), used)
        writer.add_tensor(stored, codes, raw_dtype=used)
        numbers[name] = torch.from_numpy(np.array(gguf.quants.dequantize(codes, used))).view(tensor.shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_file(numbers, plain / "model.safetensors", metadata={"format": "pt"})
    return cast(torch.nn.Module, AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32))


@pytest.mark.parametrize("kind", [Q8_0, Q4_0], ids=lambda kind: str(kind.name))
def test_answers_are_those_of_the_dequantized_weights(kind: gguf.GGMLQuantizationType, tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "model", kind)
    for name in (tmp_path / "model", tmp_path / "model" / "model.gguf"):
        with make_engine(name, quantization="gguf") as engine:
            engine.add(make_work(engine, "a", PROMPT))
            assert run(engine)["a", 0] == greedy_answer(model, PROMPT)


def test_numbers_of_a_file_are_rounded_again_where_a_format_is_asked_for(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model", Q8_0)
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
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        gguf_file(EngineConfig(model=str(folder), load_format="gguf", tensor_parallel_size=2))
