"""`usm`: the consumer maps the producer's KV memory and copies blocks straight out of it, one copy.

The producer hands out its memfd, read-only, over a unix socket (SCM_RIGHTS) to whoever names the secret from its
offer: no memory has a name in a file system that a `kill -9` could leave behind, and a descriptor cannot be
guessed. Containers that share no network namespace set `run_dir` to a folder that both mount.
"""

import asyncio
import contextlib
import logging
import mmap
import os
import secrets
import socket
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

from kvtransfer.errors import TransportUnavailable
from kvtransfer.frames import Hello, Offer, Welcome
from kvtransfer.memory import seal_size
from kvtransfer.settings import TransferSettings
from kvtransfer.transports.hostcopy import HostBlocks, host_blocks
from kvtransfer.transports.memory import AnnounceOnly, HostInlet
from kvtransfer.transports.port import NodeFacts, Wish

logger = logging.getLogger(__name__)

SECRET_BYTES = 32
ANSWER = struct.Struct("<QQ")
"""Number of blocks, bytes of a block."""
TIMEOUT_S = 2.0


class UsmTransport:
    name = "usm"
    pulls = True
    buffers = False
    streams = False
    dialects: Sequence[str] = ()

    def __init__(self, facts: NodeFacts, settings: TransferSettings) -> None:
        self._facts = facts
        self._settings = settings
        self._secret = secrets.token_bytes(SECRET_BYTES)
        unique = f"baton-{os.getpid()}-{secrets.token_hex(8)}"
        self._path = Path(settings.run_dir, unique) if settings.run_dir else None
        self._address = bytes(self._path) if self._path is not None else b"\0" + unique.encode()
        self._listener: socket.socket | None = None
        self._read_only = -1
        self._serving: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Without a shareable memory there is nothing to hand out; this node can still map its peers'."""
        fd = self._facts.memory.shared_fd
        if fd is None:
            return
        seal_size(fd)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.setblocking(False)
            listener.bind(self._address)
            listener.listen(64)
            self._read_only = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as exc:
            listener.close()
            logger.warning("shared memory is not offered: %s: %s", self._path or "socket", exc)
            return
        self._listener = listener
        asyncio.get_running_loop().add_reader(listener.fileno(), self._accept)

    def serves(self, hello: Hello) -> bool:
        return self._listener is not None and hello.host.boot_id == self._facts.host.boot_id

    async def outlet(self, wish: Wish, on_failed: Callable[[str], None]) -> AnnounceOnly:
        return AnnounceOnly(Offer(self.name, self._address, self._secret), self._facts.memory, self._settings)

    async def attach(self, welcome: Welcome, offer: Offer) -> HostInlet:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                fd, num_blocks, block_bytes = await _ask(offer)
        except (OSError, TimeoutError) as exc:
            raise TransportUnavailable(f"the producer's memory cannot be had: {exc or 'timeout'}") from exc
        try:
            return self._map(fd, num_blocks, block_bytes)
        finally:
            os.close(fd)

    async def close(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None
            os.close(self._read_only)
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _map(self, fd: int, num_blocks: int, block_bytes: int) -> HostInlet:
        target = host_blocks(self._facts.memory)
        size = num_blocks * block_bytes
        if block_bytes != target.block_bytes or os.fstat(fd).st_size < size:
            raise TransportUnavailable(f"the producer's memory is not {num_blocks} blocks of {block_bytes} bytes")
        mapping = mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        return HostInlet(HostBlocks(memoryview(mapping), num_blocks, block_bytes), target)

    def _accept(self) -> None:
        assert self._listener is not None
        with contextlib.suppress(BlockingIOError):
            connection, _ = self._listener.accept()
            task = asyncio.get_running_loop().create_task(self._serve(connection))
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)

    async def _serve(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        connection.setblocking(False)
        with connection, contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(TIMEOUT_S):
                secret = b""
                while len(secret) < SECRET_BYTES and (more := await loop.sock_recv(connection, SECRET_BYTES)):
                    secret += more
            if secrets.compare_digest(secret, self._secret) and self._read_only >= 0:
                memory = self._facts.memory
                answer = ANSWER.pack(memory.num_blocks, memory.block_bytes)
                socket.send_fds(connection, [answer], [self._read_only])


async def _ask(offer: Offer) -> tuple[int, int, int]:
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.setblocking(False)
        await loop.sock_connect(connection, offer.address)
        await loop.sock_sendall(connection, offer.secret)
        await _readable(connection)
        answer, descriptors, _, _ = socket.recv_fds(connection, ANSWER.size, 1)
    if len(answer) != ANSWER.size or len(descriptors) != 1:
        for descriptor in descriptors:
            os.close(descriptor)
        raise OSError("the producer did not hand it out")
    num_blocks, block_bytes = ANSWER.unpack(answer)
    return descriptors[0], num_blocks, block_bytes


async def _readable(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(connection.fileno(), _resolve, ready)
    try:
        await ready
    finally:
        loop.remove_reader(connection.fileno())


def _resolve(ready: "asyncio.Future[None]") -> None:
    if not ready.done():
        ready.set_result(None)
