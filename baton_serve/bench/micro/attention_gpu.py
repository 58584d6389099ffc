"""Check and time the Triton kernels on a real device: `python -m baton_serve.bench.micro.attention_gpu [--part all]`.

One call checks each kernel against its reference, then times variants of the tile sizes for decode and prefill, beside
the limits of the device and torch's own attention. Parts run in processes of their own, so that compilation uses all
cores, and a kernel that hangs stops only its part. Needs torch, triton and engine.kernels, nothing else.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import triton
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from baton_serve.bench.micro.attention_checks import check_all
from baton_serve.bench.micro.device_speeds import measure_limits
from baton_serve.child_command import module_command
from baton_serve.engine.kernels import AttentionMetadata, AttentionSpec
from baton_serve.engine.kernels.triton import layers as triton_layers
from baton_serve.engine.kernels.triton.attention import TritonAttention
from baton_serve.engine.kernels.triton.decode import decode
from baton_serve.engine.kernels.triton.kv_store import store
from baton_serve.engine.kernels.triton.prefill import prefill
from baton_serve.engine.kernels.triton.tiles import DecodeTiles, PrefillTiles

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 32, 8, 128, 64
SPEC = AttentionSpec(scale=HEAD_DIM**-0.5)
SHARDS = 8
"""Number of processes that compile the variants of one part."""


@dataclass(frozen=True, slots=True)
class GpuAttentionShape:
    """Batch size and context of a decode step."""

    batch: int
    context: int
    layers: int  # layers are visited alternately, so that no KV is read from the L2 cache


DECODES = [
    GpuAttentionShape(1, 1088, 32),
    GpuAttentionShape(8, 1088, 8),
    GpuAttentionShape(32, 1088, 4),
    GpuAttentionShape(64, 1088, 4),
    GpuAttentionShape(128, 1088, 3),
    GpuAttentionShape(256, 1088, 3),
]
LONG_DECODES = [
    GpuAttentionShape(1, 8192, 8),
    GpuAttentionShape(8, 8192, 4),
    GpuAttentionShape(64, 8192, 2),
    GpuAttentionShape(256, 8192, 1),
]
PREFILLS = [512, 2048, 8192]


def accelerator() -> torch.device:
    """Return the first accelerator. Raises `SystemExit` without one."""
    kind = torch.accelerator.current_accelerator()
    if kind is None:
        raise SystemExit("no accelerator here: this benchmark needs one")
    return torch.device(kind.type, 0)


def processors() -> int:
    return int(torch.cuda.get_device_properties(0).multi_processor_count)


def decode_variants(default: DecodeTiles, num_processors: int) -> dict[str, DecodeTiles]:
    """Return tile sizes to compare, by name; the default is the first."""
    variants = {"default": default}
    for tile, warps, stages, per in [
        (32, 4, 3, 4),
        (32, 4, 3, 8),
        (32, 4, 3, 32),
        (32, 4, 4, 32),
        (32, 2, 3, 8),
        (32, 2, 3, 32),
        (32, 2, 4, 4),
        (32, 2, 4, 32),
        (32, 1, 3, 32),
        (16, 2, 4, 32),
        (64, 2, 3, 3),
        (64, 2, 3, 32),
        (64, 4, 3, 32),
        (64, 4, 2, 32),
    ]:
        name = f"tile {tile} warps {warps} stages {stages} x{per}"
        variants[name] = replace(default, tile=tile, warps=warps, stages=stages, programs=num_processors * per)
    for split, most in [(128, 16), (128, 32), (256, 8), (256, 32), (512, 16)]:
        variants[f"split {split} at most {most}"] = replace(
            default, min_split=split, max_splits=most, programs=num_processors * 32
        )
    return variants


def prefill_variants(default: PrefillTiles) -> dict[str, PrefillTiles]:
    """Return tile sizes to compare, by name; the default is the first."""
    variants = {"default": default}
    for rows, tile, warps, stages, paired in [
        (128, 64, 8, 3, False),
        (128, 64, 8, 2, True),
        (128, 64, 8, 3, True),
        (128, 32, 8, 2, True),
        (128, 32, 8, 3, True),
        (64, 64, 4, 2, False),
        (64, 64, 4, 2, True),
        (64, 32, 4, 2, True),
        (64, 32, 4, 3, True),
        (256, 32, 8, 2, True),
    ]:
        name = f"rows {rows} tile {tile} warps {warps} stages {stages}{' paired' if paired else ''}"
        variants[name] = PrefillTiles(rows, tile, warps, stages, descriptors=True, paired=paired)
    variants["pointers rows 128 tile 64 warps 8 stages 3"] = PrefillTiles(
        128, 64, 8, 3, descriptors=False, paired=False
    )
    return variants


@dataclass(frozen=True, slots=True)
class Workload:
    """Sequences of one query length with blocks scattered over a cache of several layers."""

    meta: AttentionMetadata
    cache: Tensor
    query: Tensor
    output: Tensor

    def decode(self, tiles: DecodeTiles, layer: int) -> None:
        decode(self.output, self.query, self.cache[:, layer], self.meta, SPEC, tiles)

    def prefill(self, tiles: PrefillTiles, layer: int) -> None:
        cache = self.cache[:, layer]
        prefill(self.output, self.query, cache, self.meta, SPEC, tiles, skip_singles=False)


def workload(batch: int, query_len: int, context: int, layers: int, block: int = BLOCK) -> Workload:
    device = accelerator()
    per_seq = -(-context // block)
    tables = torch.randperm(per_seq * batch, device=device).int().view(batch, per_seq)
    positions = torch.arange(context - query_len, context, device=device).expand(batch, -1)
    slots = tables.gather(1, positions // block).long() * block + positions % block
    meta = AttentionMetadata(
        torch.arange(batch + 1, dtype=torch.int32, device=device) * query_len,
        torch.full((batch,), context, dtype=torch.int32, device=device),
        tables,
        slots.flatten(),
        query_len,
        context,
    )
    shape = (tables.numel(), layers, 2, KV_HEADS, block, HEAD_DIM)
    cache = torch.empty(shape, dtype=torch.bfloat16, device=device)
    for layer in range(layers):
        cache[:, layer].normal_()
    query = random(batch * query_len, HEADS, HEAD_DIM)
    return Workload(meta, cache, query, torch.empty_like(query))


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device=accelerator())


def graph_ms(call: Callable[[int], object], layers: int, rounds: int = 4) -> float:
    """Return the milliseconds of one call inside a captured graph, as the median of replays. `call` receives the index
    of the layer. A graph leaves out the launch overhead of the host."""
    call(0)
    torch.accelerator.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for layer in range(layers):
                call(layer)
    times: list[float] = []
    for trial in range(9):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if trial > 1:
            times.append(start.elapsed_time(end))
    return statistics.median(times) / (rounds * layers)


def time_decode(shapes: list[GpuAttentionShape], shard: int | None) -> None:
    """Measure decode variants in TB/s of KV. With a shard, only compile that part of the variants."""
    table: dict[str, list[str]] = {}
    for shape in shapes:
        work = workload(shape.batch, 1, shape.context, shape.layers)
        size = 2 * shape.batch * shape.context * KV_HEADS * HEAD_DIM * 2 / 1e9
        default, _ = TritonAttention(accelerator()).tiles(work.query, work.cache[:, 0])
        for index, (name, tiles) in enumerate(decode_variants(default, processors()).items()):
            if shard is None or index % SHARDS == shard:
                call = partial(work.decode, tiles)
                table.setdefault(name, []).append(_measured(call, shape.layers, shard, size, "TB/s"))
        if shard is None:
            narrow = replace(work, cache=work.cache.to(torch.float8_e4m3fn))
            cell = _measured(partial(narrow.decode, default), shape.layers, None, size / 2, "TB/s")
            table.setdefault("default, fp8 cache", []).append(cell)
            kv = [random(shape.batch, KV_HEADS, shape.context, HEAD_DIM) for _ in range(2)]
            peer = partial(_peer, SDPBackend.FLASH_ATTENTION, work.query[:, :, None], kv[0], kv[1])
            table.setdefault("torch flash, contiguous KV", []).append(_measured(peer, 1, None, size, "TB/s"))
    _show([f"{s.batch} x {s.context}" for s in shapes], table, shard)


def time_prefill(shard: int | None) -> None:
    """Measure prefill variants in TFLOP/s. With a shard, only compile that part of the variants."""
    table: dict[str, list[str]] = {}
    for length in PREFILLS:
        work = workload(1, length, length, 2)
        operations = 2 * length * (length + 1) * HEADS * HEAD_DIM / 1e9
        _, default = TritonAttention(accelerator()).tiles(work.query, work.cache[:, 0])
        for index, (name, tiles) in enumerate(prefill_variants(default).items()):
            if shard is None or index % SHARDS == shard:
                call = partial(work.prefill, tiles)
                table.setdefault(name, []).append(_measured(call, 2, shard, operations, "TFLOP/s"))
        wide = workload(1, length, length, 2, block=128)
        for stages in (2, 3):
            call = partial(wide.prefill, PrefillTiles(128, 128, 8, stages, descriptors=True, paired=False))
            name = f"rows 128 tile 128 stages {stages}, blocks of 128"
            table.setdefault(name, []).append(_measured(call, 2, shard, operations, "TFLOP/s"))
        if shard is None:
            q, k, v = (random(1, HEADS, length, HEAD_DIM) for _ in range(3))
            for kind in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
                row = table.setdefault(f"torch {kind.name}", [])
                row.append(_measured(partial(_peer, kind, q, k, v), 1, None, operations, "TFLOP/s"))
    _show([str(length) for length in PREFILLS], table, shard)


def _peer(kind: SDPBackend, query: Tensor, key: Tensor, value: Tensor, _: int) -> Tensor:
    with sdpa_kernel(kind):
        return functional.scaled_dot_product_attention(
            query, key, value, is_causal=query.shape[2] > 1, enable_gqa=query.shape[1] != key.shape[1]
        )


def time_layers() -> None:
    """Measure the fused layers of an 8B model with a decode and a prefill batch."""
    table: dict[str, list[str]] = {}
    for tokens in (64, 8192):
        work = workload(64, 1, 1088, 1) if tokens == 64 else workload(1, tokens, tokens, 1)
        cache, slots = work.cache[:, 0], work.meta.slots
        gates = random(tokens, 28672)
        x, residual, weight = random(tokens, 4096), random(tokens, 4096), random(4096)
        qkv = random(tokens, HEADS + 2 * KV_HEADS, HEAD_DIM)
        q, k, v = qkv[:, :HEADS], qkv[:, HEADS : HEADS + KV_HEADS], qkv[:, HEADS + KV_HEADS :]
        turn = (random(tokens, HEAD_DIM), random(tokens, HEAD_DIM))
        normed = partial(triton_layers.rms_norm, x, weight, 1e-5, residual=residual)
        calls: list[tuple[str, int, Callable[[], object]]] = [
            ("silu_mul", 3 * 14336, partial(triton_layers.silu_mul, gates)),
            ("rms_norm + residual", 4 * 4096, normed),
            ("rotary_store", 2 * 48 * 128, partial(triton_layers.rotary_store, q, k, v, turn, cache, slots)),
            ("store", 4 * 8 * 128, partial(store, k, v, cache, slots)),
            ("torch rms_norm (no residual)", 2 * 4096, partial(functional.rms_norm, x, (4096,), weight)),
        ]
        for name, elements, call in calls:
            cell = _measured(partial(_ignoring_layer, call), 2, None, tokens * elements * 2 / 1e9, "TB/s")
            table.setdefault(name, []).append(cell)
    _show(["64 tokens", "8192 tokens"], table, None)


def _ignoring_layer(call: Callable[[], object], _: int) -> object:
    return call()


def time_limits() -> None:
    """Measure copy and read bandwidth, matrix products and launch time of the device."""
    device = accelerator()
    source = torch.empty(2**32, dtype=torch.bfloat16, device=device).normal_()
    target = torch.empty_like(source)
    copied = graph_ms(lambda _: target.copy_(source), 1, 2)
    speeds = measure_limits(device)
    nothing = torch.empty(32, device=device)
    launch = graph_ms(lambda _: nothing.zero_(), 8)
    print(
        f"limits: copy {4 * 2**32 / copied / 1e9:.2f} TB/s (read + write), read {speeds.read / 1e12:.2f} TB/s, "
        f"bf16 matmul {speeds.product / 1e12:.0f} TFLOP/s, an empty launch {launch * 1e3:.1f} us"
    )


def _measured(call: Callable[[int], object], layers: int, shard: int | None, work: float, unit: str) -> str:
    """Return a table cell with milliseconds and rate. `work` is in units of 1e9 bytes or operations. With a shard,
    only compile."""
    try:
        if shard is not None:
            call(0)
            torch.accelerator.synchronize()
            return "-"
        elapsed = graph_ms(call, layers)
    except (RuntimeError, triton.runtime.errors.TritonError) as error:
        # A variant that does not fit on the device is a result, too.
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
    "checks": lambda shard: check_all(accelerator(), shard or 0, 1 if shard is None else SHARDS),
}


def run(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--part", choices=["all", *PARTS], default="all", help="part to run; all: every part in processes of its own"
    )
    parser.add_argument("--shard", type=int, help="compile only this shard of the variants")
    parser.add_argument("--limit-s", type=float, default=100.0, help="seconds after which a part is stopped")
    options = parser.parse_args(arguments)
    if options.part != "all":
        PARTS[options.part](options.shard)
        return
    start = time.monotonic()
    # First the checks, while all variants are compiled; then each timing alone on the device.
    for group in [["checks", "decode", "prefill"], ["limits"], ["decode"], ["prefill"], ["long"], ["layers"]]:
        sharded = len(group) > 1
        running = [
            subprocess.Popen(
                module_command("baton_serve.bench.micro.attention_gpu", "--part", part)
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
                print(f"killed after {options.limit_s} s: {process.args!r}")
        print(f"== {group} done at {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    run(sys.argv[1:])
