"""The router alone: instances are faked at its ZeroMQ side and answer at once, so time and CPU seen are the router's.

Load and fakes run in this process, the router in its own. Each case says requests or tokens a second, and the CPU time
of the router's process that each took.
"""

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import uvloop

from bench.fake_instances import FakeInstance
from bench.http_load import Connection, HttpError, post
from bench.report import Row, show
from contracts.instance import Role
from contracts.messages import Work

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "services" / "local" / "demo_model"
PEERS = {"c=1": ("vllm-router (Rust)", 1690.0), "c=16": ("vllm-router (Rust)", 3740.0)}
STREAM_PEERS = {"c=16": ("vllm-router (Rust)", 2080.0)}
"""Requests/s of its cache_aware policy with four backends that answer at once, measured on a machine of this kind."""
LONG_TOKENS = 4000
LIMIT_LONG_MS, LIMIT_TOKEN_MS, LIMIT_TOKENS_PER_S = 10.0, 5.0, 30_000.0
STREAM_TOKENS = 300
NUM_INSTANCES = 4


@dataclass(slots=True)
class Bench:
    port: int
    router: psutil.Process
    instances: list[FakeInstance]
    arrived: dict[str, float]

    def cpu_s(self) -> float:
        times = self.router.cpu_times()
        return float(times.user + times.system)


def chat(text: str, *, max_tokens: int = 16, stream: bool = False, request_id: str | None = None) -> bytes:
    body: dict[str, object] = {"model": "baton-demo", "messages": [{"role": "user", "content": text}]}
    body |= {"max_tokens": max_tokens, "temperature": 0, "stream": stream}
    headers = f"x-request-id: {request_id}\r\n" if request_id else ""
    return post("/v1/chat/completions", json.dumps(body).encode(), headers=headers)


@asynccontextmanager
async def running(options: argparse.Namespace, *, is_paced: bool) -> AsyncIterator[Bench]:
    """A router, and four instances as it knows them."""
    arrived: dict[str, float] = {}

    def on_work(work: Work) -> None:
        arrived.setdefault(work.request_id.split("-")[1], time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        registry = f"memory://{folder}/registry"
        command = [sys.executable, "-m", "services.cli", "router", "--model", str(MODEL), "--port", str(options.port)]
        command += ["--served-model-name", "baton-demo", "--registry", registry, "--log-level", options.log_level]
        process = await asyncio.create_subprocess_exec(*command, cwd=ROOT)
        roles: tuple[Role, ...] = ("prefill", "prefill", "decode", "decode")
        fakes = [
            FakeInstance(f"{role}-{i}", role, "baton-demo", on_work, is_paced=is_paced) for i, role in enumerate(roles)
        ]
        try:
            for fake in fakes:
                await fake.start(registry)
            await _wait_until_served(options.port)
            yield Bench(options.port, psutil.Process(process.pid), fakes, arrived)
        finally:
            for fake in fakes:
                await fake.close()
            process.terminate()
            await process.wait()


async def _wait_until_served(port: int) -> None:
    deadline = time.monotonic() + 60
    while True:
        with contextlib.suppress(OSError, HttpError):
            connection = await Connection.open(port)
            health = json.loads(await connection.ask(b"GET /health HTTP/1.1\r\nhost: bench\r\n\r\n"))
            connection.close()
            if len(health["instances"]) == NUM_INSTANCES:
                return
        if time.monotonic() > deadline:
            raise TimeoutError("the router does not serve within 60 s")
        await asyncio.sleep(0.1)


async def closed_loop(bench: Bench, options: argparse.Namespace, *, concurrency: int, stream: bool) -> list[Row]:
    latencies: list[float] = []
    end = time.perf_counter() + options.seconds

    async def client(number: int) -> None:
        connection = await Connection.open(bench.port)
        count = 0
        while (began := time.perf_counter()) < end:
            await connection.ask(chat(f"What is {number} plus {count}?", stream=stream))
            latencies.append(time.perf_counter() - began)
            count += 1
        connection.close()

    cpu, began = bench.cpu_s(), time.perf_counter()
    await asyncio.gather(*(client(i) for i in range(concurrency)))
    wall, cpu = time.perf_counter() - began, bench.cpu_s() - cpu
    case = f"{'streamed' if stream else 'short'} chat, c={concurrency}"
    peer, peer_value = (STREAM_PEERS if stream else PEERS).get(f"c={concurrency}", (None, None))
    rate = len(latencies) / wall
    return [
        Row(
            "router",
            case,
            rate,
            "requests/s",
            ratio=rate / peer_value if peer_value else None,
            peer=peer,
            peer_value=peer_value,
        ),
        Row("router", case, statistics.median(latencies) * 1e3, "ms p50"),
        Row("router", case, cpu / len(latencies) * 1e6, "us CPU/request"),
    ]


async def open_streams(bench: Bench, options: argparse.Namespace) -> list[Row]:
    """`--streams` streams at once; each step of an instance writes a token of every one of them."""
    sent: dict[int, float] = {}
    late: list[float] = []
    tokens = 0

    async def client(number: int) -> None:
        nonlocal tokens
        connection = await Connection.open(bench.port)
        seen = 0

        def on_chunk(data: bytes, at: float) -> None:
            nonlocal seen, tokens
            count = data.count(b'"content":"') - data.count(b'"role"')
            seen += count
            tokens += count
            if count > 0 and seen < STREAM_TOKENS and (began := sent.get(seen)) is not None:
                late.append(at - began)

        await connection.ask(chat(f"Count from {number}.", max_tokens=STREAM_TOKENS, stream=True), on_chunk)
        connection.close()

    clients = [asyncio.create_task(client(i)) for i in range(options.streams)]
    writers = [fake for fake in bench.instances if fake.role == "decode"]
    while sum(len(fake.streams) for fake in writers) < options.streams:  # noqa: ASYNC110 - the fakes have no events
        await asyncio.sleep(0.01)
    memory = bench.router.memory_info().rss / 2**20
    cpu, began, step = bench.cpu_s(), time.perf_counter(), 0
    first = {stream.position for fake in writers for stream in fake.streams.values()}
    interval = options.streams / options.tokens_per_s if options.tokens_per_s else 0.0
    while any(fake.streams for fake in writers):
        step += 1
        sent[max(first) + step] = time.perf_counter()
        for fake in writers:
            fake.step()
        await asyncio.sleep(max(0.0, began + step * interval - time.perf_counter()))
    await asyncio.gather(*clients)
    wall, cpu = time.perf_counter() - began, bench.cpu_s() - cpu
    case = f"{options.streams} open streams"
    p99 = statistics.quantiles(late, n=100)[98] * 1e3 if len(late) > 100 else float("nan")
    return [
        Row("router", case, tokens / wall, "tokens/s", LIMIT_TOKENS_PER_S, tokens / wall / LIMIT_TOKENS_PER_S),
        Row("router", case, tokens / cpu, "tokens/s of CPU", LIMIT_TOKENS_PER_S, tokens / cpu / LIMIT_TOKENS_PER_S),
        Row("router", case, p99, "ms p99 instance to client", LIMIT_TOKEN_MS, LIMIT_TOKEN_MS / p99),
        Row("router", case, memory, "MiB resident"),
    ]


async def long_prompts(bench: Bench, options: argparse.Namespace) -> list[Row]:
    """Prompts of 4,000 tokens, 50 a second: from the request's sending to its arrival at an instance."""
    rng = random.Random(0)
    words = ["plus", "minus", "seven", "what", "table", "house", "apple", "green", "river", "twelve"]
    took: list[float] = []
    sizes: list[int] = []

    async def one(number: int) -> None:
        text = " ".join(rng.choices(words, k=options.long_words))
        connection = await Connection.open(bench.port)
        request_id = f"long{number}"
        began = time.perf_counter()
        body = await connection.ask(chat(text, max_tokens=2, request_id=request_id))
        took.append(bench.arrived[request_id] - began)
        sizes.append(int(json.loads(body)["usage"]["prompt_tokens"]))
        connection.close()

    began, tasks = time.perf_counter(), []
    for number in range(int(50 * options.seconds)):
        tasks.append(asyncio.create_task(one(number)))
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
        async with running(options, is_paced=False) as at_once:
            for stream, name in ((False, "short"), (True, "streamed")):
                for concurrency in (1, 16) if name in wanted else ():
                    rows += await closed_loop(at_once, options, concurrency=concurrency, stream=stream)
            if "long" in wanted:
                rows += await long_prompts(at_once, options)
    if "streams" in wanted:
        async with running(options, is_paced=True) as paced:
            rows += await open_streams(paced, options)
    return rows


CASES = ("short", "streamed", "long", "streams")


def run(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="baton-bench router", description=__doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--seconds", type=float, default=4.0, help="of each case")
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--tokens-per-s", type=float, default=30_000.0, help="of all streams; 0: as fast as it goes")
    parser.add_argument("--long-words", type=int, default=3970, help="words of a long prompt")
    parser.add_argument("--port", type=int, default=18_471)
    parser.add_argument("--log-level", default="info", help="of the router: one line a request at info")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    main: Callable[[argparse.Namespace], Awaitable[list[Row]]] = bench
    show(uvloop.run(main(options)), as_json=options.json)  # type: ignore[arg-type]
