"""Measure block transfer between two processes of this host, against limits measured in the same run.

`baton-bench kv [--transports usm zeromq] [--block-kib 256 8192] [--concurrency 1 4 16] [--prompt-mib N]
[--zeromq-connections N] [--peers nixl mooncake] [--plot FILE.png] [--json]`

Throughput: the producer has published everything, then the consumer fetches; the prompt is divided among the
concurrent fetches. Limits: one memcpy of the prompt in one thread (`usm`, `memory`), and the prompt through one TCP
connection on loopback, straight into the destination (`zeromq`). Installed peers (extra `peers`) transfer the same
bytes alternately with Baton: they have rows of their own, and the fastest of the same medium stands beside each row of
Baton. All bytes are verified. Blocks are new to the producer each time; with `--checksum kept` it knows their
checksums from an earlier transfer.

Short handoffs: seconds from the producer's `finish` until the consumer's `fetch` returns; the fetch was sent before.
The best repetition counts for throughput, the median for short handoffs.
"""

import argparse
import asyncio
import contextlib
import ctypes
import itertools
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from baton_serve.bench import plots
from baton_serve.bench.report import Row, show
from baton_serve.bench.transfer.cases import MIB, block_name, clear, is_filled, layout_of, tickets_to
from baton_serve.bench.transfer.hosts_producer import HostOrder
from baton_serve.bench.transfer.peers import NAMES, Peer, PeerError, PeerReader, chosen, readings
from baton_serve.bench.transfer.results import Point
from baton_serve.child_command import module_command
from baton_serve.contracts.identity import Generation, InstanceId
from baton_serve.contracts.messages import Ticket
from baton_serve.kvtransfer import FetchResult, HostMemory, TransferNode, TransferSettings

SHORT = ((64 << 10, 1), (192 << 10, 4))
"""Block bytes and number of blocks of a 64-token prompt: a tiny model, and a 0.5B model with blocks of 16 tokens."""


KEPT = "kept"
"""Checksum mode `full` for blocks that were sent before, whose checksums the producer knows. All other rows use new
blocks."""


@dataclass
class HostNodePair:
    """The producing process, and the consuming node in this one."""

    process: asyncio.subprocess.Process
    node: TransferNode
    memory: HostMemory
    address: str

    async def order(self, order: HostOrder) -> str:
        """Send a command to the producer and return its answer."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(msgspec.json.encode(order) + b"\n")
        return str(json.loads(await self.process.stdout.readline()))

    def tickets(self, count: int) -> list[Ticket]:
        return tickets_to(self.address, count)


@contextlib.asynccontextmanager
async def pair_of(block_bytes: int, num_blocks: int, settings: TransferSettings) -> AsyncIterator[HostNodePair]:
    """Start the producer, connect a consuming node to it and stop both on exit."""
    layout = layout_of(block_bytes)
    arguments = [msgspec.json.encode(layout).decode(), msgspec.json.encode(settings).decode(), str(num_blocks)]
    process = await asyncio.create_subprocess_exec(
        *module_command("baton_serve.bench.transfer.hosts_producer", *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    memory = HostMemory(num_blocks, block_bytes)
    clear(memory)
    node = TransferNode(
        instance=InstanceId("decode-0"),
        generation=Generation(2),
        layout=layout,
        memory=memory,
        settings=settings,
    )
    await node.start()
    try:
        address = json.loads(await process.stdout.readline())
        await node.connect(address)
        yield HostNodePair(process, node, memory, address)
    finally:
        await node.close()
        memory.close()
        process.kill()
        await process.wait()


async def throughput(pair: HostNodePair, concurrency: int, *, is_fresh: bool, compares: bool = True) -> float:
    """Return the seconds to fetch all blocks with `concurrency` fetches. With `is_fresh` the blocks are new to the
    producer. With `compares` the memory is cleared first and verified afterwards."""
    if compares:
        clear(pair.memory)
    tickets = pair.tickets(concurrency)
    each = pair.memory.num_blocks // concurrency
    order = HostOrder(op="open", tickets=tickets, blocks_each=each, is_fresh=is_fresh)
    await pair.order(order)
    await pair.order(msgspec.structs.replace(order, op="publish"))
    began = time.perf_counter()
    await asyncio.gather(*(_fetch(pair, ticket, i * each, each) for i, ticket in enumerate(tickets)))
    seconds = time.perf_counter() - began
    await pair.order(msgspec.structs.replace(order, op="released"))
    if compares and not is_filled(pair.memory, each * concurrency):
        raise SystemExit("wrong bytes arrived")
    return seconds


async def short_handoff(pair: HostNodePair) -> float:
    """Return the seconds from the producer's `finish` to the end of the fetch."""
    tickets = pair.tickets(1)
    order = HostOrder(op="open", tickets=tickets, blocks_each=pair.memory.num_blocks)
    await pair.order(order)
    fetch = asyncio.create_task(_fetch(pair, tickets[0], 0, pair.memory.num_blocks))
    # Give the fetch time to reach the producer, as in a real handoff, where it is sent before prefill begins.
    await asyncio.sleep(0.002)
    await pair.order(msgspec.structs.replace(order, op="publish"))
    result = await fetch
    await pair.order(msgspec.structs.replace(order, op="released"))
    return result.exposed_s


async def raw_tcp(pair: HostNodePair) -> float:
    """Return the seconds to receive the same bytes through one TCP connection into the same memory."""
    assert pair.memory.host_view is not None
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sending = asyncio.create_task(pair.order(HostOrder(op="tcp", port=listener.getsockname()[1])))
        seconds = await asyncio.to_thread(_receive_raw, listener, pair.memory.host_view)
        await sending
    return seconds


@dataclass(frozen=True, slots=True)
class InterleavedTimes:
    """Shortest seconds of the limit, the transfer and each peer."""

    limit: float
    transfer: float
    peers: list[float]


async def measure_interleaved(
    pair: HostNodePair,
    transport: str,
    concurrency: int,
    readings: Sequence[PeerReader],
    options: argparse.Namespace,
    *,
    is_fresh: bool,
) -> InterleavedTimes:
    """Measure limit, transfer and peers alternately, so that other load on the machine affects all of them equally."""
    found: list[list[float]] = []
    # The memcpy's source has touched pages, so that no page fault is measured.
    source = HostMemory(1, pair.memory.num_blocks * pair.memory.block_bytes)
    clear(source)
    for _ in range(options.repeats):
        await quiet(options.patience_s)
        limit = await raw_tcp(pair) if transport == "zeromq" else memcpy(source, pair.memory)
        await quiet(options.patience_s)
        seconds = [limit, await throughput(pair, concurrency, is_fresh=is_fresh)]
        for reading in readings:
            await quiet(options.patience_s)
            seconds.append(await reading.seconds(concurrency))
        found.append(seconds)
    source.close()
    limit, transfer, *peers = (min(column) for column in zip(*found, strict=True))
    return InterleavedTimes(limit, transfer, peers)


async def quiet(patience_s: float) -> None:
    """Wait until other processes use less than a tenth of the processors, at most `patience_s`."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        before = _cpu_times()
        await asyncio.sleep(0.1)
        busy, total = (after - then for after, then in zip(_cpu_times(), before, strict=True))
        if busy < 0.1 * total:
            return


def memcpy(source: HostMemory, target: HostMemory) -> float:
    """Return the seconds to copy everything in one thread: the better of one call and of calls of 8 MiB, which stay in
    the cache."""
    assert source.host_view is not None and target.host_view is not None
    start = ctypes.addressof(ctypes.c_char.from_buffer(source.host_view))
    end = ctypes.addressof(ctypes.c_char.from_buffer(target.host_view))
    num_bytes, best = len(source.host_view), float("inf")
    for step in (num_bytes, 8 * MIB):
        began = time.perf_counter()
        for offset in range(0, num_bytes, step):
            ctypes.memmove(end + offset, start + offset, min(step, num_bytes - offset))
        best = min(best, time.perf_counter() - began)
    return best


async def measure(options: argparse.Namespace, peers: Sequence[Peer]) -> tuple[list[Row], list[Point]]:
    rows: list[Row] = []
    points: list[Point] = []
    for kib, transport in itertools.product(options.block_kib, options.transports):
        num_blocks = options.prompt_mib * MIB // (kib << 10)
        async with readings(peers, transport, num_blocks, kib << 10) as beside:
            for checksum in options.checksum:
                found = await measure_transport(options, transport, kib, checksum, beside)
                rows += [own.row(others) for own, others in found]
                points += [own for own, _ in found]
            # Peers have no checksums: of their measurements, those beside the last checksum mode are reported.
            rows += [other.row() for _, others in found for other in others]
            points += [other for _, others in found for other in others]
    return [*rows, *await measure_short(options)], points


async def measure_transport(
    options: argparse.Namespace, transport: str, kib: int, checksum: str, beside: Sequence[PeerReader]
) -> list[tuple[Point, list[Point]]]:
    """Return for each concurrency the result of the transport and those of the peers measured alternately with it."""
    found: list[tuple[Point, list[Point]]] = []
    prompt = options.prompt_mib * MIB
    settings = msgspec.convert(
        {
            "transports": [transport],
            "checksum": "full" if checksum == KEPT else checksum,
            "zeromq_connections": options.zeromq_connections,
        },
        TransferSettings,
    )
    by = f" by {options.zeromq_connections}" if transport == "zeromq" and options.zeromq_connections > 1 else ""
    async with pair_of(kib << 10, prompt // (kib << 10), settings) as pair:
        for concurrency in options.concurrency:
            turns = await measure_interleaved(pair, transport, concurrency, beside, options, is_fresh=checksum != KEPT)
            limit = prompt / turns.limit
            own = Point(f"{transport}{by} checksum={checksum}", kib, concurrency, prompt / turns.transfer, limit)
            others = zip(beside, turns.peers, strict=True)
            found.append((own, [Point(r.peer.name, kib, concurrency, prompt / s, limit) for r, s in others]))
    return found


async def measure_short(options: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    for (block_bytes, count), transport in itertools.product(SHORT, options.transports):
        async with pair_of(block_bytes, count, TransferSettings(transports=(transport,))) as pair:
            times = [await short_handoff(pair) for _ in range(options.handoffs)]
            milliseconds = statistics.median(times) * 1e3
            case = f"{transport} short handoff, {count} x {block_bytes >> 10} KiB, median"
            rows.append(Row("kv", case, milliseconds, "ms", 2.0, 2.0 / milliseconds))
    return rows


async def _fetch(pair: HostNodePair, ticket: Ticket, first: int, count: int) -> FetchResult:
    return await pair.node.fetch(ticket, [(block_name(first + i), first + i) for i in range(count)])


def _receive_raw(listener: socket.socket, view: memoryview) -> float:
    connection, _ = listener.accept()
    with connection:
        began, taken = time.perf_counter(), 0
        while taken < len(view) and (size := connection.recv_into(view[taken : taken + MIB])):
            taken += size
        return time.perf_counter() - began


def _cpu_times() -> tuple[int, int]:
    """Return busy and total ticks of all processors."""
    with open("/proc/stat") as file:
        ticks = [int(value) for value in file.readline().split()[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def _default_prompt_mib() -> int:
    """Return 1024 if a sixth of the free memory is that large, or else less: both caches and the two buffers of the
    memcpy must fit."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(max(min(1024, free // 6 // MIB // 64 * 64), 64))


def run(argv: Sequence[str]) -> None:
    """Run `baton-bench kv` with these arguments."""
    parser = argparse.ArgumentParser(prog="baton-bench kv", description=__doc__)
    parser.add_argument("--transports", nargs="+", default=["usm", "zeromq"], help="KV transports to measure")
    parser.add_argument("--block-kib", nargs="+", type=int, default=[256, 8192], help="block sizes in KiB")
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 4, 16], help="numbers of concurrent fetches")
    parser.add_argument(
        "--checksum",
        nargs="+",
        default=["full", "off"],
        choices=["full", KEPT, "sampled", "off"],
        help="checksum modes; kept: full, of blocks whose checksums the producer knows",
    )
    parser.add_argument(
        "--zeromq-connections",
        type=int,
        default=1,
        help="connections of a zeromq link, among which blocks are distributed",
    )
    parser.add_argument("--prompt-mib", type=int, default=_default_prompt_mib(), help="size of the prompt's KV in MiB")
    parser.add_argument("--repeats", type=int, default=5, help="repetitions of each case")
    parser.add_argument(
        "--patience-s",
        type=float,
        default=3.0,
        help="longest wait for idle processors before each measurement, in seconds",
    )
    parser.add_argument("--handoffs", type=int, default=200, help="number of short handoffs")
    parser.add_argument(
        "--peers", nargs="*", choices=NAMES, help="libraries to compare with (default: all installed ones)"
    )
    parser.add_argument("--plot", type=Path, help="PNG file for GB/s and ratio (needs matplotlib: the extra `bench`)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per row")
    options = parser.parse_args(argv)
    try:
        peers = chosen(options.peers)
        if options.plot is not None:
            plots.check()
    except (PeerError, plots.PlotError) as exc:
        parser.error(str(exc))
    try:
        rows, points = asyncio.run(measure(options, peers))
    except PeerError as exc:
        raise SystemExit(f"baton-bench kv: a peer stopped, leave it out with --peers: {exc}") from exc
    show(rows, as_json=options.json)
    if options.plot is not None:
        plots.transfers(options.plot, points)


if __name__ == "__main__":
    run(sys.argv[1:])
