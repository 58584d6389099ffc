"""The C++ norm, activation, rotary embedding and KV store against their plain-torch twins."""

import pytest
import torch
from torch import Tensor

from baton_serve.engine.kernels.cpu.build import KernelsUnavailableError, load_kernels
from baton_serve.engine.kernels.cpu.layers import CpuLayers
from baton_serve.engine.kernels.interfaces import LayerKernels, Norm
from baton_serve.engine.kernels.reference import layers as reference_layers

try:
    CPU: LayerKernels = CpuLayers(load_kernels(), torch.bfloat16)
except KernelsUnavailableError as exc:
    pytest.skip(str(exc), allow_module_level=True)
TWIN: LayerKernels = reference_layers
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    one_rounding = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-9, torch.float64: 1e-12}
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=one_rounding[actual.dtype])


@DTYPES
@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize("size", [64, 100, 7])
def test_rms_norm_equals_its_twin(dtype: torch.dtype, unit_offset: bool, size: int) -> None:
    torch.manual_seed(0)
    x, residual = (torch.randn(2, 3, 5, size) * 3).to(dtype).unbind(0)
    weight = torch.randn(size).to(dtype)
    plain = CPU.rms_norm(x, weight, 1e-6, unit_offset=unit_offset)
    assert_close(plain, TWIN.rms_norm(x, weight, 1e-6, unit_offset=unit_offset))
    summed = x + residual
    normed = CPU.rms_norm(x, weight, 1e-6, residual=residual, unit_offset=unit_offset)
    assert torch.equal(residual, summed)
    assert_close(normed, TWIN.rms_norm(summed, weight, 1e-6, unit_offset=unit_offset))


def test_a_row_of_rms_norm_has_the_same_bits_in_any_batch() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(700, 896), torch.randn(896)
    assert torch.equal(CPU.rms_norm(x, weight, 1e-6)[500:501], CPU.rms_norm(x[500:501], weight, 1e-6))


@DTYPES
def test_silu_mul_equals_its_twin(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate_up = (torch.randn(3, 3, 2 * 75) * 20).to(dtype)
    assert_close(CPU.silu_mul(gate_up), TWIN.silu_mul(gate_up))


@DTYPES
def test_gelu_mul_equals_its_twin(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate_up = torch.randn(3, 3, 2 * 75)
    gate_up[0, 0, 0], gate_up[0, 0, 1] = -1000.0, 1000.0
    found, expected = CPU.gelu_mul(gate_up.to(dtype)), TWIN.gelu_mul(gate_up.to(dtype))
    # The twin computes 1 + tanh, which cancels for negative gates.
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=4 * torch.finfo(dtype).eps)


@DTYPES
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("size", [64, 100, 7])
def test_layer_norm_equals_its_twin(dtype: torch.dtype, has_bias: bool, size: int) -> None:
    torch.manual_seed(0)
    x = (torch.randn(3, 5, size) * 3 + 1).to(dtype)
    weight, bias = torch.randn(2, size).to(dtype).unbind(0)
    norm = Norm(weight, 1e-5, bias if has_bias else None, is_centered=True)
    torch.testing.assert_close(CPU.norm(x, norm), TWIN.norm(x, norm), atol=4e-6, rtol=torch.finfo(dtype).eps * 8)
    expected = torch.nn.functional.layer_norm(
        x.double(), (size,), weight.double(), bias.double() if has_bias else None, 1e-5
    )
    torch.testing.assert_close(CPU.norm(x, norm).double(), expected, atol=2e-2, rtol=2e-2)


def test_a_norm_of_each_head_reads_the_weights_of_its_head() -> None:
    torch.manual_seed(0)
    heads, norm = torch.randn(3, 4, 16), Norm(torch.randn(4, 16), 1e-5, is_centered=True)
    for number in range(4):
        alone = CPU.norm(heads[:, number], Norm(norm.weight[number], 1e-5, is_centered=True))
        torch.testing.assert_close(CPU.norm(heads, norm)[:, number], alone)


@DTYPES
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (80, 32), (16, 12)])
def test_rotary_and_store_equal_their_twin(
    dtype: torch.dtype, interleaved: bool, head_dim: int, rotary_dim: int
) -> None:
    torch.manual_seed(0)
    fused = torch.randn(6, 4 + 2 + 2, head_dim).to(dtype)
    key, value = fused[:, 4:6], fused[:, 6:]
    angles = torch.rand(6, rotary_dim // 2).repeat(1, 2) * 100
    rotation = (angles.cos().to(dtype), angles.sin().to(dtype))
    slots = torch.tensor([3, 17, -1, 4, 9, 11])
    results = []
    for kernels in (CPU, TWIN):
        query, cache = fused[:, :4].clone(), torch.zeros(6, 2, 2, 3, head_dim, dtype=dtype)
        key_before = key.clone()
        kernels.rotary_store(query, key, value, rotation, cache, slots, interleaved=interleaved)
        assert torch.equal(key, key_before)
        results.append((query, cache))
    assert_close(results[0][0], results[1][0])
    assert_close(results[0][1], results[1][1])
