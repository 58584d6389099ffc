"""List the kernels of a decode step by their time, and the idle time of the device before each.

`baton-bench kernels [--shape llama-3.1-8b] [--batch 1] [--context 1024] [--tensor-parallel-size 1] [--json]`

The engine decodes with random weights under torch's profiler, which sees kernels inside captured graphs; of several
ranks it sees rank 0. Profiled steps are a little slower, so proportions mean more than sums.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from baton_serve.bench.micro.engine import Prompts, decoding
from baton_serve.bench.micro.engine_shapes import SHAPES, write_shape
from baton_serve.engine import Engine, EngineConfig


@dataclass(frozen=True, slots=True)
class KernelSpan:
    """One kernel or copy on the device, in microseconds since an arbitrary time."""

    name: str
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Total:
    """Count and times of one kernel per step. `idle_us` is the time for which the device was idle before it."""

    name: str
    count: float
    busy_us: float
    idle_us: float


def tally(spans: Iterable[KernelSpan], steps: int) -> list[Total]:
    """Return the totals per kernel, the one with the longest busy and idle time first. If spans overlap, the later one
    has no idle time before it."""
    totals: dict[str, list[float]] = {}
    ended: float | None = None
    for span in sorted(spans, key=lambda one: one.begin):
        total = totals.setdefault(span.name, [0.0, 0.0, 0.0])
        total[0] += 1
        total[1] += span.end - span.begin
        total[2] += 0.0 if ended is None else max(0.0, span.begin - ended)
        ended = span.end if ended is None else max(ended, span.end)
    found = [Total(name, *(value / steps for value in values)) for name, values in totals.items()]
    return sorted(found, key=lambda total: total.busy_us + total.idle_us, reverse=True)


def observe(engine: Engine, batch: int, context: int, steps: int) -> tuple[list[KernelSpan], float]:
    """Return the device's spans of `steps` steps, and the seconds of a step without the profiler (the
    first quartile)."""
    with decoding(engine, Prompts(engine), batch, context, 2 * steps + 4) as timed:
        seconds = sorted(timed(steps))[steps // 4]
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is not None
        name = accelerator.type.upper()
        with profile(activities=[getattr(ProfilerActivity, name)]) as seen:
            timed(steps)
            torch.accelerator.synchronize()
    spans = [
        KernelSpan(event.name, event.time_range.start, event.time_range.end)
        for event in seen.events() or ()
        if event.device_type.name == name
    ]
    return spans, seconds


def _config(options: argparse.Namespace, model: str) -> EngineConfig:
    return EngineConfig(
        model=model,
        device=options.device,
        dtype="bfloat16",
        load_format="dummy",
        max_model_len=options.context + 512,
        max_num_seqs=options.batch,
        max_num_batched_tokens=2048,
        gpu_memory_utilization=options.gpu_memory_utilization,
        quantization=options.quantization,
        kv_cache_dtype=options.kv_cache_dtype,
        tensor_parallel_size=options.tensor_parallel_size,
    )


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="baton-bench kernels", description=__doc__)
    made.add_argument("--shape", choices=sorted(SHAPES), default="llama-3.1-8b", help="shape of the model")
    made.add_argument("--device", choices=["auto", "cuda", "xpu"], default="auto", help="device of the engine")
    made.add_argument("--batch", type=int, default=1, help="number of decoding sequences")
    made.add_argument("--context", type=int, default=1024, help="tokens of each sequence")
    made.add_argument("--steps", type=int, default=16, help="number of profiled steps")
    made.add_argument(
        "--tensor-parallel-size", type=int, default=1, help="number of devices over which the model is split"
    )
    made.add_argument("--quantization", help="quantize the weights as the server would")
    made.add_argument("--kv-cache-dtype", default="auto", help="dtype of the KV cache")
    made.add_argument(
        "--gpu-memory-utilization", type=float, default=0.5, help="fraction of the device's memory that the engine uses"
    )
    made.add_argument("--json", action="store_true", help="print one JSON object per kernel")
    return made


def run(arguments: Sequence[str]) -> None:
    options = _parser().parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        started = time.perf_counter()
        with Engine(_config(options, str(write_shape(options.shape, Path(folder))))) as engine:
            sys.stderr.write(f"started in {time.perf_counter() - started:.1f} s\n")
            spans, seconds = observe(engine, options.batch, options.context, options.steps)
    totals = tally(spans, options.steps)
    if options.json:
        for total in totals:
            sys.stdout.write(json.dumps(asdict(total)) + "\n")
        return
    busy, idle = sum(total.busy_us for total in totals), sum(total.idle_us for total in totals)
    sys.stdout.write(f"a step: {seconds * 1e6:.0f} us; under the profiler {busy:.0f} busy, {idle:.0f} idle\n")
    sys.stdout.write(f"{'times':>7}{'busy us':>10}{'idle us':>10}{'us each':>9}  kernel\n")
    for total in totals:
        each = total.busy_us / total.count
        line = f"{total.count:7.1f}{total.busy_us:10.1f}{total.idle_us:10.1f}{each:9.2f}  {total.name[:90]}\n"
        sys.stdout.write(line)
