"""Measure open streams through the router alone: the latency of a token from its instance to its client's socket."""

import argparse
import asyncio
import gc
import multiprocessing
import statistics
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import psutil
import uvloop

from baton_serve.bench.report import Row
from baton_serve.bench.router import stamped
from baton_serve.bench.router.fake_instances import FakeInstance
from baton_serve.bench.router.targets import RouterTarget, chat

LIMIT_TOKEN_MS, LIMIT_TOKENS_PER_S = 5.0, 30_000.0
"""Design targets: p99 latency of a token in the router, and tokens per second of all streams."""
STREAM_TOKENS = 300


TokenArrival = tuple[int, int, int]
"""Number of a token in its stream, from 1; its arrival at the client's socket and the time when it was read, both in
ns."""


@dataclass(slots=True)
class SentSteps:
    """Times of the steps. `at_ns` is when the messages of a step were sent, by the number of the tokens in them;
    `made_ms` is how long it took to build them before that."""

    at_ns: dict[int, int] = field(default_factory=dict)
    made_ms: list[float] = field(default_factory=list)


async def open_streams(target: RouterTarget, options: argparse.Namespace) -> list[Row]:
    """Measure `--streams` concurrent streams; each step of an instance sends one token of each of its streams.

    The latency of a token begins when the first instance's message of its step is written. It ends when the kernel has
    the token for the client's socket and, in separate rows, when the client has read it; one client process reads all
    sockets one after another. The clients are in a process of their own, because reading would delay the steps.
    """
    assert target.process is not None
    if options.router_cpu is not None:
        _part(target.process, options.router_cpu)
    clock, sent = stamped.ClockWatch(), SentSteps()
    here, there = multiprocessing.Pipe(duplex=False)
    clients = multiprocessing.get_context("spawn").Process(target=_read, args=(target.port, options.streams, there))
    clients.start()
    there.close()
    decodes = [fake for fake in target.instances if fake.role == "decode"]
    try:
        while sum(len(fake.streams) for fake in decodes) < options.streams:
            await asyncio.sleep(0.01)
            assert clients.is_alive(), "the clients failed"
        for fake in decodes:
            fake.step()
        await asyncio.to_thread(here.recv)  # each stream has its first token, with which its answer begins
        memory = target.process.memory_info().rss / 2**20
        cpu = target.cpu_s()
        await _write(decodes, sent, interval_s=options.streams / options.tokens_per_s if options.tokens_per_s else 0.0)
        arrivals: list[TokenArrival] = await asyncio.to_thread(here.recv)
        cpu = target.cpu_s() - cpu
    finally:
        clients.terminate()
        await asyncio.to_thread(clients.join)
    clock.check()
    wall = (max(read_ns for _, _, read_ns in arrivals) - min(sent.at_ns.values())) / 1e9
    return _rows(options, arrivals, sent, wall=wall, cpu=cpu, memory=memory)


def _rows(
    options: argparse.Namespace,
    arrivals: list[TokenArrival],
    sent: SentSteps,
    *,
    wall: float,
    cpu: float,
    memory: float,
) -> list[Row]:
    ways = [(came - sent.at_ns[n], read - sent.at_ns[n]) for n, came, read in arrivals if 1 < n < STREAM_TOKENS]
    num_tokens = sum(n > 1 for n, _, _ in arrivals)
    rate, rate_of_cpu = num_tokens / wall, num_tokens / cpu
    case = f"{options.streams} open streams"
    if options.router_cpu is not None:
        case += f", router alone on CPU {options.router_cpu}"
    rows = [
        Row("router", case, rate, "tokens/s", LIMIT_TOKENS_PER_S, rate / LIMIT_TOKENS_PER_S),
        Row("router", case, rate_of_cpu, "tokens/s of CPU", LIMIT_TOKENS_PER_S, rate_of_cpu / LIMIT_TOKENS_PER_S),
    ]
    for place, end in enumerate(("client's socket", "client that has read it")):
        cuts = [cut / 1e6 for cut in statistics.quantiles([way[place] for way in ways], n=100)]
        rows += [Row("router", case, cuts[at - 1], f"ms p{at} instance to {end}") for at in (50, 90)]
        p99 = cuts[98]
        rows.append(Row("router", case, p99, f"ms p99 instance to {end}", LIMIT_TOKEN_MS, LIMIT_TOKEN_MS / p99))
    rows.append(Row("router", case, statistics.median(sent.made_ms), "ms p50 messages of a step made, before"))
    return [*rows, Row("router", case, memory, "MiB resident")]


def _part(router: psutil.Process, cpu: int) -> None:
    """Pin the router to one CPU, and this process with its children to the others. Raises `ValueError` if there are
    none."""
    others = [other for other in psutil.Process().cpu_affinity() or [] if other != cpu]
    if not others:
        raise ValueError(f"there is no CPU beside {cpu} for the load")
    for process in (router, *router.children(recursive=True)):
        process.cpu_affinity([cpu])
    psutil.Process().cpu_affinity(others)


async def _write(decodes: list[FakeInstance], sent: SentSteps, *, interval_s: float) -> None:
    """Run a step every `interval_s`, from the second token of each stream to its last."""
    positions = {stream.position for fake in decodes for stream in fake.streams.values()}
    assert positions == {1}, f"streams at different tokens: {positions}"
    loop = asyncio.get_running_loop()
    began, step = time.perf_counter(), 0
    while any(fake.streams for fake in decodes):
        step += 1
        loop.call_soon(_sending, sent, 1 + step, stamped.now_ns())
        for fake in decodes:
            fake.step()
        await asyncio.sleep(max(0.0, began + step * interval_s - time.perf_counter()))


def _sending(sent: SentSteps, number: int, began_ns: int) -> None:
    """Record the time just before the instances' messages are sent, at the end of the same iteration of the event
    loop."""
    sent.at_ns[number] = now_ns = stamped.now_ns()
    sent.made_ms.append((now_ns - began_ns) / 1e6)


def _read(port: int, num_streams: int, pipe: Connection) -> None:
    """Run the clients in their process: report when all streams have their first token, and all arrivals at the end."""
    pipe.send(uvloop.run(_clients(port, num_streams, pipe)))


async def _clients(port: int, num_streams: int, pipe: Connection) -> list[TokenArrival]:
    arrivals: list[TokenArrival] = []
    num_open = 0

    async def client(number: int) -> None:
        count = 0

        def on_read(data: bytes, came_ns: int, read_ns: int) -> None:
            """Record the tokens of one read. The kernel stamps only the last of several segments: that time counts for
            all of them."""
            nonlocal count, num_open
            for _ in range(data.count(b'"content":"') - data.count(b'"role"')):
                count += 1
                arrivals.append((count, came_ns, read_ns))
                if count == 1:
                    num_open += 1
                    if num_open == num_streams:
                        pipe.send(None)

        request = chat(f"Count from {number}.", max_tokens=STREAM_TOKENS, stream=True)
        await stamped.stream(port, request, on_read)

    gc.disable()  # collections would walk through millions of arrivals and delay reads
    await asyncio.gather(*(client(i) for i in range(num_streams)))
    return arrivals
