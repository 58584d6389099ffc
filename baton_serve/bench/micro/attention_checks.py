"""Compare each Triton kernel with its reference implementation on a real device, over dtypes, head sizes and attention
rules.
"""

import itertools
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from baton_serve.engine.kernels import AttentionMetadata, AttentionSpec
from baton_serve.engine.kernels.reference import layers as reference_layers
from baton_serve.engine.kernels.reference.attention import ReferenceAttention
from baton_serve.engine.kernels.triton import layers as triton_layers
from baton_serve.engine.kernels.triton.attention import TritonAttention

TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Largest relative error (Frobenius norm) per dtype."""


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """Shape and attention rules of one comparison."""

    heads: int
    kv_heads: int
    head_dim: int
    block: int
    dtype: torch.dtype
    cache_dtype: torch.dtype
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False


@dataclass(frozen=True, slots=True)
class Ragged:
    """Number of new tokens, and of all tokens, of each sequence in a batch."""

    queries: list[int]
    contexts: list[int]


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CASES = [
    AttentionCase(32, 8, 128, 64, BF16, BF16),
    AttentionCase(32, 8, 128, 64, FP16, FP16),
    AttentionCase(32, 8, 128, 16, BF16, BF16),
    AttentionCase(32, 8, 128, 128, BF16, BF16),
    AttentionCase(32, 8, 128, 64, FP32, FP32),
    AttentionCase(14, 2, 64, 64, BF16, BF16),
    AttentionCase(40, 8, 128, 64, BF16, BF16),
    AttentionCase(12, 12, 64, 16, FP32, FP32),
    AttentionCase(32, 32, 80, 64, BF16, BF16),
    AttentionCase(32, 32, 96, 64, BF16, BF16),
    AttentionCase(16, 8, 256, 64, BF16, BF16, window=100, softcap=50.0),
    AttentionCase(8, 4, 256, 16, FP32, FP32, window=33),
    AttentionCase(64, 8, 64, 64, BF16, BF16, window=128, sinks=True),
    AttentionCase(64, 8, 64, 64, BF16, BF16, sinks=True),
    AttentionCase(32, 8, 128, 64, BF16, torch.float8_e4m3fn),
    AttentionCase(32, 8, 128, 64, BF16, torch.float8_e5m2),
]
RAGGED = [
    Ragged([1] * 5, [1, 63, 64, 1088, 3000]),
    Ragged([1] * 20, list(range(100, 2100, 100))),
    Ragged([1], [9000]),
    Ragged([700], [700]),
    Ragged([130, 1, 0, 64, 1, 300, 2], [130, 900, 50, 1000, 3, 2300, 66]),
    Ragged([100, 100], [100, 1000]),
]


def check_all(device: torch.device, shard: int, shards: int) -> None:
    """Run the checks of one of `shards` shards and print the failures."""
    failures = 0
    for index, (case, ragged) in enumerate(itertools.product(CASES, RAGGED)):
        if index // len(RAGGED) % shards != shard:
            continue
        try:
            message = _check(case, ragged, device)
        except (RuntimeError, triton.runtime.errors.TritonError) as error:
            # A failed compilation must not hide the other cases.
            message = f"{type(error).__name__}: {str(error)[:200]}"
        if message:
            failures += 1
            print(f"FAILED {case} {ragged}: {message}", flush=True)
    if shard == 0:
        failures += _check_layers(device) + _check_graph(device)
    print(f"checks, shard {shard}: {failures} failures", flush=True)


def make_batch(ragged: Ragged, block: int, device: torch.device) -> AttentionMetadata:
    """Build attention metadata with blocks in random order."""
    per_seq = -(-max(ragged.contexts) // block)
    tables = torch.randperm(per_seq * len(ragged.contexts)).int().view(-1, per_seq)
    starts = torch.tensor([0, *itertools.accumulate(ragged.queries)], dtype=torch.int32)
    slots = [
        int(tables[s, p // block]) * block + p % block
        for s, (new, context) in enumerate(zip(ragged.queries, ragged.contexts, strict=True))
        for p in range(context - new, context)
    ]
    return AttentionMetadata(
        starts.to(device),
        torch.tensor(ragged.contexts, dtype=torch.int32, device=device),
        tables.to(device),
        torch.tensor(slots, dtype=torch.int64, device=device),
        max(ragged.queries),
        max(ragged.contexts),
    )


def _check(case: AttentionCase, ragged: Ragged, device: torch.device) -> str:
    """Return a description of the first difference, or an empty string. The memory behind the last token of each
    sequence holds NaN, so that a kernel that reads too far is found."""
    meta = make_batch(ragged, case.block, device)
    tokens = sum(ragged.queries)
    shape = (meta.block_tables.numel(), 3, 2, case.kv_heads, case.block, case.head_dim)
    cache = torch.randn(shape, device=device).to(case.cache_dtype)
    qkv = torch.randn(tokens, case.heads + 2 * case.kv_heads, case.head_dim, device=device).to(case.dtype)
    query, key, value = torch.split(qkv, [case.heads, case.kv_heads, case.kv_heads], dim=1)
    for s, context in enumerate(ragged.contexts):
        for p in range(context, meta.block_tables.shape[1] * case.block):
            if p == context or p % case.block == 0:
                rest = slice(p % case.block, None)
                cache[meta.block_tables[s, p // case.block].long(), 1, :, :, rest] = float("nan")
    mine, twins = cache[:, 1], cache[:, 1].float()
    triton, twin = TritonAttention(device), ReferenceAttention()
    triton.store(key, value, mine, meta)
    twin.store(key.to(case.cache_dtype).float(), value.to(case.cache_dtype).float(), twins, meta)
    if not torch.equal(mine.float().nan_to_num(7.0), twins.nan_to_num(7.0)):
        return "store differs"
    sinks = torch.randn(case.heads, device=device).to(case.dtype) if case.sinks else None
    spec = AttentionSpec(case.head_dim**-0.5, case.window, case.softcap, sinks)
    got = triton.attend(query, mine, meta, spec)
    again = triton.attend(query, mine, meta, spec)
    wanted = twin.attend(query.float(), twins, meta, spec)
    error = _error(got, wanted)
    if not error < TOLERANCE[case.dtype]:
        return f"error {error:.2e}"
    return "" if torch.equal(got, again) else "two runs differ"


def _check_graph(device: torch.device) -> int:
    """Check that a decode step captured once serves other lengths, other blocks and padded sequences. Return the
    number of failures."""
    batch, block, capacity = 6, 64, 5000
    meta = make_batch(Ragged([1] * batch, [capacity] * batch), block, device)
    cache = torch.randn(meta.block_tables.numel(), 2, 2, 8, block, 128, device=device).to(BF16)[:, 1]
    query, key, value = (torch.randn(batch, heads, 128, device=device).to(BF16) for heads in (32, 8, 8))
    triton, twin, spec = TritonAttention(device), ReferenceAttention(), AttentionSpec(128**-0.5)
    triton.attend(query, cache, meta, spec)
    triton.store(key, value, cache, meta)
    torch.accelerator.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        triton.store(key, value, cache, meta)
        output = triton.attend(query, cache, meta, spec)
    failures = 0
    for contexts in ([1, 64, 100, 5000, 0, 0], [4096, 300, 257, 256, 255, 1], [5000] * 6):
        lens = torch.tensor(contexts, dtype=torch.int32, device=device)
        meta.block_tables.copy_(meta.block_tables.roll(1, 0))
        last = (lens.long() - 1).clamp(min=0)
        slots = meta.block_tables.gather(1, last[:, None] // block)[:, 0].long() * block + last % block
        meta.slots.copy_(torch.where(lens > 0, slots, -1))
        meta.context_lens.copy_(lens)
        for tensor in (query, key, value):
            tensor.normal_()
        graph.replay()
        live = int((lens > 0).sum())
        wanted = twin.attend(query.float(), cache.float(), meta, spec)
        error = _error(output[:live], wanted[:live])
        if not error < TOLERANCE[BF16]:
            failures += 1
            print(f"FAILED graph {contexts}: {error:.2e}", flush=True)
    return failures


def _check_layers(device: torch.device) -> int:
    """Compare the fused layer kernels with the reference. Return the number of failures."""
    failures = 0
    for dtype, tokens in itertools.product((FP32, FP16, BF16), (1, 77)):
        x, residual = (torch.randn(tokens, 2560, device=device).to(dtype) for _ in range(2))
        weight, twins = torch.randn(2560, device=device).to(dtype), residual.clone()
        pairs = [
            ("rms_norm", triton_layers.rms_norm(x, weight, 1e-6), reference_layers.rms_norm(x, weight, 1e-6)),
            (
                "rms_norm + residual",
                triton_layers.rms_norm(x, weight, 1e-6, residual=residual, unit_offset=True),
                reference_layers.rms_norm(x, weight, 1e-6, residual=twins, unit_offset=True),
            ),
            ("residual", residual, twins),
            ("silu_mul", triton_layers.silu_mul(x), reference_layers.silu_mul(x)),
        ]
        for interleaved, rotary in itertools.product((False, True), (80, 32)):
            queries, keys, values = (torch.randn(tokens, n, 80, device=device).to(dtype) for n in (12, 3, 3))
            twin_queries = queries.clone()
            caches = [torch.zeros(9, 2, 3, 16, 80, device=device, dtype=dtype) for _ in range(2)]
            turn = (torch.randn(tokens, rotary, device=device), torch.randn(tokens, rotary, device=device))
            slots = torch.randperm(144, device=device)[:tokens] - 1
            triton_layers.rotary_store(queries, keys, values, turn, caches[0], slots, interleaved=interleaved)
            reference_layers.rotary_store(twin_queries, keys, values, turn, caches[1], slots, interleaved=interleaved)
            pairs += [("rotated query", queries, twin_queries), ("rotated cache", caches[0], caches[1])]
        for name, got, wanted in pairs:
            error = _error(got, wanted)
            if not error < TOLERANCE[dtype]:
                failures += 1
                print(f"FAILED {name} {dtype} {tokens} tokens: {error:.2e}", flush=True)
    return failures


def _error(got: Tensor, wanted: Tensor) -> float:
    """Return the relative error, or the absolute one if all wanted values are 0."""
    if wanted.float().norm() == 0:
        return float(got.float().norm())
    return float((got.float() - wanted.float()).norm() / wanted.float().norm())
