"""The product with one row against torch's own."""

import pytest
import torch
from torch.nn.functional import linear as twin

from baton_serve.engine.kernels import Linear
from baton_serve.engine.kernels.reference import layers as reference_layers
from baton_serve.engine.kernels.triton import layers as triton_layers
from tests.contract.kernels.triton_batches import DEVICE


@pytest.mark.parametrize("outputs", [1, 7, 40])
@pytest.mark.parametrize("inputs", [24, 512, 1024, 2048, 4096, 2500, 8704])
def test_one_row_equals_its_twin_whatever_the_sizes(outputs: int, inputs: int) -> None:
    x, weight, bias = (torch.randn(size, device=DEVICE) for size in [(1, inputs), (outputs, inputs), (outputs,)])
    for given in (bias, None):
        result = triton_layers.linear(x, weight, given)
        torch.testing.assert_close(result, twin(x, weight, given), rtol=1e-3, atol=1e-3)


def test_a_bfloat16_row_is_summed_in_float32() -> None:
    x = torch.full((1, 2048), 1.0, dtype=torch.bfloat16, device=DEVICE)
    weight = torch.full((3, 2048), 1.0078125, dtype=torch.bfloat16, device=DEVICE)
    assert triton_layers.linear(x, weight, None).tolist() == [[2064.0] * 3]


@pytest.mark.parametrize("width", [1, 7, 24])
@pytest.mark.parametrize("inputs", [24, 2048, 4096, 7168, 2500])
def test_one_row_of_gate_and_up_is_gated_in_their_product(width: int, inputs: int) -> None:
    x, weight, bias = (torch.randn(size, device=DEVICE) for size in [(1, inputs), (2 * width, inputs), (2 * width,)])
    weight /= inputs**0.5  # the rounding of a gate close to zero must not be multiplied by a large number
    for given in (bias, None):
        product = Linear(weight, given)
        result, wanted = (k.gated_linear(x, product, weight) for k in (triton_layers, reference_layers))
        torch.testing.assert_close(result, wanted, rtol=1e-3, atol=1e-3)


def test_more_rows_and_strided_weights_are_left_to_torch() -> None:
    x, weight = torch.randn(2, 24, device=DEVICE), torch.randn(24, 5, device=DEVICE).t()
    torch.testing.assert_close(triton_layers.linear(x, weight, None), twin(x, weight))
    torch.testing.assert_close(triton_layers.linear(x[:1], weight, None), twin(x[:1], weight))
