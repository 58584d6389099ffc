"""Activations as fixed-point numbers of two signed bytes, so that weight codes enter matrix units without conversion.

A group of 128 inputs shares a scale: an input is `(256 * high + low) * scale`, exact to 1 / 65,024 of the largest in
its group (rounding to bfloat16 changes an input by up to 2 ** -9 of itself). A product of integers is exact, and
decoding a weight costs at most a mask. The two bytes of a token are neighbouring columns of the product, which a small
batch leaves empty.

Digits are made by the kernels that compute activations: the norm, SiLU * mul, or a conversion of a tensor. Twin:
`values_of`.
"""
# mypy: disable-error-code="misc,no-untyped-def,no-untyped-call,untyped-decorator"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_serve.engine.kernels.triton.tiles import padded

GROUP = 128
"""Number of inputs that share a scale."""
MAX_DIGITS_VALUE = 32512.0
"""Largest value of a group in units of its scale; its high byte is at most 127 after rounding."""
_GROUPS_PER_PROGRAM = 16


@dataclass(frozen=True, slots=True)
class Digits:
    """Activations as 16-bit integers with a scale for each group of 128 inputs, for products of integers. `codes` is
    int8 [2 * num_tokens, inputs]: the high bytes of each token, then the low bytes. With `nibbles`, the inputs of a
    group are in the order in which four-bit codes lie in their bytes: inputs of low nibbles first, then those of high
    nibbles.
    """

    codes: Tensor
    scales: Tensor  # float32 [num_tokens, groups]
    low_sums: Tensor  # float32 [num_tokens, groups]: of a group's inputs of low nibbles (of all, without nibbles) ...
    sums: Tensor  # ... and of all its inputs, both in units of 256 scales
    nibbles: bool
    dtype: torch.dtype
    """The dtype that the activations had."""

    @property
    def num_tokens(self) -> int:
        return self.scales.shape[0]

    @property
    def inputs(self) -> int:
        return self.codes.shape[1]


def order_in_bytes(device: torch.device) -> Tensor:
    """Return, int64 [128], which input of a group stands at each place if four-bit codes are read byte by byte, first
    all low nibbles, then all high ones (`quantized_weights.pack_codes`).
    """
    place = torch.arange(GROUP, device=device)
    half, byte = place // 64, place % 64
    return 32 * (byte % 4) + 16 * half + byte // 4


def values_of(digits: Digits) -> Tensor:
    """Return the activations that `Digits` represent as float32 [num_tokens, inputs], in the order of the inputs."""
    pairs = digits.codes.view(digits.num_tokens, 2, -1, GROUP).float()
    numbers = (256.0 * pairs[:, 0] + pairs[:, 1]) * digits.scales[:, :, None]
    if digits.nibbles:
        placed = torch.empty_like(numbers)
        placed[:, :, order_in_bytes(numbers.device)] = numbers
        numbers = placed
    return numbers.flatten(1)


def split(x: Tensor, *, nibbles: bool) -> Digits:
    """Convert activations x [num_tokens, inputs] to `Digits`, in which 16-bit integers represent them. The number of
    inputs must be a multiple of 128. `nibbles` is the order for four-bit weights.
    """
    made = _empty(x.shape[0], x.shape[1], x, nibbles)
    groups = made.scales.shape[1]
    per = min(8, padded(groups))
    _split_kernel[(x.shape[0], -(-groups // per))](
        *_parts(made), x, x.stride(0), inputs=x.shape[1], groups=groups, per=per, nibbles=nibbles, num_warps=4
    )
    return made


def norm_split(
    x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None, nibbles: bool, are_parts: bool = False
) -> Digits:
    """Return the RMSNorm of x, or of x + `residual` (updated in place, contiguous), as `Digits`; hidden must be a
    multiple of 128.

    With `are_parts`, x is float32 [parts, num_tokens, hidden], the products of ranges of the inputs, whose sum is first
    rounded to the dtype of `residual`.
    """
    hidden, like = x.shape[-1], residual if are_parts and residual is not None else x
    num_tokens = x.shape[1] if are_parts else x.numel() // hidden
    rows = x.reshape(-1, hidden)
    made = _empty(num_tokens, hidden, like, nibbles)
    added = rows if residual is None else residual.view(-1, hidden)
    _norm_split_kernel[(num_tokens,)](
        *_parts(made),
        rows,
        added,
        weight,
        eps,
        rows.stride(0),
        added.stride(0),
        hidden=hidden,
        groups=hidden // GROUP,
        per=padded(hidden // GROUP),
        has_residual=residual is not None,
        parts=x.shape[0] if are_parts else 0,
        nibbles=nibbles,
        num_warps=max(1, min(16, padded(hidden) // 256)),
    )
    return made


def silu_split(gate_up: Tensor, *, nibbles: bool) -> Digits:
    """Return silu(gate) * up of rows [num_tokens, 2 * width] as `Digits`; width must be a multiple of 128."""
    width = gate_up.shape[1] // 2
    made = _empty(gate_up.shape[0], width, gate_up, nibbles)
    groups = width // GROUP
    per = min(_GROUPS_PER_PROGRAM, padded(groups))
    _silu_split_kernel[(gate_up.shape[0], -(-groups // per))](
        *_parts(made), gate_up, gate_up.stride(0), inputs=width, groups=groups, per=per, nibbles=nibbles, num_warps=4
    )
    return made


def _empty(num_tokens: int, inputs: int, like: Tensor, nibbles: bool) -> Digits:
    assert inputs % GROUP == 0
    codes = torch.empty((2 * num_tokens, inputs), dtype=torch.int8, device=like.device)
    floats = torch.empty((3, num_tokens, inputs // GROUP), dtype=torch.float32, device=like.device)
    return Digits(codes, floats[0], floats[1], floats[2], nibbles, like.dtype)


def _parts(digits: Digits) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return digits.codes, digits.scales, digits.low_sums, digits.sums


@triton.jit
def store_digits(  # noqa: PLR0913
    codes,
    scales,
    low_sums,
    sums,
    values,
    token,
    group,
    inputs: tl.constexpr,
    groups: tl.constexpr,
    nibbles: tl.constexpr,
):
    """Convert activations of one token, float32 [groups of this program, 128], to the codes, scales and sums of
    `Digits`, and store them.
    """
    column = tl.arange(0, 128)
    known = group < groups
    if nibbles:  # reorder as `order_in_bytes` before storing, since neighbouring bytes are stored together
        parts = tl.permute(tl.reshape(values, [values.shape[0], 4, 2, 16]), (0, 2, 3, 1))
        values = tl.reshape(parts, [values.shape[0], 128])
    scale = tl.maximum(tl.max(tl.abs(values), 1), 1e-20) * (1.0 / 32512.0)
    # Adding and subtracting 1.5 * 2 ** 23 rounds to the nearest integer, since floats of that size have no fraction.
    # The half that is added to `number` keeps the low byte below 128.
    number = (values * (1.0 / scale)[:, None] + 12582912.0) - 12582912.0
    high = ((number + 0.5) * 0.00390625 + 12582912.0) - 12582912.0
    low = number - high * 256.0
    at = codes + token * (2 * inputs) + group[:, None] * 128 + column[None, :]
    tl.store(at, high.to(tl.int8), known[:, None])
    tl.store(at + inputs, low.to(tl.int8), known[:, None])
    counted = number * 0.00390625
    total = tl.sum(counted, 1)
    at = token * groups + group
    tl.store(scales + at, scale + 0.0 * total, known)  # a byte cannot be NaN, but the scale can
    in_low = column < (64 if nibbles else 128)
    tl.store(low_sums + at, tl.sum(tl.where(in_low[None, :], counted, 0.0), 1), known)
    tl.store(sums + at, total, known)


@triton.jit
def _split_kernel(  # noqa: PLR0913
    codes,
    scales,
    low_sums,
    sums,
    x,
    stride,
    inputs: tl.constexpr,
    groups: tl.constexpr,
    per: tl.constexpr,
    nibbles: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * per + tl.arange(0, per)
    at = x + token * stride + group[:, None] * 128 + tl.arange(0, 128)[None, :]
    values = tl.load(at, (group < groups)[:, None], other=0.0).to(tl.float32)
    store_digits(codes, scales, low_sums, sums, values, token, group, inputs, groups, nibbles)


@triton.jit
def _norm_split_kernel(  # noqa: PLR0913
    codes,
    scales,
    low_sums,
    sums,
    x,
    residual,
    weight,
    eps,
    x_stride,
    residual_stride,
    hidden: tl.constexpr,
    groups: tl.constexpr,
    per: tl.constexpr,
    has_residual: tl.constexpr,
    parts: tl.constexpr,
    nibbles: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, per)
    known = (group < groups)[:, None]
    dim = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    if parts > 0:
        total = tl.zeros([per, 128], tl.float32)
        for number in tl.static_range(parts):
            total += tl.load(x + (number * tl.num_programs(0) + token) * x_stride + dim, known, other=0.0)
        values = total.to(residual.dtype.element_ty)
    else:
        values = tl.load(x + token * x_stride + dim, known, other=0.0)
    dtype = values.dtype
    values = values.to(tl.float32)
    if has_residual:
        at = residual + token * residual_stride + dim
        total = (values + tl.load(at, known, other=0.0).to(tl.float32)).to(dtype)
        tl.store(at, total, known)
        values = total.to(tl.float32)
    normed = values * tl.rsqrt(tl.sum(tl.sum(values * values, 1), 0) / hidden + eps)
    normed = normed.to(dtype).to(tl.float32) * tl.load(weight + dim, known, other=0.0).to(tl.float32)
    values = normed.to(dtype).to(tl.float32)
    store_digits(codes, scales, low_sums, sums, values, token, group, hidden, groups, nibbles)


@triton.jit
def _silu_split_kernel(  # noqa: PLR0913
    codes,
    scales,
    low_sums,
    sums,
    gate_up,
    stride,
    inputs: tl.constexpr,
    groups: tl.constexpr,
    per: tl.constexpr,
    nibbles: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * per + tl.arange(0, per)
    known = (group < groups)[:, None]
    at = gate_up + token * stride + group[:, None] * 128 + tl.arange(0, 128)[None, :]
    gate = tl.load(at, known, other=0.0)
    up = tl.load(at + inputs, known, other=0.0)
    wide = gate.to(tl.float32)
    # A gate below -80 has vanished in any dtype; the bound keeps exp finite.
    activated = (wide / (1.0 + tl.exp(tl.minimum(-wide, 80.0)))).to(gate.dtype)
    values = (activated.to(tl.float32) * up.to(tl.float32)).to(gate.dtype).to(tl.float32)
    store_digits(codes, scales, low_sums, sums, values, token, group, inputs, groups, nibbles)
