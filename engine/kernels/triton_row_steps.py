"""What programs of one kernel do for one row between their meetings: products, norms and gates.

Device code only. A product's inputs are cut into runs, and whoever reads it adds up the runs' parts, in order.
"""
# mypy: disable-error-code="misc,no-untyped-def,no-untyped-call,untyped-decorator"

import triton
import triton.language as tl

from engine.kernels.triton_digits import store_digits


@triton.jit
def meet(counter, failed, target, left):
    """Returns once `target` programs have come, with what is left of the patience. Who runs out of it says so in
    `failed`, and waits no more."""
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="release", scope="gpu")
    seen = tl.atomic_add(counter, 0, sem="acquire", scope="gpu")
    while (seen < target) & (left > 0):
        seen = tl.atomic_add(counter, 0, sem="acquire", scope="gpu")
        left -= 1
    if seen < target:
        tl.store(failed, float("nan"))
    return tl.where(seen < target, 0, left)


@triton.jit
def number_of(left):
    """This program's number, which the compiler cannot know to be the same in all layers: it would keep every address
    made of it in registers."""
    return tl.program_id(0) + tl.where(left == 0x5A17C0DE, 1, 0)


@triton.jit
def tensor_of(anchor, table, layer, entry: tl.constexpr, entries: tl.constexpr, dtype: tl.constexpr):
    """A pointer to `dtype` out of the table of a layer's tensors, which counts 16 bytes from `anchor`."""
    return (anchor + tl.load(table + layer * entries + entry) * 16).to(tl.pointer_type(dtype), bitcast=True)


@triton.jit
def product(  # noqa: PLR0913
    me,
    parts,
    digits,
    digit_scales,
    low_sums,
    codes,
    scales,
    factor,
    outputs: tl.constexpr,
    inputs: tl.constexpr,
    tile: tl.constexpr,
    depth: tl.constexpr,
    columns: tl.constexpr,
    programs: tl.constexpr,
    stages: tl.constexpr,
):
    """The parts of `factor` * the weight * the digits over `depth` inputs each, float32 [parts, outputs]. A program has
    the same inputs of many tiles, and neighbours have neighbouring inputs: together they read the weight in order."""
    steps: tl.constexpr = inputs // depth
    teams: tl.constexpr = programs // steps
    tiles: tl.constexpr = outputs // tile
    step, team = me % steps, me // steps
    last = tl.where(team < teams, tiles, 0)
    column = tl.arange(0, columns)
    place = tl.arange(0, 64)
    seen = column < 2
    reader = digits + step * depth + tl.where(seen, column, 0)[None, :] * inputs + place[:, None]
    stretch = step * (depth // 128) + tl.where(seen, 0, 0)
    sums, worths = low_sums + stretch, digit_scales + stretch
    worth = tl.where(column == 0, 16.0, 0.0625) * factor
    low_0, high_0, base_0, worth_0 = _stretch(reader, sums, worths, worth, 0)
    low_1, high_1, base_1, worth_1 = _stretch(reader, sums, worths, worth, 1)
    if depth > 256:
        low_2, high_2, base_2, worth_2 = _stretch(reader, sums, worths, worth, 2)
        low_3, high_3, base_3, worth_3 = _stretch(reader, sums, worths, worth, 3)
    pairs = scales.to(tl.pointer_type(tl.int32), bitcast=True) + step * (depth // 256)
    dtype: tl.constexpr = scales.dtype.element_ty
    for number in tl.range(team, last, teams, num_stages=stages):
        row = number * tile + tl.arange(0, tile)
        code = codes + row[:, None] * (inputs // 2) + step * (depth // 2) + place[None, :]
        pair = tl.load(pairs + row * (inputs // 256))  # the scales of two stretches
        acc = _times(tl.load(code), low_0, high_0, base_0) * (_scale_of(pair, 0, dtype)[:, None] * worth_0[None, :])
        acc += _times(tl.load(code + 64), low_1, high_1, base_1) * (
            _scale_of(pair, 1, dtype)[:, None] * worth_1[None, :]
        )
        if depth > 256:
            pair = tl.load(pairs + row * (inputs // 256) + 1)
            acc += _times(tl.load(code + 128), low_2, high_2, base_2) * (
                _scale_of(pair, 0, dtype)[:, None] * worth_2[None, :]
            )
            acc += _times(tl.load(code + 192), low_3, high_3, base_3) * (
                _scale_of(pair, 1, dtype)[:, None] * worth_3[None, :]
            )
        tl.store(parts + step * outputs + row, tl.sum(acc, 1))


@triton.jit
def _stretch(reader, low_sums, digit_scales, worth, ahead: tl.constexpr):
    """A stretch's digits and what they count: inputs of low nibbles, of high ones, what is taken off, scales."""
    column = tl.arange(0, reader.shape[1])
    seen = column < 2
    low = tl.load(reader + ahead * 128, seen[None, :], other=0)
    high = tl.load(reader + ahead * 128 + 64, seen[None, :], other=0)
    base = 128.0 * tl.load(low_sums + ahead, column == 0, other=0.0)
    return low, high, base, worth * tl.load(digit_scales + ahead, seen, other=0.0)


@triton.jit
def _times(both, low, high, base):
    """Sixteen times a stretch's sums [outputs, columns]."""
    low_part = tl.dot(both & 15, low, out_dtype=tl.int32)
    high_part = tl.dot((both & -16) ^ -128, high, out_dtype=tl.int32)  # sixteen times (code - 8)
    return (low_part * 16 + high_part).to(tl.float32) - base[None, :]


@triton.jit
def _scale_of(pair, half: tl.constexpr, dtype: tl.constexpr):
    bits = ((pair >> 16 * half) & 0xFFFF).to(tl.int16)
    return bits.to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def sum_parts(parts, index, known, outputs: tl.constexpr, count: tl.constexpr):
    """Outputs `index` of a product of `count` parts, float32."""
    total = tl.zeros(index.shape, tl.float32)
    for slot in tl.static_range(count):
        total += tl.load(parts + slot * outputs + index, known, other=0.0, cache_modifier=".cg")
    return total


@triton.jit
def rounded_sum(parts, index, dtype: tl.constexpr, outputs: tl.constexpr, count: tl.constexpr):
    """As the product by itself would have rounded it."""
    return sum_parts(parts, index, index >= 0, outputs, count).to(dtype).to(tl.float32)


@triton.jit
def add_norm(  # noqa: PLR0913
    me,
    digits,
    floats,
    squares,
    parts,
    residual,
    weight,
    outputs: tl.constexpr,
    count: tl.constexpr,
    programs: tl.constexpr,
):
    """A product of `count` parts joins `residual`; weight * residual as digits, which lack `norm_factor`."""
    groups: tl.constexpr = outputs // 128
    dtype: tl.constexpr = residual.dtype.element_ty
    for number in range(me, groups, programs):
        index = number * 128 + tl.arange(0, 128)
        summed = tl.load(residual + index)
        if count > 0:
            added = rounded_sum(parts, index, dtype, outputs, count)
            summed = (summed.to(tl.float32) + added).to(dtype)
            tl.debug_barrier()  # threads may hold the same number: all have loaded it before one stores
            tl.store(residual + index, summed)
        values = summed.to(tl.float32)
        tl.store(squares + number, tl.sum(values * values, 0))
        store_group(digits, floats, values * tl.load(weight + index).to(tl.float32), number, groups)


@triton.jit
def norm_factor(squares, failed, eps, hidden: tl.constexpr):
    """RMSNorm's, of sums of squares by groups; NaN once a meeting has failed."""
    number = tl.arange(0, 128)
    total = tl.zeros([128], tl.float32)
    for first in tl.static_range(0, hidden // 128, 128):
        known = first + number < hidden // 128
        total += tl.load(squares + first + number, known, other=0.0, cache_modifier=".cg")
    return tl.rsqrt(tl.sum(total, 0) / hidden + eps) + tl.load(failed, cache_modifier=".cg")


@triton.jit
def gate(  # noqa: PLR0913
    me,
    digits,
    floats,
    parts,
    dtype: tl.constexpr,
    width: tl.constexpr,
    count: tl.constexpr,
    programs: tl.constexpr,
):
    """SiLU(gate) * up of a product of `count` parts, as digits."""
    groups: tl.constexpr = width // 128
    for number in range(me, groups, programs):
        index = number * 128 + tl.arange(0, 128)
        wide = rounded_sum(parts, index, dtype, 2 * width, count)
        up = rounded_sum(parts, index + width, dtype, 2 * width, count)
        # A gate below -80 has vanished in any dtype; the bound keeps exp finite.
        activated = (wide / (1.0 + tl.exp(tl.minimum(-wide, 80.0)))).to(dtype).to(tl.float32)
        store_group(digits, floats, (activated * up).to(dtype).to(tl.float32), number, groups)


@triton.jit
def store_group(digits, floats, values, number, groups: tl.constexpr):
    """float32 [128] as the digits of group `number`."""
    group = number + tl.arange(0, 1)
    store_digits(
        digits,
        floats,
        floats + groups,
        floats + 2 * groups,
        tl.reshape(values, [1, 128]),
        0,
        group,
        groups * 128,
        groups,
        True,
    )
