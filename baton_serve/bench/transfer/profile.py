"""Measure the CPU time of a transfer between two processes of this host: milliseconds per GB, by thread.

`baton-bench kv-profile [--transports usm zeromq] [--checksum full off] [--block-kib 8192] [--prompt-mib N] [--json]`

Beside each transfer the same is measured for its parts: one memcpy, one hash, the plain TCP connection of `baton-bench
kv`, and that connection with a hash at each end, which is the least work of a verified transfer. The limit is the
speed at which the work of both ends would keep all processors of this process busy: with that amount of work, no
transfer between two processes of this host can be faster.
"""

import argparse
import asyncio
import ctypes
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import msgspec
from xxhash import xxh3_64_intdigest

from baton_serve.bench.report import Row, show
from baton_serve.bench.transfer.cases import MIB
from baton_serve.bench.transfer.hosts import HostNodePair, memcpy, pair_of, throughput
from baton_serve.bench.transfer.hosts_producer import HostOrder, thread_seconds
from baton_serve.kvtransfer import HostMemory, TransferSettings
from baton_serve.kvtransfer.native.copyhash import copy_hash

Times = dict[str, float]
"""CPU seconds by end and thread."""
GB = 1e9


async def spent(pair: HostNodePair, work: Callable[[], object]) -> tuple[float, Times]:
    """Return the seconds that `work` takes, and the CPU seconds of the threads of both ends in that time."""
    before, there = thread_seconds(), await _producer_seconds(pair)
    began = time.perf_counter()
    result = work()
    if asyncio.iscoroutine(result):
        await result
    seconds = time.perf_counter() - began
    after, then = thread_seconds(), await _producer_seconds(pair)
    found = {f"consumer, {name}": after[name] - before.get(name, 0.0) for name in after}
    found |= {f"producer, {name}": then[name] - there.get(name, 0.0) for name in then}
    return seconds, found


async def _producer_seconds(pair: HostNodePair) -> Times:
    found: Times = json.loads(await pair.order(HostOrder(op="processor")))
    return found


def rows_of(case: str, num_bytes: int, samples: Sequence[tuple[float, Times]]) -> list[Row]:
    """Return the medians per GB, so that other work on the machine, which costs time but no CPU time of these
    processes, matters little."""
    each = num_bytes / GB
    names = sorted({name for _, times in samples for name in times})
    medians = {name: statistics.median(times.get(name, 0.0) for _, times in samples) * 1e3 / each for name in names}
    in_all, best = sum(medians.values()), min(seconds for seconds, _ in samples)
    bound = len(os.sched_getaffinity(0)) / (in_all / 1e3)
    rows = [Row("kv-profile", f"{case}: {name}", value, "ms/GB") for name, value in medians.items() if value >= 1]
    return [
        *rows,
        Row("kv-profile", f"{case}: both ends", in_all, "ms/GB"),
        Row("kv-profile", f"{case}", each / best, "GB/s", bound, each / best / bound),
    ]


async def by_tcp(pair: HostNodePair, *, hashes: bool) -> None:
    """Transfer everything over one TCP connection, with `hashes` also one hash of each byte at each end."""
    view = pair.memory.host_view
    assert view is not None
    with socket.create_server(("127.0.0.1", 0)) as listener:
        order = HostOrder(op="tcp", port=listener.getsockname()[1], hashes=hashes)
        sending = asyncio.create_task(pair.order(order))
        await asyncio.to_thread(_receive, listener, view, hashes)
        await sending


def _receive(listener: socket.socket, view: memoryview, hashes: bool) -> None:
    connection, _ = listener.accept()
    with connection:
        taken = 0
        while taken < len(view) and (size := connection.recv_into(view[taken : taken + MIB])):
            if hashes:
                xxh3_64_intdigest(view[taken : taken + size])
            taken += size


def hash_all(memory: HostMemory) -> None:
    """Hash all blocks once, in one thread."""
    assert memory.host_view is not None
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory.host_view))
    copy_hash().checksums([start + i * memory.block_bytes for i in range(memory.num_blocks)], memory.block_bytes)


async def measure(options: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    size, num_bytes = options.block_kib << 10, options.prompt_mib * MIB
    for transport in options.transports:
        for checksum in options.checksum:
            settings = msgspec.convert({"transports": [transport], "checksum": checksum}, TransferSettings)
            async with pair_of(size, num_bytes // size, settings) as pair:
                await throughput(pair, options.concurrency, is_fresh=True)
                samples = [await _transfer(pair, options.concurrency) for _ in range(options.repeats)]
                rows += rows_of(f"{transport} checksum={checksum}", num_bytes, samples)
                if transport == options.transports[0] and checksum == options.checksum[0]:
                    rows = [*await limits(pair, num_bytes, options.repeats), *rows]
    return rows


async def limits(pair: HostNodePair, num_bytes: int, repeats: int) -> list[Row]:
    """Measure the parts of a transfer; the first run of each is not counted."""
    source = HostMemory(pair.memory.num_blocks, pair.memory.block_bytes)
    works: dict[str, Callable[[], object]] = {
        "memcpy, twice": lambda: memcpy(source, pair.memory),
        "one hash": lambda: hash_all(pair.memory),
        "plain TCP": lambda: by_tcp(pair, hashes=False),
        "plain TCP, a hash at each end": lambda: by_tcp(pair, hashes=True),
    }
    rows: list[Row] = []
    for case, work in works.items():
        samples = [await spent(pair, work) for _ in range(repeats + 1)][1:]
        rows += rows_of(case, num_bytes * (2 if "twice" in case else 1), samples)
    source.close()
    return rows


async def _transfer(pair: HostNodePair, concurrency: int) -> tuple[float, Times]:
    """Return the seconds of the fetches alone, and CPU time including their preparation. The received bytes are not
    compared."""
    taken: list[float] = []

    async def fetch() -> None:
        taken.append(await throughput(pair, concurrency, is_fresh=True, compares=False))

    _, times = await spent(pair, fetch)
    return taken[0], times


def run(argv: Sequence[str]) -> None:
    """Run `baton-bench kv-profile` with these arguments."""
    parser = argparse.ArgumentParser(prog="baton-bench kv-profile", description=__doc__)
    parser.add_argument("--transports", nargs="+", default=["usm", "zeromq"], help="KV transports to measure")
    parser.add_argument(
        "--checksum",
        nargs="+",
        default=["full", "off"],
        choices=["full", "sampled", "off"],
        help="checksum modes of the transfer",
    )
    parser.add_argument("--block-kib", type=int, default=8192, help="size of a block in KiB")
    parser.add_argument("--prompt-mib", type=int, default=256, help="size of the prompt's KV in MiB")
    parser.add_argument("--concurrency", type=int, default=1, help="number of concurrent fetches")
    parser.add_argument("--repeats", type=int, default=5, help="repetitions of each case")
    parser.add_argument("--json", action="store_true", help="print one JSON object per row")
    options = parser.parse_args(argv)
    show(asyncio.run(measure(options)), as_json=options.json)


if __name__ == "__main__":
    run(sys.argv[1:])
