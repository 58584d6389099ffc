"""Mixers that are wrong are found, named, and replaced by their twin."""

import logging
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from baton_serve.engine.kernels import DeltaHeads, PackedSequences
from baton_serve.engine.kernels.cpu.build import KernelsUnavailableError, load_kernels
from baton_serve.engine.kernels.cpu.linear import has_packed_linear
from baton_serve.engine.kernels.cpu.mixers import CpuMixers
from baton_serve.engine.kernels.mixer_operations import MIXER_OPERATIONS, ComposedMixers, mixer_operations
from baton_serve.engine.kernels.mixers import MixerKernels, MixerShapes, StateSpaceShapes
from baton_serve.engine.kernels.proved_kernels import KernelCandidates, ProvedKernels, prove_kernels
from baton_serve.engine.kernels.prover import TWIN, KernelCandidate, difference
from baton_serve.engine.kernels.reference import mixers as twin
from baton_serve.engine.kernels.triton import mixers as triton_mixers
from tests.contract.kernels.test_proof_triton import SHAPES
from tests.contract.kernels.triton_batches import DEVICE

SHAPES_OF_BOTH = replace(
    SHAPES,
    mixers=MixerShapes(
        num_key_heads=1,
        num_heads=2,
        key_size=16,
        value_size=16,
        taps=4,
        rank=32,
        rotary_size=16,
        num_latent_heads=4,
        num_lightning_heads=3,
        lightning_size=16,
        spaces=(
            StateSpaceShapes(2, 16, 1, 16, 4, (0.001, float("inf"))),
            StateSpaceShapes(20, 0, 0, 16, 4, (0.0, float("inf"))),
        ),
    ),
)


class Perturbed:
    """The twins, but the delta rule forgets what a prompt has left in the states."""

    channel_delta_rule = staticmethod(twin.channel_delta_rule)
    lightning = staticmethod(twin.lightning)
    state_space = staticmethod(twin.state_space)
    selective_scan = staticmethod(twin.selective_scan)

    convolve = staticmethod(twin.convolve)
    gated_norm = staticmethod(twin.gated_norm)
    sigmoid_gate = staticmethod(twin.sigmoid_gate)
    latent_rows = staticmethod(twin.latent_rows)
    pack_heads = staticmethod(twin.pack_heads)
    multiply_heads = staticmethod(twin.multiply_heads)

    @staticmethod
    def delta_rule(heads: DeltaHeads, states: Tensor, sequences: PackedSequences) -> Tensor:
        output = twin.delta_rule(heads, states, sequences)
        if sequences.max_len > 1:
            states.zero_()
        return output


def prove(mixers: MixerKernels, own: MixerShapes = SHAPES_OF_BOTH.mixers) -> ProvedKernels:
    candidates = KernelCandidates(mixers=(KernelCandidate("given", lambda: mixers),))
    return prove_kernels(candidates, replace(SHAPES, mixers=own), DEVICE, folder=None, is_timed=False)


def test_right_mixers_serve_all_operations() -> None:
    kernels = prove(triton_mixers)
    assert kernels.mixers is triton_mixers
    proved = {verdict.operation for verdict in kernels.verdicts if verdict.is_chosen}
    assert proved == set(MIXER_OPERATIONS) - {"delta rule by channel"}


def test_right_mixers_serve_models_with_a_decay_by_channel() -> None:
    own = MixerShapes(2, 2, 16, 16, 4, has_channel_decay=True)
    kernels = prove(triton_mixers, own)
    assert kernels.mixers is triton_mixers
    chosen = {verdict.operation for verdict in kernels.verdicts if verdict.is_chosen}
    assert chosen == {"short convolution", "delta rule by channel"}


def test_a_wrong_delta_rule_is_named_and_its_twin_serves(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        kernels = prove(Perturbed())
    assert [verdict.operation for verdict in kernels.verdicts if not verdict.is_right] == ["delta rule"]
    assert "the kernel for delta rule of given is wrong on this device" in caplog.text and TWIN in caplog.text
    assert isinstance(kernels.mixers, ComposedMixers)
    assert kernels.mixers.delta_rules is twin and isinstance(kernels.mixers.convolutions, Perturbed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "shapes", [(7, 14, 128, 128, 4), (1, 2, 16, 24, 4), (2, 6, 20, 72, 3)], ids=lambda sizes: "x".join(map(str, sizes))
)
def test_cpu_mixers_are_right_for_steps_and_prompts(
    dtype: torch.dtype, shapes: tuple[int, int, int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        mixers: MixerKernels = CpuMixers(load_kernels())
    except KernelsUnavailableError as error:
        pytest.skip(str(error))
    sizes = MixerShapes(*shapes, rank=64, rotary_size=24, num_latent_heads=3)
    given = replace(SHAPES, dtype=dtype, mixers=sizes)
    cpu = torch.device("cpu")
    operations = mixer_operations(given, cpu)
    expected = [operation.run(twin) for operation in operations]
    # The twins are not called: everything is computed in C++.
    for name in ("convolve", "delta_rule", "gated_norm", "sigmoid_gate", "latent_rows"):
        monkeypatch.delattr(twin, name)
    if dtype == torch.bfloat16 and has_packed_linear(load_kernels()):
        monkeypatch.delattr(twin, "multiply_heads")
    for operation, results in zip(operations, expected, strict=True):
        found = operation.run(mixers)
        assert results is not None and found is not None
        largest = max(difference(*pair) for pair in zip(found, results, strict=True))
        assert largest <= operation.tolerance, (operation.name, operation.shape)


def test_models_without_mixers_prove_none() -> None:
    candidates = KernelCandidates(mixers=(KernelCandidate("given", Perturbed),))
    kernels = prove_kernels(candidates, SHAPES, DEVICE, folder=None, is_timed=False)
    assert not kernels.verdicts
