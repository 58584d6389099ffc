"""Mixtures of experts with quantized weights: grouped products in which each program decodes the weights that it
multiplies.

Gate and up are one product, the activation is computed by torch, and down is another product. Rows are found as in
`triton.experts`. Twin: `reference.experts.mix`.
"""
# mypy: disable-error-code="misc,no-untyped-def,no-untyped-call,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_serve.engine.kernels.interfaces import Experts
from baton_serve.engine.kernels.quantized_weights import StackedWeight
from baton_serve.engine.kernels.reference.experts import activated
from baton_serve.engine.kernels.triton import experts as triton_experts
from baton_serve.engine.kernels.triton.codes import code_operand
from baton_serve.engine.kernels.triton.experts import assign_kernel, new_output, num_blocks, summed, tile_of
from baton_serve.engine.kernels.triton.quant.codes import KINDS, offset_of, table_of, values, word_arguments
from baton_serve.engine.kernels.triton.tiles import padded

_COLUMNS = 64
"""Outputs of a tile."""
_DEPTH = 64  # inputs per step, of codes of eight bits


def mix(x: Tensor, weights: Tensor, chosen: Tensor, experts: Experts) -> Tensor:
    """Return the weighted sum of each token's quantized experts, as `LayerKernels.mix` specifies. Experts that are not
    quantized are passed to `triton.experts.mix`.
    """
    if not isinstance(experts.gate_up, StackedWeight) or not isinstance(experts.down, StackedWeight):
        return triton_experts.mix(x, weights, chosen, experts)
    num_tokens, num_experts = x.shape[0], experts.num_experts
    pairs = chosen.numel()
    rows = torch.empty((num_experts, num_tokens), dtype=torch.int32, device=x.device)
    counts = torch.empty(num_experts, dtype=torch.int32, device=x.device)
    chunk = 1024 if pairs <= 1024 else 4096
    assign_kernel[(num_experts,)](rows, counts, chosen, pairs, num_tokens, chunk=chunk, num_warps=4)
    assigned = (rows, counts)
    gate_up = x.new_empty((pairs, experts.gate_up.outputs))
    _product(gate_up, x, experts.gate_up, experts.gate_up_bias, None, assigned)
    active = activated(gate_up, experts).contiguous()
    output = new_output(experts, x, pairs)
    _product(output, active, experts.down, experts.down_bias, weights, assigned)
    return summed(output, x)


def _product(
    result: Tensor,
    x: Tensor,
    stacked: StackedWeight,
    bias: Tensor | None,
    factors: Tensor | None,
    assigned: tuple[Tensor, Tensor],
) -> None:
    """Store to `result` [pairs, outputs], for each (token, expert) pair, a row of x times the expert's quantized
    weight, plus its bias, times the pair's factor. A row of x belongs to one pair or more.
    """
    weight, (rows, counts) = stacked.weight, assigned
    num_experts, num_tokens = rows.shape
    pairs, outputs = result.shape
    pairs_per_row = pairs // max(1, x.shape[0])
    tile_rows = min(64, max(16, padded(pairs // num_experts)))
    is_words = weight.codebook in KINDS
    assert is_words or weight.group >= weight.inputs
    table = table_of(weight.codebook, x.device) if KINDS.get(weight.codebook) == 3 else result
    words = word_arguments(weight) if is_words else {}
    words.pop("inputs", None)
    _expert_product_kernel[(num_blocks(pairs, num_experts, tile_rows) * triton.cdiv(outputs, _COLUMNS),)](
        result,
        x,
        weight.codes,
        weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,
        table,
        result if bias is None else bias,
        result if factors is None else factors,
        rows,
        counts,
        num_tokens,
        x.stride(0),
        weight.codes.stride(0),
        **(words or _BYTES),
        is_words=is_words,
        num_experts=num_experts,
        experts=padded(num_experts),
        pairs_per_row=pairs_per_row,
        inputs=weight.inputs,
        outputs=outputs,
        has_bias=bias is not None,
        has_factors=factors is not None,
        tile_rows=tile_rows,
        tile_columns=_COLUMNS,
        depth=_DEPTH,
        precision="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=4,
    )


_BYTES = {
    "row_words": 0,
    "stretch_words": 1,
    "kind": 0,
    "centre": 0,
    "group": 0,
    "groups": 1,
    "has_zeros": False,
}
"""Constants of the kernel for codes of eight bits, which do not lie in words and have one scale for a row."""


@triton.jit(do_not_specialize=["num_tokens"])
def _expert_product_kernel(  # noqa: C901, PLR0913
    result,
    x,
    codes,
    scales,
    zeros,
    table,
    bias,
    factors,
    rows,
    counts,
    num_tokens,
    x_stride,
    code_stride,
    row_words: tl.constexpr,
    stretch_words: tl.constexpr,
    kind: tl.constexpr,
    centre: tl.constexpr,
    group: tl.constexpr,
    groups: tl.constexpr,
    has_zeros: tl.constexpr,
    is_words: tl.constexpr,
    num_experts: tl.constexpr,
    experts: tl.constexpr,
    pairs_per_row: tl.constexpr,
    inputs: tl.constexpr,
    outputs: tl.constexpr,
    has_bias: tl.constexpr,
    has_factors: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
    depth: tl.constexpr,
    precision: tl.constexpr,
):
    expert, pair, live, column, kept = tile_of(
        rows, counts, num_tokens, num_experts, experts, outputs, tile_rows, tile_columns
    )
    if expert < num_experts:
        stacked = expert.to(tl.int64) * outputs + tl.where(kept, column, 0)
        reader = x + (pair // pairs_per_row)[:, None] * x_stride
        acc = tl.zeros([tile_rows, tile_columns], tl.float32)
        if is_words:
            within = tl.arange(0, 16)
            run: tl.constexpr = 8 if group >= 128 else group // 16  # nibbles that share a scale
            for stretch in range(row_words // stretch_words):
                at = codes + (stacked * row_words + stretch * stretch_words)[:, None]
                low = tl.load(at + within[None, :])
                high = low
                if kind == 2:
                    high = tl.load(at + 16 + (within % 8)[None, :])
                for start in tl.static_range(0, 8, run):
                    sums = tl.zeros([tile_rows, tile_columns], tl.float32)
                    index = stacked * groups + tl.minimum((stretch * 128 + start * 16) // group, groups - 1)
                    offset = tl.zeros([tile_columns], tl.float32) + offset_of(kind, centre)
                    if has_zeros:
                        offset += tl.load(zeros + index).to(tl.float32)
                    for step in tl.static_range(run):
                        number = values(low, high, within[None, :], start + step, table, kind) - offset[:, None]
                        k = stretch * 128 + (start + step) * 16 + within
                        asked = tl.load(reader + k[None, :], live[:, None] & (k < inputs)[None, :], other=0.0)
                        number = tl.trans(number.to(asked.dtype))
                        sums = tl.dot(asked, number, sums, input_precision=precision)
                    acc += sums * tl.load(scales + index).to(tl.float32)[None, :]
        else:
            place = tl.arange(0, depth)
            for start in range(0, inputs, depth):
                inside = place < inputs - start
                asked = tl.load(reader + (start + place)[None, :], live[:, None] & inside[None, :], other=0.0)
                at = codes + stacked[:, None] * code_stride + (start + place)[None, :]
                number = code_operand(tl.load(at, inside[None, :], other=0.0), asked.dtype)
                acc = tl.dot(asked, tl.trans(number), acc, input_precision=precision)
            acc *= tl.load(scales + stacked).to(tl.float32)[None, :]
        if has_bias:
            acc += tl.load(bias + stacked, kept, other=0.0).to(tl.float32)[None, :]
        dtype = result.dtype.element_ty
        if has_factors:
            acc = acc.to(dtype).to(tl.float32) * tl.load(factors + pair, live, other=0.0)[:, None]
        at = result + pair[:, None] * outputs + column[None, :]
        tl.store(at, acc.to(dtype), live[:, None] & kept[None, :])
