"""Measure what a handoff adds to a prompt: one prefill and one decode instance of `baton serve`, on this CPU, or over
several ranks each or other devices with `--baton-args`.

`baton-bench handoff [MODEL] [--transports usm zeromq] [--tensor-parallel-size 2] [--requests 100] [--input-len 64]
[--json] [--baton-args ...]`

One stream runs at a time, with a new prompt each. `to decode's first step` is the time from the end of prefill's last
step to the start of the first decode step of that sequence. Both processes share a clock, and each answer reports it
(`x-baton-explain`). `second token later` is the part that a client sees: the gap between the first two tokens, less
the median of the later gaps (one decode step each). `exposed` is the part of the handoff that was not hidden behind
prefill, from the router's metrics; its part of the time to the first token, which is little more than prefill, is in
percent.
"""

import argparse
import asyncio
import statistics
from collections.abc import Iterator, Sequence

import httpx

from baton_serve.bench.report import Row, show
from baton_serve.bench.serving.load_client import BenchTarget, RequestOutcome, drive
from baton_serve.bench.serving.peers import Server, running
from baton_serve.bench.serving.workload import random_requests
from baton_serve.child_command import module_command

TARGET_MS = 2.0
"""Design target for the time from prefill's end to decode's first step."""
TARGET_SHARE = 1.0
"""Design target for the exposed part of the handoff, in percent of the time to the first token."""
WARM_UP = 5
"""Number of requests that are sent first and not counted."""
EXPOSED = "baton:handoff_exposed_seconds"


def added_s(outcomes: Sequence[RequestOutcome]) -> list[float]:
    """Return for each request the gap before the second token less the median of the later gaps, in seconds."""
    served = [outcome.itls_s for outcome in outcomes if outcome.error is None and len(outcome.itls_s) > 2]
    return [first - statistics.median(later) for first, *later in served]


def to_step_s(outcomes: Sequence[RequestOutcome]) -> list[float]:
    """Return the seconds from prefill's end to decode's first step, of all requests that were handed off."""
    return [outcome.to_step_s for outcome in outcomes if outcome.error is None and outcome.to_step_s]


def exposed_s(metrics: str) -> float:
    """Return the mean exposed seconds of all handoffs, from the text of a router's /metrics. Raises `ValueError`
    without any handoff."""
    sums = {"_sum": 0.0, "_count": 0.0}
    for line in metrics.splitlines():
        for suffix in sums:
            if line.startswith(EXPOSED + suffix):
                sums[suffix] += float(line.rpartition(" ")[2])
    if not sums["_count"]:
        raise ValueError("nothing was handed off")
    return sums["_sum"] / sums["_count"]


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Start a cluster for each transport, send the load and yield the results."""
    for transport in options.transports:
        serve = module_command("baton_serve", "serve", *([options.model] if options.model else []))
        flags = ["--port", "{port}", "--disaggregation-min-tokens", "0", "--kv-transport", transport]
        flags += ["--tensor-parallel-size", str(options.tensor_parallel_size), "--device", "cpu", *options.baton_args]
        with running(Server(transport, [*serve, *flags])) as url:
            outcomes = send(url, options)
            steps, added = to_step_s(outcomes), added_s(outcomes)
            if len(steps) < 2 or len(added) < 2:
                raise SystemExit(f"baton-bench handoff: fewer than two handoffs: {outcomes[0].error}")
            exposed = exposed_s(httpx.get(f"{url}/metrics", timeout=10).text)
        median = statistics.median(steps) * 1e3
        yield Row("handoff", f"{transport}: to decode's first step", median, "ms", TARGET_MS, TARGET_MS / median)
        yield Row("handoff", f"{transport}: the same, p99", _p99(steps) * 1e3, "ms")
        yield Row("handoff", f"{transport}: second token later", statistics.median(added) * 1e3, "ms")
        yield Row("handoff", f"{transport}: the same, p99", _p99(added) * 1e3, "ms")
        yield Row("handoff", f"{transport}: exposed, mean", exposed * 1e3, "ms")
        ttft = statistics.median(outcome.ttft_s for outcome in outcomes if outcome.error is None)
        share = exposed / ttft * 100
        yield Row("handoff", f"{transport}: exposed, part of TTFT", share, "%", TARGET_SHARE, TARGET_SHARE / share)


def _p99(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[-1]


def send(url: str, options: argparse.Namespace) -> list[RequestOutcome]:
    """Send the warm-up and the measured requests, one after another, and return the outcomes of the measured ones."""
    count = WARM_UP + options.requests
    requests = random_requests(
        count=count, input_tokens=options.input_len, output_tokens=16, rate_per_s=float("inf"), range_ratio=0.0, seed=3
    )
    load = BenchTarget(url, max_concurrency=1, headers={"x-baton-explain": "1"})
    outcomes, _ = asyncio.run(drive(requests, load))
    return outcomes[WARM_UP:]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="baton-bench handoff", description=__doc__)
    made.add_argument("model", nargs="?", help="folder of a model; default: the bundled demo model")
    made.add_argument(
        "--transports", nargs="+", default=["usm", "zeromq"], help="KV transports to measure, one after another"
    )
    made.add_argument("--requests", type=int, default=100, help="number of measured requests")
    made.add_argument("--input-len", type=int, default=64, help="approximate number of tokens of a prompt")
    made.add_argument("--tensor-parallel-size", type=int, default=1, help="ranks of each instance")
    made.add_argument("--json", action="store_true", help="print one JSON object per row")
    made.add_argument(
        "--baton-args", nargs=argparse.REMAINDER, default=[], help="more options of `baton serve`; must come last"
    )
    return made


def run(arguments: Sequence[str]) -> None:
    options = parser().parse_args(arguments)
    show(rows(options), as_json=options.json)
