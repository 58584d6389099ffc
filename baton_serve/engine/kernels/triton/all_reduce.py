"""Two kernels that exchange data between tensor-parallel ranks by writing directly into the memory of the other ranks:
the sum of all ranks with the residual and its norm, and the largest of all ranks' logits.

Each 32-bit word is stored together with the number of its exchange, in one store of 64 bits. A rank that reads the
right number also reads the right word, so no other synchronization is needed. An inbox has two halves, used
alternately: a rank writes one half again only after it has read the other one from all ranks, which shows that they
have finished reading the first.
"""
# mypy: disable-error-code="misc,no-untyped-def,no-untyped-call,untyped-decorator"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_serve.engine.kernels.triton.argmax import NO_NUMBER, part_keys
from baton_serve.engine.kernels.triton.tiles import padded

HALVES = 2
"""Number of halves of an inbox."""
WORDS_PER_ARGMAX = 2
"""Words that `argmax` exchanges for a row: the largest key, and its column."""
WORD_BYTES = 8
"""Bytes of a word with the number of its exchange."""
MAX_POLLS = (1 << 31) - 1
"""How often a kernel reads an inbox that has no new value before it gives up."""
_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@dataclass(frozen=True, slots=True)
class Inboxes:
    """The device memory through which tensor-parallel ranks exchange values, as one rank sees it. `addresses`, int64
    [ranks], has the address of each rank's inbox in this process: `HALVES` x `max_rows` x ranks x `words` words, zero
    at first. `counters`, int32 [max_rows] of this rank, is zero at first too. Only the kernels of this module may write
    to both.
    """

    rank: int
    addresses: Tensor
    counters: Tensor
    words: int  # of 32 bits, in a row
    max_rows: int

    def fits(self, x: Tensor) -> bool:
        """Return whether `sum_norm` supports x [rows, hidden] with these inboxes: its number of rows, row size and
        dtype.
        """
        row_bytes = x.shape[-1] * x.element_size()
        is_row = x.ndim == 2 and x.is_contiguous() and x.dtype in _DTYPES
        return is_row and row_bytes == 4 * self.words and 0 < x.shape[0] <= self.max_rows


def inbox_bytes(ranks: int, rows: int, words: int) -> int:
    """Return the size of one rank's inbox in bytes, for `rows` rows of `words` 32-bit words from each of `ranks`
    ranks.
    """
    return HALVES * ranks * rows * words * WORD_BYTES


def sum_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, inboxes: Inboxes, *, polls: int = MAX_POLLS
) -> Tensor:
    """Add the sum of `x` over the ranks to `residual` [rows, hidden] in place, and return the RMSNorm of the result.

    The sum is taken in float32 in the order of the ranks, so that all ranks get the same. All ranks must call it in the
    same order. After `polls` reads without a new value the result is undefined. Twin: `rms_norm` of the sum.
    """
    rows, hidden = x.shape
    output = torch.empty_like(x)
    dims = padded(inboxes.words)
    _sum_norm_kernel[(rows,)](
        output.view(torch.int32),
        x.view(torch.int32),
        residual.view(torch.int32),
        weight.view(torch.int32),
        eps,
        inboxes.addresses,
        inboxes.counters,
        polls,
        rank=inboxes.rank,
        ranks=len(inboxes.addresses),
        max_rows=inboxes.max_rows,
        hidden=hidden,
        words=inboxes.words,
        dims=dims,
        dtype=_DTYPES[x.dtype],
        num_warps=max(1, min(16, dims // 256)),
    )
    return output


def argmax(logits: Tensor, out: Tensor, inboxes: Inboxes, *, polls: int = MAX_POLLS) -> Tensor:
    """Write to `out`, int64 [rows], the column of each row's largest value in the logits of all ranks, side by side,
    and return `out`. `logits` are this rank's columns, [rows, columns].

    Among equal values the first counts; a row with NaN gives the number of all columns. The rows of the inboxes must
    have two words. After `polls` reads without a new value the result is undefined.
    """
    assert inboxes.words == WORDS_PER_ARGMAX and len(logits) <= inboxes.max_rows
    found = part_keys(logits)
    (rows, columns), parts = logits.shape, found.shape[2]
    _argmax_kernel[(rows,)](
        out,
        found[0],
        found[1],
        parts,
        columns,
        inboxes.addresses,
        inboxes.counters,
        polls,
        rank=inboxes.rank,
        ranks=len(inboxes.addresses),
        max_rows=inboxes.max_rows,
        width=padded(parts),
        num_warps=1,
    )
    return out


@triton.jit
def _low(bits, dtype: tl.constexpr):
    """Return the first of the two 16-bit numbers in each 32-bit word, or the whole word if the dtype has 32 bits, as
    float32.
    """
    if dtype == tl.float32:
        number = bits.to(tl.float32, bitcast=True)
    else:
        number = bits.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    return number


@triton.jit
def _high(bits, dtype: tl.constexpr):
    if dtype == tl.float32:
        number = tl.zeros_like(bits).to(tl.float32)
    else:
        number = (bits >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    return number


@triton.jit
def _word(low, high, dtype: tl.constexpr):
    if dtype == tl.float32:
        word = low.to(tl.int32, bitcast=True)
    else:
        first = low.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        word = first | (high.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) << 16)
    return word


@triton.jit
def _sum_norm_kernel(  # noqa: PLR0913
    output,
    x,
    residual,
    weight,
    eps,
    addresses,
    counters,
    polls,
    rank: tl.constexpr,
    ranks: tl.constexpr,
    max_rows: tl.constexpr,
    hidden: tl.constexpr,
    words: tl.constexpr,
    dims: tl.constexpr,
    dtype: tl.constexpr,
):
    row = tl.program_id(0)
    word = tl.arange(0, dims)
    live = word < words
    # Start the loads that depend on no other rank first, so that they overlap with the exchange.
    inbox = tl.load(addresses + rank).to(tl.pointer_type(tl.int64))
    nearest = tl.load(addresses + (rank + 1) % ranks).to(tl.pointer_type(tl.int64))
    before = tl.load(residual + row * words + word, live, other=0)
    factor = tl.load(weight + word, live, other=0)
    number = tl.load(counters + row) + 1
    own = tl.load(x + row * words + word, live, other=0)
    half = ((number & 1) * max_rows + row) * (ranks * words)
    parcel = (number.to(tl.int64) << 32) | (own.to(tl.int64) & 0xFFFFFFFF)
    tl.store(nearest + half + rank * words + word, parcel, live, cache_modifier=".wt")
    for step in tl.static_range(2, ranks):
        theirs = tl.load(addresses + (rank + step) % ranks).to(tl.pointer_type(tl.int64))
        tl.store(theirs + half + rank * words + word, parcel, live, cache_modifier=".wt")
    low = tl.zeros([dims], tl.float32)
    high = tl.zeros([dims], tl.float32)
    for sender in tl.static_range(ranks):
        bits = own
        if sender != rank:
            at = inbox + half + sender * words + word
            found = tl.load(at, live, other=0, volatile=True)
            looks = 0
            missing = tl.max((live & ((found >> 32).to(tl.int32) != number)).to(tl.int32), 0)
            while (missing != 0) & (looks < polls):
                found = tl.load(at, live, other=0, volatile=True)
                missing = tl.max((live & ((found >> 32).to(tl.int32) != number)).to(tl.int32), 0)
                looks += 1
            bits = found.to(tl.int32)
        low += _low(bits, dtype)
        high += _high(bits, dtype)
    low = (low.to(dtype).to(tl.float32) + _low(before, dtype)).to(dtype).to(tl.float32)
    high = (high.to(dtype).to(tl.float32) + _high(before, dtype)).to(dtype).to(tl.float32)
    tl.store(residual + row * words + word, _word(low, high, dtype), live)
    scale = tl.rsqrt(tl.sum(low * low + high * high, 0) / hidden + eps)
    low = (low * scale).to(dtype).to(tl.float32) * _low(factor, dtype)
    high = (high * scale).to(dtype).to(tl.float32) * _high(factor, dtype)
    tl.store(output + row * words + word, _word(low, high, dtype), live)
    tl.store(counters + row, number)


@triton.jit
def _argmax_kernel(  # noqa: PLR0913
    out,
    keys,
    places,
    parts,
    columns,
    addresses,
    counters,
    polls,
    rank: tl.constexpr,
    ranks: tl.constexpr,
    max_rows: tl.constexpr,
    width: tl.constexpr,
):
    """Reduce the parts of one row of this rank's logits, exchange the largest value with the other ranks, and store the
    largest of all. Of the two exchanged words one is the key of the value, the other its column.
    """
    row = tl.program_id(0)
    part, word = tl.arange(0, width), tl.arange(0, 2)
    number = tl.load(counters + row) + 1
    key = tl.load(keys + row * parts + part, part < parts, other=-0x80000000)
    place = tl.load(places + row * parts + part, part < parts, other=0)
    largest = tl.max(key, 0)
    best = tl.min(tl.where((key == largest) & (part < parts), place, columns), 0) + rank * columns
    half = ((number & 1) * max_rows + row) * (ranks * 2)
    own = tl.where(word == 0, largest, best)
    parcel = (number.to(tl.int64) << 32) | (own.to(tl.int64) & 0xFFFFFFFF)
    for step in tl.static_range(1, ranks):
        theirs = tl.load(addresses + (rank + step) % ranks).to(tl.pointer_type(tl.int64))
        tl.store(theirs + half + rank * 2 + word, parcel, cache_modifier=".wt")
    inbox = tl.load(addresses + rank).to(tl.pointer_type(tl.int64))
    for sender in tl.static_range(ranks):
        if sender != rank:
            at = inbox + half + sender * 2 + word
            found = tl.load(at, volatile=True)
            looks = 0
            missing = tl.max(((found >> 32).to(tl.int32) != number).to(tl.int32), 0)
            while (missing != 0) & (looks < polls):
                found = tl.load(at, volatile=True)
                missing = tl.max(((found >> 32).to(tl.int32) != number).to(tl.int32), 0)
                looks += 1
            bits = found.to(tl.int32)
            other = tl.max(tl.where(word == 0, bits, -0x80000000), 0)
            there = tl.max(tl.where(word == 1, bits, 0), 0)
            wins = (other > largest) | ((other == largest) & (there < best))
            best = tl.where(wins, there, best)
            largest = tl.maximum(largest, other)
    tl.store(out + row, tl.where(largest == NO_NUMBER, ranks * columns, best).to(tl.int64))
    tl.store(counters + row, number)
