"""Steps of models on transformers' layers that graphs capture: they read nothing back from the device.

The modules run on torch's device "meta", whose tensors have no values: reading one raises an error. The kernels are
replaced by ones that return zeros.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from baton_serve.engine import device as devices
from baton_serve.engine.collectives.backends import SingleRank
from baton_serve.engine.kernels import (
    AttentionMetadata,
    AttentionSpec,
    ChannelDeltaHeads,
    LayerKernels,
    LightningHeads,
    PackedSequences,
    ScanChannels,
    StateSpaceHeads,
)
from baton_serve.engine.kernels.reference import layers, mixers
from baton_serve.engine.kernels.reference.attention import ReferenceAttention
from baton_serve.engine.kv.state_memory import StateMemory
from baton_serve.engine.model.attention_adapters import MLAProjection
from baton_serve.engine.model.batch_inputs import StepInputs, StepStates
from baton_serve.engine.model.forward import choose_forward
from tests.engine.test_recurrent import load
from tests.families import HYBRIDS
from tests.tiny_models import write_tiny_model


class NoAttention(ReferenceAttention):
    def store(self, key: Tensor, value: Tensor, cache: Tensor, meta: AttentionMetadata) -> None:
        pass

    def attend(self, query: Tensor, cache: Tensor, meta: AttentionMetadata, spec: AttentionSpec) -> Tensor:
        return torch.zeros_like(query[..., : spec.value_dim])


class NoMixers:
    delta_rule = staticmethod(mixers.delta_rule)
    gated_norm = staticmethod(mixers.gated_norm)
    sigmoid_gate = staticmethod(mixers.sigmoid_gate)
    latent_rows = staticmethod(mixers.latent_rows)
    pack_heads = staticmethod(mixers.pack_heads)
    multiply_heads = staticmethod(mixers.multiply_heads)

    @staticmethod
    def convolve(x: Tensor, *_: object, has_silu: bool) -> Tensor:
        return torch.zeros_like(x, memory_format=torch.contiguous_format)

    @staticmethod
    def state_space(heads: StateSpaceHeads, states: Tensor, sequences: PackedSequences) -> Tensor:
        return heads.xbc.new_zeros(len(heads.xbc), heads.num_heads, heads.head_dim)

    @staticmethod
    def channel_delta_rule(heads: ChannelDeltaHeads, states: Tensor, sequences: PackedSequences) -> Tensor:
        return heads.qkv.new_zeros(len(heads.qkv), heads.num_heads, heads.value_size)

    @staticmethod
    def lightning(heads: LightningHeads, states: Tensor, sequences: PackedSequences) -> Tensor:
        return heads.qkv.new_zeros(len(heads.qkv), heads.num_heads, heads.size)

    @staticmethod
    def selective_scan(channels: ScanChannels, states: Tensor, sequences: PackedSequences) -> Tensor:
        return torch.zeros_like(channels.x, memory_format=torch.contiguous_format)


def no_mix(x: Tensor, weights: Tensor, chosen: Tensor, experts: object) -> Tensor:
    return torch.zeros_like(x)


LAYERS = cast(LayerKernels, SimpleNamespace(**{**vars(layers), "mix": no_mix}))
"""Plain torch, which reads back how many tokens an expert has, but for the experts."""


@pytest.mark.parametrize("lengths", [[1, 1, 1], [4, 1, 2]], ids=["tokens", "prompts"])
@pytest.mark.parametrize(
    "family",
    [
        *("bamba", "falcon_h1", "falcon_mamba", "mamba", "mamba2", "zamba2", "granite_dense"),
        *("bailing_hybrid", "granitemoehybrid", "jamba", "kimi_linear", "minimax", "nemotron_h"),
    ],
)
def test_a_step_that_is_captured_reads_nothing_back(
    family: str, lengths: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Experts without a gate stay transformers' own.
    monkeypatch.setattr(devices, "has_grouped_products", lambda *_: True)
    name, changes = (family, {}) if family in HYBRIDS else ("granitemoehybrid", {"num_local_experts": 0})
    # torch's grouped products without values are those of bfloat16.
    model = load(write_tiny_model(tmp_path / family, name, **changes), dtype="bfloat16")
    forward = choose_forward(model, NoAttention(), LAYERS, SingleRank(), mixers=NoMixers())
    assert forward.is_capturable
    model.module.to("meta")
    for part in model.module.modules():
        if isinstance(latent := getattr(part, "baton_latent", None), MLAProjection):
            part.baton_latent = MLAProjection(latent.keys.to("meta"), latent.values.to("meta"))  # type: ignore[assignment]
    with torch.device("meta"), torch.inference_mode():
        batch, tokens = torch.arange(len(lengths)), torch.arange(sum(lengths))
        starts = torch.zeros(len(lengths) + 1, dtype=torch.int32)
        tables = torch.zeros(len(lengths), 1, dtype=torch.int32)
        meta = AttentionMetadata(starts, starts[1:], tables, tokens, max_query_len=max(lengths), max_context_len=64)
        cache = [
            torch.zeros(1, kv.num_planes, kv.num_kv_heads, 16, kv.head_dim, dtype=model.dtype) for kv in model.kv_shapes
        ]
        memory = StateMemory(model.states, len(lengths), torch.zeros(1, 4096, dtype=torch.uint8), torch.device("meta"))
        states = StepStates(batch, [], memory.views)
        logits = forward(StepInputs(tokens, tokens, batch, meta, states=states), cache)
    assert logits.shape == (len(lengths), model.vocab_size)


@pytest.mark.parametrize("family", ["nemotron_h", "lfm2"])
def test_steps_of_other_layers_of_transformers_are_not_captured(family: str, tmp_path: Path) -> None:
    """Experts without a gate may read back how many tokens each has, and other layers divide the step on the host."""
    model = load(write_tiny_model(tmp_path / family, family))
    forward = choose_forward(model, NoAttention(), layers, SingleRank(), mixers=NoMixers())
    assert not forward.is_capturable
