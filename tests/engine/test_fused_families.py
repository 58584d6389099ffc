"""Each family in the table of fused layers gives transformers' logits through fused layers, and only through them."""

import json
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from baton_serve.contracts.messages import TokenLogprobs
from baton_serve.engine import Engine
from baton_serve.engine.kernels.cpu.layers import CpuLayers
from baton_serve.engine.kernels.cpu.linear import Matrix, has_packed_linear
from baton_serve.engine.kernels.interfaces import Weight
from baton_serve.engine.kernels.quantized_weights import QuantizedWeight
from baton_serve.engine.kernels.selection import layer_kernels
from baton_serve.engine.model import families, forward, fused_cpu
from baton_serve.engine.model.families import FAMILIES, describe
from tests.engine.conftest import Reference, References
from tests.engine.driving import make_engine, make_work
from tests.tiny_models import FAMILIES as CONFIGS
from tests.tiny_models import load_reference

pytestmark = pytest.mark.slow

FUSED = [
    *("cohere", "cohere2", "cohere_norms", "ernie4_5", "ernie4_5_moe", "exaone4", "gemma", "gemma2", "gemma3", "glm"),
    *("glm4", "glm4_moe", "gpt_oss", "granite", "granitemoe", "llama", "ministral", "mistral", "mixtral", "olmo2"),
    *("olmo3", "olmoe", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3"),
    *("stablelm", "cwm", "helium", "starcoder2", "vaultgemma", "deepseek_v2", "deepseek_v3", "glm4_moe_lite"),
    *("qwen3_next", "qwen3_5", "qwen3_5_moe", "youtu"),
]
UNLOADED = {"DenseLayer"}
"""The layer of our own loader, which serves Llama, Mistral, Qwen2 and Qwen3."""


@pytest.fixture
def only_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(model: Any, *_: object) -> None:
        raise AssertionError(f"{model.name} runs through transformers' own layers")

    monkeypatch.setattr(forward, "TransformersForward", refuse)


def prompt_logprobs(engine: Engine, reference: Reference, salt: str) -> list[list[TokenLogprobs]]:
    prompts = {f"{salt}-{number}": prompt for number, prompt in enumerate(reference.prompts)}
    for name, prompt in prompts.items():
        engine.add(make_work(engine, name, prompt, max_tokens=1, prompt_logprobs=0))
    reported: dict[str, list[TokenLogprobs]] = {name: [] for name in prompts}
    while engine.has_work():
        for first in engine.step().first:
            reported[first.request_id] += [token for token in first.prompt_logprobs or [] if token]
    return list(reported.values())


def expected_logprobs(model: Any, prompt: list[int]) -> torch.Tensor:
    """By transformers: the logprob of each token of a prompt but the first."""
    with torch.inference_mode():
        logprobs = model(torch.tensor([prompt])).logits[0].float().log_softmax(dim=-1)
    chosen: torch.Tensor = logprobs[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    return chosen


@pytest.mark.usefixtures("only_fused")
@pytest.mark.parametrize("family", FUSED)
def test_logits_are_those_of_transformers_however_prompts_are_cut(family: str, references: References) -> None:
    reference = references(family)
    model = load_reference(reference.folder)
    expected = [expected_logprobs(model, prompt) for prompt in reference.prompts]
    for settings in ({}, {"max_num_batched_tokens": 17, "max_num_seqs": 2}):
        with make_engine(reference.folder, dtype="float32", **settings) as engine:
            found = prompt_logprobs(engine, reference, "once")
        for prompt, tokens in zip(expected, found, strict=True):
            logprobs = torch.tensor([token.chosen.logprob for token in tokens])
            assert torch.allclose(logprobs, prompt, atol=2e-3), (logprobs - prompt).abs().max()


@pytest.mark.usefixtures("only_fused")
@pytest.mark.parametrize("family", ["qwen3_5", "qwen2_moe"])
def test_weights_in_bfloat16_are_packed_for_the_cpu(
    family: str, references: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The layers one by one, not in one call.
    monkeypatch.setattr(fused_cpu, "fits", lambda *_: False)
    reference, packed, found = references(family), list[Weight](), list[torch.Tensor]()
    pack = CpuLayers.pack

    def record(self: CpuLayers, weight: torch.Tensor | QuantizedWeight) -> Weight:
        packed.append(pack(self, weight))
        return packed[-1]

    for other in (record, lambda _, weight: weight):
        monkeypatch.setattr(CpuLayers, "pack", other)
        with make_engine(reference.folder, dtype="bfloat16") as engine:
            reported = prompt_logprobs(engine, reference, "once")
        found.append(torch.tensor([token.chosen.logprob for tokens in reported for token in tokens]))
    library = layer_kernels(torch.device("cpu"), torch.bfloat16)
    if isinstance(library, CpuLayers) and has_packed_linear(library.library):
        assert packed and all(isinstance(weight, Matrix) for weight in packed)
    assert torch.allclose(found[0], found[1], atol=0.1), (found[0] - found[1]).abs().max()


def test_every_row_of_the_table_is_compared_with_transformers() -> None:
    compared: set[str] = set()
    for family in FUSED:
        values = dict(CONFIGS[family])
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))
        assert describe(model) is not None
        compared.add(type(model.model.layers[0]).__name__)
    assert compared | UNLOADED == set(FAMILIES)


@pytest.mark.parametrize(
    ("family", "changed"),
    [
        ("olmoe", {"clip_qkv": 1.0}),
        ("stablelm", {"use_parallel_residual": True}),
        ("stablelm", {"qk_layernorm": True}),
        ("llama", {"hidden_act": "gelu"}),
        ("phimoe", {"rope_parameters": {"rope_type": "longrope"}}),
    ],
)
def test_what_the_table_does_not_describe_stays_with_transformers(
    family: str, changed: dict[str, Any], references: References
) -> None:
    model = load_reference(references(family).folder)
    assert describe(model) is not None
    for name, value in changed.items():
        setattr(model.config, name, value)
    assert describe(model) is None


def test_a_layer_without_a_norm_that_its_family_has_stays_with_transformers(references: References) -> None:
    model = load_reference(references("gemma2").folder)
    model.model.layers[1].pre_feedforward_layernorm = None
    assert describe(model) is None


def test_layers_of_several_families_in_one_model_stay_with_transformers(references: References) -> None:
    model, other = (load_reference(references(family).folder) for family in ("llama", "granite"))
    model.model.layers = nn.ModuleList([*model.model.layers, *other.model.layers])
    assert describe(model) is None


def test_layers_without_rotation_have_a_rotation_of_their_own(references: References) -> None:
    model = load_reference(references("smollm3").folder)
    family = describe(model)
    assert family is not None
    rotations = families.rotations_of(family, model)
    assert rotations.of_layer == (0, 1, 0)
    assert rotations.frequencies[0].all()
    assert not rotations.frequencies[1].any()


def test_local_and_global_layers_have_the_frequencies_of_their_config(references: References) -> None:
    reference = references("gemma3")
    thetas = json.loads((reference.folder / "config.json").read_text())["rope_parameters"]
    model = load_reference(reference.folder)
    family = describe(model)
    assert family is not None
    rotations = families.rotations_of(family, model)
    assert rotations.of_layer == (0, 1, 0)  # sliding, full, sliding
    for number, kind in enumerate(("sliding_attention", "full_attention")):
        second = thetas[kind]["rope_theta"] ** (-2 / 32)
        assert rotations.frequencies[number, 1].item() == pytest.approx(second, rel=1e-5)
