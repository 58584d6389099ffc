"""Time kernels of single model families: `baton-bench family-kernels [--part all]`.

These are the delta rule with a decay for each channel (shape of Kimi-Linear), and attention with heads of 512 elements
(shape of Gemma 4 31B), in bf16. Each is compared with its plain-torch twin, and timed beside the limits of the device,
the twin, and torch's own attention. It needs an accelerator.
"""

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from baton_serve.bench.micro.attention_gpu import accelerator, graph_ms, random
from baton_serve.bench.micro.device_speeds import DeviceSpeeds, measure_limits
from baton_serve.engine.kernels import AttentionMetadata, AttentionSpec
from baton_serve.engine.kernels.mixers import ChannelDeltaHeads, MixerKernels, PackedSequences
from baton_serve.engine.kernels.reference import mixers as twins
from baton_serve.engine.kernels.reference.attention import ReferenceAttention
from baton_serve.engine.kernels.triton import mixers as triton_mixers
from baton_serve.engine.kernels.triton.attention import TritonAttention

DELTA_HEADS, DELTA_SIZE, CHUNK = 32, 128, 64
HEADS, KV_HEADS, HEAD_DIM, BLOCK = 32, 4, 512, 64
SPEC = AttentionSpec(scale=HEAD_DIM**-0.5)
PROMPTS = [(1, 2048), (1, 8192), (8, 1024)]
"""Numbers of sequences, and tokens of each."""
SINGLES = [1, 32, 128]
"""Batch sizes of decode steps of the delta rule."""
WIDE_PROMPTS = [512, 2048, 8192]
WIDE_DECODES = [(1, 8192, 8), (32, 8192, 2)]
"""Batch size, context, and the layers that are visited alternately, so that no KV is read from the L2 cache."""
TWIN_ROUNDS = 3


def delta_case(
    num_seqs: int, length: int, *, is_steep: bool = False
) -> tuple[ChannelDeltaHeads, Tensor, PackedSequences]:
    """Return the inputs of sequences of equal length, and their states. Channels decay as in a model that is not
    trained yet: by rates of 1 to 16 and time steps of 0.001 to 0.1. If `is_steep`, some forget almost everything with
    one token.
    """
    device, count = accelerator(), num_seqs * length
    shape = (count, DELTA_HEADS, DELTA_SIZE)
    exponents = torch.randn(shape, device=device)
    if is_steep:
        decay = -(2.0 * exponents - 2.0).exp()
    else:
        rates = torch.linspace(1.0, 16.0, DELTA_HEADS, device=device)[:, None]
        steps = torch.logspace(-3.0, -1.0, DELTA_SIZE, device=device)
        decay = -rates * steps * (0.5 * exponents).exp()
    heads = ChannelDeltaHeads(
        qkv=random(count, DELTA_HEADS * 3 * DELTA_SIZE),
        beta=random(count, DELTA_HEADS),
        decay=decay,
    )
    states = torch.randn(num_seqs, DELTA_HEADS, DELTA_SIZE, DELTA_SIZE, device=device)
    starts = torch.arange(num_seqs + 1, dtype=torch.int32, device=device) * length
    return heads, states, PackedSequences(starts, torch.arange(num_seqs, device=device), length)


def delta_work(num_seqs: int, length: int) -> tuple[float, float]:
    """Return (bytes, operations) that the delta rule needs: inputs and outputs once, states twice; products of the
    chunked form, of which half of the pairs of tokens count, or those of the recurrence for single tokens.
    """
    rows, state = num_seqs * length * DELTA_HEADS, num_seqs * DELTA_HEADS * DELTA_SIZE**2
    num_bytes = rows * (3 * DELTA_SIZE * 2 + DELTA_SIZE * 4 + 2 + DELTA_SIZE * 2) + 2 * 4 * state
    pairs = 5 * CHUNK // 2 if length > 1 else 0
    return num_bytes, 2.0 * rows * (pairs * DELTA_SIZE + 3 * DELTA_SIZE**2)


def time_delta_rule(speed: DeviceSpeeds) -> None:
    singles = [(batch, 1, False) for batch in SINGLES]
    for num_seqs, length, is_steep in [*((*prompt, False) for prompt in PROMPTS), (*PROMPTS[1], True), *singles]:
        heads, states, sequences = delta_case(num_seqs, length, is_steep=is_steep)

        def compute(
            kernels: MixerKernels,
            stored: Tensor,
            heads: ChannelDeltaHeads = heads,
            sequences: PackedSequences = sequences,
        ) -> Tensor:
            return kernels.channel_delta_rule(heads, stored, sequences)

        ours, theirs = states.clone(), states.clone()
        results = [(compute(triton_mixers, ours), compute(twins, theirs)), (ours, theirs)]
        call = partial(compute, triton_mixers, states.clone())
        elapsed = graph_ms(partial(_without_layer, call), 1) * 1e3
        peer = {"twin": eager_ms(partial(compute, twins, states.clone())) * 1e3}
        name = f"delta rule by channel, {num_seqs} x {length} tokens{', steep decays' if is_steep else ''}"
        show(name, elapsed, speed.limit_us(*delta_work(num_seqs, length)), peer, results)
        if length > 1:
            show_kernels(call)


def _without_layer(call: Callable[[], object], _: int) -> object:
    return call()


def attention_case(batch: int, query_len: int, context: int, layers: int) -> tuple[AttentionMetadata, Tensor, Tensor]:
    """Return (metadata, query, cache of several layers) of sequences whose blocks are scattered."""
    device, per_seq = accelerator(), -(-context // BLOCK)
    tables = torch.randperm(per_seq * batch, device=device).int().view(batch, per_seq)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=device) * query_len
    lengths = torch.full((batch,), context, dtype=torch.int32, device=device)
    slots = torch.zeros(batch * query_len, dtype=torch.int64, device=device)
    meta = AttentionMetadata(starts, lengths, tables, slots, query_len, context)
    cache = torch.empty(tables.numel(), layers, 2, KV_HEADS, BLOCK, HEAD_DIM, dtype=torch.bfloat16, device=device)
    for layer in range(layers):
        cache[:, layer].normal_()
    return meta, random(batch * query_len, HEADS, HEAD_DIM), cache


def time_wide_heads(speed: DeviceSpeeds) -> None:
    backend, twin = TritonAttention(accelerator()), ReferenceAttention()
    prompts = [(1, length, length, 2) for length in WIDE_PROMPTS]
    for batch, query_len, context, layers in prompts + [(batch, 1, *rest) for batch, *rest in WIDE_DECODES]:
        meta, query, cache = attention_case(batch, query_len, context, layers)

        def compute(layer: int, query: Tensor = query, cache: Tensor = cache, meta: AttentionMetadata = meta) -> Tensor:
            return backend.attend(query, cache[:, layer], meta, SPEC)

        attend = partial(twin.attend, query, cache[:, 0], meta, SPEC)
        pairs = context * (context + 1) / 2 if query_len > 1 else batch * context
        work = 2 * batch * context * KV_HEADS * HEAD_DIM * 2 + 4 * query.numel(), 4 * pairs * HEADS * HEAD_DIM
        results = [(compute(0), attend())]
        elapsed = graph_ms(compute, layers) * 1e3
        peers = {"twin": eager_ms(attend) * 1e3, **torch_attention(batch, query_len, context)}
        kind = f"prompt of {query_len}" if query_len > 1 else f"decode, {batch} x {context}"
        show(f"attention, heads of {HEAD_DIM}, {kind} tokens", elapsed, speed.limit_us(*work), peers, results)


def torch_attention(batch: int, query_len: int, context: int) -> dict[str, float]:
    """Return the microseconds of torch's implementations over contiguous KV, which they read once for each KV head.
    A prompt's KV heads are repeated before.
    """
    group = HEADS // KV_HEADS
    if query_len > 1:
        query, key, value = (random(batch, HEADS, context, HEAD_DIM) for _ in range(3))
    else:  # the query heads of a group are rows
        query = random(batch, KV_HEADS, group, HEAD_DIM)
        key, value = (random(batch, KV_HEADS, context, HEAD_DIM) for _ in range(2))
    found = {}
    for kind in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        try:
            with warnings.catch_warnings(action="ignore"), sdpa_kernel(kind):
                call = partial(functional.scaled_dot_product_attention, query, key, value, is_causal=query_len > 1)
                found[kind.name.split("_")[0].lower()] = eager_ms(call) * 1e3
        except RuntimeError:  # it does not support such heads
            continue
    return found


def eager_ms(call: Callable[[], object], rounds: int = TWIN_ROUNDS) -> float:
    """Return the milliseconds of a call that graphs cannot capture, as the median of `rounds` after a first one."""
    times = []
    for _ in range(rounds + 1):
        torch.accelerator.synchronize()
        began = time.perf_counter()
        call()
        torch.accelerator.synchronize()
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times[1:])


def show(
    name: str,
    elapsed_us: float,
    limit: tuple[float, str],
    peers: dict[str, float],
    results: Sequence[tuple[Tensor, Tensor]],
) -> None:
    """Print a case. The error is the largest difference of a result from the twin's, over the twin's largest value."""
    worst = max(float((one.float() - two.float()).abs().max() / two.float().abs().max()) for one, two in results)
    others = "".join(f", {peer} {time_us:.0f} us ({time_us / elapsed_us:.1f} x)" for peer, time_us in peers.items())
    ratio = f"{limit[0]:.1f} us by {limit[1]}, {limit[0] / elapsed_us:.2f}"
    print(f"{name}: {elapsed_us:.1f} us (limit {ratio}){others}; error {worst:.1e}", flush=True)


def show_kernels(call: Callable[[], object]) -> None:
    """Print the time of each kernel of one call."""
    with warnings.catch_warnings(action="ignore"), profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.accelerator.synchronize()
    spans = [f"{event.name} {event.device_time:.1f}" for event in seen.events() or () if event.device_time > 0]
    print("    us: " + ", ".join(spans), flush=True)


PARTS: dict[str, Callable[[DeviceSpeeds], None]] = {"delta": time_delta_rule, "wide": time_wide_heads}


def run(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=["all", *PARTS], default="all", help="part to run")
    options = parser.parse_args(arguments)
    with torch.inference_mode():
        speed = measure_limits(accelerator())
        print(f"limits: read {speed.read / 1e12:.2f} TB/s, bf16 matmul {speed.product / 1e12:.0f} TFLOP/s", flush=True)
        for name, part in PARTS.items():
            if options.part in ("all", name):
                part(speed)


if __name__ == "__main__":
    run(sys.argv[1:])
