"""Compare one prefill and one decode instance with one unified instance on the same CPU cores, in a closed loop.

`baton-bench pd-cpu MODEL [--concurrency 8] [--prompt 1024] [--output 128] [--requests 32] [--chunks 128 512] [--json]`

`baton serve` starts the setups alternately, `--rounds` times each, so that all of them meet the same other load of the
machine; values are medians over rounds. Prompts are new random token IDs. Throughput counts output tokens. The last
rows compare 1P1D with each unified setup: a ratio above 1 means that 1P1D is better.
"""

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import httpx

from baton_serve.bench.report import Row, show
from baton_serve.bench.serving.load_client import BenchTarget, drive, percentile
from baton_serve.bench.serving.peers import FIRST_TOKEN, LAST_TOKEN, START_S, Server, running
from baton_serve.bench.serving.workload import BenchRequest
from baton_serve.child_command import module_command

WARM_UP = 2
"""Requests that are sent to each new server and not counted."""


@dataclass(frozen=True, slots=True)
class CpuSetup:
    name: str
    flags: tuple[str, ...]
    is_apart: bool


@dataclass(frozen=True, slots=True)
class Values:
    tokens_per_s: float
    p99_itl_s: float
    mean_itl_s: float
    mean_ttft_s: float


def setups(options: argparse.Namespace) -> list[CpuSetup]:
    """Return the setups to measure, 1P1D first."""
    apart = ("--prefill", "1", "--decode", "1", *options.pd_args)
    unified = ("--prefill", "0", "--decode", "0", "--unified", "1")
    sized = ((chunk, ("--max-num-batched-tokens", str(chunk))) for chunk in options.chunks)
    return [
        CpuSetup("1P1D", apart, True),
        *(CpuSetup(f"unified, chunk {chunk}", (*unified, *flags), False) for chunk, flags in sized),
    ]


def measure(setup: CpuSetup, options: argparse.Namespace, *, seed: int) -> Values:
    """Start one setup, send the load once and return its values. `seed` determines the prompts. Raises `SystemExit` if
    a request fails."""
    serve = module_command("baton_serve", "serve", options.model, "--port", "{port}")
    draw = random.Random(seed)

    def requests(count: int) -> list[BenchRequest]:
        prompts = ([draw.randint(FIRST_TOKEN, LAST_TOKEN) for _ in range(options.prompt)] for _ in range(count))
        return [BenchRequest(at_s=0.0, prompt=prompt, max_tokens=options.output) for prompt in prompts]

    with running(Server(setup.name, [*serve, *setup.flags, *options.baton_args])) as url:
        sending = BenchTarget(url, max_concurrency=options.concurrency)
        wait_for_instances(url, 2 if setup.is_apart else 1)
        asyncio.run(drive(requests(WARM_UP), sending))
        outcomes, seconds = asyncio.run(drive(requests(options.requests), sending))
    if failed := [outcome.error for outcome in outcomes if outcome.error]:
        raise SystemExit(f"baton-bench pd-cpu: {setup.name} answered {failed[0]}")
    gaps = [gap for outcome in outcomes for gap in outcome.itls_s]
    return Values(
        tokens_per_s=sum(outcome.output_tokens for outcome in outcomes) / seconds,
        p99_itl_s=percentile(gaps, 99),
        mean_itl_s=statistics.fmean(gaps),
        mean_ttft_s=statistics.fmean(outcome.ttft_s for outcome in outcomes),
    )


def wait_for_instances(url: str, count: int) -> None:
    """Wait until `count` instances are ready. A router is healthy as soon as one instance can answer. Raises
    `SystemExit` after `START_S`."""
    deadline = time.monotonic() + START_S
    while len(httpx.get(f"{url}/health", timeout=START_S).json()["instances"]) < count:
        if time.monotonic() > deadline:
            raise SystemExit(f"baton-bench pd-cpu: {count} instances did not start within {START_S:g} s")
        time.sleep(0.1)


def rows(found: Sequence[tuple[CpuSetup, Sequence[Values]]]) -> Iterator[Row]:
    """Yield the medians of each setup, then the comparisons. `found` has each setup with its values of every round."""
    middle = {
        setup: Values(
            *(
                statistics.median(getattr(values, name) for values in rounds)
                for name in ("tokens_per_s", "p99_itl_s", "mean_itl_s", "mean_ttft_s")
            )
        )
        for setup, rounds in found
    }
    for setup, values in middle.items():
        yield Row("pd-cpu", f"{setup.name}: throughput", values.tokens_per_s, "tok/s")
        yield Row("pd-cpu", f"{setup.name}: p99 ITL", values.p99_itl_s * 1e3, "ms")
        yield Row("pd-cpu", f"{setup.name}: mean ITL", values.mean_itl_s * 1e3, "ms")
        yield Row("pd-cpu", f"{setup.name}: mean TTFT", values.mean_ttft_s * 1e3, "ms")
    apart = next(values for setup, values in middle.items() if setup.is_apart)
    for setup, peer in middle.items():
        if setup.is_apart:
            continue
        pairs = (
            ("throughput", "tok/s", apart.tokens_per_s, peer.tokens_per_s, apart.tokens_per_s / peer.tokens_per_s),
            ("p99 ITL", "ms", apart.p99_itl_s * 1e3, peer.p99_itl_s * 1e3, peer.p99_itl_s / apart.p99_itl_s),
        )
        for what, unit, ours, theirs, ratio in pairs:
            yield Row("pd-cpu", f"1P1D: {what}", ours, unit, None, ratio, setup.name, theirs)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="baton-bench pd-cpu", description=__doc__)
    made.add_argument("model", help="folder of a model in Hugging Face format")
    made.add_argument("--concurrency", type=int, default=8, help="number of concurrent requests")
    made.add_argument("--prompt", type=int, default=1024, help="prompt tokens of each request")
    made.add_argument("--output", type=int, default=128, help="output tokens of each request")
    made.add_argument("--requests", type=int, default=32, help="number of measured requests")
    made.add_argument("--rounds", type=int, default=3, help="how often each setup is started and measured")
    made.add_argument(
        "--chunks", type=int, nargs="*", default=[128, 512], help="--max-num-batched-tokens of the unified setups"
    )
    made.add_argument(
        "--baton-args", type=str.split, default=[], help="more flags of `baton serve` for all setups, as one string"
    )
    made.add_argument(
        "--pd-args", type=str.split, default=[], help="more flags of `baton serve` for 1P1D, as one string"
    )
    made.add_argument("--json", action="store_true", help="print one JSON object per row")
    return made


def run(arguments: Sequence[str]) -> None:
    options = parser().parse_args(arguments)
    chosen = setups(options)
    found: list[tuple[CpuSetup, list[Values]]] = [(setup, []) for setup in chosen]
    for number in range(options.rounds):
        for setup, rounds in found:
            values = measure(setup, options, seed=number)
            rounds.append(values)
            sys.stderr.write(
                f"{setup.name}: {values.tokens_per_s:.4g} tok/s, p99 ITL {values.p99_itl_s * 1e3:.4g} ms, mean"
                f" {values.mean_itl_s * 1e3:.4g} ms, TTFT {values.mean_ttft_s * 1e3:.4g} ms\n"
            )
            sys.stderr.flush()
    show(rows(found), as_json=options.json)
