"""Steps of a layer over weights in few bits that share a launch: equal to the same steps apart, and fewer."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.jit import KernelInterface

from baton_serve.engine.config import Quantization
from baton_serve.engine.kernels import Activations, LayerKernels, Linear, Norm, QuantizedWeight
from baton_serve.engine.kernels.reference import layers as reference_layers
from baton_serve.engine.kernels.triton import layers as triton_layers
from baton_serve.engine.kernels.triton.quant.gemm import counters_of
from baton_serve.engine.kernels.triton.quant.linear import parts
from baton_serve.engine.model.quantized.formats import quantize, scheme
from tests.contract.kernels.triton_batches import DEVICE

OUTPUTS, INPUTS = 128, 1024


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The kernels launched, by name."""
    seen: list[str] = []
    launch = KernelInterface.__getitem__

    def noted(kernel: Any, grid: Any) -> Any:
        seen.append(kernel.fn.__name__)
        return launch(kernel, grid)

    monkeypatch.setattr(KernelInterface, "__getitem__", noted)
    yield seen


def weight_of(name: Quantization, outputs: int, inputs: int, seed: int = 0) -> QuantizedWeight:
    torch.manual_seed(seed)
    made = quantize(torch.randn(outputs, inputs, device=DEVICE), scheme(name, fp8_dtype="e4m3", group_size=128))
    assert made is not None
    return made


def product(kernels: LayerKernels, activations: Activations, weight: QuantizedWeight) -> Tensor:
    return kernels.linear(activations, weight, None).float()


@pytest.mark.parametrize("num_tokens", [1, 3])
@pytest.mark.parametrize("name", ["sym_int4", "fp8_e4m3"])
def test_a_norm_adds_the_parts_of_a_cut_product_up(name: Quantization, num_tokens: int, launches: list[str]) -> None:
    """No program of the product waits for another one: counters stay untouched."""
    weight, then = weight_of(name, OUTPUTS, 4 * INPUTS), weight_of(name, 64, OUTPUTS, seed=1)
    x = torch.randn(num_tokens, 4 * INPUTS, device=DEVICE).half()
    norm, residual = Norm(torch.rand(OUTPUTS, device=DEVICE).half(), 1e-5), torch.randn(num_tokens, OUTPUTS).half()
    residual = residual.to(DEVICE)
    is_cut = parts(x, weight) is not None
    assert is_cut == (name != "fp8_e4m3" or num_tokens > 1)
    apart, together, twins = residual.clone(), residual.clone(), residual.clone()
    expected = triton_layers.norm_for(triton_layers.linear(x, weight, None), norm, then, residual=apart)
    launches.clear()
    found = triton_layers.linear_norm(x, Linear(weight, None), together, norm, then)
    assert len(launches) == (3 if name != "fp8_e4m3" else 2)  # two bytes are made of x itself by one more
    assert torch.equal(together, apart)
    assert torch.equal(product(triton_layers, found, then), product(triton_layers, expected, then))
    wanted = reference_layers.linear_norm(x, Linear(weight, None), twins, norm, then)
    torch.testing.assert_close(
        product(triton_layers, found, then), product(reference_layers, wanted, then), rtol=2e-2, atol=0.2
    )
    assert not bool(counters_of(x.device).any())


@pytest.mark.parametrize(("name", "has_bias"), [("fp8_e4m3", True), ("int8", False), ("mxfp4", True)])
def test_one_row_is_gated_in_the_product_of_gate_and_up(
    name: Quantization, has_bias: bool, launches: list[str]
) -> None:
    width = 56  # no multiple of what a program has
    gate_up, then = weight_of(name, 2 * width, INPUTS), weight_of(name, 32, 128)
    bias = torch.randn(2 * width, device=DEVICE).half() if has_bias else None
    x = torch.randn(1, INPUTS, device=DEVICE).half()
    expected = triton_layers.silu_mul(triton_layers.linear(x, gate_up, bias))
    assert len(launches) == 2
    launches.clear()
    found = triton_layers.gated_linear(x, Linear(gate_up, bias), then)
    assert len(launches) == 1
    assert isinstance(found, Tensor) and torch.equal(found, expected)
    wanted = reference_layers.gated_linear(x, Linear(gate_up, bias), then)
    assert isinstance(wanted, Tensor)
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-2 * float(wanted.abs().max()))


def test_gates_are_made_as_the_next_product_reads_them() -> None:
    first, then = weight_of("sym_int4", 256, INPUTS), weight_of("sym_int4", 32, 128)
    x = (torch.randn(2, INPUTS, device=DEVICE) / 32).half()
    found = triton_layers.gated_linear(x, Linear(first, None), then)
    assert not isinstance(found, Tensor)
    wanted = product(reference_layers, reference_layers.gated_linear(x, Linear(first, None), then), then)
    result = product(triton_layers, found, then)
    torch.testing.assert_close(result, wanted, rtol=1e-2, atol=1e-2 * float(wanted.abs().max()))
