"""Checks and times the Triton kernels on a real device: `python -m bench.attention_gpu [--part all]`.

One call does it all: every kernel against its twin, then tile variants for decode and prefill with the limits of the
device and torch's own attention measured beside them. Parts run in processes of their own, so that compilation uses
every core and a kernel that hangs costs its part only. Needs torch, triton and engine.kernels, nothing else.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.attention_checks import check_all
from engine.kernels import AttentionMetadata, AttentionSpec, triton_layers
from engine.kernels.triton_attention import TritonAttention
from engine.kernels.triton_decode import decode
from engine.kernels.triton_prefill import prefill
from engine.kernels.triton_tiles import DecodeTiles, PrefillTiles

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 32, 8, 128, 64
SPEC = AttentionSpec(scale=HEAD_DIM**-0.5)
SHARDS = 8


@dataclass(frozen=True, slots=True)
class Shape:
    batch: int
    context: int
    layers: int  # the cache's layers are visited in turn, so that no layer is read from the L2


DECODES = [Shape(1, 1088, 32), Shape(8, 1088, 8), Shape(32, 1088, 4), Shape(64, 1088, 4), Shape(128, 1088, 3), Shape(256, 1088, 3)]
LONG_DECODES = [Shape(1, 8192, 8), Shape(8, 8192, 4), Shape(64, 8192, 2), Shape(256, 8192, 1)]
PREFILLS = [512, 2048, 8192]


def accelerator() -> torch.device:
    kind = torch.accelerator.current_accelerator()
    if kind is None:
        raise SystemExit("no accelerator here: this benchmark needs one")
    return torch.device(kind.type, 0)


def decode_variants(default: DecodeTiles, processors: int) -> dict[str, DecodeTiles]:
    variants = {"default": default}
    for tile, warps, stages, per in [
        (64, 4, 3, 3),
        (64, 4, 2, 4),
        (64, 4, 4, 2),
        (64, 2, 3, 3),
        (64, 8, 3, 3),
        (32, 4, 4, 4),
        (32, 4, 3, 5),
        (32, 2, 4, 4),
        (32, 2, 3, 5),
        (128, 4, 2, 2),
    ]:
        name = f"tile {tile} warps {warps} stages {stages} x{per}"
        variants[name] = replace(default, tile=tile, warps=warps, stages=stages, programs=processors * per)
    variants["no fused combine"] = replace(default, fused=False)
    for split, most in [(128, 32), (256, 16), (256, 8), (512, 16), (1024, 16)]:
        variants[f"split {split} at most {most}"] = replace(default, min_split=split, max_splits=most)
    for per in (2, 6, 8, 100):
        variants[f"x{per} programs"] = replace(default, programs=processors * per)
    return variants


def prefill_variants(default: PrefillTiles) -> dict[str, PrefillTiles]:
    variants = {"default": default}
    for rows, tile, warps, stages, described in [
        (128, 64, 8, 2, True),
        (128, 64, 8, 3, True),
        (128, 64, 8, 4, True),
        (128, 64, 4, 2, True),
        (64, 64, 4, 2, True),
        (64, 64, 4, 3, True),
        (64, 32, 4, 3, True),
        (128, 32, 8, 3, True),
        (256, 64, 8, 2, True),
        (256, 64, 16, 2, True),
        (128, 64, 8, 2, False),
        (128, 64, 8, 3, False),
        (128, 128, 8, 2, False),
        (64, 64, 4, 2, False),
        (64, 32, 4, 3, False),
    ]:
        name = f"rows {rows} tile {tile} warps {warps} stages {stages}{'' if described else ' pointers'}"
        variants[name] = PrefillTiles(rows=rows, tile=tile, warps=warps, stages=stages, descriptors=described)
    return variants


def batch_of(query_len: int, contexts: list[int], device: torch.device) -> AttentionMetadata:
    """Sequences of one query length with blocks scattered over the cache."""
    per_seq = -(-max(contexts) // BLOCK)
    tables = torch.randperm(per_seq * len(contexts), device=device).int().view(len(contexts), per_seq)
    lens = torch.tensor(contexts, dtype=torch.int32, device=device)
    positions = (lens[:, None] - query_len + torch.arange(query_len, device=device)).long()
    slots = tables.gather(1, positions // BLOCK).long() * BLOCK + positions % BLOCK
    starts = torch.arange(len(contexts) + 1, dtype=torch.int32, device=device) * query_len
    return AttentionMetadata(starts, lens, tables, slots.flatten(), query_len, max(contexts))


def cache_of(meta: AttentionMetadata, layers: int, device: torch.device) -> Tensor:
    shape = (meta.block_tables.numel(), layers, 2, KV_HEADS, BLOCK, HEAD_DIM)
    cache = torch.empty(shape, dtype=torch.bfloat16, device=device)
    for layer in range(layers):
        cache[:, layer].normal_()
    return cache


def graph_ms(call: Callable[[int], object], layers: int, rounds: int = 4) -> float:
    """Milliseconds of one call inside a captured graph; median of replays. `call` gets the layer's index."""
    call(0)
    torch.accelerator.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for layer in range(layers):
                call(layer)
    times = []
    for trial in range(9):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if trial > 1:
            times.append(start.elapsed_time(end))
    return statistics.median(times) / (rounds * layers)


def time_decode(shapes: list[Shape], shard: int | None) -> None:
    device = accelerator()
    backend = TritonAttention(device)
    counters = torch.zeros(65536, dtype=torch.int32, device=device)
    table: dict[str, list[str]] = {}
    for shape in shapes:
        meta = batch_of(1, [shape.context] * shape.batch, device)
        cache = cache_of(meta, shape.layers, device)
        query = torch.randn(shape.batch, HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device)
        output = torch.empty_like(query)
        size = 2 * shape.batch * shape.context * KV_HEADS * HEAD_DIM * 2
        default, _ = backend.tiles(query, cache[:, 0])
        variants = decode_variants(default, torch.cuda.get_device_properties(device).multi_processor_count)
        for index, (name, tiles) in enumerate(variants.items()):
            if shard is not None and index % SHARDS != shard:
                continue

            def call(layer: int, tiles: DecodeTiles = tiles) -> None:
                decode(output, query, cache[:, layer], meta, SPEC, tiles, counters)

            table.setdefault(name, []).append(_measured(call, shape.layers, shard, size / 1e9, "TB/s"))
        if shard is None:
            keys, values = (
                torch.randn(shape.batch, KV_HEADS, shape.context, HEAD_DIM, dtype=torch.bfloat16, device=device)
                for _ in range(2)
            )

            def peer(_: int) -> Tensor:
                return functional.scaled_dot_product_attention(query[:, :, None], keys, values, enable_gqa=True)

            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                table.setdefault("torch flash, contiguous KV", []).append(_measured(peer, 1, None, size / 1e9, "TB/s"))
    _show([f"{s.batch} x {s.context}" for s in shapes], table, shard)


def time_prefill(shard: int | None) -> None:
    device = accelerator()
    backend = TritonAttention(device)
    table: dict[str, list[str]] = {}
    for length in PREFILLS:
        meta = batch_of(length, [length], device)
        cache = cache_of(meta, 2, device)
        query = torch.randn(length, HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device)
        output = torch.empty_like(query)
        work = 2 * length * (length + 1) * HEADS * HEAD_DIM / 1e9
        _, default = backend.tiles(query, cache[:, 0])
        for index, (name, tiles) in enumerate(prefill_variants(default).items()):
            if shard is not None and index % SHARDS != shard:
                continue

            def call(layer: int, tiles: PrefillTiles = tiles) -> None:
                prefill(output, query, cache[:, layer], meta, SPEC, tiles, skip_singles=False)

            table.setdefault(name, []).append(_measured(call, 2, shard, work, "TFLOP/s"))
        if shard is None:
            q, k, v = (torch.randn(1, n, length, HEAD_DIM, dtype=torch.bfloat16, device=device) for n in (HEADS,) * 3)
            for kind in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):

                def peer(_: int) -> Tensor:
                    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

                with sdpa_kernel(kind):
                    table.setdefault(f"torch {kind.name}", []).append(_measured(peer, 1, None, work, "TFLOP/s"))
    _show([str(length) for length in PREFILLS], table, shard)


def time_layers() -> None:
    """Fused layers of the 8B shape at a decode and a prefill batch."""
    device = accelerator()
    table: dict[str, list[str]] = {}
    for tokens in (64, 8192):
        wide = [torch.randn(tokens, 28672, dtype=torch.bfloat16, device=device) for _ in range(2)]
        x, residual = (torch.randn(tokens, 4096, dtype=torch.bfloat16, device=device) for _ in range(2))
        weight = torch.randn(4096, dtype=torch.bfloat16, device=device)
        meta = batch_of(1, [1088] * tokens, device) if tokens == 64 else batch_of(tokens, [tokens], device)
        cache = cache_of(meta, 1, device)[:, 0]
        qkv = torch.randn(tokens, HEADS + 2 * KV_HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device)
        q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        turn = (torch.rand(tokens, HEAD_DIM, device=device), torch.rand(tokens, HEAD_DIM, device=device))
        backend = TritonAttention(device)
        calls: list[tuple[str, int, Callable[[int], object]]] = [
            ("silu_mul", tokens * 3 * 14336, lambda i: triton_layers.silu_mul(wide[i])),
            ("rms_norm + residual", tokens * 4 * 4096, lambda _: triton_layers.rms_norm(x, weight, 1e-5, residual=residual)),
            ("rotary_store", tokens * 2 * 48 * 128, lambda _: triton_layers.rotary_store(q, k, v, turn, cache, meta.slots)),
            ("store", tokens * 4 * 8 * 128, lambda _: backend.store(k, v, cache, meta)),
            ("torch rms_norm (no residual)", tokens * 2 * 4096, lambda _: functional.rms_norm(x, (4096,), weight)),
        ]
        for name, elements, call in calls:
            table.setdefault(name, []).append(_measured(call, 2, None, elements * 2 / 1e9, "TB/s"))
    _show(["64 tokens", "8192 tokens"], table, None)


def time_limits() -> None:
    device = accelerator()
    source = torch.empty(2**32, dtype=torch.bfloat16, device=device).normal_()
    target = torch.empty_like(source)
    copied = graph_ms(lambda _: target.copy_(source), 1, 2)
    read = graph_ms(lambda _: source.view(torch.int32).max(), 1, 2)
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device=device) for _ in range(2))
    product = graph_ms(lambda _: a @ b, 1)
    nothing = torch.empty(32, device=device)
    print(
        f"limits: copy {4 * 2**32 / copied / 1e9:.2f} TB/s (read + write), read {2 * 2**32 / read / 1e9:.2f} TB/s, "
        f"bf16 matmul {2 * 8192**3 / product / 1e9:.0f} TFLOP/s, an empty launch {graph_ms(lambda _: nothing.zero_(), 8) * 1e3:.1f} us"
    )


def _measured(call: Callable[[int], object], layers: int, shard: int | None, work: float, unit: str) -> str:
    """`work` in units of 1e9 (bytes or operations); with a shard only compiles."""
    try:
        if shard is not None:
            call(0)
            torch.accelerator.synchronize()
            return "-"
        elapsed = graph_ms(call, layers)
    except Exception as error:  # a variant that does not fit the device is a result, not a failure
        return f"{type(error).__name__:.14}"
    rate = work / elapsed
    return f"{elapsed:.4f} {rate:6.2f}" if unit == "TB/s" else f"{elapsed:.4f} {rate:5.0f}"


def _show(columns: list[str], table: dict[str, list[str]], shard: int | None) -> None:
    if shard is not None:
        return
    print(f"{'':46s}" + "".join(f"{column:>16s}" for column in columns))
    for name, cells in table.items():
        print(f"{name:46s}" + "".join(f"{cell:>16s}" for cell in cells), flush=True)


PARTS: dict[str, Callable[[int | None], None]] = {
    "limits": lambda _: time_limits(),
    "decode": lambda shard: time_decode(DECODES if shard is None else [DECODES[0], DECODES[3]], shard),
    "long": lambda _: time_decode(LONG_DECODES, None),
    "prefill": time_prefill,
    "layers": lambda _: time_layers(),
    "checks": lambda shard: check_all(accelerator(), shard or 0, SHARDS),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=["all", *PARTS], default="all")
    parser.add_argument("--shard", type=int)
    parser.add_argument("--limit-s", type=float, default=100.0, help="seconds that one part may take")
    options = parser.parse_args()
    if options.part != "all":
        PARTS[options.part](options.shard)
        return
    start = time.monotonic()
    # Checks first, with all variants compiling beside them; then the timings, alone on the device.
    for group in [["checks", "decode", "prefill"], ["limits"], ["decode"], ["prefill"], ["long"], ["layers"]]:
        sharded = len(group) > 1
        running = [
            subprocess.Popen(
                [sys.executable, "-m", "bench.attention_gpu", "--part", part]
                + ([f"--shard={shard}"] if sharded else [])
            )
            for part in group
            for shard in (range(SHARDS) if sharded else [0])
        ]
        deadline = time.monotonic() + options.limit_s
        for process in running:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                print(f"killed after {options.limit_s} s: {process.args}")
        print(f"== {group} done at {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
