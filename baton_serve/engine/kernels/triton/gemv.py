"""A matrix product with a single row. Its time is that of reading the weight once.

Libraries cut such products for matrix units, which one row leaves idle, and need a second kernel to add the parts.
Twin: torch's linear.
"""
# mypy: disable-error-code="misc,no-untyped-def,no-untyped-call,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_serve.engine.kernels.interfaces import Activations, Weight
from baton_serve.engine.kernels.quantized_weights import QuantizedWeight
from baton_serve.engine.kernels.triton.activation_digits import Digits
from baton_serve.engine.kernels.triton.overlap import overlapping, start_early
from baton_serve.engine.kernels.triton.quant import linear as triton_quant
from baton_serve.engine.kernels.triton.quant.digit_products import digit_product
from baton_serve.engine.kernels.triton.tiles import row_tiles


def pack(weight: Tensor | QuantizedWeight) -> Weight:
    """Return a weight unchanged: the Triton kernels read numbers and codes in their own order."""
    return weight


def linear(x: Activations, weight: Weight, bias: Tensor | None) -> Tensor:
    """Return x [num_tokens, inputs] times the weight [outputs, inputs], plus the bias: [num_tokens, outputs]."""
    if isinstance(x, Digits):
        assert isinstance(weight, QuantizedWeight)
        return digit_product(x, weight, bias)
    assert isinstance(x, Tensor)
    if isinstance(weight, QuantizedWeight):
        return triton_quant.linear(x, weight, bias)
    assert isinstance(weight, Tensor)
    if not is_row(x, weight):
        return torch.nn.functional.linear(x, weight, bias)
    outputs, inputs = weight.shape
    result = torch.empty((1, outputs), dtype=x.dtype, device=x.device)
    tiles = row_tiles(inputs)
    _one_row_kernel[(-(-outputs // tiles.rows),)](
        result,
        x,
        weight,
        result if bias is None else bias,
        outputs,
        inputs=inputs,
        rows=tiles.rows,
        chunk=tiles.chunk,
        has_bias=bias is not None,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **overlapping(x.device),
    )
    return result


def is_row(x: Tensor, weight: Tensor) -> bool:
    """Return whether `gated_row` computes a product of x with this weight: x has one row, and both are contiguous."""
    return x.shape[0] == 1 and x.stride(-1) == 1 and weight.is_contiguous()


def gated_row(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return silu(gate) * up for one row x, where `weight` computes gate and up. The result is rounded as if the
    product were stored in between. Call it only if `is_row` is True.
    """
    width, inputs = weight.shape[0] // 2, weight.shape[1]
    result = torch.empty((1, width), dtype=x.dtype, device=x.device)
    tiles = row_tiles(inputs)
    _gated_row_kernel[(width,)](
        result,
        x,
        weight,
        result if bias is None else bias,
        width,
        inputs=inputs,
        chunk=tiles.chunk,
        has_bias=bias is not None,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **overlapping(x.device),
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
    overlaps: tl.constexpr,
):
    start_early(overlaps)
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


@triton.jit
def _gated_row_kernel(  # noqa: PLR0913
    result,
    x,
    weight,
    bias,
    width,
    inputs: tl.constexpr,
    chunk: tl.constexpr,
    has_bias: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Compute silu(gate) * up of one row of activations. Each program computes one gate and its up value."""
    start_early(overlaps)
    output = tl.program_id(0)
    row, column = output + tl.arange(0, 2) * width, tl.arange(0, chunk)
    acc = tl.zeros([2, chunk], tl.float32)
    for start in range(0, inputs, chunk):
        seen = start + column < inputs
        at = row[:, None].to(tl.int64) * inputs + start + column[None, :]
        weights = tl.load(weight + at, seen[None, :], other=0.0).to(tl.float32)
        acc += weights * tl.load(x + start + column, seen, other=0.0).to(tl.float32)[None, :]
    total = tl.sum(acc, 1)
    if has_bias:
        total += tl.load(bias + row).to(tl.float32)
    dtype: tl.constexpr = result.dtype.element_ty
    gate, up = tl.split(total.to(dtype))
    wide = gate.to(tl.float32)
    # As in `silu_mul`: a gate below -80 has vanished in any dtype; the bound keeps exp finite.
    activated = (wide / (1.0 + tl.exp(tl.minimum(-wide, 80.0)))).to(dtype)
    tl.store(result + output, (activated.to(tl.float32) * up.to(tl.float32)).to(dtype))
