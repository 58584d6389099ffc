"""Triton's argmax is torch's, ties included; a row with NaN has none."""

import pytest
import torch

from baton_serve.engine.kernels.reference import layers as reference_layers
from baton_serve.engine.kernels.triton import argmax as triton_argmax
from tests.contract.kernels.triton_batches import DEVICE


def both(logits: torch.Tensor) -> list[list[int]]:
    outs = [torch.full((len(logits),), -1, dtype=torch.int64, device=DEVICE) for _ in range(2)]
    return [
        f(logits, out).tolist() for f, out in zip((triton_argmax.argmax, reference_layers.argmax), outs, strict=True)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [7, 2048, 5003])
def test_the_largest_is_found_and_of_equals_the_first(dtype: torch.dtype, columns: int) -> None:
    torch.manual_seed(0)
    for logits in (torch.randn(5, columns), torch.randint(-2, 3, (5, columns)), -torch.rand(5, columns) - 1):
        found, expected = both(logits.to(DEVICE, dtype))
        assert found == expected


def test_rows_of_a_wider_array_and_strange_numbers() -> None:
    inf, nan = float("inf"), float("nan")
    wide = torch.full((8, 5000), -1.0, device=DEVICE)
    wide[1, 4000] = inf
    wide[2, [10, 4500]] = torch.tensor([inf, nan], device=DEVICE)
    wide[3, [3000, 20]] = nan
    wide[4, [5, 2500]] = torch.tensor([-0.0, 0.0], device=DEVICE)
    wide[5] = -inf
    wide[6, :4100] = -nan
    wide[7, 4200] = inf  # beyond the columns that are asked for
    found, expected = both(wide[:, :4150])
    assert found == expected == [0, 4000, 10, 4150, 5, 0, 4150, 0]
    assert both(wide)[0] == both(wide)[1]
