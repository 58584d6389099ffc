"""The fused layers against their plain-torch twins."""

import pytest
import torch

from baton_serve.engine.kernels.interfaces import Norm
from baton_serve.engine.kernels.reference import layers as reference_layers
from baton_serve.engine.kernels.triton import layers as triton_layers
from tests.contract.kernels.triton_batches import DEVICE


@pytest.mark.parametrize("is_offset", [False, True])
def test_rms_norm_equals_its_twin_and_leaves_the_sum_in_the_residual(is_offset: bool) -> None:
    x, residual = torch.randn(3, 40, device=DEVICE), torch.randn(3, 40, device=DEVICE)
    weight, twins = torch.randn(40, device=DEVICE), residual.clone()
    normed = triton_layers.rms_norm(x, weight, 1e-6, residual=residual, unit_offset=is_offset)
    torch.testing.assert_close(
        normed, reference_layers.rms_norm(x, weight, 1e-6, residual=twins, unit_offset=is_offset)
    )
    torch.testing.assert_close(residual, twins)
    torch.testing.assert_close(triton_layers.rms_norm(x, weight, 1e-6), reference_layers.rms_norm(x, weight, 1e-6))


def test_silu_mul_equals_its_twin_also_where_the_exponential_overflows() -> None:
    gate_up = torch.randn(3, 2 * 24, device=DEVICE)
    gate_up[0, 0], gate_up[0, 1] = -1000.0, 1000.0
    torch.testing.assert_close(triton_layers.silu_mul(gate_up), reference_layers.silu_mul(gate_up))
    torch.testing.assert_close(triton_layers.gelu_mul(gate_up), reference_layers.gelu_mul(gate_up))


@pytest.mark.parametrize("kind", ["plain", "has_offset", "is_centered"])
def test_norms_of_all_kinds_equal_their_twins_over_strided_rows(kind: str) -> None:
    heads = torch.randn(3, 10, 24, device=DEVICE)
    weights = (torch.randn(size, device=DEVICE) for size in (24, 6 * 24))
    one, wide = (
        Norm(weight, 1e-5, is_centered=kind == "is_centered", has_offset=kind == "has_offset") for weight in weights
    )
    for x, norm in ((heads[:, :6], one), (heads[:, :6].flatten(1), wide)):
        torch.testing.assert_close(triton_layers.norm(x, norm), reference_layers.norm(x, norm))


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [24, 16])
def test_rotary_store_rotates_the_query_in_place_and_writes_the_cache(is_interleaved: bool, rotary_dim: int) -> None:
    qkv = torch.randn(4, 14, 24, device=DEVICE)
    query, key, value = qkv[:, :10], qkv[:, 10:12], qkv[:, 12:]
    turn = (torch.randn(4, rotary_dim, device=DEVICE), torch.randn(4, rotary_dim, device=DEVICE))
    slots = torch.tensor([17, 3, -1, 40], device=DEVICE)
    twin_query, twin_cache = query.clone(), torch.zeros(3, 2, 2, 16, 24, device=DEVICE)
    cache = twin_cache.clone()
    reference_layers.rotary_store(twin_query, key, value, turn, twin_cache, slots, interleaved=is_interleaved)
    triton_layers.rotary_store(query, key, value, turn, cache, slots, interleaved=is_interleaved)
    torch.testing.assert_close(query, twin_query)
    torch.testing.assert_close(cache, twin_cache)


@pytest.mark.parametrize("half", [8, 24])
def test_rotation_equals_its_twin_far_into_a_text(half: int) -> None:
    positions = torch.tensor([0, 1, 4097, 131071], device=DEVICE)
    frequencies = 10000.0 ** -(torch.arange(half, device=DEVICE) / half)
    for result, wanted in zip(
        triton_layers.rotation(positions, frequencies, 1.25),
        reference_layers.rotation(positions, frequencies, 1.25),
        strict=True,
    ):
        assert result.shape == (4, 2 * half)
        torch.testing.assert_close(result, wanted, rtol=0, atol=1e-6)
