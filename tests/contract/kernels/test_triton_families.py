"""Decoders of several families through the Triton kernels: the logits and the KV of the plain-torch twins."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from baton_serve.engine import EngineConfig
from baton_serve.engine.collectives.backends import SingleRank
from baton_serve.engine.kernels.interfaces import AttentionBackend, LayerKernels
from baton_serve.engine.kernels.reference import layers as twin_layers
from baton_serve.engine.kernels.reference.attention import ReferenceAttention
from baton_serve.engine.kernels.triton import layers as triton_layers
from baton_serve.engine.kernels.triton.attention import TritonAttention
from baton_serve.engine.kernels.triton.tiles import DeviceLimits
from baton_serve.engine.loading.transformers_loader import load_model
from baton_serve.engine.model.batch_inputs import StepInputs
from baton_serve.engine.model.fused_forward import FusedForward
from tests.contract.kernels.triton_batches import DEVICE, Batch, random_batch
from tests.tiny_models import FAMILIES, write_tiny_model

LIMITS = DeviceLimits(processors=64, shared_bytes=1 << 16, descriptors=False)
BATCHES = {"decode": ([1, 1, 1], [37, 5, 20]), "mixed": ([1, 9, 1], [37, 12, 20])}


def inputs_of(batch: Batch, queries: list[int], contexts: list[int]) -> StepInputs:
    positions = [torch.arange(end - new, end) for new, end in zip(queries, contexts, strict=True)]
    tokens = torch.arange(3, 3 + sum(queries)) * 7 % 250
    return StepInputs(tokens.to(DEVICE), torch.cat(positions).to(DEVICE), None, batch.meta)


@pytest.mark.parametrize("steps", sorted(BATCHES))
@pytest.mark.parametrize(
    "family", ["cohere_norms", "cohere2", "gemma2", "gemma3", "glm4", "granite", "olmo3", "smollm3"]
)
@torch.inference_mode()
def test_a_step_gives_what_the_twins_give(family: str, steps: str, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", family)
    heads = FAMILIES[family]["num_attention_heads"]
    queries, contexts = BATCHES[steps]
    results = []
    kinds: list[tuple[AttentionBackend, LayerKernels]] = [
        (ReferenceAttention(), twin_layers),
        (TritonAttention(limits=LIMITS), triton_layers),
    ]
    for attention, layers in kinds:
        # Packed weights belong to one set of kernels, so each has a model of its own.
        model = load_model(EngineConfig(model=str(folder), dtype="float32"), DEVICE, lambda *_: None)
        shape = {"heads": heads, "kv_heads": model.num_kv_heads, "head_dim": model.head_dim}
        batch = random_batch(queries, contexts, **shape)
        caches = [batch.cache.clone().nan_to_num() for _ in model.specs]
        forward = FusedForward(model, attention, layers, SingleRank())
        assert forward.is_capturable
        logits = forward(inputs_of(batch, queries, contexts), caches)
        results.append((logits, torch.stack(caches)))
    (expected, kv), (found, found_kv) = results
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))
    torch.testing.assert_close(found_kv, kv, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "cohere2", "gemma2", "granite", "qwen3_moe", "olmo2"])
@torch.inference_mode()
def test_behind_the_last_attention_only_tokens_go_on_whose_logits_are_needed(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny_model(tmp_path / "model", family)
    queries, contexts = [1, 9, 6], [37, 12, 20]
    model = load_model(EngineConfig(model=str(folder), dtype="float32"), DEVICE, lambda *_: None)
    shape = {"heads": FAMILIES[family]["num_attention_heads"], "kv_heads": model.num_kv_heads}
    batch = random_batch(queries, contexts, head_dim=model.head_dim, **shape)
    forward = FusedForward(model, ReferenceAttention(), twin_layers, SingleRank())
    multiplied: list[int] = []
    gated = twin_layers.gated_linear

    def gated_linear(x: torch.Tensor, *others: Any) -> Any:
        multiplied.append(len(x))
        return gated(x, *others)

    monkeypatch.setattr(twin_layers, "gated_linear", gated_linear)
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    for rows in (None, torch.tensor([0, 9, 15], device=DEVICE)):
        caches = [batch.cache.clone().nan_to_num() for _ in model.specs]
        logits = forward(replace(inputs_of(batch, queries, contexts), logit_rows=rows), caches)
        found.append((logits if rows is not None else logits[[0, 9, 15]], torch.stack(caches)))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)
    if family == "llama":
        assert multiplied == [16] * len(model.specs) + [16] * (len(model.specs) - 1) + [3]
