"""The kernel tests of `baton doctor --probe`, with Triton's kernels as on a GPU, and with kernels that are wrong."""

from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch import Tensor

from baton_serve.engine.kernels import AttentionMetadata, AttentionSpec
from baton_serve.engine.kernels.reference import layers as twin_layers
from baton_serve.engine.kernels.reference.attention import ReferenceAttention
from baton_serve.engine.kernels.triton import layers as triton_layers
from baton_serve.engine.kernels.triton.argmax import argmax
from baton_serve.engine.kernels.triton.attention import TritonAttention
from baton_serve.engine.kernels.triton.tiles import DeviceLimits
from baton_serve.services.doctor.kernel_findings import KERNELS, MAX_DIFFERENCE
from baton_serve.services.doctor.kernel_probe import KernelChecks, difference
from tests.contract.kernels.triton_batches import DEVICE

DTYPE = torch.float32 if DEVICE.type == "cpu" else torch.bfloat16
LIMITS = DeviceLimits(processors=8, shared_bytes=65536, descriptors=False)


class IgnoringTables(ReferenceAttention):
    """Reads the first blocks of the cache instead of those of the sequences."""

    def attend(self, query: Tensor, cache: Tensor, meta: AttentionMetadata, spec: AttentionSpec) -> Tensor:
        wrong = torch.arange(meta.block_tables.numel()).view_as(meta.block_tables) % cache.shape[0]
        return super().attend(query, cache, replace(meta, block_tables=wrong), spec)


class ForgettingLastToken(ReferenceAttention):
    def store(self, key: Tensor, value: Tensor, cache: Tensor, meta: AttentionMetadata) -> None:
        slots = torch.cat((meta.slots[:-1], torch.tensor([-1])))
        super().store(key, value, cache, replace(meta, slots=slots))


@pytest.mark.parametrize("kernel", KERNELS)
def test_tritons_kernels_pass(kernel: str) -> None:
    layers: ModuleType = triton_layers
    checks = KernelChecks(DEVICE, TritonAttention(DEVICE, limits=LIMITS), layers, argmax, dtype=DTYPE)
    assert checks.backend == "triton"
    assert difference(*checks.result(kernel)) <= MAX_DIFFERENCE


@pytest.mark.parametrize(
    ("kernel", "attention"),
    [
        ("decode attention", IgnoringTables()),
        ("prefill attention", IgnoringTables()),
        ("store", ForgettingLastToken()),
    ],
)
def test_a_kernel_that_uses_wrong_blocks_fails(kernel: str, attention: ReferenceAttention) -> None:
    checks = KernelChecks(torch.device("cpu"), attention, twin_layers, twin_layers.argmax)
    assert difference(*checks.result(kernel)) > 10 * MAX_DIFFERENCE


def test_nan_is_an_infinite_difference() -> None:
    assert difference(torch.tensor([float("nan")]), torch.ones(1)) == float("inf")
