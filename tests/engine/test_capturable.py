"""Decode steps of models on transformers' layers that graphs capture: they read nothing back from the device.

The modules run on torch's device "meta", whose tensors have no values: reading one raises an error. The kernels are
replaced by ones that return zeros.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from baton_serve.engine.collectives.backends import SingleRank
from baton_serve.engine.kernels import (
    AttentionMetadata,
    ChannelDeltaHeads,
    LightningHeads,
    PackedSequences,
    ScanChannels,
    StateSpaceHeads,
)
from baton_serve.engine.kernels.reference import layers, mixers
from baton_serve.engine.kernels.reference.attention import ReferenceAttention
from baton_serve.engine.kv.state_memory import StateMemory
from baton_serve.engine.model.batch_inputs import StepInputs, StepStates
from baton_serve.engine.model.forward import choose_forward
from tests.engine.test_recurrent import load
from tests.families import HYBRIDS
from tests.tiny_models import write_tiny_model

BATCH = 3


class NoAttention(ReferenceAttention):
    def store(self, key: Tensor, value: Tensor, cache: Tensor, meta: AttentionMetadata) -> None:
        pass

    def attend(self, query: Tensor, cache: Tensor, meta: AttentionMetadata, spec: object) -> Tensor:
        return torch.zeros_like(query)


class NoMixers:
    delta_rule = staticmethod(mixers.delta_rule)
    gated_norm = staticmethod(mixers.gated_norm)
    sigmoid_gate = staticmethod(mixers.sigmoid_gate)
    latent_rows = staticmethod(mixers.latent_rows)

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


@pytest.mark.parametrize("family", ["bamba", "falcon_h1", "falcon_mamba", "mamba", "mamba2", "zamba2", "granite_dense"])
def test_a_step_that_is_captured_reads_nothing_back(family: str, tmp_path: Path) -> None:
    name, changes = (family, {}) if family in HYBRIDS else ("granitemoehybrid", {"num_local_experts": 0})
    model = load(write_tiny_model(tmp_path / family, name, **changes))
    forward = choose_forward(model, NoAttention(), layers, SingleRank(), mixers=NoMixers())
    assert forward.is_capturable
    model.module.to("meta")
    with torch.device("meta"), torch.inference_mode():
        numbers = torch.arange(BATCH)
        starts, tables = torch.zeros(BATCH + 1, dtype=torch.int32), torch.zeros(BATCH, 1, dtype=torch.int32)
        meta = AttentionMetadata(starts, starts[:BATCH], tables, numbers, max_query_len=1, max_context_len=64)
        cache = [torch.zeros(1, 2, 2, 16, 32) for _ in model.specs]
        memory = StateMemory(model.states, BATCH, torch.zeros(1, 4096, dtype=torch.uint8), torch.device("meta"))
        states = StepStates(numbers, [1] * BATCH, memory.views)
        logits = forward(StepInputs(numbers, numbers, None, meta, states=states), cache)
    assert logits.shape == (BATCH, model.vocab_size)


@pytest.mark.parametrize("family", ["jamba", "nemotron_h", "lfm2"])
def test_steps_of_other_layers_of_transformers_are_not_captured(family: str, tmp_path: Path) -> None:
    """Mixtures of experts read back how many tokens an expert has, and other layers divide the step on the host."""
    model = load(write_tiny_model(tmp_path / family, family))
    forward = choose_forward(model, NoAttention(), layers, SingleRank(), mixers=NoMixers())
    assert not forward.is_capturable
