"""A transfer node in a process of its own, which executes commands, one JSON line each, with one answer line each.

`Peer` is the handle of the test; `main` runs in the process. Both directions use one socket, which is the process's
standard output. The process is forked from one that has imported torch, if torch is installed.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from baton_serve.contracts.identity import Generation, InstanceId, TicketId
from baton_serve.contracts.messages import Ticket
from baton_serve.kvtransfer import TransferError, TransferSettings
from tests.contract.transports_pair import Blocks, Node, name, running

MARK = b"answer "
ROOT = Path(__file__).resolve().parents[2]
MAX_LINE_BYTES = 1 << 20
_STDERR = 2


class Peer:
    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        send_signal: Callable[[int], None],
        greeting: dict[str, Any],
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._send_signal = send_signal
        self.address: str = greeting["address"]
        self.instance = InstanceId(greeting["instance"])
        self.generation = Generation(greeting["generation"])

    async def ask(self, op: str, **arguments: object) -> Any:
        self._writer.write(json.dumps({"op": op, **arguments}).encode() + b"\n")
        return await _answer_of(self._reader)

    def signal(self, number: signal.Signals) -> None:
        self._send_signal(number)


@contextlib.asynccontextmanager
async def peer(
    instance: str, settings: TransferSettings, generation: int, *, module: str | None = None
) -> AsyncIterator[Peer]:
    """`module`: a program that calls `main` below, with other memory."""
    argv = [instance, str(generation), msgspec.json.encode(settings).decode()]
    here, there = socket.socketpair()
    with there:
        if module is None and find_spec("torch") is not None:
            send_signal, wait = _fork(argv, there.fileno())
        else:
            send_signal, wait = _program([module or __name__, *argv], there.fileno())
    reader, writer = await asyncio.open_unix_connection(sock=here, limit=MAX_LINE_BYTES)
    try:
        yield Peer(reader, writer, send_signal, await _answer_of(reader))
    finally:
        send_signal(signal.SIGKILL)
        await asyncio.to_thread(wait)
        writer.close()


def _fork(argv: list[str], out: int) -> tuple[Callable[[int], None], Callable[[], int]]:
    """How to send it a signal, and how to wait until it has ended."""
    from baton_serve.services.local.plan import Process
    from tests.forking import PEER, forks

    forked = forks()(Process("peer", [PEER, *argv], {}), os.environ, out, _STDERR)
    return forked.signal, forked.wait


def _program(argv: list[str], out: int) -> tuple[Callable[[int], None], Callable[[], int]]:
    popen = subprocess.Popen([sys.executable, "-m", *argv], stdin=subprocess.DEVNULL, stdout=out, cwd=ROOT)
    return popen.send_signal, popen.wait


async def _answer_of(reader: asyncio.StreamReader) -> Any:
    """The next line of ours: libraries print what they like."""
    while line := await reader.readline():
        if line.startswith(MARK):
            return json.loads(line.removeprefix(MARK))
    raise EOFError("the peer ended")


async def serve(node: Node) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=socket.socket(fileno=os.dup(1)), limit=MAX_LINE_BYTES)

    def answer(value: object) -> None:
        writer.write(MARK + json.dumps(value).encode() + b"\n")

    answer({"address": node.node.address, "instance": node.instance, "generation": node.generation})
    fetches: dict[str, asyncio.Task[str]] = {}
    while line := await reader.readline():
        command = json.loads(line)
        if command["op"] == "connect":
            await node.node.connect(command["address"])
            answer(None)
        else:
            answer(await obey(node, command, fetches))


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


def main(argv: Sequence[str], memory: Blocks | None = None) -> None:
    instance, generation, settings = argv

    async def run() -> None:
        decoded = msgspec.json.decode(settings, type=TransferSettings)
        async with running(instance, decoded, generation=int(generation), memory=memory) as node:
            await serve(node)

    uvloop.run(run())
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
