"""Packed products in place of transformers' linear layers: the same results, and each weight in memory once."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextExperts

from baton_serve.engine import EngineConfig
from baton_serve.engine.kernels.cpu.build import KernelsUnavailableError, load_kernels
from baton_serve.engine.kernels.cpu.linear import has_packed_linear
from baton_serve.engine.model import forward
from baton_serve.engine.model.lora.products import adapt_modules
from baton_serve.engine.model.lora.store import AdapterStore
from baton_serve.engine.model.packed_modules import (
    JointProduct,
    PackedEmbedding,
    PackedExperts,
    PackedLayer,
    pack_modules,
)
from tests.devices import DEVICE
from tests.engine.conftest import References
from tests.engine.test_packed import make, prompt_logprobs, values
from tests.families import HYBRIDS
from tests.tiny_models import write_tiny_model

BF16 = torch.bfloat16


def _can_pack() -> bool:
    try:
        return DEVICE == "cpu" and has_packed_linear(load_kernels())
    except KernelsUnavailableError:
        return False


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not _can_pack(), reason="needs a compiler and a CPU with bf16 dot products"),
]


class Tiny(nn.Module):
    """A module with siblings, a layer that reads its own input, and a tied head. `heads` are further layers."""

    def __init__(self, *, bias: bool = False, **heads: nn.Linear) -> None:
        super().__init__()
        self.embed = nn.Embedding(70, 24)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(24, size, bias=bias) for size in (40, 8, 7))
        self.out = nn.Linear(40, 24, bias=not bias)
        self.lm_head = nn.Linear(24, 70, bias=False)
        self.lm_head.weight = self.embed.weight
        for name, layer in heads.items():
            setattr(self, name, layer)
        self.to(BF16).requires_grad_(False)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embed = value  # type: ignore[assignment]


def packed(module: nn.Module) -> nn.Module:
    pack_modules(module, BF16, load_kernels())
    return module


def storages(module: nn.Module) -> Iterator[Tensor]:
    """The tensors of a model with packed ones, without those of modules that were replaced."""
    yield from module.parameters()
    for part in module.modules():
        if isinstance(part, PackedLayer):
            yield part._product.matrix.words
        if isinstance(part, PackedExperts):
            yield from (matrix.words for matrix in [*part._up, *part._down])


def num_bytes(module: nn.Module) -> int:
    found = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in storages(module)}
    return sum(found.values())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(0, 24), (1, 24), (1, 5, 24), (3, 1, 24)])
def test_layers_compute_what_torch_does(bias: bool, shape: tuple[int, ...]) -> None:
    module = Tiny(bias=bias)
    x, inner = torch.randn(shape).to(BF16), torch.randn(*shape[:-1], 40).to(BF16)
    expected = [layer(x).float() for layer in (module.q_proj, module.k_proj, module.v_proj)]
    expected.append(module.out(inner).float())
    packed(module)
    # In another order and again, since an output is kept for one call only.
    for _ in range(2):
        found = {name: getattr(module, name)(x).float() for name in ("v_proj", "q_proj", "k_proj")}
        for layer, wanted in zip(("q_proj", "k_proj", "v_proj"), expected, strict=False):
            torch.testing.assert_close(found[layer], wanted, atol=0.02, rtol=0.02)
    torch.testing.assert_close(module.out(inner).float(), expected[3], atol=0.02, rtol=0.02)


def test_siblings_with_other_inputs_do_not_take_each_others_outputs() -> None:
    module, plain = Tiny(), Tiny()
    plain.load_state_dict(module.state_dict())
    packed(module)
    first, second = torch.randn(2, 24).to(BF16), torch.randn(2, 24).to(BF16)
    for x, name in ((first, "q_proj"), (second, "k_proj"), (first, "v_proj"), (first, "q_proj")):
        wanted = getattr(plain, name)(x).float()
        torch.testing.assert_close(getattr(module, name)(x).float(), wanted, atol=0.02, rtol=0.02)


def test_a_tied_embedding_reads_the_packed_head() -> None:
    module = Tiny()
    table = module.embed.weight.detach().clone()
    packed(module)
    ids = torch.tensor([[0, 69, 31], [32, 5, 5]])
    assert isinstance(module.embed, PackedEmbedding)
    assert torch.equal(module.embed(ids), table[ids]) and torch.equal(module.embed.weight, table)


def test_a_weight_that_a_module_reads_is_the_original_one() -> None:
    module = Tiny(bias=True)
    weights = {name: getattr(module, name).weight.detach().clone() for name in ("q_proj", "v_proj", "out")}
    packed(module)
    x = torch.randn(4, 24).to(BF16)
    before = module.v_proj(x).float()
    for name, weight in weights.items():
        assert torch.equal(getattr(module, name).weight, weight)
    torch.testing.assert_close(module.v_proj(x).float(), before, atol=0.02, rtol=0.02)


def test_a_weight_of_several_layers_is_packed_once_or_stays() -> None:
    layer, part = nn.Linear(24, 12, bias=False), nn.Linear(24, 12, bias=False)
    module = Tiny(first=layer, second=part, third=nn.Linear(24, 40, bias=False))
    module.second.weight = module.first.weight  # type: ignore[union-attr]
    module.third.weight = module.q_proj.weight  # type: ignore[union-attr]  # one of three that are joined
    x = torch.randn(3, 24).to(BF16)
    wanted = {name: getattr(module, name)(x).float() for name in ("first", "second", "third", "q_proj")}
    before = num_bytes(module)
    packed(module)
    assert isinstance(module.first, PackedLayer) and isinstance(module.second, PackedLayer)
    assert module.first._product is module.second._product
    assert type(module.third) is nn.Linear and type(module.q_proj) is nn.Linear
    for name, output in wanted.items():
        torch.testing.assert_close(getattr(module, name)(x).float(), output, atol=0.02, rtol=0.02)
    # Packed rows are padded to 32.
    assert num_bytes(module) <= before + 2 * 24 * 32 * 4


def test_float32_keeps_the_layers_of_torch() -> None:
    module = Tiny().float()
    pack_modules(module, torch.float32, load_kernels())
    assert not any(isinstance(part, PackedLayer | PackedEmbedding) for part in module.modules())


def test_experts_compute_what_transformers_does() -> None:
    config = Qwen3NextConfig(hidden_size=64, moe_intermediate_size=48, num_experts=6, num_experts_per_tok=2)
    holder: Any = nn.Module()
    holder.experts = Qwen3NextExperts(config).to(BF16)
    for weight in holder.parameters():
        weight.data.normal_(std=0.2)
    holder.get_input_embeddings = lambda: None
    x, scores = torch.randn(9, 64).to(BF16), torch.rand(9, 6)
    weights, chosen = scores.topk(2)
    with torch.inference_mode():
        wanted = holder.experts(x, chosen, weights.to(BF16)).float()
        packed(holder)
        assert isinstance(holder.experts, PackedExperts)
        found = holder.experts(x, chosen, weights.to(BF16)).float()
    torch.testing.assert_close(found, wanted, atol=0.05 * float(wanted.abs().max()), rtol=0.05)


@pytest.mark.parametrize("family", sorted(HYBRIDS))
def test_no_weight_of_a_hybrid_is_in_memory_twice(family: str, tmp_path: Path) -> None:
    write_tiny_model(tmp_path, family)
    module = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=BF16).requires_grad_(False)
    before = num_bytes(module)
    packed(module)
    products = {part._product for part in module.modules() if isinstance(part, PackedLayer)}
    matrices = [product.matrix for product in products if isinstance(product, JointProduct)]
    matrices += [
        matrix for part in module.modules() if isinstance(part, PackedExperts) for matrix in [*part._up, *part._down]
    ]
    padding = sum(matrix.words.nbytes - 2 * matrix.inputs * matrix.outputs for matrix in matrices)
    assert matrices
    assert num_bytes(module) <= before + padding


@pytest.mark.parametrize("family", [*sorted(HYBRIDS), "cohere2", "deepseek_v3", "gemma2", "granite", "olmo2"])
def test_the_engine_is_as_precise_as_without_packing(
    family: str, references: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = references(family)
    # Experts that are chosen differently make large differences, so both are compared with float32.
    with make(reference.folder, dtype="float32") as engine:
        exact = values(prompt_logprobs(engine, reference.prompts))
    errors = []
    for is_packed in (True, False):
        if not is_packed:
            monkeypatch.setattr(forward, "pack_modules", lambda *_: None)
        with make(reference.folder) as engine:
            errors.append(float((values(prompt_logprobs(engine, reference.prompts)) - exact).abs().mean()))
    assert errors[0] < 1.3 * errors[1] + 0.01, f"mean error {errors[0]}, without packing {errors[1]}"


def test_adapters_find_the_layers_that_are_packed(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "granite")
    config = EngineConfig(model=str(tmp_path), enable_lora=True)
    offered: list[set[str]] = []
    for is_packed in (False, True):
        module = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=BF16).requires_grad_(False)
        if is_packed:
            packed(module)
        store = AdapterStore(
            max_rank=config.max_lora_rank,
            max_adapters=1,
            dtype=BF16,
            model_dtype=BF16,
            slots=None,
            device=torch.device("cpu"),
        )
        adapt_modules(module, store)
        offered.append({name for name, part in module.named_modules() if type(part).__name__ == "AdaptedLinear"})
    assert offered[0] == offered[1] != set()
