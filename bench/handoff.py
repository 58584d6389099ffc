"""What a handoff adds for the client of a short prompt: a prefill and a decode instance of `baton serve`, on this CPU.

`baton-bench handoff [MODEL] [--transports usm zeromq] [--requests 100] [--input-len 64] [--json]`

One stream at a time, fresh prompts. Prefill sends the first token as its computing ends, decode's first step brings the
second: so the gap between the two, less the median of the later gaps (a decode step each), is what lies between
prefill's end and decode's first step. Beside it the part of the handoff that the router was told nothing hid.
"""

import argparse
import asyncio
import statistics
import sys
from collections.abc import Iterator, Sequence

import httpx

from bench.peers import Server, running
from bench.report import Row, show
from bench.serve import Outcome, drive
from bench.workload import random_requests

TARGET_MS = 2.0
WARM_UP = 5
EXPOSED = "baton:handoff_exposed_seconds"


def added_s(outcomes: Sequence[Outcome]) -> list[float]:
    """By request: the second token's gap less the median gap after it."""
    served = [outcome.itls_s for outcome in outcomes if outcome.error is None and len(outcome.itls_s) > 2]
    return [first - statistics.median(later) for first, *later in served]


def exposed_s(metrics: str) -> float:
    """Mean over all handoffs, from a router's /metrics. Raises ValueError without one."""
    sums = {"_sum": 0.0, "_count": 0.0}
    for line in metrics.splitlines():
        for suffix in sums:
            if line.startswith(EXPOSED + suffix):
                sums[suffix] += float(line.rpartition(" ")[2])
    if not sums["_count"]:
        raise ValueError("nothing was handed off")
    return sums["_sum"] / sums["_count"]


def rows(options: argparse.Namespace) -> Iterator[Row]:
    for transport in options.transports:
        serve = [sys.executable, "-m", "services.cli", "serve", *([options.model] if options.model else [])]
        flags = ["--port", "{port}", "--device", "cpu", "--disaggregation-min-tokens", "0", "--kv-transport", transport]
        with running(Server(transport, [*serve, *flags])) as url:
            outcomes = _send(url, options)
            found = added_s(outcomes)
            if not found:
                raise SystemExit(f"baton-bench handoff: no request succeeded: {outcomes[0].error}")
            exposed = exposed_s(httpx.get(f"{url}/metrics", timeout=10).text)
        median, worst = statistics.median(found) * 1e3, statistics.quantiles(found, n=100)[-1] * 1e3
        yield Row("handoff", f"{transport}: median added", median, "ms", TARGET_MS, TARGET_MS / median)
        yield Row("handoff", f"{transport}: p99 added", worst, "ms")
        yield Row("handoff", f"{transport}: exposed, mean", exposed * 1e3, "ms")


def _send(url: str, options: argparse.Namespace) -> list[Outcome]:
    count = WARM_UP + options.requests
    requests = random_requests(
        count=count, input_tokens=options.input_len, output_tokens=16, rate_per_s=float("inf"), range_ratio=0.0, seed=3
    )
    load = argparse.Namespace(max_concurrency=1, base_url=url, model=None, api_key=None, ignore_eos=True)
    outcomes, _ = asyncio.run(drive(requests, load))
    return outcomes[WARM_UP:]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="baton-bench handoff", description=__doc__)
    made.add_argument("model", nargs="?", help="a model's folder; default: the bundled one")
    made.add_argument("--transports", nargs="+", default=["usm", "zeromq"])
    made.add_argument("--requests", type=int, default=100)
    made.add_argument("--input-len", type=int, default=64, help="tokens of a prompt, about")
    made.add_argument("--json", action="store_true")
    return made


def run(arguments: Sequence[str]) -> None:
    options = parser().parse_args(arguments)
    show(rows(options), as_json=options.json)
