"""Measure block transfer between two accelerators, in two processes, against limits measured in the same run.

`baton-bench kv-device [--devices cuda:0 cuda:1] [--transports oneccl usm zeromq] [--prompt-mib 1024] [--json]`

KV of an 8B model: blocks of 8 MiB. Limits: one large NCCL message at a time (`oneccl`), a pinned copy in one direction
(`usm`, `zeromq`). All transferred bytes are verified on the receiving device. Exposed time: the producer publishes a
prompt chunk by chunk while its device multiplies matrices for as long as prefill would take, then calls `finish`; the
exposed time is from there to the end of the fetch. With `--tail-parts N` the last chunk is sent in N groups of layers
while later layers are computed. With one device both processes share it; with `cpu` only the code paths are tested.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from baton_serve.bench.report import Row, show
from baton_serve.bench.transfer.cases import MIB, layout_of, tickets_to
from baton_serve.bench.transfer.devices_producer import LARGE, BenchDeviceMemory, DeviceOrder, node_of, places_of
from baton_serve.child_command import module_command
from baton_serve.contracts.identity import BlockHash
from baton_serve.contracts.messages import Ticket
from baton_serve.kvtransfer import TransferError, TransferNode, TransferSettings
from baton_serve.kvtransfer.transports.devicecopy import DeviceBlocks, HostArea
from baton_serve.kvtransfer.transports.oneccl.device_pair import DeviceBackend, DevicePair
from baton_serve.kvtransfer.transports.zeromq_staged import pinned

PREFILL_S = 0.218
"""Seconds of prefill of an 8,192-token prompt of an 8B model on an H200 (docs/performance.md)."""


@dataclass
class DeviceNodePair:
    """The producing process and the consuming node in this process."""

    process: asyncio.subprocess.Process
    node: TransferNode
    memory: BenchDeviceMemory
    address: str
    is_scattered: bool

    async def order(self, order: DeviceOrder) -> Any:
        """Send a command to the producer and return its answer."""
        assert self.process.stdin is not None and self.process.stdout is not None
        order = msgspec.structs.replace(order, is_scattered=self.is_scattered)
        self.process.stdin.write(msgspec.json.encode(order) + b"\n")
        return json.loads(await _answer_of(self.process.stdout))

    def tickets(self, count: int) -> list[Ticket]:
        return tickets_to(self.address, count)

    def places(self, first: int, count: int) -> list[tuple[BlockHash, int]]:
        return places_of(first, count, self.memory.num_blocks, is_scattered=self.is_scattered)


@contextlib.asynccontextmanager
async def pair_of(
    options: argparse.Namespace, num_blocks: int, settings: TransferSettings
) -> AsyncIterator[DeviceNodePair]:
    """Start the producer, connect a consuming node to it and stop both on exit."""
    layout, (source, target) = layout_of(options.block_kib << 10), options.devices
    arguments = [msgspec.json.encode(value).decode() for value in (layout, settings)]
    process = await asyncio.create_subprocess_exec(
        *module_command("baton_serve.bench.transfer.devices_producer", source, str(num_blocks), *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=16 * MIB,
    )
    assert process.stdout is not None
    memory = BenchDeviceMemory(num_blocks, layout.block_bytes, target)
    node = node_of("decode-0", 2, layout, memory, settings)
    await node.start()
    try:
        address = json.loads(await _answer_of(process.stdout))
        await node.connect(address)
        yield DeviceNodePair(process, node, memory, address, options.scattered)
    finally:
        await node.close()
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def throughput(pair: DeviceNodePair, concurrency: int, num_blocks: int, digest: Sequence[int]) -> float:
    """Return the seconds to fetch `concurrency` prompts of `num_blocks` blocks at once."""
    tickets, each = pair.tickets(concurrency), num_blocks
    order = DeviceOrder(op="open", tickets=tickets, blocks_each=each)
    pair.memory.device_tensor.zero_()
    _synchronize(pair.memory)
    await pair.order(order)
    await pair.order(msgspec.structs.replace(order, op="publish"))
    began = time.perf_counter()
    await asyncio.gather(*(_fetch(pair, ticket, i * each, each) for i, ticket in enumerate(tickets)))
    seconds = time.perf_counter() - began
    await pair.order(msgspec.structs.replace(order, op="released"))
    _compare(pair, each * concurrency, digest)
    return seconds


async def exposed(pair: DeviceNodePair, num_blocks: int, seconds: float, parts: int, digest: Sequence[int]) -> float:
    """Return the seconds from the producer's `finish` to the end of the fetch."""
    order = DeviceOrder(op="open", tickets=pair.tickets(1), blocks_each=num_blocks, seconds=seconds, parts=parts)
    pair.memory.device_tensor.zero_()
    _synchronize(pair.memory)
    await pair.order(order)
    fetch = asyncio.create_task(_fetch(pair, order.tickets[0], 0, num_blocks))
    # Give the fetch time to reach the producer, as in a real handoff, where it is sent before prefill begins.
    await asyncio.sleep(0.002)
    await pair.order(msgspec.structs.replace(order, op="prefill"))
    result = await fetch
    await pair.order(msgspec.structs.replace(order, op="released"))
    _compare(pair, num_blocks, digest)
    return float(result.exposed_s)


def _compare(pair: DeviceNodePair, count: int, digest: Sequence[int]) -> None:
    """Compare the received blocks with the producer's. Raises `SystemExit` if bytes differ."""
    found, where = pair.memory.digest(), [place for _, place in pair.places(0, count)]
    if [found[place] for place in where] != [digest[place] for place in where]:
        raise SystemExit("wrong bytes arrived")


async def large_messages(pair: DeviceNodePair, options: argparse.Namespace) -> float:
    """Return bytes per second of large messages, one after another, through the same library without anything else."""
    blocks = DeviceBlocks(pair.memory)
    backend = DeviceBackend(options.backend, blocks)
    meeting = await pair.order(DeviceOrder(op="meet", backend=options.backend))
    flat = pair.memory.device_tensor.view(-1)
    part = flat[: min(LARGE, len(flat))]

    def receive() -> float:
        other: DevicePair = backend.join(meeting.encode(), b"", 60.0)
        times: list[float] = []
        for _ in range(12):
            began = time.perf_counter()
            other.exchange_all([[part]] * 4, is_send=False)
            times.append(time.perf_counter() - began)
        return 4 * len(part) / min(times[2:])

    return await asyncio.to_thread(receive)


def pinned_copy(memory: BenchDeviceMemory, *, to_host: bool) -> float:
    """Return bytes per second of large copies from or to pinned memory."""
    blocks, size = DeviceBlocks(memory), memory.block_bytes
    count = max(min(LARGE // size, memory.num_blocks), 1)
    area, best = HostArea(pinned(count * size, blocks.device), size, blocks.device, is_pinned=True), float("inf")
    for _ in range(10):
        began = time.perf_counter()
        if to_host:
            blocks.read(range(count), area, range(count))
        else:
            blocks.write(area, range(count), range(count))
        best = min(best, time.perf_counter() - began)
    return count * size / best


def peer_copy(options: argparse.Namespace) -> float:
    """Return bytes per second of large copies between the devices within one process."""
    source, target = (torch.zeros(LARGE, dtype=torch.uint8, device=device) for device in options.devices)
    best = float("inf")
    for _ in range(10):
        began = time.perf_counter()
        target.copy_(source)
        for tensor in (source, target):
            if tensor.device.type != "cpu":
                torch.get_device_module(tensor.device).synchronize(tensor.device)
        best = min(best, time.perf_counter() - began)
    return LARGE / best


async def measure(options: argparse.Namespace) -> list[Row]:
    rows = [Row("kv-device", "peer copy in one process", peer_copy(options) / 1e9, "GB/s")]
    prompt = options.prompt_mib * MIB
    num_blocks = prompt // (options.block_kib << 10)
    for transport, dialect, checksum, batch, parts in _cases(options):
        settings = msgspec.convert(
            {
                "transports": [transport],
                "oneccl_backend": dialect,
                "checksum": checksum,
                "device_batch_bytes": batch * MIB,
                "ring_bytes": options.ring_mib * MIB,
                "parts": parts,
            },
            TransferSettings,
        )
        name = " ".join(
            [transport, *([dialect] if dialect != "auto" else []), f"checksum={checksum} batch={batch}M parts={parts}"]
        )
        try:
            rows += await _measure_one(options, name, settings, num_blocks)
        except (TransferError, TimeoutError, RuntimeError, OSError) as exc:
            rows.append(Row("kv-device", f"{name}: FAILED {type(exc).__name__}: {str(exc)[:160]}", 0.0, ""))
    return rows


async def _measure_one(
    options: argparse.Namespace, name: str, settings: TransferSettings, num_blocks: int
) -> list[Row]:
    rows: list[Row] = []
    prompt = options.prompt_mib * MIB
    in_all = num_blocks * max(options.concurrency)
    async with asyncio.timeout(options.timeout_s), pair_of(options, in_all, settings) as pair:
        digest = await pair.order(DeviceOrder(op="digest"))
        for concurrency in options.concurrency:
            limit = await _limit(pair, options, settings)
            seconds = min([await throughput(pair, concurrency, num_blocks, digest) for _ in range(options.repeats)])
            speed, case = concurrency * prompt / seconds, f"{name} x{concurrency}"
            rows.append(Row("kv-device", case, speed / 1e9, "GB/s", limit / 1e9, speed / limit))
        times = [
            await exposed(pair, num_blocks, options.prefill_s, settings.parts, digest)
            for _ in range(options.repeats + 2)
        ]
        milliseconds = statistics.median(times) * 1e3
        case = f"{name} exposed, median (of prefill: {milliseconds / 1e3 / options.prefill_s:.2%})"
        rows.append(Row("kv-device", case, milliseconds, "ms"))
    return rows


async def _limit(pair: DeviceNodePair, options: argparse.Namespace, settings: TransferSettings) -> float:
    """Measure the limit of the transport, close in time to the transfers."""
    if settings.transports == ("oneccl",):
        return await large_messages(pair, options)
    return min(pinned_copy(pair.memory, to_host=True), pinned_copy(pair.memory, to_host=False))


def _cases(options: argparse.Namespace) -> list[tuple[str, str, str, int, int]]:
    """Return all combinations of transport, dialect, checksum, batch and parts."""
    cases: list[tuple[str, str, str, int, int]] = []
    chosen = itertools.product(options.transports, options.checksum, options.batch_mib, options.tail_parts)
    for transport, checksum, batch, parts in chosen:
        dialects = options.dialects if transport == "oneccl" else ["auto"]
        cases += [(transport, dialect, checksum, batch, parts) for dialect in dialects]
    return cases


async def _fetch(pair: DeviceNodePair, ticket: Ticket, first: int, count: int) -> Any:
    return await pair.node.fetch(ticket, pair.places(first, count))


def _synchronize(memory: BenchDeviceMemory) -> None:
    if memory.device_tensor.device.type != "cpu":
        torch.get_device_module(memory.device_tensor.device).synchronize(memory.device_tensor.device)


async def _answer_of(stdout: asyncio.StreamReader) -> bytes:
    while line := await stdout.readline():
        if line.startswith(b"answer "):
            return line.removeprefix(b"answer ")
    raise SystemExit("the producing process ended")


def default_devices() -> list[str]:
    """Return two accelerators if there are, or one device twice."""
    kind = next((k for k in ("xpu", "cuda") if hasattr(torch, k) and getattr(torch, k).is_available()), "cpu")
    if kind == "cpu":
        return ["cpu", "cpu"]
    return [f"{kind}:0", f"{kind}:{min(1, torch.get_device_module(kind).device_count() - 1)}"]


def run(argv: Sequence[str]) -> None:
    """Run `baton-bench kv-device` with these arguments."""
    parser = argparse.ArgumentParser(prog="baton-bench kv-device", description=__doc__)
    parser.add_argument("--devices", nargs=2, default=default_devices(), help="source and destination device")
    parser.add_argument("--transports", nargs="+", default=["oneccl", "usm", "zeromq"], help="KV transports to measure")
    parser.add_argument("--dialects", nargs="+", default=["auto"], help="dialects of oneccl: nccl, nccl+staging, …")
    parser.add_argument("--backend", default="", help="library used to measure the limit: nccl, xccl or gloo")
    parser.add_argument(
        "--batch-mib", nargs="+", type=int, default=[256], help="sizes of the batches that the transport sends, in MiB"
    )
    parser.add_argument(
        "--tail-parts",
        nargs="+",
        type=int,
        default=[1, 8],
        help="numbers of layer groups in which the last chunk is sent; 1: whole blocks",
    )
    parser.add_argument("--ring-mib", type=int, default=256, help="size of the staging buffer in MiB")
    parser.add_argument("--block-kib", type=int, default=8192, help="size of a block in KiB")
    parser.add_argument(
        "--scattered", action="store_true", help="scatter the blocks of a prompt over the memory, without neighbours"
    )
    parser.add_argument("--prompt-mib", type=int, default=1024, help="KV of one prompt in MiB")
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 4, 16], help="numbers of concurrent handoffs")
    parser.add_argument(
        "--checksum",
        nargs="+",
        default=["sampled", "off"],
        choices=["full", "sampled", "off"],
        help="checksum modes of the transfer",
    )
    parser.add_argument("--repeats", type=int, default=5, help="repetitions of each case")
    parser.add_argument(
        "--prefill-s", type=float, default=PREFILL_S, help="seconds of simulated prefill for the exposed time"
    )
    parser.add_argument("--timeout-s", type=float, default=60.0, help="seconds after which a case is given up")
    parser.add_argument("--json", action="store_true", help="print one JSON object per row")
    options = parser.parse_args(argv)
    kind = options.devices[0].partition(":")[0]
    options.backend = options.backend or {"cuda": "nccl", "xpu": "xccl"}.get(kind, "gloo")
    show(asyncio.run(measure(options)), as_json=options.json)


if __name__ == "__main__":
    run(sys.argv[1:])
