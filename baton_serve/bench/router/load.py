"""Measure the router alone: fake instances answer its messages at once, so that time and CPU are the router's.

Load and fake instances run in this process (the clients of open streams in another one), the router in its own. Each
case reports requests or tokens per second, and the CPU time of the router's process for each.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import uvloop

from baton_serve.bench.report import Row, show
from baton_serve.bench.router.http_load import LoadConnection
from baton_serve.bench.router.streams import open_streams
from baton_serve.bench.router.targets import RouterTarget, baton, chat, others

LIMIT_LONG_MS, LIMIT_ADDED_MS = 10.0, 0.6
"""Design targets: ms from a long prompt to its instance, and ms that the router adds to a request."""


@dataclass(frozen=True, slots=True)
class ClosedLoopResult:
    """Rate, latency and CPU time per request of one closed loop."""

    rate: float
    p50_ms: float
    cpu_us: float


async def closed_loop(target: RouterTarget, *, seconds: float, concurrency: int, stream: bool) -> ClosedLoopResult:
    """Let `concurrency` clients send one request after another for `seconds`."""
    latencies: list[float] = []
    end = time.perf_counter() + seconds

    async def client(number: int) -> None:
        connection = await LoadConnection.open(target.port)
        count = 0
        while (began := time.perf_counter()) < end:
            await connection.ask(chat(f"What is {number} plus {count}?", stream=stream))
            latencies.append(time.perf_counter() - began)
            count += 1
        connection.close()

    cpu, began = target.cpu_s(), time.perf_counter()
    await asyncio.gather(*(client(i) for i in range(concurrency)))
    wall, cpu = time.perf_counter() - began, target.cpu_s() - cpu
    return ClosedLoopResult(len(latencies) / wall, statistics.median(latencies) * 1e3, cpu / len(latencies) * 1e6)


async def compared(
    targets: list[RouterTarget], options: argparse.Namespace, *, concurrency: int, stream: bool
) -> list[Row]:
    """Measure all targets alternately, `--rounds` times. Take the best result of each, because the machine may have
    other work."""
    runs: dict[str, list[ClosedLoopResult]] = {target.name: [] for target in targets}
    for _ in range(options.rounds):
        for target in targets:
            loop = await closed_loop(target, seconds=options.seconds, concurrency=concurrency, stream=stream)
            runs[target.name].append(loop)
    best = {name: max(loops, key=lambda loop: loop.rate) for name, loops in runs.items()}
    ours, direct = best.pop("Baton"), best.pop("direct")
    case = f"{'streamed' if stream else 'short'} chat, c={concurrency}"
    added = ours.p50_ms - direct.p50_ms
    rows = [
        Row("router", case, ours.rate, "requests/s", direct.rate, ours.rate / direct.rate),
        Row("router", case, ours.p50_ms, "ms p50"),
        Row("router", case, added, "ms p50 added", LIMIT_ADDED_MS, LIMIT_ADDED_MS / added),
        Row("router", case, ours.cpu_us, "us CPU/request"),
    ]
    for name, loop in best.items():
        rows += [
            Row("router", case, ours.rate, "requests/s", None, ours.rate / loop.rate, name, loop.rate),
            Row("router", case, ours.p50_ms, "ms p50", None, loop.p50_ms / ours.p50_ms, name, loop.p50_ms),
            Row("router", case, ours.cpu_us, "us CPU/request", None, loop.cpu_us / ours.cpu_us, name, loop.cpu_us),
        ]
    return rows


async def long_prompts(target: RouterTarget, options: argparse.Namespace) -> list[Row]:
    """Measure prompts of 4,000 tokens, 50 per second: the time from sending a request to its arrival at an instance."""
    rng = random.Random(0)
    words = ["plus", "minus", "seven", "what", "table", "house", "apple", "green", "river", "twelve"]
    took: list[float] = []
    sizes: list[int] = []

    async def one(number: int) -> None:
        text = " ".join(rng.choices(words, k=options.long_words))
        connection = await LoadConnection.open(target.port)
        request_id = f"long{number}"
        began = time.perf_counter()
        body = await connection.ask(chat(text, max_tokens=2, request_id=request_id))
        took.append(target.arrived[request_id] - began)
        sizes.append(int(json.loads(body)["usage"]["prompt_tokens"]))
        connection.close()

    began, tasks = time.perf_counter(), []
    for number in range(int(50 * options.seconds)):
        tasks.append(asyncio.create_task(one(number)))
        # Sleep until an absolute time, so that delays do not add up.
        await asyncio.sleep(max(0.0, began + (number + 1) / 50 - time.perf_counter()))
    await asyncio.gather(*tasks)
    p99 = statistics.quantiles(took, n=100)[98] * 1e3
    case = f"prompts of {statistics.fmean(sizes):,.0f} tokens at 50/s"
    return [
        Row("router", case, statistics.median(took) * 1e3, "ms p50 to instance"),
        Row("router", case, p99, "ms p99 to instance", LIMIT_LONG_MS, LIMIT_LONG_MS / p99),
    ]


async def bench(options: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    wanted = options.cases
    if {"short", "streamed", "long"} & set(wanted):
        async with baton(log_level=options.log_level, workers=options.workers) as ours, others(options.peer) as rest:
            for stream, name in ((False, "short"), (True, "streamed")):
                for concurrency in (1, 16) if name in wanted else ():
                    rows += await compared([ours, *rest], options, concurrency=concurrency, stream=stream)
            if "long" in wanted:
                rows += await long_prompts(ours, options)
    if "streams" in wanted:
        async with baton(log_level=options.log_level, is_paced=True, workers=options.workers) as paced:
            rows += await open_streams(paced, options)
    return rows


CASES = ("short", "streamed", "long", "streams")


def run(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="baton-bench router", description=__doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="cases to run")
    parser.add_argument("--seconds", type=float, default=4.0, help="measuring time of each case and target in seconds")
    parser.add_argument("--streams", type=int, default=200, help="number of open streams")
    parser.add_argument(
        "--tokens-per-s",
        type=float,
        default=30_000.0,
        help="tokens per second of all open streams together; 0: as fast as possible",
    )
    parser.add_argument(
        "--router-cpu", type=int, help="with open streams: run the router on this CPU and the load on the others"
    )
    parser.add_argument("--long-words", type=int, default=2850, help="words of a long prompt (2850 are 4,000 tokens)")
    parser.add_argument(
        "--rounds", type=int, default=2, help="repetitions of the short and streamed cases; the best one counts"
    )
    parser.add_argument(
        "--workers", type=int, default=1, help="number of processes of Baton's router, which share its port"
    )
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME=COMMAND",
        help="another router; its command may contain {port}, {servers} or {server_list}, and {models}",
    )
    parser.add_argument("--log-level", default="info", help="log level of the router (info: one line per request)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per row")
    options = parser.parse_args(arguments)
    main: Callable[[argparse.Namespace], Awaitable[list[Row]]] = bench
    show(uvloop.run(main(options)), as_json=options.json)  # type: ignore[arg-type]
