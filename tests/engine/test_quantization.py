"""Weights rounded while loading: the answers are transformers' own on the dequantized weights; KV in one byte."""

import random
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from baton_serve.engine import ConfigError, EngineConfig, UnsupportedModelError
from baton_serve.engine.config import KvCacheDtype, Quantization
from baton_serve.engine.kernels.quantized_weights import QuantizedWeight, dequantize
from baton_serve.engine.loading.transformers_loader import load_model
from baton_serve.engine.model.quantized.formats import Scheme, quantize, scheme
from baton_serve.engine.model.quantized.modules import quantized_layers
from baton_serve.engine.model.quantized.quantization_plan import HEAD_SCHEME
from tests.engine.conftest import References, greedy_answer
from tests.engine.driving import hand_over, make_engine, make_work, run
from tests.tiny_models import write_tiny_model

FORMATS: list[Quantization] = ["fp8", "fp8_e5m2", "int8", "sym_int4", "asym_int4", "fp6", "mxfp4"]
KV_DTYPES: list[KvCacheDtype] = ["fp8_e4m3", "fp8_e5m2", "int8"]
PROMPT = [random.Random(1).randrange(256) for _ in range(70)]


def rounded(folder: Path, how: Scheme, *, head: Scheme | None = HEAD_SCHEME) -> torch.nn.Module:
    """Return the model of transformers with dequantized weights."""
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for name, part in model.named_modules():
            if isinstance(part, torch.nn.Linear) and (chosen := head if name == "lm_head" else how) is not None:
                made = quantize(part.weight, chosen)
                assert made is not None
                part.weight.copy_(dequantize(made))
    return model


@pytest.mark.parametrize("name", FORMATS)
def test_answers_are_those_of_the_dequantized_weights(references: References, name: Quantization) -> None:
    reference = references("llama")
    model = rounded(reference.folder, scheme(name, fp8_dtype="e4m3", group_size=128))
    with make_engine(reference.folder, quantization=name) as engine:
        for number, prompt in enumerate(reference.prompts):
            engine.add(make_work(engine, str(number), prompt))
        answers = run(engine)
    assert [answers[str(n), 0] for n in range(len(answers))] == [greedy_answer(model, p) for p in reference.prompts]


@pytest.mark.parametrize("family", ["qwen3", "phi3", "gemma3", "glm4", "mistral"])
def test_other_families_too(references: References, family: str) -> None:
    reference = references(family)
    model = rounded(reference.folder, scheme("asym_int4", fp8_dtype="e4m3", group_size=32))
    with make_engine(reference.folder, quantization="asym_int4", quantization_group_size=32) as engine:
        engine.add(make_work(engine, "a", reference.prompts[3]))
        assert run(engine)["a", 0] == greedy_answer(model, reference.prompts[3])


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *[("qwen3_moe", "int8"), ("mixtral", "sym_int4"), ("gpt_oss", "mxfp4"), ("gpt_oss", "fp8")],
        *[("qwen2_moe", "int8"), ("glm4_moe", "int8"), ("olmoe", "sym_int4"), ("ernie4_5_moe", "fp8")],
    ],
)
def test_experts_are_rounded_too(references: References, family: str, name: Quantization) -> None:
    reference, how = references(family), scheme(name, fp8_dtype="e4m3", group_size=32)
    model = rounded(reference.folder, how)
    with torch.no_grad():
        for full, stacked in model.named_parameters():
            if full.endswith(("experts.gate_up_proj", "experts.down_proj")):
                rows = stacked.transpose(1, 2) if family == "gpt_oss" else stacked
                made = quantize(rows.flatten(0, 1), how)
                assert made is not None
                rows.copy_(dequantize(made).view(rows.shape))
    with make_engine(reference.folder, quantization=name, quantization_group_size=32) as engine:
        engine.add(make_work(engine, "a", reference.prompts[3]))
        assert run(engine)["a", 0] == greedy_answer(model, reference.prompts[3])


def test_a_tied_embedding_is_the_rounded_head(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tied", "qwen2", tie_word_embeddings=True)
    model = rounded(folder, scheme("int8", fp8_dtype="e4m3", group_size=128))
    with make_engine(folder, quantization="int8") as engine:
        engine.add(make_work(engine, "a", PROMPT))
        assert run(engine)["a", 0] == greedy_answer(model, PROMPT)


def test_skipped_modules_keep_their_weights(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tied", "qwen2", tie_word_embeddings=True)
    how = scheme("sym_int4", fp8_dtype="e4m3", group_size=128)
    model = rounded(folder, how, head=None)
    with make_engine(folder, quantization="sym_int4", quantization_skip=("lm_head",)) as engine:
        engine.add(make_work(engine, "a", PROMPT))
        assert run(engine)["a", 0] == greedy_answer(model, PROMPT)
    with make_engine(folder, quantization="sym_int4", quantization_skip=("lm_head", "v_proj")) as engine:
        engine.add(make_work(engine, "a", PROMPT))
        assert len(run(engine)["a", 0]) == 12  # through transformers' layers: products of two kinds do not merge


def test_instances_with_other_weights_never_share_blocks(references: References) -> None:
    folder = references("llama").folder
    names: set[str] = set()
    for name in (None, *FORMATS):
        with make_engine(folder, quantization=name) as engine:
            names.add(engine.layout.fingerprint)
    assert len(names) == 1 + len(FORMATS)


def test_what_cannot_be_rounded_is_refused(references: References) -> None:
    with pytest.raises(UnsupportedModelError, match="experts of a kind"):
        make_engine(references("hunyuan_v1_moe").folder, quantization="int8")
    with pytest.raises(UnsupportedModelError, match="no linear layers"):
        make_engine(references("gpt2").folder, quantization="int8")
    with pytest.raises(ConfigError, match="group_size is 48"):
        make_engine(references("llama").folder, quantization="sym_int4", quantization_group_size=48)


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_kv_in_one_byte_gives_one_answer_on_every_path(references: References, dtype: KvCacheDtype) -> None:
    folder = references("llama").folder
    with make_engine(folder, kv_cache_dtype=dtype) as engine, make_engine(folder, kv_cache_dtype=dtype) as other:
        engine.add(make_work(engine, "whole", PROMPT))
        plain = run(engine)["whole", 0]
        engine.add(make_work(engine, "cached", PROMPT))
        assert run(engine)["cached", 0] == plain
        assert hand_over(engine, other, make_work(engine, "handed", PROMPT))["handed", 0] == plain
        assert engine.layout.block_bytes == 3 * 2 * 2 * (16 + 2) * 16
    with make_engine(folder, kv_cache_dtype=dtype, max_num_batched_tokens=16) as chunked:
        chunked.add(make_work(chunked, "chunked", PROMPT))
        assert run(chunked)["chunked", 0] == plain


def test_kv_in_int8_is_close_to_the_model(references: References) -> None:
    reference = references("llama")
    with make_engine(reference.folder, kv_cache_dtype="int8") as engine:
        for number, prompt in enumerate(reference.prompts):
            engine.add(make_work(engine, str(number), prompt))
        answers = run(engine)
    assert [answers[str(n), 0][0] for n in range(len(answers))] == [answer[0] for answer in reference.answers]


@pytest.mark.parametrize("quantization", [None, "sym_int4"])
def test_a_bfloat16_model_takes_coded_kv(references: References, quantization: Quantization | None) -> None:
    folder = references("llama").folder
    settings = {"dtype": "bfloat16", "kv_cache_dtype": "fp8", "quantization": quantization}
    with make_engine(folder, **settings) as engine, make_engine(folder, **settings) as other:
        engine.add(make_work(engine, "a", PROMPT))
        plain = run(engine)["a", 0]
        assert hand_over(engine, other, make_work(engine, "b", PROMPT))["b", 0] == plain


@dataclass
class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of tensors that are alive."""

    live: int = 0
    peak: int = 0

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor._base is None and tensor.device.type == "cpu":
                size = tensor.nbytes
                self.live += size
                weakref.finalize(tensor, self._freed, size)
        self.peak = max(self.peak, self.live)
        return result

    def _freed(self, size: int) -> None:
        self.live -= size


def test_a_model_is_never_in_memory_unrounded(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 12, "vocab_size": 512}
    folder = write_tiny_model(tmp_path / "larger", "llama", **sizes)
    whole = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    config = EngineConfig(model=str(folder), device="cpu", quantization="sym_int4")
    with Ledger() as ledger:
        model = load_model(config, torch.device("cpu"), lambda what, fraction: None)
    layers = list(quantized_layers(model.module))
    final = sum(layer.weight.nbytes for layer in layers if isinstance(layer.weight, QuantizedWeight))
    final += sum(parameter.nbytes for parameter in model.module.parameters())
    largest = 512 * 256 * 4
    assert len(layers) == 12 * 7 + 1 and final < whole / 3.5
    assert ledger.peak < final + 8 * largest < whole / 1.5  # one layer in float32, and what rounding it takes
