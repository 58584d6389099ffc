"""A matrix product with a single row: every weight is read once, which is all that takes time.

Libraries cut such products for matrix units, which one row leaves idle, and add a second kernel to sum the parts.
Twin: torch's linear.
"""
# mypy: disable-error-code="misc,no-untyped-def,no-untyped-call,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels import triton_quant
from engine.kernels.metadata import Activations, Weight
from engine.kernels.quantized import QuantizedWeight
from engine.kernels.triton_digits import Digits
from engine.kernels.triton_quant_digits import digit_product


def pack(weight: QuantizedWeight) -> Weight:
    """The codes lie as the kernels read them already."""
    return weight


def linear(x: Activations, weight: Weight, bias: Tensor | None) -> Tensor:
    """x [num_tokens, inputs], weight [outputs, inputs] -> [num_tokens, outputs]."""
    if isinstance(x, Digits):
        assert isinstance(weight, QuantizedWeight)
        return digit_product(x, weight, bias)
    assert isinstance(x, Tensor)
    if isinstance(weight, QuantizedWeight):
        return triton_quant.linear(x, weight, bias)
    assert isinstance(weight, Tensor)
    if x.shape[0] != 1 or not weight.is_contiguous():
        return torch.nn.functional.linear(x, weight, bias)
    outputs, inputs = weight.shape
    result = torch.empty((1, outputs), dtype=x.dtype, device=x.device)
    # Measured (docs/experiments.md): long rows go faster in more, smaller programs.
    chunk = next((size for size in (2048, 1024, 512) if inputs % size == 0), 512) if inputs <= 8192 else 512
    rows = 2 if chunk == 2048 else 4
    _one_row_kernel[(-(-outputs // rows),)](
        result,
        x,
        weight,
        result if bias is None else bias,
        outputs,
        inputs=inputs,
        rows=rows,
        chunk=chunk,
        has_bias=bias is not None,
        num_warps=8 if chunk == 2048 else 4,
        num_stages=2 if chunk == 2048 else 3,
    )
    return result


@triton.jit
def _one_row_kernel(  # noqa: PLR0913
    result,
    x,
    weight,
    bias,
    outputs,
    inputs: tl.constexpr,
    rows: tl.constexpr,
    chunk: tl.constexpr,
    has_bias: tl.constexpr,
):
    row, column = tl.program_id(0) * rows + tl.arange(0, rows), tl.arange(0, chunk)
    live = row < outputs
    acc = tl.zeros([rows, chunk], tl.float32)
    for start in range(0, inputs, chunk):
        seen = start + column < inputs
        at = row[:, None].to(tl.int64) * inputs + start + column[None, :]
        weights = tl.load(weight + at, live[:, None] & seen[None, :], other=0.0).to(tl.float32)
        acc += weights * tl.load(x + start + column, seen, other=0.0).to(tl.float32)[None, :]
    total = tl.sum(acc, 1)
    if has_bias:
        total += tl.load(bias + row, live, other=0.0).to(tl.float32)
    tl.store(result + row, total.to(result.dtype.element_ty), live)
