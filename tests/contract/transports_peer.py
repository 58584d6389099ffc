"""A transfer node in a process of its own, told what to do by lines of JSON on stdin. It answers each with one line.

`Peer` is the test's handle; `python -m tests.contract.transports_peer` the process.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from contracts.identity import Generation, InstanceId, TicketId
from contracts.messages import Ticket
from kvtransfer import TransferError, TransferSettings
from tests.contract.transports_pair import Blocks, Node, name, running

MARK = b"answer "
ROOT = Path(__file__).resolve().parents[2]


class Peer:
    def __init__(self, process: asyncio.subprocess.Process, greeting: dict[str, Any]) -> None:
        self.process = process
        self.address: str = greeting["address"]
        self.instance = InstanceId(greeting["instance"])
        self.generation = Generation(greeting["generation"])

    async def ask(self, op: str, **arguments: object) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({"op": op, **arguments}).encode() + b"\n")
        return await _answer_of(self.process.stdout)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


@contextlib.asynccontextmanager
async def peer(
    instance: str, settings: TransferSettings, generation: int, *, module: str = "tests.contract.transports_peer"
) -> AsyncIterator[Peer]:
    """`module` runs `main` below, perhaps with other memory."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        instance,
        str(generation),
        msgspec.json.encode(settings).decode(),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
        limit=1 << 20,
    )
    assert process.stdout is not None
    try:
        yield Peer(process, await _answer_of(process.stdout))
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _answer_of(stdout: asyncio.StreamReader) -> Any:
    """The next line of ours: libraries print what they like."""
    while line := await stdout.readline():
        if line.startswith(MARK):
            return json.loads(line.removeprefix(MARK))
    raise EOFError("the peer ended")


async def serve(node: Node) -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    greeting = {"address": node.node.address, "instance": node.instance, "generation": node.generation}
    answer(greeting)
    fetches: dict[str, asyncio.Task[str]] = {}
    while line := await reader.readline():
        command = json.loads(line)
        if command["op"] == "connect":
            await node.node.connect(command["address"])
            answer(None)
        else:
            answer(await obey(node, command, fetches))


def answer(value: object) -> None:
    sys.stdout.write(MARK.decode() + json.dumps(value) + "\n")
    sys.stdout.flush()


async def obey(node: Node, command: dict[str, Any], fetches: dict[str, "asyncio.Task[str]"]) -> object:
    ticket = TicketId(command.get("ticket", ""))
    match command["op"]:
        case "open":
            node.node.open(msgspec.json.decode(command["full"], type=Ticket))
        case "publish":
            _publish(node, ticket, command["blocks"], command.get("part"))
        case "finish":
            node.node.finish(ticket, b"payload")
        case "released":
            return await node.node.released(ticket)
        case "fetch":
            full = msgspec.json.decode(command["full"], type=Ticket)
            fetches[full.ticket] = asyncio.create_task(_fetch(node, full, command["blocks"]))
        case "fetched":
            return await fetches[ticket]
        case "block":
            time.sleep(command["seconds"])  # noqa: ASYNC251  (busy, not frozen: the loop stands still, the process lives)
        case "sessions":
            return node.node.num_sessions()
        case op:
            raise ValueError(op)
    return None


def _publish(node: Node, ticket: TicketId, blocks: list[tuple[int, int]], part: int | None) -> None:
    for index, place in blocks:
        node.fill(place, seed=index)
    named = [(name(index), place) for index, place in blocks]
    if part is None:
        node.node.publish(ticket, named)
    else:
        node.node.publish_parts(ticket, named, range(part, part + 1))


async def _fetch(node: Node, ticket: Ticket, blocks: list[tuple[int, int]]) -> str:
    try:
        result = await node.node.fetch(ticket, [(name(index), place) for index, place in blocks])
    except TransferError as exc:
        return f"{type(exc).__name__}: {exc}"
    right = all(node.holds(place, seed=index) for index, place in blocks)
    return f"{result.transport}: {'right' if right else 'WRONG'}"


async def main(memory: Blocks | None = None) -> None:
    instance, generation, settings = sys.argv[1:]
    decoded = msgspec.json.decode(settings, type=TransferSettings)
    async with running(instance, decoded, generation=int(generation), memory=memory) as node:
        await serve(node)


if __name__ == "__main__":
    uvloop.run(main())
    os._exit(0)
