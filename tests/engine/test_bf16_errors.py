"""In bf16 the engine is about as far from float32 as transformers in bf16 is.

A value that is rounded in a wrong place, such as a scale or a norm's weight, makes its error larger.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from baton_serve.engine.execution import kernel_shapes
from baton_serve.engine.kernels.proved_kernels import KernelCandidates
from tests.engine.test_packed import make, prompt_logprobs, values
from tests.tiny_models import write_tiny_model

pytestmark = pytest.mark.slow

FAMILIES = ["llama", "gemma", "gemma3n", "granite", "cohere2", "glm4", "olmo2", "phi", "bloom", "youtu"]
MIXTURES = ["qwen3_moe", "qwen2_moe", "gpt_oss", "granitemoe", "deepseek_v3", "glm4_moe", "mixtral", "olmoe"]
"""A token that chooses other experts because of rounding is far away: of these the median counts."""
HYBRIDS = ["qwen3_5", "jamba", "bamba", "lfm2"]
MAX_RATIO = 1.5
LENGTHS = (9, 33, 70, 120)


def write_rounded(folder: Path, family: str) -> Path:
    """Write a tiny model in float32 with weights that bf16 holds exactly, so that rounding them causes no error."""
    write_tiny_model(folder, family)
    for file in folder.glob("*.safetensors"):
        stored = load_file(file)
        save_file({name: tensor.bfloat16().float() for name, tensor in stored.items()}, file, {"format": "pt"})
    return folder


@torch.inference_mode()
def logprobs_of_transformers(folder: Path, prompts: list[list[int]], dtype: torch.dtype) -> Tensor:
    """Return the logprobs of all tokens of the prompts but the first ones."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        logprobs = model(ids).logits[0, :-1].float().log_softmax(-1)
        found.append(logprobs.gather(1, ids[0, 1:, None])[:, 0])
    return torch.cat(found)


@pytest.mark.parametrize("kernels", ["own", "twins"])
@pytest.mark.parametrize("family", [*FAMILIES, *HYBRIDS, *MIXTURES])
def test_errors_are_those_of_transformers(
    family: str, kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_rounded(tmp_path, family)
    draw = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, 250, (length,), generator=draw).tolist() for length in LENGTHS]
    exact, rounded = (logprobs_of_transformers(folder, prompts, dtype) for dtype in (torch.float32, torch.bfloat16))
    if kernels == "twins":
        monkeypatch.setattr(kernel_shapes, "kernel_candidates", lambda *_: KernelCandidates())
    with make(folder, dtype="bfloat16") as engine:
        found = values(prompt_logprobs(engine, prompts))
    middle = torch.median if family in MIXTURES else torch.mean
    assert middle((found - exact).abs()) < MAX_RATIO * middle((rounded - exact).abs())
