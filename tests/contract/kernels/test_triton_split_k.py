"""Products whose parts the norm adds up, against the twin."""

import pytest
import torch

from baton_serve.engine.kernels import Linear, Norm
from baton_serve.engine.kernels.reference import layers as reference_layers
from tests.contract.kernels.triton_batches import DEVICE

triton_layers = pytest.importorskip("baton_serve.engine.kernels.triton.layers")
triton_split = pytest.importorskip("baton_serve.engine.kernels.triton.split_k")

EPS = 1e-5


def _draw(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "is_split"),
    [
        (2, 64, 1024, True),
        (8, 96, 1024, True),
        (16, 32, 2048, True),
        (1, 64, 1024, False),
        (17, 64, 1024, False),
        (1030, 64, 32, False),
        (4, 40, 1024, False),
        (4, 64, 640, False),
        (4, 64, 1280, True),
    ],
)
def test_the_norm_of_a_product_and_a_residual(rows: int, outputs: int, inputs: int, is_split: bool) -> None:
    x, weight = _draw(rows, inputs) / inputs**0.5, _draw(outputs, inputs)
    residual, norm_weight = _draw(rows, outputs), _draw(outputs)
    expected_residual = residual.clone()
    expected = reference_layers.linear_norm(x, Linear(weight, None), expected_residual, Norm(norm_weight, EPS))
    if DEVICE.type == "cpu":  # a device's tiles are larger, so these sizes may go the plain way there
        assert triton_split.fits(x, weight) == is_split
    found = triton_layers.linear_norm(x, Linear(weight, None), residual, Norm(norm_weight, EPS))
    torch.testing.assert_close(residual, expected_residual, rtol=4e-3, atol=4e-3)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


def test_a_bias_or_wide_numbers_go_the_plain_way() -> None:
    x, weight, residual, norm_weight = _draw(2, 1024), _draw(64, 1024), _draw(2, 64), _draw(64)
    bias, kept = _draw(64), residual.clone()
    expected = reference_layers.linear_norm(x, Linear(weight, bias), kept, Norm(norm_weight, EPS))
    found = triton_layers.linear_norm(x, Linear(weight, bias), residual, Norm(norm_weight, EPS))
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
    assert not triton_split.fits(x.float(), weight.float())
