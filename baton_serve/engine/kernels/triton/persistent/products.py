"""The steps of the row kernel between two barriers: products whose inputs each program computes itself.

Device code only. A product's inputs are cut into stretches of `depth`. Their contributions to an output are added in
fixed point, where the order does not change the sum. A program that finds NaN or an overflow stores it in `failed`, for
all programs. A program waits inside its loop over tiles, after it has requested the codes of the first tiles, because
Triton requests them several tiles ahead.
"""
# mypy: disable-error-code="misc,no-untyped-def,no-untyped-call,untyped-decorator"

import triton
import triton.language as tl

UNIT: tl.constexpr = tl.constexpr(2.0**32)
"""The number one in a sum, which is fixed point with steps of 2 ** -32 and a range up to 2 ** 31."""
MOST: tl.constexpr = tl.constexpr(2.0**24)
"""Largest contribution of a stretch of inputs to an output. Larger ones, and NaN, make the result NaN."""


@triton.jit
def arrive(counter):
    """Add 1 to the barrier `counter`, to signal that this program has finished its step."""
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="release", scope="gpu")


@triton.jit
def wait(counter, failed, target, left):
    """Spin until `counter` reaches `target`, at most `left` times, and return the number of spins left. On timeout
    store NaN in `failed` and return 0, so that later waits return immediately.
    """
    seen = tl.atomic_add(counter, 0, sem="acquire", scope="gpu")
    while (seen < target) & (left > 0):
        seen = tl.atomic_add(counter, 0, sem="acquire", scope="gpu")
        left -= 1
    if seen < target:
        tl.store(failed, float("nan"))
    return tl.where(seen < target, 0, left)


@triton.jit
def number_of(left):
    """Return this program's number, in a way that the compiler cannot recognize as the same in all layers. Otherwise it
    would keep every address that depends on it in registers.
    """
    return tl.program_id(0) + tl.where(left == 0x5A17C0DE, 1, 0)


@triton.jit
def place_of(table, layer, entry: tl.constexpr, entries: tl.constexpr):
    """Return the address of one tensor of the layer `layer` from the table of all layers' tensors, in units of
    `tensor_of`. `entry` is the tensor's number among the `entries` of a layer.
    """
    return tl.load(table + layer * entries + entry)


@triton.jit
def tensor_of(anchor, place, dtype: tl.constexpr):
    """Return a pointer to elements of `dtype` at an address from the table of tensors, which counts 16 bytes from
    `anchor`.
    """
    return (anchor + place * 16).to(tl.pointer_type(dtype), bitcast=True)


@triton.jit
def normed_product(  # noqa: PLR0913
    me,
    counter,
    failed,
    target,
    left,
    sums,
    codes,
    scales,
    added,
    has_added,
    residual,
    to,
    weight,
    squares,
    outputs: tl.constexpr,
    inputs: tl.constexpr,
    tile: tl.constexpr,
    depth: tl.constexpr,
    columns: tl.constexpr,
    programs: tl.constexpr,
    stages: tl.constexpr,
    runs: tl.constexpr,
):
    """After a barrier of all programs, store `residual` + `added` in `to` and the sums of its `squares`, and add this
    program's part of the product of `to` * norm weight with a weight to `sums`. The RMSNorm's factor (`norm_factor`) is
    missing there: the code that reads `sums` applies it.
    """
    tiles: tl.constexpr = outputs // tile
    steps: tl.constexpr = inputs // depth
    wide: tl.constexpr = columns if columns > depth // 64 else depth // 64
    first, last, stride = share_of(me, steps, tiles, programs, runs)
    low, high, base, worth = no_digits(depth, wide)
    for item in tl.range(first, last, stride, num_stages=stages):
        step, number = place_in(item, me, steps, tiles, runs)
        if (item == first) | (runs and number == 0):
            if item == first:
                left = wait(counter, failed, target, left)
            values = _normed(step, number == 0, added, has_added, residual, to, weight, squares, depth)
            low, high, base, worth = digits_of(values, depth, wide)
        add_tile(sums, failed, codes, scales, low, high, base, worth, number, step, inputs, tile, depth, wide)
    if first >= last:
        left = wait(counter, failed, target, left)
    return left


@triton.jit
def gated_product(  # noqa: PLR0913
    me,
    counter,
    failed,
    target,
    left,
    sums,
    codes,
    scales,
    gates,
    squares,
    eps,
    dtype: tl.constexpr,
    hidden: tl.constexpr,
    outputs: tl.constexpr,
    inputs: tl.constexpr,
    tile: tl.constexpr,
    depth: tl.constexpr,
    columns: tl.constexpr,
    programs: tl.constexpr,
    stages: tl.constexpr,
    runs: tl.constexpr,
):
    """After a barrier of all programs, add this program's part of the product of silu(gate) * up with a weight to
    `sums`. `gates` are the sums of the product that computes gate and up.
    """
    tiles: tl.constexpr = outputs // tile
    steps: tl.constexpr = inputs // depth
    wide: tl.constexpr = columns if columns > depth // 64 else depth // 64
    first, last, stride = share_of(me, steps, tiles, programs, runs)
    low, high, base, worth = no_digits(depth, wide)
    for item in tl.range(first, last, stride, num_stages=stages):
        step, number = place_in(item, me, steps, tiles, runs)
        if (item == first) | (runs and number == 0):
            if item == first:
                left = wait(counter, failed, target, left)
            values = _gated(step, gates, squares, failed, eps, dtype, hidden, inputs, depth)
            low, high, base, worth = digits_of(values, depth, wide)
        add_tile(sums, failed, codes, scales, low, high, base, worth, number, step, inputs, tile, depth, wide)
    if first >= last:
        left = wait(counter, failed, target, left)
    return left


@triton.jit
def share_of(me, steps: tl.constexpr, tiles: tl.constexpr, programs: tl.constexpr, runs: tl.constexpr):
    """Return (first, last, stride) of the items that this program computes. An item is one output tile of one step; a
    step is a range of inputs.

    With `runs`, all programs have the same number of consecutive items and may reach a second step. Otherwise a program
    stays at one step, whose tiles a team of programs shares alternately.
    """
    teams: tl.constexpr = programs // steps
    if runs:
        first, last, stride = me * (steps * tiles) // programs, (me + 1) * (steps * tiles) // programs, 1
    else:
        first, last, stride = me // steps, tl.where(me // steps < teams, tiles, 0), teams
    return first, last, stride


@triton.jit
def place_in(item, me, steps: tl.constexpr, tiles: tl.constexpr, runs: tl.constexpr):
    """Return (step, tile) of the item number `item`: its range of inputs and its output tile; see `share_of`."""
    if runs:
        step, number = item // tiles, item % tiles
    else:
        step, number = me % steps, item
    return step, number


@triton.jit
def no_digits(depth: tl.constexpr, columns: tl.constexpr):
    none = tl.zeros([columns, depth // 8], tl.int32)
    return none, none, tl.zeros([columns], tl.float32), tl.zeros([columns], tl.float32)


@triton.jit
def digits_of(values, depth: tl.constexpr, columns: tl.constexpr):
    """Convert activations `values`, float32 [groups, 128], to integers that are the right operand of a product.

    Return the inputs of low nibbles and of high ones, four bytes to a word [columns, words]; the constants to subtract
    from the sums [columns]; and the scales of the columns [columns]. A group has columns of its own, so that one sum
    serves all groups.
    """
    groups: tl.constexpr = depth // 128
    per: tl.constexpr = columns // groups
    scale = tl.maximum(tl.max(tl.abs(values), 1), 1e-20) * (1.0 / 32512.0)
    # Adding and subtracting 1.5 * 2 ** 23 rounds to the nearest integer, since floats of that size have no fraction.
    # The half that is added to `number` keeps the low byte below 128.
    number = (values * (1.0 / scale)[:, None] + 12582912.0) - 12582912.0
    is_low = (tl.arange(0, 128) // 16) % 2 == 0
    # Multiplied by 0, NaN stays NaN: it shows in this sum from either half, although no byte can be NaN.
    low_sum = tl.sum(number * is_low[None, :].to(tl.float32), 1)
    first = ((number + 0.5) * 0.00390625 + 12582912.0) - 12582912.0
    second = (number - first * 256.0).to(tl.int32) & 255
    both = (first.to(tl.int32) & 255).to(tl.int64) | (second.to(tl.int64) << 32)
    byte = tl.arange(0, 128) // 32  # within its word
    words = tl.sum(tl.reshape(both << (byte * 8).to(tl.int64)[None, :], [groups, 4, 2, 16]), 1)
    low, high = tl.split(tl.permute(words, (0, 2, 1)))
    kind = tl.arange(0, columns) % per
    base = tl.where(kind == 0, _spread(low_sum, columns) * 0.5, 0.0)
    worth = _spread(scale, columns) * tl.where(kind == 0, 16.0, 0.0625)
    return _columns_of(low, depth, columns), _columns_of(high, depth, columns), base, worth


@triton.jit
def _spread(values, columns: tl.constexpr):
    groups: tl.constexpr = values.shape[0]
    return tl.reshape(tl.broadcast_to(values[:, None], [groups, columns // groups]), [columns])


@triton.jit
def _columns_of(words, depth: tl.constexpr, columns: tl.constexpr):
    """Return 64-bit words [groups, 16] as 32-bit words [columns, words], each in the columns of its group: low halves
    (the inputs' first bytes) in one column, high halves (their second bytes) in the next.
    """
    per: tl.constexpr = columns // (depth // 128)
    words = tl.reshape(words, [depth // 8])
    column, word = tl.arange(0, columns), tl.arange(0, depth // 8)
    kind = (column % per)[:, None]
    chosen = tl.where(kind == 0, words.to(tl.int32)[None, :], (words >> 32).to(tl.int32)[None, :])
    return tl.where(((column // per)[:, None] == (word // 16)[None, :]) & (kind < 2), chosen, 0)


@triton.jit
def _bytes_of(words):
    """Return words of four bytes, [columns, words], as the right operand of a product: int8 [bytes, columns]."""
    even = tl.join(words.to(tl.int8), (words >> 16).to(tl.int8))
    odd = tl.join((words >> 8).to(tl.int8), (words >> 24).to(tl.int8))
    return tl.trans(tl.reshape(tl.join(even, odd), [words.shape[0], 4 * words.shape[1]]))


@triton.jit
def add_tile(  # noqa: PLR0913
    sums,
    failed,
    codes,
    scales,
    low,
    high,
    base,
    worth,
    number,
    step,
    inputs: tl.constexpr,
    tile: tl.constexpr,
    depth: tl.constexpr,
    columns: tl.constexpr,
):
    """Add the product of `depth` inputs, which `digits_of` has converted, with the codes of a weight to the sums of
    `tile` outputs. `number` is the output tile, `step` the range of inputs.
    """
    group = tl.arange(0, columns) // (columns // (depth // 128))
    row = number * tile + tl.arange(0, tile)
    code = codes + row[:, None] * (inputs // 2) + step * (depth // 2) + tl.arange(0, depth // 2)[None, :]
    both = tl.load(code)
    # The scales of all groups of a tile are read as one word: Triton pipelines only loads of 32 bits and more.
    kind: tl.constexpr = tl.int32 if depth == 256 else tl.int64
    word = tl.load(scales.to(tl.pointer_type(kind), bitcast=True) + row * (inputs // depth) + step)
    bits = (word[:, None] >> (16 * group).to(kind)[None, :]).to(tl.int16)
    scale = bits.to(scales.dtype.element_ty, bitcast=True).to(tl.float32)
    low_part = tl.dot(both & 15, _bytes_of(low), out_dtype=tl.int32)
    high_part = tl.dot(
        (both & -16) ^ -128, _bytes_of(high), out_dtype=tl.int32
    )  # the operand is sixteen times (code - 8)
    shares = ((low_part * 16 + high_part).to(tl.float32) - base[None, :]) * (scale * worth[None, :])
    share = tl.sum(shares, 1)
    tl.atomic_add(sums + row, (share * UNIT).to(tl.int64), sem="relaxed", scope="gpu")
    tl.store(failed + 1 + 0 * row, float("nan"), (tl.abs(share) <= MOST) == 0)


@triton.jit
def sum_of(sums, index, known):
    """Return the outputs number `index` of a finished product as float32, where the mask `known` is True."""
    return tl.load(sums + index, known, other=0, cache_modifier=".cg").to(tl.float32) * (1.0 / UNIT)


@triton.jit
def clear(me, sums, count: tl.constexpr, programs: tl.constexpr):
    """Set the first `count` sums of a product to zero; each of the programs clears its part."""
    for start in range(me * 128, count, programs * 128):
        index = start + tl.arange(0, 128)
        tl.store(sums + index, tl.zeros([128], tl.int64), index < count)


@triton.jit
def _inputs(step, depth: tl.constexpr):
    return step * depth + tl.arange(0, depth // 128)[:, None] * 128 + tl.arange(0, 128)[None, :]


@triton.jit
def _normed(  # noqa: PLR0913
    step, is_first, added, has_added, residual, to, weight, squares, depth: tl.constexpr
):
    """Return the inputs of one step of a product after the norm, without `norm_factor`. The program that computes the
    first tile of a step (`is_first`) also stores `residual` + `added` and the sums of squares, which all tiles of the
    step share.
    """
    dtype: tl.constexpr = residual.dtype.element_ty
    index = _inputs(step, depth)
    more = sum_of(added, index, (index >= 0) & has_added).to(dtype).to(tl.float32)
    summed = (tl.load(residual + index, cache_modifier=".cg").to(tl.float32) + more).to(dtype)
    values = summed.to(tl.float32)
    tl.store(to + index, summed, (index >= 0) & is_first)
    group = step * (depth // 128) + tl.arange(0, depth // 128)
    tl.store(squares + group, tl.sum(values * values, 1), (group >= 0) & is_first)
    return values * tl.load(weight + index).to(tl.float32)


@triton.jit
def norm_factor(squares, failed, eps, hidden: tl.constexpr):
    """Return the factor of RMSNorm, 1 / sqrt(mean of squares + eps), from the sums of squares of all groups. Return NaN
    if a barrier has failed or a sum was invalid.
    """
    number = tl.arange(0, 128)
    total = tl.zeros([128], tl.float32)
    for first in tl.static_range(0, hidden // 128, 128):
        known = first + number < hidden // 128
        total += tl.load(squares + first + number, known, other=0.0, cache_modifier=".cg")
    return tl.rsqrt(tl.sum(total, 0) / hidden + eps) + lost(failed)


@triton.jit
def lost(failed):
    """Return NaN if a barrier has failed or a sum was invalid, otherwise 0. Added to a result, it marks the result as
    wrong.
    """
    return tl.load(failed, cache_modifier=".cg") + tl.load(failed + 1, cache_modifier=".cg")


@triton.jit
def _gated(  # noqa: PLR0913
    step,
    gates,
    squares,
    failed,
    eps,
    dtype: tl.constexpr,
    hidden: tl.constexpr,
    width: tl.constexpr,
    depth: tl.constexpr,
):
    index = _inputs(step, depth)
    wide, up = sum_of(gates, index, index >= 0), sum_of(gates, index + width, index >= 0)
    factor = norm_factor(squares, failed, eps, hidden)
    wide, up = (wide * factor).to(dtype).to(tl.float32), (up * factor).to(dtype).to(tl.float32)
    # A gate below -80 has vanished in any dtype; the bound keeps exp finite.
    activated = (wide / (1.0 + tl.exp(tl.minimum(-wide, 80.0)))).to(dtype).to(tl.float32)
    return (activated * up).to(dtype).to(tl.float32)
