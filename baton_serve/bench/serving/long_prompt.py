"""Measure running streams beside one long prompt: how much longer their gaps become, with 1P1D and with one instance.

`baton-bench long-prompt [MODEL] [--shape bench-0.5b-hybrid] [--prompt 32000] [--streams 4] [--output 512] [--json]`

Each setup of `baton serve` gets the streams first without the long prompt, then again with it: it is sent `--delay-s`
seconds after them. Gaps between two tokens of a stream count from the time when the long prompt was sent to its first
token. The target is a p99 at most 1.2 times that without the prompt. Without MODEL, a model of `--shape` with random
weights is served.
"""

import argparse
import asyncio
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory

from baton_serve.bench.micro.engine_shapes import SHAPES
from baton_serve.bench.report import Row, show
from baton_serve.bench.serving.load_client import BenchTarget, RequestOutcome, drive, percentile
from baton_serve.bench.serving.pd_cpu import wait_for_instances
from baton_serve.bench.serving.peers import FIRST_TOKEN, LAST_TOKEN, Server, running
from baton_serve.bench.serving.servable_shape import write_servable_shape
from baton_serve.bench.serving.workload import BenchRequest
from baton_serve.child_command import module_command

MAX_GAP_RATIO = 1.2
"""Design target: the streams' p99 gap beside the long prompt, over that without it."""
SHORT_PROMPT = 64
"""Prompt tokens of each stream."""
SETUPS = {
    "1P1D": ("--prefill", "1", "--decode", "1", "--disaggregation-min-tokens", "0"),
    "unified": ("--prefill", "0", "--decode", "0", "--unified", "1"),
}


@dataclass(frozen=True, slots=True)
class StreamGaps:
    """The gaps of all streams in seconds, without the long prompt and beside it, and the TTFT of the long prompt."""

    without_s: list[float]
    beside_s: list[float]
    ttft_s: float


def gaps_within(outcome: RequestOutcome, start_s: float, end_s: float) -> list[float]:
    """Return the gaps of a stream, in seconds, that end between two moments of the monotonic clock."""
    first_s = outcome.started_s + outcome.ttft_s
    ends = list(accumulate(outcome.itls_s, initial=first_s))[1:]
    return [gap for gap, at in zip(outcome.itls_s, ends, strict=True) if start_s <= at <= end_s]


def measure(name: str, model: Sequence[str], options: argparse.Namespace) -> StreamGaps:
    """Start one setup and send the streams without and beside the long prompt. Raises `SystemExit` if one fails."""
    serve = module_command("baton_serve", "serve", *model, "--port", "{port}")
    draw = random.Random(5)

    def request(at_s: float, num_tokens: int, max_tokens: int) -> BenchRequest:
        prompt = [draw.randint(FIRST_TOKEN, LAST_TOKEN) for _ in range(num_tokens)]
        return BenchRequest(at_s=at_s, prompt=prompt, max_tokens=max_tokens)

    def streams() -> list[BenchRequest]:
        return [request(0.0, SHORT_PROMPT, options.output) for _ in range(options.streams)]

    with running(Server(name, [*serve, *SETUPS[name], *options.baton_args])) as url:
        wait_for_instances(url, 2 if name == "1P1D" else 1)
        target = BenchTarget(url, timeout_s=options.timeout_s)
        asyncio.run(drive([request(0.0, SHORT_PROMPT, 8)], target))
        alone, _ = asyncio.run(drive(streams(), target))
        mixed, _ = asyncio.run(drive([*streams(), request(options.delay_s, options.prompt, 2)], target))
    if failed := [outcome.error for outcome in (*alone, *mixed) if outcome.error]:
        raise SystemExit(f"baton-bench long-prompt: {name} answered {failed[0]}")
    long = mixed[-1]
    start_s, end_s = long.started_s, long.started_s + long.ttft_s
    return StreamGaps(
        [gap for outcome in alone for gap in outcome.itls_s],
        [gap for outcome in mixed[:-1] for gap in gaps_within(outcome, start_s, end_s)],
        long.ttft_s,
    )


def rows(name: str, found: StreamGaps) -> Iterator[Row]:
    """Yield the results of one setup. Raises `SystemExit` if the streams had ended before the long prompt began."""
    if not found.beside_s:
        raise SystemExit("baton-bench long-prompt: the streams ended before the prompt began: give a longer --output")
    without, beside = percentile(found.without_s, 99), percentile(found.beside_s, 99)
    yield Row("long-prompt", f"{name}: p99 gap without the prompt", without * 1e3, "ms")
    limit = MAX_GAP_RATIO * without
    yield Row("long-prompt", f"{name}: p99 gap beside the prompt", beside * 1e3, "ms", limit * 1e3, limit / beside)
    yield Row("long-prompt", f"{name}: longest gap beside the prompt", max(found.beside_s) * 1e3, "ms")
    yield Row("long-prompt", f"{name}: TTFT of the prompt", found.ttft_s, "s")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="baton-bench long-prompt", description=__doc__)
    made.add_argument("model", nargs="?", help="folder of a model; default: random weights of --shape")
    made.add_argument("--shape", choices=sorted(SHAPES), default="bench-0.5b-hybrid", help="shape of random weights")
    made.add_argument("--setups", nargs="+", choices=list(SETUPS), default=list(SETUPS), help="setups to measure")
    made.add_argument("--prompt", type=int, default=32_000, help="tokens of the long prompt")
    made.add_argument("--streams", type=int, default=4, help="number of running streams")
    made.add_argument("--output", type=int, default=512, help="output tokens of each stream")
    made.add_argument("--delay-s", type=float, default=1.0, help="seconds from the streams to the long prompt")
    made.add_argument("--timeout-s", type=float, default=1800.0, help="longest time of a request in seconds")
    made.add_argument(
        "--baton-args", type=str.split, default=[], help="more flags of `baton serve` for all setups, as one string"
    )
    made.add_argument("--json", action="store_true", help="print one JSON object per row")
    return made


def run(arguments: Sequence[str]) -> None:
    options = parser().parse_args(arguments)
    found: list[Row] = []
    with TemporaryDirectory() as folder:
        model = [options.model] if options.model else []
        if not model:
            model = [str(write_servable_shape(options.shape, Path(folder))), "--load-format", "dummy"]
        for name in options.setups:
            found += rows(name, measure(name, model, options))
            sys.stderr.write(f"{name} is measured\n")
    show(found, as_json=options.json)
