"""Mixtures of experts for one token: each program multiplies rows of the chosen experts' weights, which are read once.

Matrix units, for which the grouped products of `experts` are cut, would multiply 15 empty rows. The sum over experts
is part of the second product. Twin: `reference.experts.mix`.
"""
# mypy: disable-error-code="misc,no-untyped-def,no-untyped-call,untyped-decorator"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_serve.engine.kernels.interfaces import Experts
from baton_serve.engine.kernels.triton.overlap import overlapping, start_early
from baton_serve.engine.kernels.triton.tiles import padded


@dataclass(frozen=True, slots=True)
class ExpertRowTiles:
    """Tile sizes and launch settings of a product of one token with the weights of its experts."""

    chunk: int  # inputs of a step
    warps: int
    stages: int


GATE_UP_TILES = ExpertRowTiles(chunk=1024, warps=4, stages=2)
DOWN_TILES = ExpertRowTiles(chunk=128, warps=2, stages=4)
MAX_WIDTH = 2048
"""Width of an expert up to which these products are taken: a program reads one row of each chosen expert."""


def fits(x: Tensor, experts: Experts) -> bool:
    """Return whether `mix_row` computes these experts of x: narrow ones of one token, with plain weights, no biases."""
    gate_up, down = experts.gate_up, experts.down
    if not isinstance(gate_up, Tensor) or not isinstance(down, Tensor) or x.shape[0] != 1 or x.stride(1) != 1:
        return False
    is_dense = gate_up.is_contiguous() and down.is_contiguous()
    return is_dense and experts.is_plain and down.shape[2] <= MAX_WIDTH


def mix_row(x: Tensor, weights: Tensor, chosen: Tensor, experts: Experts) -> Tensor:
    """Return the weighted sum of one token's experts, [1, hidden], as `LayerKernels.mix` specifies. Call it only if
    `fits`.
    """
    gate_up, down = experts.gate_up, experts.down
    assert isinstance(gate_up, Tensor) and isinstance(down, Tensor)
    num_experts, hidden, width = down.shape
    top_k = chosen.shape[1]
    first, second = GATE_UP_TILES, DOWN_TILES
    active = torch.empty((top_k, width), dtype=x.dtype, device=x.device)
    _gate_up_row_kernel[(width, top_k)](
        active,
        x,
        gate_up,
        chosen,
        num_experts,
        inputs=hidden,
        outputs=width,
        chunk=min(first.chunk, padded(hidden)),
        num_warps=first.warps,
        num_stages=first.stages,
        **overlapping(x.device),
    )
    result = torch.empty((1, hidden), dtype=x.dtype, device=x.device)
    _down_row_kernel[(hidden,)](
        result,
        active,
        down,
        weights,
        chosen,
        num_experts,
        top_k=top_k,
        choices=padded(top_k),
        inputs=width,
        outputs=hidden,
        chunk=min(second.chunk, padded(width)),
        num_warps=second.warps,
        num_stages=second.stages,
        **overlapping(x.device),
    )
    return result


@triton.jit(do_not_specialize=["num_experts"])
def _gate_up_row_kernel(  # noqa: PLR0913
    active,
    x,
    weight,
    chosen,
    num_experts,
    inputs: tl.constexpr,
    outputs: tl.constexpr,
    chunk: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Compute silu(gate) * up of one chosen expert for one output."""
    start_early(overlaps)
    output, choice = tl.program_id(0), tl.program_id(1)
    expert = tl.load(chosen + choice)
    if expert < num_experts:  # others are on other ranks
        step = tl.arange(0, chunk)
        row = weight + (expert.to(tl.int64) * (2 * outputs) + output) * inputs + step
        gate = tl.zeros([chunk], tl.float32)
        up = tl.zeros([chunk], tl.float32)
        for start in range(0, inputs, chunk):
            inside = start + step < inputs
            seen = tl.load(x + start + step, inside, other=0.0).to(tl.float32)
            gate += tl.load(row + start, inside, other=0.0).to(tl.float32) * seen
            up += tl.load(row + outputs * inputs + start, inside, other=0.0).to(tl.float32) * seen
        dtype: tl.constexpr = active.dtype.element_ty
        # Round as if the product had been stored, as the twin does.
        gated, added = tl.sum(gate, 0).to(dtype).to(tl.float32), tl.sum(up, 0).to(dtype).to(tl.float32)
        # A gate below -80 has vanished in any dtype; the bound keeps exp finite.
        gated = (gated / (1.0 + tl.exp(tl.minimum(-gated, 80.0)))).to(dtype).to(tl.float32)
        tl.store(active + choice * outputs + output, (gated * added).to(dtype))


@triton.jit(do_not_specialize=["num_experts"])
def _down_row_kernel(  # noqa: PLR0913
    result,
    active,
    weight,
    factors,
    chosen,
    num_experts,
    top_k: tl.constexpr,
    choices: tl.constexpr,
    inputs: tl.constexpr,
    outputs: tl.constexpr,
    chunk: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Compute one output of all chosen experts at the same time, and add them up."""
    start_early(overlaps)
    choice, step, output = tl.arange(0, choices), tl.arange(0, chunk), tl.program_id(0)
    expert = tl.load(chosen + choice, choice < top_k, other=num_experts)
    is_own = expert < num_experts
    dtype: tl.constexpr = result.dtype.element_ty
    factor = tl.load(factors + choice, is_own, other=0.0)
    rows = weight + (expert.to(tl.int64) * outputs + output)[:, None] * inputs + step[None, :]
    acc = tl.zeros([choices, chunk], tl.float32)
    for start in range(0, inputs, chunk):
        mask = is_own[:, None] & (start + step < inputs)[None, :]
        seen = tl.load(active + choice[:, None] * inputs + start + step[None, :], mask, other=0.0).to(tl.float32)
        acc += tl.load(rows + start, mask, other=0.0).to(tl.float32) * seen
    # Round as if each expert's output had been stored, as the twin does.
    product = tl.sum(acc, 1).to(dtype).to(tl.float32) * factor
    total = tl.sum(tl.where(is_own, product.to(dtype).to(tl.float32), 0.0), 0)
    tl.store(result + output, total.to(dtype))
