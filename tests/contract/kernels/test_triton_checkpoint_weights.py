"""Triton's products over the weights that quantized checkpoints give, against the plain twin."""

from dataclasses import replace

import pytest
import torch

from baton_serve.engine.kernels import quantized_weights
from baton_serve.engine.kernels.quantized_weights import QuantizedWeight
from baton_serve.engine.kernels.triton.quant import linear as triton_quant
from baton_serve.engine.loading.quantization.checkpoints.checkpoint_format import from_unsigned
from baton_serve.engine.loading.quantization.checkpoints.fp8 import float8
from tests.contract.kernels.triton_batches import DEVICE

OUTPUTS = 48


def integers(bits: int, group: int | None, inputs: int, *, has_zeros: bool) -> QuantizedWeight:
    """float16 scales, as GPTQ and AWQ have them."""
    torch.manual_seed(3)
    codes = torch.randint(0, 2**bits, (OUTPUTS, inputs), dtype=torch.uint8, device=DEVICE)
    scales = (torch.rand(OUTPUTS, inputs // (group or inputs), device=DEVICE) / 2**bits).half()
    zeros = torch.randint(0, 2**bits, scales.shape, device=DEVICE) if has_zeros else None
    return from_unsigned(codes, scales, zeros, bits=bits, group=group)


def floats(inputs: int) -> QuantizedWeight:
    codes = torch.randn(OUTPUTS, inputs, device=DEVICE).to(torch.float8_e4m3fn)
    return float8(codes, torch.rand(1, inputs // 128, device=DEVICE) / 8 + 0.1, (128, 128))


def nf4(inputs: int) -> QuantizedWeight:
    return replace(integers(4, 64, inputs, has_zeros=False), codebook="nf4")


WEIGHTS = {
    "gptq 4 bit": lambda: integers(4, 128, 256, has_zeros=False),
    "gptq 4 bit, zeros, rows": lambda: integers(4, None, 288, has_zeros=True),
    "awq": lambda: integers(4, 32, 288, has_zeros=True),
    "gptq 8 bit": lambda: integers(8, 128, 256, has_zeros=False),
    "gptq 8 bit, zeros": lambda: integers(8, 32, 288, has_zeros=True),
    "gptq 8 bit, zeros, rows": lambda: integers(8, None, 288, has_zeros=True),
    "groups of 256": lambda: integers(4, 256, 512, has_zeros=True),
    "groups of 384": lambda: integers(4, 384, 768, has_zeros=True),
    "8 bit, groups of 384": lambda: integers(8, 384, 768, has_zeros=True),
    "fp8 in blocks": lambda: floats(256),
    "nf4": lambda: nf4(256),
}


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("num_tokens", [1, 19, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_products_equal_the_twin(name: str, num_tokens: int, dtype: torch.dtype) -> None:
    weight = WEIGHTS[name]()
    torch.manual_seed(5)
    x = torch.randn(num_tokens, weight.inputs, device=DEVICE).to(dtype)
    expected = quantized_weights.linear(x.float(), weight, None)
    error = 1e-4 if dtype == torch.float32 else 2e-3
    found = triton_quant.linear(x, weight, None).float()
    torch.testing.assert_close(found, expected, rtol=error, atol=error * expected.abs().max().item())
