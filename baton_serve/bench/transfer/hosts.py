"""Block transfer between two processes of this host, against what the machine allows, measured in the same run.

`baton-bench kv [--transports usm zeromq] [--block-kib 256 8192] [--concurrency 1 4 16] [--prompt-mib N]
[--zeromq-connections N] [--peers nixl mooncake] [--plot FILE.png] [--json]`

Throughput: the producer has published everything, then the consumer fetches; the prompt is divided among the concurrent
fetches. Limits: one memcpy of the prompt in one thread (`usm`, `memory`), and the prompt through a plain TCP socket
on loopback, straight into the destination (`zeromq`). Installed peers (extra `peers`) read the same bytes in the same
turns: rows of their own, and the fastest of the same medium beside each of Baton's. Every byte is compared.
Blocks are new to their producer each time; with `--checksum kept` it knows their checksums from sending them before.
Short handoffs: from the producer's `finish` to the consumer's `fetch` returning, fetch sent before. Best of the repeats
for throughput, median for short handoffs.
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
"""Block bytes and number of blocks of a 64-token prompt: a tiny model, and a 0.5B one with blocks of 16 tokens."""


KEPT = "kept"
"""`full`, of blocks that were sent before: their producer knows the sums. In all other rows it does not."""


@dataclass
class HostNodePair:
    """The producing process, and the consuming node in this one."""

    process: asyncio.subprocess.Process
    node: TransferNode
    memory: HostMemory
    address: str

    async def order(self, order: HostOrder) -> str:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(msgspec.json.encode(order) + b"\n")
        return str(json.loads(await self.process.stdout.readline()))

    def tickets(self, count: int) -> list[Ticket]:
        return tickets_to(self.address, count)


@contextlib.asynccontextmanager
async def pair_of(block_bytes: int, num_blocks: int, settings: TransferSettings) -> AsyncIterator[HostNodePair]:
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
    """Seconds for all blocks, divided among `concurrency` fetches. `is_fresh`: none was sent before. `compares`: not
    what an earlier transfer has left is what is found."""
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
    """Seconds from the producer's `finish` to the end of the fetch."""
    tickets = pair.tickets(1)
    order = HostOrder(op="open", tickets=tickets, blocks_each=pair.memory.num_blocks)
    await pair.order(order)
    fetch = asyncio.create_task(_fetch(pair, tickets[0], 0, pair.memory.num_blocks))
    await asyncio.sleep(0.002)
    await pair.order(msgspec.structs.replace(order, op="publish"))
    result = await fetch
    await pair.order(msgspec.structs.replace(order, op="released"))
    return result.exposed_s


async def raw_tcp(pair: HostNodePair) -> float:
    """Seconds for the same bytes through one TCP connection into the same memory."""
    assert pair.memory.host_view is not None
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sending = asyncio.create_task(pair.order(HostOrder(op="tcp", port=listener.getsockname()[1])))
        seconds = await asyncio.to_thread(_receive_raw, listener, pair.memory.host_view)
        await sending
    return seconds


@dataclass(frozen=True, slots=True)
class InterleavedTimes:
    """Best seconds of each."""

    limit: float
    transfer: float
    peers: list[float]


async def in_turns(
    pair: HostNodePair,
    transport: str,
    concurrency: int,
    readings: Sequence[PeerReader],
    options: argparse.Namespace,
    *,
    is_fresh: bool,
) -> InterleavedTimes:
    """Limit, transfer and peers one after another: other load on the machine meets all of them."""
    found: list[list[float]] = []
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
    """Wait, within reason, for a moment in which nothing else uses the processors."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        before = _cpu_times()
        await asyncio.sleep(0.1)
        busy, total = (after - then for after, then in zip(_cpu_times(), before, strict=True))
        if busy < 0.1 * total:
            return


def memcpy(source: HostMemory, target: HostMemory) -> float:
    """Seconds for one memcpy of everything in one thread: the better of one call and calls of 8 MiB."""
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
            # Peers know no checksums: their rows are those of the last turns.
            rows += [other.row() for _, others in found for other in others]
            points += [other for _, others in found for other in others]
    return [*rows, *await measure_short(options)], points


async def measure_transport(
    options: argparse.Namespace, transport: str, kib: int, checksum: str, beside: Sequence[PeerReader]
) -> list[tuple[Point, list[Point]]]:
    """For each concurrency: the transport, and the peers that took turns with it."""
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
            turns = await in_turns(pair, transport, concurrency, beside, options, is_fresh=checksum != KEPT)
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
    """Busy and all ticks of all processors."""
    with open("/proc/stat") as file:
        ticks = [int(value) for value in file.readline().split()[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def _default_prompt_mib() -> int:
    """1 GiB if a sixth of the free memory holds it: both caches and the memcpy's two buffers must fit."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(max(min(1024, free // 6 // MIB // 64 * 64), 64))


def run(argv: Sequence[str]) -> None:
    """Entry point for `baton-bench kv`."""
    parser = argparse.ArgumentParser(prog="baton-bench kv", description=__doc__)
    parser.add_argument("--transports", nargs="+", default=["usm", "zeromq"])
    parser.add_argument("--block-kib", nargs="+", type=int, default=[256, 8192])
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--checksum", nargs="+", default=["full", "off"], choices=["full", KEPT, "sampled", "off"])
    parser.add_argument("--zeromq-connections", type=int, default=1, help="of a link, which blocks take in turns")
    parser.add_argument("--prompt-mib", type=int, default=_default_prompt_mib())
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--patience-s", type=float, default=3.0, help="how long each waits for idle processors")
    parser.add_argument("--handoffs", type=int, default=200)
    parser.add_argument("--peers", nargs="*", choices=NAMES, help="default: those that are installed")
    parser.add_argument("--plot", type=Path, help="GB/s and ratio as PNG (needs matplotlib: the extra `bench`)")
    parser.add_argument("--json", action="store_true")
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
