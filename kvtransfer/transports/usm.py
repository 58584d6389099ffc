"""The transport `usm`, on one host: the consumer maps the producer's KV memory and copies blocks out of it.

Blocks of a device pass through a ring in shared memory instead (`ring`), which both ends pin. The producer hands a
memfd (read-only for its KV cache) over a unix socket (SCM_RIGHTS) to each process that presents the secret of its
offer. No memory has a name in a file system, so `kill -9` leaves nothing behind, and a descriptor cannot be guessed.
Containers without a common network namespace set `run_dir` to a folder that both mount.
"""

import asyncio
import contextlib
import importlib
import logging
import mmap
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from baton_serve.contracts.same_user import stranger
from baton_serve.kvtransfer.block_memory import seal_size
from baton_serve.kvtransfer.control_messages import Hello, Offer, Welcome
from baton_serve.kvtransfer.errors import TransportUnavailable
from baton_serve.kvtransfer.settings import TransferSettings
from baton_serve.kvtransfer.transports.hostcopy import HostBlocks, host_blocks
from baton_serve.kvtransfer.transports.memory import AnnounceOnly, HostReceiver, converting
from baton_serve.kvtransfer.transports.port import AttachRequest, NodeFacts, Receiver, ReceiveTarget, Sender

logger = logging.getLogger(__name__)

SECRET_BYTES = 32
"""Length of the secret that a process must present to get a descriptor."""
ANSWER_BYTES = 256
"""Largest answer that comes with a descriptor."""
TIMEOUT_S = 2.0
"""Seconds that one end waits for the other while a descriptor is handed over."""


class MappingAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The message that a producer sends together with a file descriptor of memory to map: the number of its blocks,
    their size in bytes, and whether it is a ring in which blocks of a device are staged.
    """

    num_blocks: Annotated[int, Meta(ge=1, le=2**40)]
    block_bytes: Annotated[int, Meta(ge=1, le=2**40)]
    is_ring: bool


@dataclass(frozen=True, slots=True)
class ExportedMemory:
    """Memory of this process, a KV cache or a ring, that another process of the same host may map if it knows the
    secret.
    """

    fd: int
    num_blocks: int
    block_bytes: int
    is_ring: bool


class UsmTransport:
    """The transport `usm`: shares this node's block memory with other processes of this host, and maps theirs to copy
    blocks from it.
    """

    name = "usm"
    pulls = True
    buffers = False
    streams = False
    narrows = False
    dialects: Sequence[str] = ()

    def __init__(self, facts: NodeFacts, settings: TransferSettings) -> None:
        self._facts = facts
        self._settings = settings
        self._refused: set[int] = set()
        self._shown: dict[bytes, ExportedMemory] = {}
        self._secret = secrets.token_bytes(SECRET_BYTES)
        unique = f"baton-{os.getpid()}-{secrets.token_hex(8)}"
        self._path = Path(settings.run_dir, unique) if settings.run_dir else None
        # An abstract socket needs no file, but only processes of the same network namespace can reach it.
        self._address = bytes(self._path) if self._path is not None else b"\0" + unique.encode()
        self._listener: socket.socket | None = None
        self._serving: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen for processes of this host that want to map this node's memory. If its memory cannot be shared, do not
        listen: this node can then only map the memory of others.
        """
        memory = self._facts.memory
        if memory.shared_fd is None and memory.host_view is not None:
            return
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.setblocking(False)
            listener.bind(self._address)
            listener.listen(64)
            if memory.shared_fd is not None:
                seal_size(memory.shared_fd)
                # Opening it again gives a descriptor of its own mode: a peer can read the cache and never write it.
                fd = os.open(f"/proc/self/fd/{memory.shared_fd}", os.O_RDONLY | os.O_CLOEXEC)
                self._shown[self._secret] = ExportedMemory(fd, memory.num_blocks, memory.block_bytes, is_ring=False)
        except OSError as exc:
            listener.close()
            logger.warning(
                "shared memory cannot be offered, usm stays unused: %s: %s", self._path or "abstract socket", exc
            )
            return
        # Set at the end: `serves` offers this transport only when the socket listens.
        self._listener = listener
        asyncio.get_running_loop().add_reader(listener.fileno(), self._accept)

    def serves(self, hello: Hello) -> bool:
        return self._listener is not None and hello.host.boot_id == self._facts.host.boot_id

    async def sender(self, request: AttachRequest, on_failed: Callable[[str], None]) -> Sender:
        if request.memory.host_view is not None:
            return AnnounceOnly(Offer(self.name, self._address, self._secret), request, self._settings)
        ring_module = importlib.import_module("baton_serve.kvtransfer.transports.ring")
        ring = await asyncio.to_thread(ring_module.Ring, request.memory, self._settings.ring_bytes)
        secret = secrets.token_bytes(SECRET_BYTES)
        # A secret for each ring, so that one consumer cannot map the ring of another one.
        self._shown[secret] = ExportedMemory(ring.fd, ring.num_slots, ring.block_bytes, is_ring=True)
        offer = Offer(self.name, self._address, secret)
        close = partial(self._shown.pop, secret, None)
        sender: Sender = ring_module.RingSender(offer, ring, self._settings, on_close=close)
        return sender

    async def attach(self, welcome: Welcome, offer: Offer, target: ReceiveTarget) -> Receiver:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                fd, answer = await _ask(offer)
        except (OSError, TimeoutError) as exc:
            raise TransportUnavailable(f"the producer's memory cannot be mapped: {exc or 'timeout'}") from exc
        try:
            return await asyncio.to_thread(_mapped, fd, answer, target)
        finally:
            # The mapping stays valid without the descriptor.
            os.close(fd)

    async def close(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None
        whole = self._shown.pop(self._secret, None)
        if whole is not None:
            os.close(whole.fd)
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        if self._path is not None:
            self._path.unlink(missing_ok=True)

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
            if (uid := stranger(connection)) is not None:
                self._refuse(uid)
                return
            async with asyncio.timeout(TIMEOUT_S):
                secret = b""
                while len(secret) < SECRET_BYTES and (more := await loop.sock_recv(connection, SECRET_BYTES)):
                    secret += more
            for known, shown in self._shown.items():
                # The comparison takes the same time for every guess.
                if secrets.compare_digest(secret, known):
                    answer = MappingAnswer(shown.num_blocks, shown.block_bytes, shown.is_ring)
                    socket.send_fds(connection, [msgspec.msgpack.encode(answer)], [shown.fd])
                    return

    def _refuse(self, uid: int) -> None:
        """Log that a process of another user (`uid`) was refused. Log each user only once, because its processes may
        try again without end.
        """
        if uid not in self._refused:
            self._refused.add(uid)
            logger.warning("shared memory was refused to a process of another user (uid %d)", uid)


def _mapped(fd: int, answer: "MappingAnswer", target: ReceiveTarget) -> Receiver:
    size, memory, converter = answer.num_blocks * answer.block_bytes, target.memory, target.converter
    # Reading behind the end of a mapped file would end this process with SIGBUS: check the size first.
    if answer.block_bytes % target.block_bytes or os.fstat(fd).st_size < size:
        raise TransportUnavailable(f"the producer's memory is not {answer.num_blocks} blocks of {target.block_bytes}")
    # The cache is mapped read-only. A ring is mapped writable, because CUDA's `cudaHostRegister` cannot pin a read-only
    # mapping by default.
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if answer.is_ring else 0)
    mapping = memoryview(mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=protection))
    source = HostBlocks(mapping, size // target.block_bytes, target.block_bytes)
    if converter is not None:
        return converting(source, converter, is_ring=answer.is_ring)
    if memory.host_view is not None:
        return HostReceiver(source, host_blocks(memory), stages=answer.is_ring)
    blocks = importlib.import_module("baton_serve.kvtransfer.transports.devicecopy").DeviceBlocks(memory)
    ring_module = importlib.import_module("baton_serve.kvtransfer.transports.ring")
    receiver: Receiver = ring_module.DeviceReceiver(source, mapping, blocks, is_ring=answer.is_ring)
    return receiver


async def _ask(offer: Offer) -> tuple[int, "MappingAnswer"]:
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.setblocking(False)
        await loop.sock_connect(connection, offer.address)
        if (uid := stranger(connection)) is not None:
            raise OSError(f"a process of another user (uid {uid}) listens at the producer's address")
        await loop.sock_sendall(connection, offer.secret)
        await _readable(connection)
        answer, descriptors, _, _ = socket.recv_fds(connection, ANSWER_BYTES, 1)
    try:
        if len(descriptors) != 1:
            raise OSError("the producer did not send a descriptor")
        return descriptors[0], msgspec.msgpack.decode(answer, type=MappingAnswer)
    except (OSError, msgspec.MsgspecError):
        for descriptor in descriptors:
            os.close(descriptor)
        raise OSError("the producer did not send a descriptor") from None


async def _readable(connection: socket.socket) -> None:
    """Wait until `connection` can be read without blocking. asyncio cannot receive messages that carry file
    descriptors, so the caller reads the socket itself.
    """
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
