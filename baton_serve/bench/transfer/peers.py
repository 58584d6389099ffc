"""Other libraries that move blocks between processes of this host, measured beside Baton's transports.

NIXL (UCX) with the path that it chooses itself, which is the memory of the other process, and over TCP; Mooncake's
Transfer Engine over TCP. None of them verifies its bytes; this benchmark does, outside of the measured time.
"""

import asyncio
import contextlib
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Self

from baton_serve.child_command import module_command

START_S = 60.0
READ_S = 120.0


class PeerError(Exception):
    """The peer cannot be measured on this machine."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A library with its environment."""

    name: str
    engine: str
    """Its name in `bench.transfer.peer_process` and in `--peers`."""
    module: str
    transport: str
    """Baton's transport of the same medium."""
    environment: Mapping[str, str]


PEERS = (
    Peer("NIXL UCX (shared memory)", "nixl", "nixl", "usm", {}),
    Peer("NIXL UCX (tcp)", "nixl", "nixl", "zeromq", {"UCX_TLS": "tcp"}),
    Peer("Mooncake (tcp)", "mooncake", "mooncake", "zeromq", {}),
)
NAMES = tuple(dict.fromkeys(peer.engine for peer in PEERS))
QUIET = {"NIXL_LOG_LEVEL": "ERROR", "UCX_LOG_LEVEL": "error", "MC_LOG_LEVEL": "ERROR", "GLOG_minloglevel": "2"}
"""Environment that keeps the libraries' logs short."""


def chosen(names: Collection[str] | None) -> list[Peer]:
    """Return the peers with these names, or all installed ones if `names` is None. Raises `PeerError` if a named peer
    is not installed."""
    missing = [peer.engine for peer in PEERS if importlib.util.find_spec(peer.module) is None]
    if asked := sorted(set(missing) & set(names or ())):
        raise PeerError(f"not installed: {', '.join(asked)} (pip install 'baton-serve[peers]')")
    return [peer for peer in PEERS if peer.engine not in missing and (names is None or peer.engine in names)]


class PeerReader:
    """The holding and the reading process of a peer."""

    def __init__(self, peer: Peer, log: IO[bytes]) -> None:
        self.peer = peer
        self._log = log
        self._ends: list[asyncio.subprocess.Process] = []

    @classmethod
    async def start(cls, peer: Peer, num_blocks: int, block_bytes: int) -> Self:
        """Start both processes and read all blocks once, to connect them. Raises `PeerError`."""
        reading = cls(peer, tempfile.TemporaryFile())  # noqa: SIM115
        try:
            holder = await reading._spawn("hold", num_blocks, block_bytes)
            reader = await reading._spawn("read", num_blocks, block_bytes)
            card = await reading._line(holder, START_S)
            assert reader.stdin is not None
            reader.stdin.write(card)
            await reading.seconds(1)
        except BaseException:
            await reading.close()
            raise
        return reading

    async def seconds(self, concurrency: int) -> float:
        """Return the seconds to read all blocks, divided among `concurrency` transfers."""
        reader = self._ends[1]
        assert reader.stdin is not None
        with contextlib.suppress(ConnectionError):  # it has ended; the end of its log is read below
            reader.stdin.write(json.dumps({"concurrency": concurrency}).encode() + b"\n")
            await reader.stdin.drain()
        return float(json.loads(await self._line(reader, READ_S))["seconds"])

    async def close(self) -> None:
        for process in self._ends:
            if process.returncode is None:
                process.kill()
            await process.wait()
        self._log.close()

    async def _spawn(self, end: str, num_blocks: int, block_bytes: int) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            *module_command(
                "baton_serve.bench.transfer.peer_process", self.peer.engine, end, str(num_blocks), str(block_bytes)
            ),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, **QUIET, **self.peer.environment},
        )
        self._ends.append(process)
        return process

    async def _line(self, process: asyncio.subprocess.Process, timeout_s: float) -> bytes:
        assert process.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                line = await process.stdout.readline()
        except TimeoutError:
            raise PeerError(f"no answer within {timeout_s:g} s") from None
        if not line:
            raise PeerError(self._end_of_log())
        return line

    def _end_of_log(self) -> str:
        """Return the last line of the peer's log."""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(size - 2000, 0))
        lines = self._log.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it ended without any output")


@contextlib.asynccontextmanager
async def readings(
    peers: Sequence[Peer], transport: str, num_blocks: int, block_bytes: int
) -> AsyncIterator[list[PeerReader]]:
    """Start the peers with the transport's medium and yield them; stop them on exit. A peer that cannot run is
    reported on stderr and skipped."""
    started: list[PeerReader] = []
    try:
        for peer in peers:
            if peer.transport == transport:
                try:
                    started.append(await PeerReader.start(peer, num_blocks, block_bytes))
                except PeerError as exc:
                    sys.stderr.write(f"baton-bench kv: {peer.name} is left out: {exc}\n")
        yield started
    finally:
        for reading in started:
            await reading.close()
