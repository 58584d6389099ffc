"""Measure the engine alone, in this process: decode and prefill of a named model shape, against limits of the machine.

`baton-bench engine [--shape llama-3.1-8b | --model DIR] [--device auto] [--batches 1 8 …] [--context 1024] [--json]`

A decode step is limited by the weights and the KV that it reads, at the read bandwidth, or by its products at the
speed of one large matrix product (on a CPU in bf16 or float32, whichever is faster). Prefill is limited by its
products. The limits are measured in the same run. On a CPU, other processes use memory and matrix units too, so limits
are measured before and after each value, and medians with the quartiles of the ratio are reported. Times are those of
a caller of `Engine.step`: they include scheduling and results. Weights are random; prompts are random and never repeat
between cases, except that larger decode batches find the prompts of smaller ones in the prefix cache.
"""

import argparse
import gc
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from baton_serve.bench.micro.device_speeds import DeviceSpeeds, measure_limits
from baton_serve.bench.micro.engine_adapters import load_random_adapters
from baton_serve.bench.micro.engine_model_costs import model_costs
from baton_serve.bench.micro.engine_peer import NAME as PEER_LABEL
from baton_serve.bench.micro.engine_peer import TransformersPeer
from baton_serve.bench.micro.engine_shapes import (
    COUNTED_BY_CONFIG,
    SHAPES,
    WEIGHT_BITS,
    Costs,
    costs,
    write_shape,
)
from baton_serve.bench.report import Row, show
from baton_serve.contracts.block_hash import root_hash
from baton_serve.contracts.identity import RequestId
from baton_serve.contracts.messages import Work, with_prompt_root
from baton_serve.contracts.sampling import SamplingSpec
from baton_serve.engine import Engine, EngineConfig, ModelError, device

PEER = "vLLM 0.22.1, H200"
PEER_VALUES = {
    "decode 1 x 1024": 4.97,
    "decode 8 x 1024": 5.24,
    "decode 32 x 1024": 6.35,
    "decode 64 x 1024": 7.70,
    "decode 128 x 1024": 10.77,
    "decode 256 x 1024": 17.34,
    "prefill 128 x 512": 43260.0,
    "prefill 32 x 2048": 42030.0,
    "prefill 8 x 8192": 37760.0,
    "first token 512": 16.4,
    "first token 2048": 52.3,
    "first token 8192": 219.0,
    "start": 55.0,
}
"""Values of the peer for the llama-3.1-8b shape, measured on the same kind of machine (docs/performance.md). They are
printed only for the same case."""


class Prompts:
    """Generates requests with random token IDs; the same number and length give the same prompt.

    Requests use the LoRA adapters with these fingerprints in turn; "" is none.
    """

    def __init__(self, engine: Engine, adapters: Sequence[str] = ("",)) -> None:
        self._layout = engine.layout
        self._vocab_size = engine.vocab_size
        self._adapters = adapters
        self._next = 0

    def work(self, number: int, length: int, max_tokens: int) -> Work:
        self._next += 1
        draw, layout = np.random.default_rng([number, length]), self._layout
        lora = self._adapters[number % len(self._adapters)]
        work = Work(
            request_id=RequestId(f"{id(self)}-{self._next}"),
            token_ids=draw.integers(0, self._vocab_size, length).tolist(),
            num_prompt_tokens=length,
            sampling=SamplingSpec(seed=0, max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
            root=root_hash(
                fingerprint=layout.fingerprint, kv_dtype=layout.dtype, block_tokens=layout.block_tokens, lora=lora
            ),
            lora=lora,
        )
        return with_prompt_root(work, layout)


@dataclass(frozen=True, slots=True)
class CaseResult:
    """Medians of a case, with the quartiles of its ratio."""

    value: float
    limit: float
    ratio: float
    quartiles: tuple[float, float] | None


class InterleavedRuns:
    """Measures a value and its limit alternately on a CPU; on an accelerator, which has no other load, once."""

    def __init__(self, options: argparse.Namespace, target: torch.device) -> None:
        self._target = target
        self._count = options.tensor_parallel_size * options.pipeline_parallel_size
        self.is_host = device.is_host(target)
        self.rounds = options.rounds if self.is_host else 1
        self.first = measure_limits(target).times(self._count)

    def __call__(
        self, value: Callable[[], float], limit: Callable[[DeviceSpeeds], float], *, less_is_better: bool
    ) -> CaseResult:
        """Measure a case. `limit` returns what `value` would be at given speeds."""
        values, limits, ratios = list[float](), list[float](), list[float]()
        before = self._speeds()
        for _ in range(self.rounds):
            values.append(value())
            after = self._speeds()
            limits.append(limit(DeviceSpeeds((before.read + after.read) / 2, (before.product + after.product) / 2)))
            ratios.append(limits[-1] / values[-1] if less_is_better else values[-1] / limits[-1])
            before = after
        quartiles = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else None
        ends = (quartiles[0], quartiles[2]) if quartiles else None
        return CaseResult(statistics.median(values), statistics.median(limits), statistics.median(ratios), ends)

    def _speeds(self) -> DeviceSpeeds:
        return measure_limits(self._target).times(self._count) if self.is_host else self.first


@contextmanager
def decoding(
    engine: Engine, prompts: Prompts, batch: int, context: int, steps: int
) -> Iterator[Callable[[int], list[float]]]:
    """Add `batch` sequences and compute their prompts. Yield a function that returns the seconds of each of the next
    steps, which only decode; at most `steps` in all. Cancel the sequences on exit."""
    works = [prompts.work(number, context, max_tokens=steps + batch + 8) for number in range(batch)]
    for work in works:
        engine.add(work)
    while engine.stats().queued_tokens or engine.stats().waiting:
        engine.step()
    # The first decode steps may compile kernels or capture graphs.
    for _ in range(3):
        engine.step()

    def timed(count: int) -> list[float]:
        times: list[float] = []
        while len(times) < count:
            started, num_decoded = time.perf_counter(), 0
            while num_decoded < batch:  # a pipeline decodes the sequences in several steps
                num_decoded += len(engine.step().tokens)
            times.append(time.perf_counter() - started)
            assert num_decoded == batch, f"{num_decoded} tokens of {batch} sequences were decoded"
        return times

    yield timed
    for work in works:
        engine.cancel(work.request_id)


def prefill_seconds(engine: Engine, prompts: Prompts, first: int, count: int, length: int) -> float:
    """Return the seconds to compute `count` new prompts, from the first `add` to the token of the last one."""
    works = [prompts.work(first + number, length, max_tokens=1) for number in range(count)]
    started = time.perf_counter()
    for work in works:
        engine.add(work)
    while engine.has_work():
        engine.step()
    return time.perf_counter() - started


class Cases:
    """The cases of one engine. Each prompt is new."""

    def __init__(self, engine: Engine, cost: Costs, interleaved: InterleavedRuns, steps: int) -> None:
        self._engine, self._cost, self._interleaved, self._steps = engine, cost, interleaved, steps
        self._prompts = Prompts(engine)
        self._next = itertools.count(2000)

    def fresh(self, count: int, length: int) -> float:
        """Return the seconds to compute `count` new prompts."""
        return prefill_seconds(self._engine, self._prompts, next(self._next) * count, count, length)

    def first_token(self, length: int) -> CaseResult:
        """Measure TTFT of a single prompt, in seconds."""
        at_once = 1 if self._interleaved.is_host else 3
        return self._interleaved(
            lambda: statistics.median(self.fresh(1, length) for _ in range(at_once)),
            lambda limits: self._cost.prefill_flops(1, length) / limits.product,
            less_is_better=True,
        )

    def prefill(self, count: int, length: int) -> CaseResult:
        """Measure the prefill rate, in tokens per second."""
        self.fresh(min(count, 16), length)  # warm up: libraries load code for each size
        return self._interleaved(
            lambda: count * length / self.fresh(count, length),
            lambda limits: count * length * limits.product / self._cost.prefill_flops(count, length),
            less_is_better=False,
        )

    def decode(self, batch: int, context: int, prompts: Prompts | None = None) -> CaseResult:
        """Measure a decode step, in seconds, of `prompts` if they are given."""
        steps = -(-self._steps // self._interleaved.rounds)
        total = steps * self._interleaved.rounds
        with decoding(self._engine, prompts or self._prompts, batch, context, total) as timed:
            return self._interleaved(
                lambda: statistics.median(timed(steps)),
                lambda limits: limits.decode_s(self._cost, batch, context + batch // 2 + total // 2),
                less_is_better=True,
            )


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """Start the engine and yield the rows of all cases."""
    if options.model and not Path(options.model).exists():  # before the limits, which take long on a busy CPU
        raise ModelError(f"{options.model} is not a folder; give a local folder in Hugging Face's format")
    target = device.select_device(options.device)
    interleaved = InterleavedRuns(options, target)
    limits = interleaved.first
    yield _row(options, "read bandwidth", limits.read / 1e9, "GB/s")
    yield _row(options, "matrix product", limits.product / 1e12, "TFLOP/s")
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or str(write_shape(options.shape, Path(folder)))
        started = time.perf_counter()
        config = _config(options, model)
        engine = Engine(config)
        yield _row(options, "start", time.perf_counter() - started, "s")
        if options.model or options.shape in COUNTED_BY_CONFIG:
            cost = model_costs(config, engine.layout)
        else:
            cost = costs(options.shape, options.quantization, options.kv_cache_dtype)
    gc.collect()
    gc.freeze()  # as in a serving process: objects made at start are never garbage, so collections skip them
    with engine:
        cases = Cases(engine, cost, interleaved, options.steps)
        cases.fresh(1, min(512, engine.max_model_len - 1))  # warm up
        adapters = load_random_adapters(
            engine, options.shape, target, count=options.adapters, rank=options.adapter_rank
        )
        for length in options.single:
            yield _timed_row(options, f"first token {length}", cases.first_token(length))
        for count, length in options.prefill:
            taken = cases.prefill(count, length)
            yield _row(options, f"prefill {count} x {length}", taken.value, "tok/s", taken)
        for context in options.context:
            for batch in options.batches:
                needed = batch * -(-(context + options.steps + batch + 8) // engine.layout.block_tokens)
                if needed > engine.stats().total_blocks:
                    sys.stderr.write(f"decode {batch} x {context}: skipped, its KV does not fit in the cache\n")
                    continue
                yield _timed_row(options, f"decode {batch} x {context}", cases.decode(batch, context))
                if adapters:
                    taken = cases.decode(batch, context, Prompts(engine, adapters))
                    yield _timed_row(options, f"decode {batch} x {context}, {len(adapters)} adapters", taken)


def measure_peer(options: argparse.Namespace) -> Iterator[Row]:
    """Yield the same cases with transformers' continuous batching, as far as they fit in its memory."""
    target, draw = device.select_device(options.device), np.random.default_rng(7)
    vocab_size = SHAPES[options.shape]["vocab_size"]
    assert isinstance(vocab_size, int)

    def prompts(count: int, length: int) -> list[list[int]]:
        made: list[list[int]] = draw.integers(0, vocab_size, (count, length)).tolist()
        return made

    with tempfile.TemporaryDirectory() as folder:
        peer = TransformersPeer(write_shape(options.shape, Path(folder)), target, options.peer)
        for count, length in options.prefill:
            value = count * length / peer.prefill_s(prompts(count, length))
            yield _row(options, f"{PEER_LABEL} ({options.peer}): prefill {count} x {length}", value, "tok/s")
        for batch in options.batches:
            value = peer.decode_s(prompts(batch, options.context[0]), options.peer_steps)
            case = f"{PEER_LABEL} ({options.peer}): decode {batch} x {options.context[0]}"
            yield _row(options, case, value * 1e3, "ms")
        peer.close()


def _timed_row(options: argparse.Namespace, case: str, taken: CaseResult) -> Row:
    """Return the row of a result in seconds, in ms."""
    in_ms = CaseResult(taken.value * 1e3, taken.limit * 1e3, taken.ratio, taken.quartiles)
    return _row(options, case, in_ms.value, "ms", in_ms)


def _row(options: argparse.Namespace, case: str, value: float, unit: str, taken: CaseResult | None = None) -> Row:
    sys.stderr.write(f"{case}: {value:.4g} {unit}\n")
    is_measured = (
        options.model is None
        and options.shape == "llama-3.1-8b"
        and not options.quantization
        and options.kv_cache_dtype == "auto"
    )
    peer = PEER_VALUES.get(case) if is_measured else None
    name = PEER if peer is not None else None
    if taken is None:
        return Row("engine", case, value, unit, peer=name, peer_value=peer)
    return Row("engine", case, value, unit, taken.limit, taken.ratio, name, peer, taken.quartiles)


def _config(options: argparse.Namespace, model: str) -> EngineConfig:
    longest = max([*options.context, *options.single, *(length for _, length in options.prefill)])
    return EngineConfig(
        tensor_parallel_size=options.tensor_parallel_size,
        pipeline_parallel_size=options.pipeline_parallel_size,
        enable_expert_parallel=options.enable_expert_parallel,
        disable_custom_all_reduce=options.disable_custom_all_reduce,
        cpu_offload_gb=options.cpu_offload_gb,
        model=model,
        device=options.device,
        dtype="bfloat16",
        load_format=options.load,
        max_model_len=options.max_model_len or longest + 512,
        max_num_seqs=max(options.batches),
        max_num_batched_tokens=max(options.max_num_batched_tokens, max(options.batches)),
        gpu_memory_utilization=options.gpu_memory_utilization,
        enforce_eager=options.enforce_eager,
        async_scheduling=False if options.no_async_scheduling else None,
        quantization=options.quantization,
        kv_cache_dtype=options.kv_cache_dtype,
        enable_lora=options.adapters > 0,
        max_loras=max(1, options.adapters),
        max_lora_rank=options.adapter_rank,
    )


def _pair(text: str) -> tuple[int, int]:
    """Parse a case such as `32x2048`: count and length."""
    count, _, length = text.partition("x")
    return int(count), int(length)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="baton-bench engine", description=__doc__)
    made.add_argument("--shape", choices=sorted(SHAPES), default="llama-3.1-8b", help="shape of the model")
    made.add_argument("--model", help="folder of a model, whose config gives the limits, in place of a shape")
    made.add_argument(
        "--load",
        choices=["dummy", "auto"],
        default="dummy",
        help="load format: dummy (random weights) or auto (the weights of --model)",
    )
    made.add_argument("--device", choices=["auto", "cpu", "cuda", "xpu"], default="auto", help="device of the engine")
    made.add_argument(
        "--batches", type=int, nargs="+", default=[1, 8, 32, 64, 128, 256], help="batch sizes of the decode cases"
    )
    made.add_argument("--context", type=int, nargs="+", default=[1024], help="tokens of each decoding sequence")
    made.add_argument(
        "--prefill",
        type=_pair,
        nargs="*",
        default=[(128, 512), (32, 2048), (8, 8192)],
        help="prefill cases as COUNTxLENGTH",
    )
    made.add_argument(
        "--single", type=int, nargs="*", default=[512, 2048, 8192], help="prompt lengths of the TTFT cases"
    )
    made.add_argument(
        "--rounds", type=int, default=5, help="on a CPU: how often value and limit are measured alternately"
    )
    made.add_argument("--steps", type=int, default=48, help="decode steps of which the median is taken")
    made.add_argument("--max-num-batched-tokens", type=int, default=8192, help="most tokens in one step")
    made.add_argument("--max-model-len", type=int, help="context length (default: as long as the cases need)")
    made.add_argument(
        "--gpu-memory-utilization", type=float, default=0.9, help="fraction of the device's memory that the engine uses"
    )
    made.add_argument("--enforce-eager", action="store_true", help="do not capture graphs")
    made.add_argument(
        "--no-async-scheduling", action="store_true", help="schedule each step after the previous one has ended"
    )
    made.add_argument(
        "--tensor-parallel-size", type=int, default=1, help="number of devices over which the model is split"
    )
    made.add_argument(
        "--pipeline-parallel-size", type=int, default=1, help="number of stages into which the layers are divided"
    )
    made.add_argument(
        "--enable-expert-parallel", action="store_true", help="give each device whole experts, not a part of each"
    )
    made.add_argument(
        "--cpu-offload-gb", type=float, default=0.0, help="memory to save by weights in host memory, in GiB"
    )
    made.add_argument(
        "--disable-custom-all-reduce", action="store_true", help="sum over devices with the communication library only"
    )
    made.add_argument(
        "--peer", help="also measure transformers' continuous batching, with this attention implementation (sdpa, …)"
    )
    made.add_argument("--peer-steps", type=int, default=16, help="decode steps of the peer")
    made.add_argument("--quantization", choices=sorted(WEIGHT_BITS), help="quantize the weights as the server would")
    made.add_argument(
        "--kv-cache-dtype",
        choices=["auto", "fp8", "fp8_e4m3", "fp8_e5m2", "int8"],
        default="auto",
        help="dtype of the KV cache",
    )
    made.add_argument(
        "--adapters", type=int, default=0, help="also measure decode steps that mix this number of LoRA adapters"
    )
    made.add_argument("--adapter-rank", type=int, default=16, help="rank of the adapters")
    made.add_argument("--json", action="store_true", help="print one JSON object per row")
    return made


def run(arguments: Sequence[str]) -> None:
    options = parser().parse_args(arguments)
    with torch.inference_mode():
        rows = list(measure(options))
    if options.peer:
        gc.collect()
        rows += measure_peer(options)
    show(rows, as_json=options.json)
