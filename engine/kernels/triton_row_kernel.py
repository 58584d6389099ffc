"""One kernel for all layers of one row over four-bit weights: nine steps a layer, and a meeting of all programs after
each. Device code only; see triton_row_layers for who may launch it."""
# mypy: disable-error-code="misc,no-untyped-def,no-untyped-call,untyped-decorator"

import triton
import triton.language as tl

from engine.kernels.triton_row_attention import attend, merge
from engine.kernels.triton_row_steps import add_norm, gate, meet, norm_factor, number_of, product, tensor_of


@triton.jit
def layers_kernel(  # noqa: PLR0913, PLR0915
    counter,
    failed,
    residual,
    anchor,
    table,
    parts,
    gate_parts,
    partial,
    stats,
    squares,
    digits,
    floats,
    gated_digits,
    gated_floats,
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
    patience: tl.constexpr,
):
    """`table`: see triton_row_layers. `parts` are of whichever narrow product was computed last."""
    qkv: tl.constexpr = (heads + 2 * kv_heads) * head_dim
    attended: tl.constexpr = heads * head_dim
    groups: tl.constexpr = hidden // 128
    head_groups: tl.constexpr = attended // 128
    gate_groups: tl.constexpr = width // 128
    dtype: tl.constexpr = residual.dtype.element_ty
    context, slot = tl.load(contexts), tl.load(slots)
    left = tl.where(tl.load(failed) == 0, patience, 0)
    target = programs
    me = number_of(left)
    norm = tensor_of(anchor, table, 0, 0, entries, dtype)
    add_norm(me, digits, floats, squares, parts, residual, norm, hidden, 0, programs)
    left = meet(counter, failed, target, left)
    for layer in range(layers):
        me = number_of(left)
        codes = tensor_of(anchor, table, layer, 1, entries, tl.int8)
        scales = tensor_of(anchor, table, layer, 2, entries, scale_dtype)
        factor = norm_factor(squares, failed, eps, hidden)
        product(
            me, parts, digits, floats, floats + groups, codes, scales, factor, qkv, hidden, tile, depth, columns,
            programs, stages,
        )  # fmt: skip
        target += programs
        left = meet(counter, failed, target, left)
        me = number_of(left)
        cache = tensor_of(anchor, table, layer, 10, entries, dtype)
        attend(
            me, partial, stats, parts, cos, sin, cache, block_table, context, slot, scale, block_stride, heads,
            kv_heads, head_dim, hidden // depth, rows, few, token_tile, max_splits, block_tokens, head_rows, programs,
        )  # fmt: skip
        target += programs
        left = meet(counter, failed, target, left)
        me = number_of(left)
        merge(me, digits, floats, partial, stats, context, dtype, heads, head_dim, token_tile, max_splits, programs)
        output_codes = tensor_of(anchor, table, layer, 3, entries, tl.int8)
        output_scales = tensor_of(anchor, table, layer, 4, entries, scale_dtype)
        target += programs
        left = meet(counter, failed, target, left)
        me = number_of(left)
        product(
            me, parts, digits, floats, floats + head_groups, output_codes, output_scales, 1.0, hidden, attended,
            tile, depth, columns, programs, stages,
        )  # fmt: skip
        target += programs
        left = meet(counter, failed, target, left)
        me = number_of(left)
        norm = tensor_of(anchor, table, layer, 5, entries, dtype)
        add_norm(me, digits, floats, squares, parts, residual, norm, hidden, attended // depth, programs)
        gate_codes = tensor_of(anchor, table, layer, 6, entries, tl.int8)
        gate_scales = tensor_of(anchor, table, layer, 7, entries, scale_dtype)
        target += programs
        left = meet(counter, failed, target, left)
        me = number_of(left)
        factor = norm_factor(squares, failed, eps, hidden)
        product(
            me, gate_parts, digits, floats, floats + groups, gate_codes, gate_scales, factor, 2 * width, hidden,
            tile, depth, columns, programs, stages,
        )  # fmt: skip
        target += programs
        left = meet(counter, failed, target, left)
        me = number_of(left)
        gate(me, gated_digits, gated_floats, gate_parts, dtype, width, hidden // depth, programs)
        down_codes = tensor_of(anchor, table, layer, 8, entries, tl.int8)
        down_scales = tensor_of(anchor, table, layer, 9, entries, scale_dtype)
        target += programs
        left = meet(counter, failed, target, left)
        me = number_of(left)
        product(
            me, parts, gated_digits, gated_floats, gated_floats + gate_groups, down_codes, down_scales, 1.0, hidden,
            width, tile, depth, columns, programs, stages,
        )  # fmt: skip
        target += programs
        left = meet(counter, failed, target, left)
        me = number_of(left)
        after = tl.minimum(layer + 1, layers - 1)  # nobody reads the last one's norm
        norm = tensor_of(anchor, table, after, 0, entries, dtype)
        add_norm(me, digits, floats, squares, parts, residual, norm, hidden, width // depth, programs)
        target += programs
        if layer + 1 < layers:
            left = meet(counter, failed, target, left)
    tl.debug_barrier()
    if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == target - 1:
        tl.store(counter, 0)
