"""Decides by number of rows which kernel multiplies by a quantized weight. Twin: `quantized_weights.linear`."""

from itertools import pairwise

import torch
from torch import Tensor

from baton_serve.engine.kernels.interfaces import Activations
from baton_serve.engine.kernels.quantized_weights import QuantizedWeight
from baton_serve.engine.kernels.triton.activation_digits import Digits, split
from baton_serve.engine.kernels.triton.quant.dense import dense
from baton_serve.engine.kernels.triton.quant.digit_products import (
    digit_parts,
    digit_product,
    digit_tiles,
    has_nibbles,
    takes_digits,
)
from baton_serve.engine.kernels.triton.quant.gemm import is_paired, tile_parts, tile_product
from baton_serve.engine.kernels.triton.quant.gemv import row_product

LONG_ROW = 8192
"""Row length from which rows of paired weights are cut over programs even for one token (measured at 4,096 and 14,336
inputs).
"""
DENSE_TOKENS = 193
"""Number of tokens from which the weight is decoded once for a product and multiplied by the library; more than three
tiles of 64.
"""
DENSE_BYTES = 256 << 20
"""Largest part of a weight, in bytes, that is decoded in one piece."""
PIECE_OUTPUTS = 256
"""The number of outputs of a piece is a multiple of this, if it has so many. Libraries multiply matrices with odd
numbers of columns several times more slowly: tensor cores read and write 16 bytes, and whole tiles.
"""


def is_row(x: Tensor, weight: QuantizedWeight) -> bool:
    """Return whether each output of a product of x with this quantized weight is computed by one program. Then
    `row_product` can apply silu(gate) * up in the same kernel.
    """
    if x.shape[0] != 1 or takes_digits(weight, 1, x.dtype):
        return False
    return not (weight.inputs > LONG_ROW and is_paired(weight, x.dtype))


def parts(x: Activations, weight: QuantizedWeight) -> Tensor | None:
    """Return float32 [parts, num_tokens, outputs]: the products of ranges of the inputs, whose sum is `linear` without
    a bias. Return None if the inputs are not divided into ranges.
    """
    if isinstance(x, Digits):
        return digit_parts(x, weight)
    assert isinstance(x, Tensor)
    x = x if x.stride(-1) == 1 else x.contiguous()
    if takes_digits(weight, x.shape[0], x.dtype):
        is_cut = digit_tiles(weight, x.shape[0]).splits > 1
        return digit_parts(split(x, nibbles=has_nibbles(weight)), weight) if is_cut else None
    if is_row(x, weight) or x.shape[0] >= DENSE_TOKENS:
        return None
    return tile_parts(x, weight)


def linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """Return x [num_tokens, inputs] times a quantized weight, plus the bias: [num_tokens, outputs]."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    if takes_digits(weight, x.shape[0], x.dtype):
        return digit_product(split(x, nibbles=has_nibbles(weight)), weight, bias)
    if is_row(x, weight):
        return row_product(x, weight, bias)
    if x.shape[0] < DENSE_TOKENS:
        return tile_product(x, weight, bias)
    ends = piece_ends(weight.outputs, DENSE_BYTES // (weight.inputs * x.element_size()))
    if len(ends) == 1:
        return torch.nn.functional.linear(x, dense(weight, x.dtype), bias)
    result = x.new_empty((x.shape[0], weight.outputs))
    for start, end in pairwise([0, *ends]):
        piece, part = dense(weight.rows(start, end), x.dtype).t(), result[:, start:end]
        if bias is None:
            torch.mm(x, piece, out=part)
        else:
            torch.addmm(bias[start:end], x, piece, out=part)
    return result


def piece_ends(outputs: int, most: int) -> list[int]:
    """Return the end of each piece into which `outputs` rows of a weight are divided, of at most `most` rows each; the
    pieces are about equally long.
    """
    most = max(1, most)
    count = -(-outputs // most)
    unit = min(PIECE_OUTPUTS, 1 << most.bit_length() - 1)
    size = -(-outputs // (count * unit)) * unit
    # Rounded up, a piece may be too long; then there is one more.
    size = size if size <= most else most // unit * unit
    return [*range(size, outputs, size), outputs]
