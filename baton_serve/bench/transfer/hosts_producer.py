"""The producing process of `bench.transfer.hosts`: a transfer node that executes commands, one JSON line each on
stdin.
"""

import asyncio
import json
import os
import socket
import sys
import threading
from pathlib import Path

import msgspec
from xxhash import xxh3_64_intdigest

from baton_serve.bench.transfer.cases import MIB, block_name, fill
from baton_serve.contracts.block_layout import KVLayout
from baton_serve.contracts.identity import Generation, InstanceId, TicketId
from baton_serve.contracts.messages import Ticket
from baton_serve.kvtransfer import HostMemory, TransferNode, TransferSettings


class HostOrder(msgspec.Struct, kw_only=True):
    """A command for the producer."""

    op: str
    tickets: list[Ticket] = []
    blocks_each: int = 0
    port: int = 0
    is_fresh: bool = False
    """Count up the versions of all blocks, so that the node computes their checksums again."""
    hashes: bool = False
    """Hash the bytes before they are sent over the plain TCP connection."""


async def serve(node: TransferNode, memory: HostMemory) -> None:
    """Execute commands from stdin until it ends, with one answer line each."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    _answer(node.address)
    while line := await reader.readline():
        order = msgspec.json.decode(line, type=HostOrder)
        match order.op:
            case "open":
                if order.is_fresh and memory.versions is not None:
                    memory.versions = [version + 1 for version in memory.versions]
                for ticket in order.tickets:
                    node.open(ticket)
            case "publish":
                _publish(node, order)
            case "released":
                for ticket in order.tickets:
                    await node.released(ticket.ticket)
            case "tcp":
                await asyncio.to_thread(_send_raw, memory, order.port, hashes=order.hashes)
            case "processor":
                _answer(json.dumps(thread_seconds()))
                continue
        _answer("")


def thread_seconds() -> dict[str, float]:
    """Return the CPU time of this process's threads so far, summed over threads with the same name."""
    names = {thread.native_id: thread.name.rstrip("0123456789-_") for thread in threading.enumerate()}
    found: dict[str, float] = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            name = names.get(int(task.name)) or (task / "comm").read_text().strip()
            seconds = int((task / "schedstat").read_text().split()[0]) / 1e9
        except OSError:
            continue  # the thread has ended
        found[name] = found.get(name, 0.0) + seconds
    return found


def _publish(node: TransferNode, order: HostOrder) -> None:
    for position, ticket in enumerate(order.tickets):
        first = position * order.blocks_each
        blocks = [(block_name(first + i), first + i) for i in range(order.blocks_each)]
        node.publish(TicketId(ticket.ticket), blocks)
        node.finish(TicketId(ticket.ticket), b"first tokens")


def _send_raw(memory: HostMemory, port: int, *, hashes: bool) -> None:
    view = memory.host_view
    assert view is not None
    with socket.create_connection(("127.0.0.1", port)) as connection:
        if not hashes:
            connection.sendall(view)
            return
        for first in range(0, len(view), MIB):
            xxh3_64_intdigest(view[first : first + MIB])
            connection.sendall(view[first : first + MIB])


def _answer(value: str) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


async def main() -> None:
    layout_text, settings_text, num_blocks = sys.argv[1:]
    layout = msgspec.json.decode(layout_text, type=KVLayout)
    settings = msgspec.json.decode(settings_text, type=TransferSettings)
    memory = HostMemory(int(num_blocks), layout.block_bytes)
    fill(memory)
    memory.versions = [0] * memory.num_blocks
    node = TransferNode(
        instance=InstanceId("prefill-0"),
        generation=Generation(1),
        layout=layout,
        memory=memory,
        settings=settings,
    )
    await node.start()
    await serve(node, memory)
    await node.close()


if __name__ == "__main__":
    asyncio.run(main())
    # Threads of the transport may never end.
    os._exit(0)
