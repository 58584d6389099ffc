"""The producing process of `bench.transfer.devices`. It executes commands, one JSON line each on stdin, and answers
with one line each.
"""

import asyncio
import json
import math
import os
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import torch

from baton_serve.bench.transfer.cases import MIB, block_name
from baton_serve.contracts.block_layout import KVLayout
from baton_serve.contracts.identity import BlockHash, Generation, InstanceId
from baton_serve.contracts.messages import Ticket
from baton_serve.kvtransfer import TransferNode, TransferSettings
from baton_serve.kvtransfer.transports.device_checksums import sums_of
from baton_serve.kvtransfer.transports.devicecopy import DeviceBlocks
from baton_serve.kvtransfer.transports.oneccl.device_pair import DeviceBackend

CHUNKS = 4
"""Number of chunks of the simulated prefill."""
LARGE = 256 * MIB
"""Bytes of one large message or copy, for limits."""


class BenchDeviceMemory:
    """KV memory on a device, with the interface `kvtransfer.block_memory.DeviceMemory`."""

    shared_fd = None
    host_view = None

    def __init__(self, num_blocks: int, block_bytes: int, device: str) -> None:
        self.num_blocks, self.block_bytes = num_blocks, block_bytes
        self.device_tensor = torch.zeros((num_blocks, block_bytes), dtype=torch.uint8, device=device)
        self._computed: Any = None

    def fill(self) -> None:
        """Write random bytes, the same in every run."""
        torch.manual_seed(7)
        for block in self.device_tensor:
            block.copy_(torch.randint(0, 256, block.shape, dtype=torch.uint8, device=block.device))
        self.mark()

    def mark(self) -> None:
        """Record an event: blocks may be sent once the work queued so far is done."""
        if self.device_tensor.device.type != "cpu":
            self._computed = torch.get_device_module(self.device_tensor.device).Event()
            self._computed.record()

    def ready_after(self, blocks: Iterable[int]) -> Sequence[Any]:
        return () if self._computed is None else (self._computed,)

    def digest(self) -> list[int]:
        """Return one checksum per block, computed on the device."""
        return sums_of(DeviceBlocks(self), range(self.num_blocks), sample=False)


class DeviceOrder(msgspec.Struct, kw_only=True):
    """A command for the producer."""

    op: str
    tickets: list[Ticket] = []
    blocks_each: int = 0
    seconds: float = 0.0
    address: str = ""
    backend: str = ""
    is_scattered: bool = False
    parts: int = 1
    """Number of layer groups in which the last chunk is sent."""


def node_of(
    name: str, generation: int, layout: KVLayout, memory: BenchDeviceMemory, settings: TransferSettings
) -> TransferNode:
    return TransferNode(
        instance=InstanceId(name), generation=Generation(generation), layout=layout, memory=memory, settings=settings
    )


async def produce(device: str, num_blocks: int, layout: KVLayout, settings: TransferSettings) -> None:
    """Create the node and execute commands from stdin until it ends."""
    memory = BenchDeviceMemory(num_blocks, layout.block_bytes, device)
    memory.fill()
    node = node_of("prefill-0", 1, layout, memory, settings)
    await node.start()
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    _say(node.address)
    while line := await reader.readline():
        _say(await _obey(node, memory, msgspec.json.decode(line, type=DeviceOrder)))
    await node.close()


async def _obey(node: TransferNode, memory: BenchDeviceMemory, order: DeviceOrder) -> Any:
    match order.op:
        case "open":
            for ticket in order.tickets:
                node.open(ticket)
        case "publish":
            for position, ticket in enumerate(order.tickets):
                _publish(node, memory, order, ticket, position * order.blocks_each, order.blocks_each)
                node.finish(ticket.ticket, b"first tokens")
        case "prefill":
            await _prefill(node, memory, order)
        case "released":
            for ticket in order.tickets:
                await node.released(ticket.ticket)
        case "digest":
            return memory.digest()
        case "meet":
            return _send_large(memory, order.backend)
    return None


def _publish(
    node: TransferNode, memory: BenchDeviceMemory, order: DeviceOrder, ticket: Ticket, first: int, count: int
) -> None:
    node.publish(ticket.ticket, places_of(first, count, memory.num_blocks, is_scattered=order.is_scattered))


def places_of(first: int, count: int, num_blocks: int, *, is_scattered: bool) -> list[tuple[BlockHash, int]]:
    """Return hash and index of each block of a prompt, the same at both ends."""
    step = 1
    if is_scattered:
        # A step without a common divisor visits each block exactly once, and never a neighbour.
        step = num_blocks * 2 // 3 + 1
        while math.gcd(step, num_blocks) > 1:
            step += 1
    return [(block_name(index), index * step % num_blocks) for index in range(first, first + count)]


async def _prefill(node: TransferNode, memory: BenchDeviceMemory, order: DeviceOrder) -> None:
    """Publish blocks as an engine does: each chunk after its computation, while the next one is computed; with parts,
    the last chunk group by group of layers."""
    (ticket,), each = order.tickets, order.blocks_each // CHUNKS
    for chunk in range(CHUNKS - 1):
        await asyncio.to_thread(_compute, memory, order.seconds / CHUNKS)
        _publish(node, memory, order, ticket, chunk * each, each)
    first, is_scattered = (CHUNKS - 1) * each, order.is_scattered
    last = places_of(first, order.blocks_each - first, memory.num_blocks, is_scattered=is_scattered)
    for part in range(order.parts):
        await asyncio.to_thread(_compute, memory, order.seconds / CHUNKS / order.parts)
        if order.parts > 1:
            node.publish_parts(ticket.ticket, last, range(part, part + 1))
    node.publish(ticket.ticket, last)
    node.finish(ticket.ticket, b"first tokens")


def _compute(memory: BenchDeviceMemory, seconds: float) -> None:
    """Keep the device busy for this time (on a CPU: sleep)."""
    device = memory.device_tensor.device
    if device.type == "cpu":
        time.sleep(seconds)
        return
    square = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        for _ in range(4):
            square @ square
        torch.get_device_module(device).current_stream(device).synchronize()
    memory.mark()


def _send_large(memory: BenchDeviceMemory, backend: str) -> str:
    meeting = DeviceBackend(backend, DeviceBlocks(memory)).meet("127.0.0.1")
    flat = memory.device_tensor.view(-1)
    part = flat[: min(LARGE, len(flat))]

    def send() -> None:
        pair: Any = meeting.join(60.0)
        for _ in range(12):
            pair.exchange_all([[part]] * 4, is_send=True)

    threading.Thread(target=send, daemon=True).start()
    return meeting.address.decode()


def _say(value: Any) -> None:
    sys.stdout.write("answer " + json.dumps(value) + "\n")
    sys.stdout.flush()


def main() -> None:
    device, count, layout, settings = sys.argv[1:]
    decoded = msgspec.json.decode(layout, type=KVLayout), msgspec.json.decode(settings, type=TransferSettings)
    asyncio.run(produce(device, int(count), *decoded))
    # Threads of the communication library may never end.
    os._exit(0)


if __name__ == "__main__":
    main()
