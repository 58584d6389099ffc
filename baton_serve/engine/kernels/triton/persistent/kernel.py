"""One kernel for all layers of one row over four-bit weights: five steps for each layer, with a barrier of all programs
between two steps. Loads that do not depend on the previous step start before a program waits at the barrier.

Device code only; `triton.persistent.launch` decides who may launch it.
"""
# mypy: disable-error-code="misc,no-untyped-def,no-untyped-call,untyped-decorator"

import triton
import triton.language as tl

from baton_serve.engine.kernels.triton.persistent.attention import attend, merged_product
from baton_serve.engine.kernels.triton.persistent.products import (
    arrive,
    clear,
    gated_product,
    lost,
    normed_product,
    number_of,
    place_of,
    sum_of,
    tensor_of,
    wait,
)


@triton.jit
def layers_kernel(  # noqa: PLR0913, PLR0915
    counter,
    failed,
    residual,
    other,
    anchor,
    table,
    heads_sums,
    hidden_sums,
    gate_sums,
    partial,
    stats,
    squares,
    cos,
    sin,
    block_table,
    contexts,
    slots,
    layers,
    scale,
    eps,
    block_stride,
    hidden: tl.constexpr,
    width: tl.constexpr,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    block_tokens: tl.constexpr,
    head_rows: tl.constexpr,
    scale_dtype: tl.constexpr,
    entries: tl.constexpr,
    rows: tl.constexpr,
    few: tl.constexpr,
    token_tile: tl.constexpr,
    max_splits: tl.constexpr,
    tile: tl.constexpr,
    depth: tl.constexpr,
    columns: tl.constexpr,
    programs: tl.constexpr,
    stages: tl.constexpr,
    down_runs: tl.constexpr,
    patience: tl.constexpr,
):
    """Compute all decoder layers for one token in one kernel, in place in `residual`. `table` has the addresses of the
    layers' tensors (see `launch.py`). `heads_sums` must be zero and is left so; `hidden_sums` holds the sums of
    the two products that are added to the residual.

    A buffer that a step adds to was cleared two barriers earlier, and the step that clears it does not read it.
    """
    qkv: tl.constexpr = (heads + 2 * kv_heads) * head_dim
    attended: tl.constexpr = heads * head_dim
    dtype: tl.constexpr = residual.dtype.element_ty
    down_sums = hidden_sums + hidden
    context, slot = tl.load(contexts), tl.load(slots)
    left = tl.where(tl.load(failed) == 0, patience, 0)
    target = 0
    norm_at, codes_at = place_of(table, 0, 0, entries), place_of(table, 0, 1, entries)
    scales_at = place_of(table, 0, 2, entries)
    for layer in range(layers):
        me = number_of(left)
        cache_at = place_of(table, layer, 10, entries)
        left = normed_product(
            me, counter, failed, target, left, heads_sums, tensor_of(anchor, codes_at, tl.int8),
            tensor_of(anchor, scales_at, scale_dtype), down_sums, layer > 0, residual, other,
            tensor_of(anchor, norm_at, dtype), squares, qkv, hidden, tile, depth, columns, programs, stages, True,
        )  # fmt: skip
        arrive(counter)
        target += programs
        me = number_of(left)
        codes_at, scales_at = place_of(table, layer, 3, entries), place_of(table, layer, 4, entries)
        clear(me, gate_sums, 2 * width, programs)
        clear(me, hidden_sums, hidden, programs)
        left = attend(
            me, counter, failed, target, left, partial, stats, heads_sums, squares, cos, sin,
            tensor_of(anchor, cache_at, dtype), block_table, context, slot, scale, eps, block_stride, hidden, heads,
            kv_heads, head_dim, rows, few, token_tile, max_splits, block_tokens, head_rows, programs,
        )  # fmt: skip
        arrive(counter)
        target += programs
        me = number_of(left)
        norm_at = place_of(table, layer, 5, entries)
        gate_codes_at, gate_scales_at = place_of(table, layer, 6, entries), place_of(table, layer, 7, entries)
        clear(me, down_sums, hidden, programs)
        left = merged_product(
            me, counter, failed, target, left, hidden_sums, tensor_of(anchor, codes_at, tl.int8),
            tensor_of(anchor, scales_at, scale_dtype), partial, stats, context, dtype, head_dim, token_tile,
            max_splits, hidden, attended, tile, depth, columns, programs, stages, True,
        )  # fmt: skip
        arrive(counter)
        target += programs
        me = number_of(left)
        codes_at, scales_at = place_of(table, layer, 8, entries), place_of(table, layer, 9, entries)
        clear(me, heads_sums, qkv, programs)
        left = normed_product(
            me, counter, failed, target, left, gate_sums, tensor_of(anchor, gate_codes_at, tl.int8),
            tensor_of(anchor, gate_scales_at, scale_dtype), hidden_sums, True, other, residual,
            tensor_of(anchor, norm_at, dtype), squares, 2 * width, hidden, tile, depth, columns, programs, stages, True,
        )  # fmt: skip
        arrive(counter)
        target += programs
        me = number_of(left)
        after = tl.minimum(layer + 1, layers - 1)
        down_codes_at, down_scales_at = codes_at, scales_at
        norm_at, codes_at = place_of(table, after, 0, entries), place_of(table, after, 1, entries)
        scales_at = place_of(table, after, 2, entries)
        left = gated_product(
            me, counter, failed, target, left, down_sums, tensor_of(anchor, down_codes_at, tl.int8),
            tensor_of(anchor, down_scales_at, scale_dtype), gate_sums, squares, eps, dtype, hidden, hidden, width,
            tile, depth, columns, programs, stages, down_runs,
        )  # fmt: skip
        arrive(counter)
        target += programs
    left = wait(counter, failed, target, left)
    me = number_of(left)
    nothing = lost(failed)
    for start in range(me * 128, hidden, programs * 128):
        index = start + tl.arange(0, 128)
        more = sum_of(down_sums, index, index < hidden).to(dtype).to(tl.float32)
        value = tl.load(residual + index, cache_modifier=".cg").to(tl.float32)
        # Several threads may hold the same element: all must have loaded it before one of them stores it.
        tl.debug_barrier()
        tl.store(residual + index, (value + more + nothing).to(dtype))
    tl.debug_barrier()
    target += programs
    if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == target - 1:
        tl.store(counter, 0)
        tl.store(failed + 1, 0.0)
