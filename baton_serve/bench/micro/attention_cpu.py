"""Measure CPU attention against limits of the machine that are measured in the same run.

`baton-bench attention-cpu [--kv-cache-dtype fp8_e4m3] [--json] [--threads N] [--seconds S]`

The limit of decode is the bytes of KV divided by the read bandwidth; the limit of prefill is its products at the speed
of torch's matrix product. The peer is torch's SDPA on contiguous K and V, which are never quantized, with the query
group folded (decode) or the KV heads repeated (prefill).
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from baton_serve.engine.kernels import (
    AttentionBackend,
    AttentionMetadata,
    AttentionSpec,
    attention_backend,
    quantized_kv,
)

KV_DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2, "int8": torch.int8}
ROTATED_LAYERS = 8  # layers visited alternately, so that no KV stays in the processor's cache


@dataclass(frozen=True, slots=True)
class Result:
    """One case. Times are medians; `best` is the fastest call. `ratio` is value / limit: 1.0 means that the limit was
    reached."""

    bench: str
    case: str
    value: float
    unit: str
    best: float
    limit: float
    ratio: float
    peer: str
    peer_value: float


@dataclass(frozen=True, slots=True)
class CpuAttentionShape:
    """Head counts, block size and dtypes of one case."""

    num_heads: int = 14
    num_kv_heads: int = 2
    head_dim: int = 64
    block_tokens: int = 16
    dtype: torch.dtype = torch.bfloat16
    codes: torch.dtype | None = None
    """One-byte dtype of a quantized KV cache; None for `dtype`."""

    def token_bytes(self) -> int:
        """Return the bytes of one token's K and V in one layer, with scales."""
        row = self.head_dim * self.dtype.itemsize if self.codes is None else self.head_dim + 2
        return 2 * self.num_kv_heads * row

    def cache(self, num_blocks: int, num_layers: int) -> Tensor:
        """Return a cache with random content: [num_blocks, num_layers, 2, num_kv_heads, block_tokens, head_dim]."""
        shape = (num_blocks, num_layers, 2, self.num_kv_heads)
        if self.codes is None:
            return torch.randn(*shape, self.block_tokens, self.head_dim, dtype=self.dtype)
        rows = self.block_tokens + -(-2 * self.block_tokens // self.head_dim)
        whole = torch.randint(0, 0x70, (*shape, rows, self.head_dim), dtype=torch.uint8)
        cache = whole.view(self.codes)[..., : self.block_tokens, :]
        for layer in range(num_layers):
            quantized_kv.scales_of(cache[:, layer]).fill_(0.01)
        return cache

    def __str__(self) -> str:
        dtype = str(self.codes or self.dtype).removeprefix("torch.")
        return f"{self.num_heads}/{self.num_kv_heads} heads of {self.head_dim}, blocks of {self.block_tokens}, {dtype}"


def run(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object per line instead of a table")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="number of CPU threads")
    parser.add_argument("--kv-cache-dtype", choices=["auto", *KV_DTYPES], default="auto", help="dtype of the KV cache")
    parser.add_argument("--seconds", type=float, default=2.0, help="measuring time of each case in seconds")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    bytes_per_s = read_bandwidth(options.seconds)
    if not options.json:
        print(f"{options.threads} threads, read bandwidth {bytes_per_s / 1e9:.1f} GB/s")
        print(f"{'case':78} {'median':>9} {'best':>9} {'limit':>9} {'ratio':>6} {'SDPA':>9}  ms")
    codes = KV_DTYPES.get(options.kv_cache_dtype)
    gqa, wide = (
        CpuAttentionShape(codes=codes),
        CpuAttentionShape(num_heads=32, num_kv_heads=8, head_dim=128, codes=codes),
    )
    for shape, batch, context in (
        (gqa, 16, 2048),
        (CpuAttentionShape(block_tokens=64, codes=codes), 16, 2048),
        (gqa, 1, 2048),
        (gqa, 1, 32768),
        (wide, 4, 2048),
        (CpuAttentionShape(dtype=torch.float32, codes=codes), 16, 2048),
    ):
        show(decode(shape, batch, context, bytes_per_s, options.seconds), as_json=options.json)
    for shape, tokens, prefix in (
        (gqa, 2048, 0),
        (gqa, 512, 1536),
        (wide, 1024, 0),
        (CpuAttentionShape(dtype=torch.float32, codes=codes), 2048, 0),
    ):
        show(prefill(shape, tokens, prefix, options.seconds), as_json=options.json)


def show(result: Result, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(asdict(result)), flush=True)
        return
    numbers = f"{result.value:9.3f} {result.best:9.3f} {result.limit:9.3f} {result.ratio:6.2f} {result.peer_value:9.3f}"
    print(f"{result.bench + ' ' + result.case:78} {numbers}", flush=True)


def decode(shape: CpuAttentionShape, batch: int, context: int, bytes_per_s: float, seconds: float) -> Result:
    """Measure one token for each of `batch` sequences with `context` tokens, whose blocks lie in random order."""
    num_blocks = batch * -(-context // shape.block_tokens)
    layers = ROTATED_LAYERS if batch * context <= 1 << 16 else 2
    cache = shape.cache(num_blocks, layers)
    meta = metadata([1] * batch, context, num_blocks)
    query = torch.randn(batch, shape.num_heads, shape.head_dim, dtype=shape.dtype)
    median, best = time_attend(query, cache, meta, shape, seconds)
    contiguous = torch.randn(2, batch, shape.num_kv_heads, context, shape.head_dim, dtype=shape.dtype)
    copies = cycle([contiguous] + [contiguous.clone() for _ in range(layers - 1)])
    folded = query.view(batch, shape.num_kv_heads, -1, shape.head_dim)

    def peer() -> None:
        keys, values = next(copies).unbind(0)
        scaled_dot_product_attention(folded, keys, values)

    limit = batch * context * shape.token_bytes() / bytes_per_s * 1e3
    case = f"batch {batch}, context {context}, {shape}"
    return result_of("decode", case, median, best, limit, measure(peer, seconds)[0])


def prefill(shape: CpuAttentionShape, tokens: int, prefix: int, seconds: float) -> Result:
    """Measure `tokens` new tokens of one sequence after `prefix` cached ones. SDPA computes the same with a mask or
    `is_causal`."""
    context = tokens + prefix
    num_blocks = -(-context // shape.block_tokens)
    cache = shape.cache(num_blocks, 2)
    query = torch.randn(tokens, shape.num_heads, shape.head_dim, dtype=shape.dtype)
    median, best = time_attend(query, cache, metadata([tokens], context, num_blocks), shape, seconds)
    heads = query.transpose(0, 1)[None]
    keys, values = torch.randn(2, 1, shape.num_heads, context, shape.head_dim, dtype=shape.dtype).unbind(0)
    mask = torch.ones(tokens, context, dtype=torch.bool).tril(prefix) if prefix else None
    peer = measure(
        lambda: scaled_dot_product_attention(heads, keys, values, attn_mask=mask, is_causal=mask is None), seconds
    )
    products = 4 * shape.num_heads * shape.head_dim * (tokens * prefix + tokens * (tokens + 1) / 2)
    limit = products / product_speed(shape.dtype, seconds) * 1e3
    return result_of("prefill", f"{tokens} tokens after {prefix}, {shape}", median, best, limit, peer[0])


def result_of(bench: str, case: str, value: float, best: float, limit: float, peer: float) -> Result:
    return Result(bench, case, value, "ms", best, limit, value / limit, "torch SDPA", peer)


def metadata(new_tokens: list[int], context: int, num_blocks: int) -> AttentionMetadata:
    return AttentionMetadata(
        query_starts=torch.tensor([0, *new_tokens]).cumsum(0).int(),
        context_lens=torch.full((len(new_tokens),), context, dtype=torch.int32),
        block_tables=torch.randperm(num_blocks).int().view(len(new_tokens), -1),
        slots=torch.empty(0, dtype=torch.int64),
        max_query_len=max(new_tokens),
        max_context_len=context,
    )


def time_attend(
    query: Tensor, cache: Tensor, meta: AttentionMetadata, shape: CpuAttentionShape, seconds: float
) -> tuple[float, float]:
    backend: AttentionBackend = attention_backend(torch.device("cpu"), shape.dtype)
    spec = AttentionSpec(shape.head_dim**-0.5)
    layers = cycle(cache.unbind(1))
    return measure(lambda: backend.attend(query, next(layers), meta, spec), seconds)


def read_bandwidth(seconds: float) -> float:
    """Return the bytes per second of a sum over more memory than any cache holds."""
    numbers = torch.ones(64 << 20)
    return numbers.nbytes / measure(numbers.sum, seconds)[1] * 1e3


def product_speed(dtype: torch.dtype, seconds: float) -> float:
    """Return the floating-point operations per second of torch's matrix product at the sizes of a model, in `dtype` or
    in float32, whichever is faster: some CPUs multiply bf16 more slowly."""
    rows, inner, columns = 512, 896, 4864

    def product_ms(dtype: torch.dtype) -> float:
        a, b = torch.randn(rows, inner, dtype=dtype), torch.randn(columns, inner, dtype=dtype)
        return measure(lambda: linear(a, b), seconds / 2)[1]

    return 2 * rows * inner * columns / min(product_ms(dtype), product_ms(torch.float32)) * 1e3


def measure(call: Callable[[], object], seconds: float) -> tuple[float, float]:
    """Return median and best time of a call in ms."""
    for _ in range(3):
        call()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3, min(times) * 1e3


if __name__ == "__main__":
    run(sys.argv[1:])
