"""Compare one encode, one prefill and one decode instance with two unified ones, for chats with images.

`baton-bench encode-pool [--images 4] [--rates 1 2 inf] [--num-prompts 32] [--budget-s 280] [--baton-args "..."]`

Serves the Qwen2.5-VL-7B shape with random weights. `baton serve` gives instances the devices in turn: on a machine of
one device the instances of both setups share it, and each must be given a part of its memory, as by
`--baton-args "--kv-cache-memory-bytes 16G"`. Each setup gets the same chats at the same times; all images differ. Some
chats that are not counted warm it up. A ratio above 1 means that the setup with the encode pool is better.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
from tokenizers import Tokenizer

from baton_serve.bench.report import Row, show
from baton_serve.bench.serving.datasets import (
    Arrivals,
    ImageSize,
    RandomImages,
    RandomLengths,
    TextMeasure,
    random_dataset,
    with_images,
)
from baton_serve.bench.serving.load_client import BenchTarget, drive
from baton_serve.bench.serving.peers import Server, running, wait_complete
from baton_serve.bench.serving.servable_shape import write_servable_images
from baton_serve.bench.serving.serve_report import ServeMeasures, measure
from baton_serve.bench.serving.workload import BenchRequest
from baton_serve.child_command import module_command

APART, UNIFIED = "1 encode + 1 prefill + 1 decode", "2 unified"
SETUPS = {
    "unified": (UNIFIED, ("--unified", "2", "--prefill", "0", "--decode", "0"), 2),
    "apart": (APART, ("--encode", "1", "--prefill", "1", "--decode", "1"), 3),
}
"""Name, flags of `baton serve` and number of instances of each setup, by its name on the command line."""
_LATENCIES = (("ttft", 50), ("ttft", 99), ("tpot", 50), ("tpot", 99), ("itl", 99))
"""Metrics and percentiles in the output."""


@dataclass(frozen=True, slots=True)
class ImageLoad:
    """The chats of one rate: requests per second, or inf for all at once."""

    rate: float
    requests: list[BenchRequest]

    @property
    def name(self) -> str:
        return f"{len(self.requests)} at once" if self.rate == float("inf") else f"{self.rate:g}/s"


def chats(options: argparse.Namespace, tokenizer: Tokenizer, *, count: int, rate: float, seed: int) -> ImageLoad:
    """Return chats of random text and images with their times of arrival."""
    lengths = RandomLengths(options.text_tokens, options.output)
    sizes = (ImageSize(options.image_size, options.image_size, 1.0),)
    found = random_dataset(count, lengths, TextMeasure(tokenizer), seed)
    found = with_images(found, RandomImages(options.images, sizes), seed)
    times = Arrivals(rate).times(count, seed)
    return ImageLoad(rate, [replace(request, at_s=at) for request, at in zip(found, times, strict=True)])


def measure_setups(
    options: argparse.Namespace, folder: Path, warm_up: ImageLoad, loads: Sequence[ImageLoad]
) -> Iterator[tuple[str, ImageLoad, ServeMeasures]]:
    """Start each setup, send it all loads, and yield what was measured. Each setup has an equal part of the time budget
    and what earlier ones left: a load whose last chat would come later is reported on stderr and skipped, as is a setup
    that does not start."""
    begun, share_s = time.monotonic(), options.budget_s / len(options.setups)
    for number, (name, flags, count) in enumerate((SETUPS[setup] for setup in options.setups), 1):
        deadline = begun + number * share_s
        serve = module_command("baton_serve", "serve", str(folder), "--load-format", "dummy", "--port", "{port}")
        started = time.monotonic()
        try:
            with running(Server(name, [*serve, *flags, *options.baton_args])) as url:
                wait_complete(url, count)
                sys.stderr.write(f"{name}: ready after {time.monotonic() - started:.1f} s\n")
                target = BenchTarget(url, backend="openai-chat")
                asyncio.run(drive(warm_up.requests, target))
                for load in loads:
                    left_s = deadline - time.monotonic()
                    if load.requests[-1].at_s > left_s:
                        sys.stderr.write(f"{name}, {load.name}: skipped, it would exceed --budget-s\n")
                        continue
                    outcomes, seconds = asyncio.run(drive(load.requests, replace(target, timeout_s=left_s)))
                    measured = measure(outcomes, seconds, metrics=("ttft", "tpot", "itl"), percentiles=(50.0, 99.0))
                    _report(name, load, measured)
                    yield name, load, measured
                sys.stderr.write(f"{name}: images that came from the encode pool: {_num_fetched(url)}\n")
        except SystemExit as exc:
            sys.stderr.write(f"{name}: {exc}\n")


def _report(name: str, load: ImageLoad, measured: ServeMeasures) -> None:
    """Show a load's measures on stderr at once: a later one may not come."""
    latencies = ", ".join(
        f"p{percent} {metric.upper()} {_ms(measured, metric, percent):.4g}" for metric, percent in _LATENCIES
    )
    rate = measured.per_second(measured.completed)
    failed = f", {measured.failed} failed" if measured.failed else ""
    sys.stderr.write(f"{name}, {load.name}: {latencies} ms, {rate:.3g} requests/s{failed}\n")
    sys.stderr.flush()


def _ms(measured: ServeMeasures, metric: str, percent: int) -> float:
    return measured.latencies[metric].percentiles[percent]


def _num_fetched(url: str) -> int:
    """Return the number of images whose embeddings instances have fetched from encode instances."""
    instances = httpx.get(f"{url}/health", timeout=10).json()["instances"]
    texts = [httpx.get(f"http://{one['http_address']}/metrics", timeout=10).text for one in instances]
    counts = [line for text in texts for line in text.splitlines() if line.startswith("baton:image_embeddings_total")]
    return int(sum(float(line.rsplit(" ", 1)[1]) for line in counts if 'result="fetched"' in line))


def rows(found: Sequence[tuple[str, ImageLoad, ServeMeasures]]) -> Iterator[Row]:
    """Yield latencies and throughput of each load; the setup with the encode pool stands beside the unified one."""
    by_load = {(name, load.name): measured for name, load, measured in found}
    for (name, load), measured in by_load.items():
        case = f"{name}, {load}"
        peer = by_load.get((UNIFIED, load)) if name == APART else None
        for metric, percent in _LATENCIES:
            theirs = None if peer is None else _ms(peer, metric, percent)
            latency = f"{case}: p{percent} {metric.upper()}"
            yield _beside(latency, _ms(measured, metric, percent), "ms", theirs, is_less_better=True)
        theirs = None if peer is None else peer.per_second(peer.completed)
        throughput = measured.per_second(measured.completed)
        yield _beside(f"{case}: requests", throughput, "req/s", theirs, is_less_better=False)
        yield Row("encode-pool", f"{case}: failed", float(measured.failed), "")


def _beside(case: str, ours: float, unit: str, theirs: float | None, *, is_less_better: bool) -> Row:
    if theirs is None:
        return Row("encode-pool", case, ours, unit)
    return Row(
        "encode-pool", case, ours, unit, None, theirs / ours if is_less_better else ours / theirs, UNIFIED, theirs
    )


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="baton-bench encode-pool", description=__doc__)
    made.add_argument("--setups", nargs="+", choices=SETUPS, default=list(SETUPS), help="setups to measure, in order")
    made.add_argument("--rates", type=float, nargs="+", default=[1.0, 2.0, float("inf")], help="requests per second")
    made.add_argument("--num-prompts", type=int, default=32, help="chats at each rate")
    made.add_argument("--images", type=int, default=4, help="images of each chat")
    made.add_argument("--image-size", type=int, default=1024, help="width and height of images in pixels")
    made.add_argument("--text-tokens", type=int, default=100, help="tokens of text of each chat")
    made.add_argument("--output", type=int, default=64, help="tokens of each answer")
    made.add_argument("--budget-s", type=float, default=600.0, help="time for all setups in seconds")
    made.add_argument("--baton-args", type=str.split, default=[], help="more options of `baton serve`, as one string")
    made.add_argument("--small", action="store_true", help="serve a tiny shape, whose values say nothing about speed")
    made.add_argument("--json", action="store_true", help="print one JSON object per row")
    return made


def run(arguments: Sequence[str]) -> None:
    """Run `baton-bench encode-pool` with these arguments."""
    options = parser().parse_args(arguments)
    with tempfile.TemporaryDirectory() as made:
        folder = write_servable_images(Path(made), is_small=options.small)
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        warm_up = chats(options, tokenizer, count=4, rate=float("inf"), seed=1)
        loads = [
            chats(options, tokenizer, count=options.num_prompts, rate=rate, seed=number)
            for number, rate in enumerate(options.rates, 2)
        ]
        found = list(measure_setups(options, folder, warm_up, loads))
    show(rows(found), as_json=options.json)
