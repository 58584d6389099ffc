"""gpt-oss's experts in MXFP4: the answers are transformers' own on the numbers that their codes stand for."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from baton_serve.engine import EngineConfig, ModelError
from baton_serve.engine.kernels.quantized_weights import code_values
from baton_serve.engine.loading.transformers_loader import load_model
from baton_serve.engine.model.quantized.experts import QuantizedExperts
from tests.engine.conftest import greedy_answer
from tests.engine.driving import make_engine, make_work, run
from tests.quantized_checkpoints import add_to_config
from tests.tiny_models import write_tiny_model

PROMPT = [(7 * place + 3) % 256 for place in range(40)]


def write(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[experts, inputs, outputs] -> blocks, scales, and the numbers that they stand for."""
    experts, inputs, outputs = weight.shape
    table = torch.tensor(code_values("fp4"))
    grouped = weight.transpose(1, 2).reshape(experts, outputs, inputs // 32, 32)
    exponents = torch.floor(torch.log2(grouped.abs().amax(3))) - 2
    scaled = grouped / torch.exp2(exponents)[..., None]
    codes = scaled.unsqueeze(4).sub(table).abs().argmin(4)
    blocks = (codes[..., 1::2] << 4 | codes[..., ::2]).to(torch.uint8)
    numbers = (table[codes] * torch.exp2(exponents)[..., None]).reshape(experts, outputs, inputs).transpose(1, 2)
    return blocks, (exponents + 127).to(torch.uint8), numbers.contiguous()


def make(folder: Path) -> torch.nn.Module:
    plain = write_tiny_model(folder.with_name("plain"), "gpt_oss")
    write_tiny_model(folder, "gpt_oss")
    numbers = load_file(plain / "model.safetensors")
    tensors = dict(numbers)
    for name in [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"], numbers[name] = write(tensors.pop(name))
    assert len(tensors) == len(numbers) + 6
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    save_file(numbers, plain / "model.safetensors", metadata={"format": "pt"})
    add_to_config(folder, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    return model


def test_answers_are_those_of_the_dequantized_experts(tmp_path: Path) -> None:
    model = make(tmp_path / "model")
    with make_engine(tmp_path / "model", quantization="mxfp4") as engine:
        engine.add(make_work(engine, "a", PROMPT))
        assert run(engine)["a", 0] == greedy_answer(model, PROMPT)


def test_experts_stay_in_four_bits(tmp_path: Path) -> None:
    make(tmp_path / "model")
    config = EngineConfig(model=str(tmp_path / "model"), device="cpu", dtype="float32")
    module = load_model(config, torch.device("cpu"), lambda what, fraction: None).module
    experts = [part for part in module.modules() if isinstance(part, QuantizedExperts)]
    assert experts
    assert all({w.weight.codebook for w in part.weights.values()} == {"fp4"} for part in experts)
    assert not any(parameter.dim() == 3 for parameter in module.parameters())


def test_blocks_without_scales_are_an_error(tmp_path: Path) -> None:
    make(tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(path).items() if "down_proj_scales" not in name}
    save_file(kept, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match="is not stored as mxfp4 says: it has no _scales"):
        make_engine(tmp_path / "model")
