"""One end of a peer library's transfer: `python -m baton_serve.bench.transfer.peer_process ENGINE END BLOCKS
BLOCK_BYTES`.

The holder fills its blocks, prints a card with the data that the other end needs to connect, and stays until stdin
ends. The other end receives the card as its first line. For each further line of JSON `{"concurrency": n}` it reads
all blocks and answers with the seconds. Both libraries print to stdout; so answers go to a copy of stdout, and stdout
itself becomes stderr.
"""

import base64
import importlib
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Protocol

from baton_serve.bench.transfer.cases import clear, fill, is_filled
from baton_serve.kvtransfer import HostMemory
from baton_serve.kvtransfer.block_memory import address_of

POLL_S = 2e-5
"""Interval at which the state of a NIXL transfer is polled."""
HOST = "127.0.0.1"


class PeerEngine(Protocol):
    """A library that moves bytes between the registered memories of two processes."""

    def card(self) -> dict[str, str]:
        """Return the data that the other end needs to connect."""
        ...

    def meet(self, card: Mapping[str, str]) -> None: ...

    def read(self, parts: Sequence[Sequence[tuple[int, int, int]]]) -> None:
        """Read all parts concurrently. Each part is a list of (local address, remote address, size). Return when all
        bytes have arrived."""
        ...


class Nixl:
    """NIXL with the UCX backend."""

    def __init__(self, name: str, address: int, size: int) -> None:
        api = importlib.import_module("nixl._api")
        self._agent = api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"]))
        self._agent.register_memory([(address, size, 0, "")], mem_type="DRAM")
        self._remote = ""

    def card(self) -> dict[str, str]:
        return {"agent": base64.b64encode(self._agent.get_agent_metadata()).decode()}

    def meet(self, card: Mapping[str, str]) -> None:
        self._remote = self._agent.add_remote_agent(base64.b64decode(card["agent"]))

    def read(self, parts: Sequence[Sequence[tuple[int, int, int]]]) -> None:
        agent, handles = self._agent, []
        for part in parts:
            here = agent.get_xfer_descs([(start, size, 0) for start, _, size in part], mem_type="DRAM")
            there = agent.get_xfer_descs([(start, size, 0) for _, start, size in part], mem_type="DRAM")
            handles.append(agent.initialize_xfer("READ", here, there, self._remote))
        states = [agent.transfer(handle) for handle in handles]
        for handle, started in zip(handles, states, strict=True):
            state = started
            while state == "PROC":
                time.sleep(POLL_S)
                state = agent.check_xfer_state(handle)
            if state != "DONE":
                raise SystemExit(f"the transfer ended as {state}")
        for handle in handles:
            agent.release_xfer_handle(handle)


class Mooncake:
    """Mooncake's Transfer Engine over TCP, without a metadata server. Each part is a call from a thread of its own."""

    def __init__(self, name: str, address: int, size: int) -> None:
        self._engine = importlib.import_module("mooncake.engine").TransferEngine()
        _check(self._engine.initialize(HOST, "P2PHANDSHAKE", "tcp", ""), "initialize")
        _check(self._engine.register_memory(address, size), "register_memory")
        self._session = ""
        self._threads = ThreadPoolExecutor(16)

    def card(self) -> dict[str, str]:
        return {"session": f"{HOST}:{self._engine.get_rpc_port()}"}

    def meet(self, card: Mapping[str, str]) -> None:
        self._session = card["session"]

    def read(self, parts: Sequence[Sequence[tuple[int, int, int]]]) -> None:
        list(self._threads.map(self._read_part, parts))

    def _read_part(self, part: Sequence[tuple[int, int, int]]) -> None:
        here, there, sizes = (list(column) for column in zip(*part, strict=True))
        _check(self._engine.batch_transfer_sync_read(self._session, here, there, sizes), "batch_transfer_sync_read")


ENGINES: dict[str, type[Nixl] | type[Mooncake]] = {"nixl": Nixl, "mooncake": Mooncake}


def hold(engine: PeerEngine, memory: HostMemory, address: int) -> None:
    """Fill the memory, print the card and wait until stdin ends."""
    fill(memory)
    _answer({**engine.card(), "address": str(address)})
    sys.stdin.read()


def read_by_order(engine: PeerEngine, memory: HostMemory, address: int) -> None:
    """Read all blocks for each line of stdin, verify them and answer with the seconds."""
    card = json.loads(sys.stdin.readline())
    engine.meet(card)
    size, there = memory.block_bytes, int(card["address"])
    offsets = [index * size for index in range(memory.num_blocks)]
    for line in sys.stdin:
        count = json.loads(line)["concurrency"]
        ends = [memory.num_blocks * part // count for part in range(count + 1)]
        parts = [
            [(address + offset, there + offset, size) for offset in offsets[first:end]] for first, end in pairwise(ends)
        ]
        clear(memory)
        began = time.perf_counter()
        engine.read([part for part in parts if part])
        seconds = time.perf_counter() - began
        if not is_filled(memory, memory.num_blocks):
            raise SystemExit("wrong bytes arrived")
        _answer({"seconds": seconds})


def _check(code: int, call: str) -> None:
    if code:
        raise SystemExit(f"{call} answered {code}")


def _answer(value: Mapping[str, str | float]) -> None:
    os.write(_ANSWERS, json.dumps(value).encode() + b"\n")


def main() -> None:
    name, end, num_blocks, block_bytes = sys.argv[1:]
    memory = HostMemory(int(num_blocks), int(block_bytes))
    clear(memory)
    assert memory.host_view is not None
    address = address_of(memory.host_view)
    engine = ENGINES[name](f"{end}-{os.getpid()}", address, len(memory.host_view))
    (hold if end == "hold" else read_by_order)(engine, memory, address)


if __name__ == "__main__":
    # Before the library is loaded: it must not write to the pipe of the answers.
    _ANSWERS = os.dup(1)
    os.dup2(2, 1)
    main()
    sys.stderr.flush()
    os._exit(0)  # threads of either library may never end
