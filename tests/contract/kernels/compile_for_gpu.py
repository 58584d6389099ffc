"""Compiles kernels for a GPU that need not exist. Run it as a program, without Triton's interpreter.

The interpreter accepts variables that change their type in a loop or a branch; the compiler does not.
"""

import re
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from baton_serve.engine.kernels.triton import (
    argmax,
    channel_delta,
    convolution,
    decode,
    decode_new,
    delta_chunks,
    delta_step,
    experts,
    experts_row,
    experts_sorted,
    gemv,
    latent,
    layers,
    mixers,
    prefill,
    selective_scan,
    state_space,
)
from baton_serve.engine.kernels.triton.codes import CODE_KINDS
from baton_serve.engine.kernels.triton.tiles import padded_head

HALF, WIDE, INT, LONG = "*bf16", "*fp32", "*i32", "*i64"
TARGET = GPUTarget("cuda", 90, 32)
DELTA = {"num_heads": 4, "group": 2, "key_size": 32, "keys": 32, "value_size": 32, "values": 32}
CHUNKS = {**DELTA, "chunk": 64, "precision": "tf32"}
SPACE = {"num_heads": 4, "group": 2, "head_dim": 32, "state_size": 16}
MAMBA = {
    "x_at": 0,
    "x_step": 32,
    "b_at": 128,
    "b_step": 16,
    "c_behind": 32,
    "dim_stride": 16,
    "size_stride": 1,
    "is_constant": False,
}
LIGHTNING = {
    "group": 1,
    "x_at": 32,
    "x_step": 48,
    "b_at": 16,
    "b_step": 48,
    "c_behind": -16,
    "dim_stride": 1,
    "size_stride": 32,
    "is_constant": True,
}
BY_CHANNEL = {**{name: CHUNKS[name] for name in CHUNKS if name != "group"}, "keys": 64, "values": 64}
SCAN = {"num_channels": 64, "state_size": 16, "size": 16, "seqs": 16, "chunk": 16, "tile": 32}
WIDE_HEADS = {
    "kv_heads": 2,
    "group": 8,
    "head_dim": 512,
    "dims": 512,
    "tile": 16,
    "block_tokens": 64,
    "head_rows": 64,
    "window": 0,
    "capped": False,
    "sunk": False,
    "seqs": 16,
    "precision": "tf32",
}
IN_PARTS: dict[str, Any] = {"rows": 128, "tile": 64, "parts": 2, "described": True}
"""Changes for wide heads whose values are computed in parts."""
SMALL_HEADS = {**WIDE_HEADS, "head_dim": 8, "dims": padded_head(8)}
LATENT = {
    "head_dim": 80,
    "value_dim": 64,
    "dims": 64,
    "tail_dims": 16,
    "tile": 16,
    "block_tokens": 64,
    "num_heads": 4,
    "scaled": False,
    "capped": False,
    "precision": "tf32",
    "seqs": 16,
}
EXPERTS = {
    "num_experts": 8,
    "experts": 8,
    "top_k": 2,
    "inputs": 64,
    "outputs": 64,
    "has_bias": False,
    "tile_rows": 16,
    "tile_columns": 32,
    "tile_depth": 32,
    "precision": "tf32",
}
ROW = {"inputs": 128, "rows": 2, "chunk": 64, "has_bias": True}
CUT = {"min_split": 64, "split_limit": 4, "align": 64, "window": 0}
NEW_HEADS = {
    **WIDE_HEADS,
    **CUT,
    "head_dim": 64,
    "dims": 64,
    "half": 16,
    "rows": 16,
    "few": 8,
    "query_normed": True,
    "key_normed": True,
}
TILES = experts_sorted.GATE_UP_TILES, experts_sorted.DOWN_TILES
SORTED = [
    {
        "num_experts": 8,
        "top_k": 2,
        "inputs": 512,
        "outputs": 512,
        "tile_rows": tiles.rows,
        "tile_columns": tiles.columns,
        "tile_depth": tiles.depth,
    }
    for tiles in TILES
]
POINTERS = {
    **dict.fromkeys(
        ("output", "result", "x", "weight", "bias", "qkv", "beta", "step", "new_values", "seen_keys"), HALF
    ),
    **dict.fromkeys(("residual", "heads", "query_norm", "key_norm"), HALF),
    **dict.fromkeys(("frequencies",), WIDE),
    **dict.fromkeys(("keys", "places"), INT),
    **dict.fromkeys(("out", "positions"), LONG),
    **dict.fromkeys(("sinks", "pairs", "words", "seen_ends"), HALF),
    **dict.fromkeys(("asking", "adding", "scores"), HALF),
    **dict.fromkeys(("xbc", "skip", "b", "c"), HALF),
    **dict.fromkeys(
        ("query", "cache", "values_of", "scales", "latents", "to", "gate", "active", "conv_states", "logits"), HALF
    ),
    **dict.fromkeys(
        ("states", "totals", "log_rate", "rate", "step_bias", "units", "partial", "stats", "cos", "sin", "factors"),
        WIDE,
    ),
    "entering": WIDE,
    "finals": WIDE,
    "decays": WIDE,
    "mixing": WIDE,
    **dict.fromkeys(("starts", "query_starts", "context_lens", "block_tables", "rows", "counts", "chosen"), INT),
    "blocks": INT,
    "order": LONG,
    "weights": WIDE,
    "slots": LONG,
    "inner_slots": LONG,
    "inner_tokens": INT,
}
FLOATS = {"scale", "softcap", "eps", "limit", "alpha", "shortest", "longest", "scaling", "query_eps", "key_eps"}
KERNELS: list[tuple[Any, dict[str, Any]]] = [
    (convolution._convolve_kernel, {"tokens": 4, "seqs": 16, "has_bias": False}),
    *((convolution._convolve_step_kernel, {"padded_taps": 4, "has_bias": biased}) for biased in (False, True)),
    (convolution._keep_kernel, {}),
    *((delta_step._step_kernel, {**DELTA, "by_channel": by_channel}) for by_channel in (False, True)),
    (delta_chunks._solve_kernel, {**CHUNKS, "seqs": 16, "block": 16, "exact": "tf32x3"}),
    (delta_chunks._pass_kernel, CHUNKS),
    *(
        (kernel, {**BY_CHANNEL, "seqs": 16, "block": 16, "exact": "tf32x3"})
        for kernel in (channel_delta._sum_kernel, channel_delta._pairs_kernel, channel_delta._solve_kernel)
    ),
    (channel_delta._pass_kernel, BY_CHANNEL),
    *((state_space._step_kernel, {**SPACE, **kind, "keys": 16, "values": 32}) for kind in (MAMBA, LIGHTNING)),
    *(
        (
            state_space._chunks_kernel,
            {**SPACE, **kind, "keys": 64, "values": 64, "chunk": 64, "precision": "tf32"},
        )
        for kind in (MAMBA, LIGHTNING)
    ),
    (selective_scan._scan_kernel, {**SCAN, "is_single": True, "has_output": True}),
    *((selective_scan._scan_kernel, {**SCAN, "is_single": False, "has_output": last}) for last in (False, True)),
    (selective_scan._pass_kernel, SCAN),
    (mixers._gated_norm_kernel, {"num_heads": 4, "size": 32, "dims": 32, "tile": 4}),
    (mixers._sigmoid_gate_kernel, {"width": 64, "tile": 64}),
    (
        mixers._latent_kernel,
        {
            "num_heads": 4,
            "size": 32,
            "rank": 64,
            "dims": 64,
            "half": 8,
            "half_dims": 8,
            "tile": 4,
            "step": 2,
            "gap": 1,
            "step_to": 1,
            "gap_to": 8,
        },
    ),
    *(
        (
            decode._decode_kernel,
            {**heads, "rows": 16, "kind": kind, "min_split": 64, "max_splits": 4, "split_limit": 4, "align": 64},
        )
        for heads, kind in ((WIDE_HEADS, -1), (WIDE_HEADS, CODE_KINDS[torch.int8]), (SMALL_HEADS, -1))
    ),
    *(
        (
            prefill._prefill_kernel,
            {
                **heads,
                "rows": 32,
                "parts": 1,
                "scaled": False,
                "skip_singles": True,
                "sees_later": False,
                "described": False,
                "paired": False,
                **changes,
            },
        )
        for heads, changes in ((WIDE_HEADS, {}), (WIDE_HEADS, IN_PARTS), (SMALL_HEADS, {}))
    ),
    (latent._decode_kernel, {**LATENT, "rows": 16, "min_split": 64, "split_limit": 4, "align": 64}),
    *(
        (latent._prefill_kernel, {**LATENT, "head_rows": 4, "tokens": 4, "skip_singles": True, "parts": parts})
        for parts in (1, 2)
    ),
    *(
        (
            experts._gate_up_kernel,
            {**EXPERTS, "is_single": single, "interleaved": False, "clamped": False},
        )
        for single in (False, True)
    ),
    *((experts._down_kernel, {**EXPERTS, "is_single": single}) for single in (False, True)),
    (experts_row._gate_up_row_kernel, {"inputs": 64, "outputs": 32, "chunk": 64}),
    (
        experts_row._down_row_kernel,
        {"top_k": 3, "choices": 4, "inputs": 32, "outputs": 64, "chunk": 32},
    ),
    (experts_sorted._block_kernel, {"num_experts": 8, "experts": 8, "rows": 64}),
    (experts_sorted._gate_up_kernel, SORTED[0]),
    (experts_sorted._down_kernel, SORTED[1]),
    (
        experts._route_kernel,
        {
            "num_experts": 8,
            "experts": 8,
            "top_k": 2,
            "num_shared": 1,
            "picks": 4,
            "renormalize": True,
            "has_gate": True,
        },
    ),
    (gemv._one_row_kernel, ROW),
    (gemv._gated_row_kernel, ROW),
    (layers._rotation_kernel, {"half": 4, "dims": 8}),
    (layers._rms_norm_kernel, {"heads": 1, "hidden": 64, "dims": 64, "has_residual": True, "unit_offset": True}),
    (decode_new._decode_new_kernel, NEW_HEADS),
    (decode._combine_kernel, {**CUT, "heads": 4, "head_dim": 32, "dims": 32, "max_splits": 4, "sunk": False}),
    (argmax._part_kernel, {"part": 64}),
    (argmax._whole_kernel, {"width": 16}),
]
SHORT = {"channels": 64, "taps": 4, "has_silu": True, "columns": 32}
"""Constants of the convolution."""


def compile_kernel(kernel: Any, constants: dict[str, Any]) -> None:
    """Compile a kernel for `TARGET`. Raises Triton's `CompilationError`."""
    names, types = kernel.arg_names, dict(POINTERS)
    constants = {"overlaps": True, **constants}
    if constants.get("kind", -1) >= 0:  # a KV cache of codes, which are also read in pairs and in words
        types.update(cache="*i8", pairs="*i16", words="*i32")
    if "taps" in names:
        constants, types["states"] = {**SHORT, **constants}, HALF
    options: dict[str, int] = {}
    if kernel in (experts_sorted._gate_up_kernel, experts_sorted._down_kernel):
        tiles = TILES[kernel is experts_sorted._down_kernel]
        types["weight"] = f"tensordesc<bf16[{tiles.columns}, {tiles.depth}]>"
        if kernel is experts_sorted._down_kernel:
            types["active"] = f"tensordesc<bf16[{tiles.rows}, {tiles.depth}]>"
        options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    if constants.get("described"):
        types["cache"] = f"tensordesc<bf16[{constants['tile']}, {constants['dims']}]>"
        types["values_of"] = f"tensordesc<bf16[{constants['tile']}, {constants['dims'] // constants['parts']}]>"
        options = {"num_warps": 8, "num_stages": 1}
    constants = {name: value for name, value in constants.items() if name in names}
    signature = {
        name: "constexpr" if name in constants else "fp32" if name in FLOATS else types.get(name, "i32")
        for name in names
    }
    fixed = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=fixed)
    assembly: str = triton.compile(source, target=TARGET, options=options).asm["ptx"]
    if "overlaps" in names:
        check_overlap(assembly)


def check_overlap(assembly: str) -> None:
    """Check that a kernel that starts early waits for the kernel before it ahead of its accesses to memory."""
    first = re.search(r"\b(ld|st|atom|red|cp)\.\S*(global|bulk)", assembly)
    launch, wait = (assembly.index(f"griddepcontrol.{name};") for name in ("launch_dependents", "wait"))
    assert first is not None and launch < wait < first.start(), "memory is accessed before the wait"
    assert assembly.count("griddepcontrol.wait;") == 1


def main() -> None:
    for kernel, constants in KERNELS:
        compile_kernel(kernel, constants)
        sys.stdout.write(f"{kernel.__name__}\n")


if __name__ == "__main__":
    main()
