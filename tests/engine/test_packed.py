"""On a CPU that multiplies bf16 a whole decoder runs in one call, on packed weights.

It gives the logits that its layers give one by one, and the same bits however prompts are cut and batched.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from baton_serve.contracts.messages import TokenLogprobs
from baton_serve.engine import Engine
from baton_serve.engine.kernels.cpu import layers as cpu_layers
from baton_serve.engine.kernels.cpu.build import KernelsUnavailableError, load_kernels
from baton_serve.engine.kernels.cpu.linear import has_packed_linear
from baton_serve.engine.model import fused_cpu
from tests.devices import DEVICE
from tests.engine.conftest import References
from tests.engine.driving import make_engine, make_work

FAMILIES = [
    *("llama", "qwen2", "qwen3", "mistral", "phi3"),
    *("granite", "olmo2", "olmo3", "gemma", "gemma2", "gemma3", "glm", "glm4", "cohere", "cohere_norms", "cohere2"),
    *("exaone4", "smollm3", "ernie4_5", "stablelm", "ministral", "seed_oss", "helium", "starcoder2", "vaultgemma"),
]
HYBRID = "qwen3_5"
"""Its bits depend on where prompts are cut, but not on other sequences."""


def can_pack() -> bool:
    try:
        return DEVICE == "cpu" and has_packed_linear(load_kernels())
    except KernelsUnavailableError:
        return False


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not can_pack(), reason="needs a compiler and a CPU with bf16 dot products"),
]


def prompt_logprobs(engine: Engine, prompts: list[list[int]]) -> list[list[TokenLogprobs]]:
    for number, prompt in enumerate(prompts):
        engine.add(make_work(engine, str(number), prompt, max_tokens=1, prompt_logprobs=0))
    reported: dict[str, list[TokenLogprobs]] = {str(number): [] for number in range(len(prompts))}
    while engine.has_work():
        for first in engine.step().first:
            reported[first.request_id] += [token for token in first.prompt_logprobs or [] if token]
    return [reported[str(number)] for number in range(len(prompts))]


def values(reported: list[list[TokenLogprobs]]) -> torch.Tensor:
    return torch.tensor([token.chosen.logprob for prompt in reported for token in prompt])


def make(folder: Path, **settings: Any) -> Engine:
    return make_engine(folder, **{"dtype": "bfloat16", "enable_prefix_caching": False, **settings})


@pytest.mark.parametrize("family", [*FAMILIES, HYBRID])
def test_one_call_computes_what_the_layers_do(
    family: str, references: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It rounds in other places than the layers: it must be no further from float32 than they are."""
    reference = references(family)

    def reported(dtype: str) -> torch.Tensor:
        with make(reference.folder, dtype=dtype) as engine:
            return values(prompt_logprobs(engine, reference.prompts))

    exact, packed = reported("float32"), reported("bfloat16")
    monkeypatch.setattr(fused_cpu, "fits", lambda *_: False)
    layers = reported("bfloat16")
    assert len(packed) == sum(len(prompt) - 1 for prompt in reference.prompts)
    assert (packed - exact).abs().mean() <= 1.1 * (layers - exact).abs().mean()
    assert (packed - layers).abs().mean() < 0.05


@pytest.mark.parametrize("family", FAMILIES)
def test_bits_depend_on_nothing_but_the_tokens(family: str, references: References) -> None:
    reference = references(family)
    with make(reference.folder) as engine:
        together = prompt_logprobs(engine, reference.prompts)
    with make(reference.folder, max_num_batched_tokens=17, max_num_seqs=2) as engine:
        assert [prompt_logprobs(engine, [prompt])[0] for prompt in reference.prompts] == together


def test_bits_of_a_hybrid_do_not_depend_on_other_sequences(references: References) -> None:
    reference = references(HYBRID)
    with make(reference.folder) as engine:
        together = prompt_logprobs(engine, reference.prompts)
    with make(reference.folder) as engine:
        assert [prompt_logprobs(engine, [prompt])[0] for prompt in reference.prompts] == together


@pytest.mark.parametrize("quantization", ["fp8_e4m3", "fp8_e5m2", "int8", "sym_int4", "asym_int4", "fp6", "mxfp4"])
@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_codes_are_multiplied_where_they_lie(
    family: str, quantization: str, references: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one call, and in transformers' own layers: no further from float32 than the plain twin in bf16 is."""
    reference = references(family)

    def reported(dtype: str) -> torch.Tensor:
        with make(reference.folder, quantization=quantization, dtype=dtype) as engine:
            return values(prompt_logprobs(engine, reference.prompts))

    exact, packed = reported("float32"), reported("bfloat16")
    monkeypatch.setattr(fused_cpu, "fits", lambda *_: False)
    monkeypatch.setattr(cpu_layers, "can_pack", lambda _: False)
    plain = reported("bfloat16")
    assert not torch.equal(packed, plain)
    assert (packed - exact).abs().mean() <= 1.1 * (plain - exact).abs().mean()
