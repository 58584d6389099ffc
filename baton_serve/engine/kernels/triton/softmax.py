"""Device code that prefill and decode attention share: scores, running softmax, and the place of a tile in the
cache.

Device code only; it knows nothing of launches or tile sizes. Peaks are kept in units of log2, so that exp2 can be used.
Addresses are counted in rows of head_dim elements: an int32 then spans half a terabyte of bf16 heads of 128.
"""
# mypy: disable-error-code="misc,no-untyped-def,no-untyped-call,untyped-decorator"

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
HIDDEN: tl.constexpr = tl.constexpr(float("-inf"))  # the score of a masked token
# The peak of a row without tokens. It is finite, so that exp2(HIDDEN - LOWEST) is 0 and not NaN, and below any score.
LOWEST: tl.constexpr = tl.constexpr(-1.0e30)


@triton.jit
def tile_rows(block, start, head, block_rows, head_rows: tl.constexpr, block_tokens: tl.constexpr):
    """Return the number of the row that holds the key of token `start` for one head, with the KV cache seen as rows of
    head_dim elements. The rows behind it hold the next tokens of the KV block `block`. The value of a token lies one
    plane (all keys of a layer in a block) behind its key.
    """
    return block * block_rows + head * head_rows + start % block_tokens


@triton.jit
def load_scales(  # noqa: PLR0913
    scales,
    block,
    position,
    head,
    mask,
    block_rows,
    head_rows: tl.constexpr,
    block_tokens: tl.constexpr,
    head_dim: tl.constexpr,
):
    """Return the scales of the quantized keys of one head for the tokens `position`; see `quantized_kv`."""
    row = (block * block_rows + head * head_rows + block_tokens).to(tl.int64)
    return tl.load(scales + row * (head_dim // 2) + position % block_tokens, mask, other=0.0).to(tl.float32)


@triton.jit
def load_rows(cache, rows, mask, dims, head_dim: tl.constexpr):
    """Load the rows `rows` of the cache as [tokens, padded_dim]. Tokens outside `mask` read as zero, because memory
    that was never written may hold NaN.
    """
    offsets = rows.to(tl.int64)[:, None] * head_dim + dims[None, :]
    if head_dim == dims.shape[0] or head_dim == 2 * dims.shape[0]:  # all elements, or half of them
        return tl.load(cache + offsets, mask=mask[:, None], other=0.0)
    return tl.load(cache + offsets, mask=mask[:, None] & (dims < head_dim)[None, :], other=0.0)


@triton.jit
def factor_of(scale, softcap, capped: tl.constexpr):
    """Return the factor that converts results of `capped_scores` to exponents of 2. It is applied inside exp2's
    argument, where it costs nothing.
    """
    return softcap * LOG2E if capped else scale * LOG2E


@triton.jit
def capped_scores(raw, scale, softcap, capped: tl.constexpr):
    """Return attention scores `raw` (q @ k^T) unchanged, or if `capped` the tanh of the scaled scores over `softcap`,
    written with exp2, which every backend supports.
    """
    if capped:
        power = tl.minimum(raw * (scale / softcap) * (2 * LOG2E), 126.0, tl.PropagateNan.ALL)
        return 1.0 - 2.0 / (tl.exp2(power) + 1.0)
    return raw


@triton.jit
def absorb(  # noqa: PLR0913
    acc, total, peak, scores, factor, values, worths, scaled: tl.constexpr, precision: tl.constexpr
):
    """Add a tile of key tokens to the running softmax of the queries (online softmax). Return the new (acc, total,
    peak): weighted sums of values, sums of weights, largest scores. `scores` is [rows, tokens], `values` [tokens, dim].
    With `scaled`, the values are quantized, with scales `worths` [tokens].
    """
    new_peak = tl.maximum(peak, tl.max(scores, 1) * factor)
    shrink = tl.exp2(peak - new_peak)
    weights = tl.exp2(scores * factor - new_peak[:, None])
    total = total * shrink + tl.sum(weights, 1)
    if scaled:
        if values.dtype == tl.float16:  # the product of weight and scale could exceed its range
            values = (values.to(tl.float32) * worths[:, None]).to(tl.float16)
        else:
            weights = weights * worths[None, :]
    acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None], input_precision=precision)
    return acc, total, new_peak
