"""Open streams through the router alone: what a token's way from its instance to its client's socket takes."""

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
STREAM_TOKENS = 300


TokenArrival = tuple[int, int, int]
"""A token's number in its stream, from 1 on; when it came to its client's socket, and when it was read, in ns."""


@dataclass(slots=True)
class SentSteps:
    """`at_ns`: when each step's messages left, by the number of the tokens in them. `made_ms`: what making them took,
    before."""

    at_ns: dict[int, int] = field(default_factory=dict)
    made_ms: list[float] = field(default_factory=list)


async def open_streams(target: RouterTarget, options: argparse.Namespace) -> list[Row]:
    """`--streams` streams at once; each step of an instance writes a token of every one of them.

    A token's way begins when the first instance's message of its step is written. It ends where the kernel has it for
    the client's socket; and, said apart, where the client has read it, which reads all of the sockets one after the
    other. The clients are a process of their own: reading would make the steps late.
    """
    assert target.process is not None
    if options.router_cpu is not None:
        _part(target.process, options.router_cpu)
    clock, sent = stamped.ClockWatch(), SentSteps()
    here, there = multiprocessing.Pipe(duplex=False)
    clients = multiprocessing.get_context("spawn").Process(target=_read, args=(target.port, options.streams, there))
    clients.start()
    there.close()
    writers = [fake for fake in target.instances if fake.role == "decode"]
    try:
        while sum(len(fake.streams) for fake in writers) < options.streams:
            await asyncio.sleep(0.01)
            assert clients.is_alive(), "the clients failed"
        for fake in writers:
            fake.step()
        await asyncio.to_thread(here.recv)  # each stream has its first token, with which its answer begins
        memory = target.process.memory_info().rss / 2**20
        cpu = target.cpu_s()
        await _write(writers, sent, interval_s=options.streams / options.tokens_per_s if options.tokens_per_s else 0.0)
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
    """The router's loop on one CPU, this process and what it starts on the others."""
    others = [other for other in psutil.Process().cpu_affinity() or [] if other != cpu]
    if not others:
        raise ValueError(f"there is no CPU beside {cpu} for the load")
    for process in (router, *router.children(recursive=True)):
        process.cpu_affinity([cpu])
    psutil.Process().cpu_affinity(others)


async def _write(writers: list[FakeInstance], sent: SentSteps, *, interval_s: float) -> None:
    """A step each `interval_s`, from the second token of each stream to its last."""
    positions = {stream.position for fake in writers for stream in fake.streams.values()}
    assert positions == {1}, f"streams at different tokens: {positions}"
    loop = asyncio.get_running_loop()
    began, step = time.perf_counter(), 0
    while any(fake.streams for fake in writers):
        step += 1
        loop.call_soon(_sending, sent, 1 + step, stamped.now_ns())
        for fake in writers:
            fake.step()
        await asyncio.sleep(max(0.0, began + step * interval_s - time.perf_counter()))


def _sending(sent: SentSteps, number: int, began_ns: int) -> None:
    """Called just before what the instances send leaves: that is due at the end of the same turn of the loop."""
    sent.at_ns[number] = now_ns = stamped.now_ns()
    sent.made_ms.append((now_ns - began_ns) / 1e6)


def _read(port: int, num_streams: int, pipe: Connection) -> None:
    """The clients' process: says when each stream has its first token, and at the end all arrivals."""
    pipe.send(uvloop.run(_clients(port, num_streams, pipe)))


async def _clients(port: int, num_streams: int, pipe: Connection) -> list[TokenArrival]:
    arrivals: list[TokenArrival] = []
    num_open = 0

    async def client(number: int) -> None:
        count = 0

        def on_read(data: bytes, came_ns: int, read_ns: int) -> None:
            """Of several tokens in one read the kernel says when the last came: that counts for all of them."""
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

    gc.disable()  # what it would look through is the arrivals
    await asyncio.gather(*(client(i) for i in range(num_streams)))
    return arrivals
