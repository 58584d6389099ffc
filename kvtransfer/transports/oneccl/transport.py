"""The transport `oneccl`: moves blocks from device to device by a collective library, in groups of two processes.

Blocks of devices travel from device to device: with `xccl` on Arc, `nccl` on CUDA, and `ccl` if only Intel's older
bindings are installed. For host memory, oneCCL's own library or `gloo` does the same.
"""

import asyncio
import importlib
import logging
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from baton_serve.kvtransfer.block_memory import BlockMemory
from baton_serve.kvtransfer.control_messages import Hello, Host, Offer, Welcome
from baton_serve.kvtransfer.errors import TransportUnavailable
from baton_serve.kvtransfer.settings import TransferSettings
from baton_serve.kvtransfer.transports.hostcopy import host_blocks
from baton_serve.kvtransfer.transports.oneccl.backends import device_backends, host_backends
from baton_serve.kvtransfer.transports.oneccl.host_ends import PairReceiver, PairSender
from baton_serve.kvtransfer.transports.oneccl.pair import Backend, Pair
from baton_serve.kvtransfer.transports.oneccl.thread import PairThread
from baton_serve.kvtransfer.transports.port import AttachRequest, NodeFacts, Receiver, ReceiveTarget, Sender
from baton_serve.kvtransfer.transports.zeromq import FrameReceiver

logger = logging.getLogger(__name__)

MAX_STUCK = 8
"""Largest number of pairs that may hang in the library after they were closed. Beyond it, this process makes no more
pairs.
"""


class OneCclTransport:
    """The transport `oneccl`: connects a pair of processes through a collective library for each connection of a
    consumer, with the best library (dialect) that both ends have.
    """

    name = "oneccl"
    pulls = True
    """A send reads the blocks when the peer takes them. A peer that froze must not count bytes that it got after its
    lease.
    """
    buffers = True
    streams = True
    narrows = False

    def __init__(self, facts: NodeFacts, settings: TransferSettings) -> None:
        self._memory = facts.memory
        self._here = facts.host
        self._settings = settings
        self._host = _host_of(settings)
        self._blocks: Any = None
        """The `devicecopy.DeviceBlocks` if the memory is a device's, otherwise None."""
        self._backends: dict[str, Backend] = {}
        self._threads: list[PairThread] = []

    @property
    def dialects(self) -> Sequence[str]:
        return tuple(self._backends)

    async def start(self) -> None:
        """Load the collective libraries that the settings allow. A library that cannot be loaded is logged and left
        out.
        """
        try:
            found = await asyncio.to_thread(self._find)
        except TransportUnavailable as exc:
            logger.warning("transport oneccl cannot be used: %s", exc)
            return
        chosen = self._settings.oneccl_backend
        for backend in found:
            try:
                if chosen in ("auto", backend.name):
                    await asyncio.to_thread(backend.load)
                    self._backends[backend.name] = backend
            except TransportUnavailable as exc:
                logger.warning("transport oneccl: backend %s cannot be used: %s", backend.name, exc)

    def serves(self, hello: Hello) -> bool:
        return bool(self._backends)

    async def sender(self, request: AttachRequest, on_failed: Callable[[str], None]) -> Sender:
        self._check_secrecy(request.hello.host)
        backend = self._choose(request.dialects)
        meeting = await asyncio.to_thread(backend.meet, self._host)
        offer = Offer(self.name, meeting.address, meeting.secret, backend.name)
        thread = self._thread(lambda: meeting.join(self._settings.attach_timeout_s), on_failed)
        if self._blocks is None:
            return PairSender(offer, thread, request, self._settings)
        sender: Sender = _device_module().DeviceSender(offer, thread, _blocks_of(request.memory), self._settings)
        return sender

    async def attach(self, welcome: Welcome, offer: Offer, target: ReceiveTarget) -> Receiver:
        self._check_secrecy(welcome.host)
        backend, timeout_s = self._choose([offer.dialect]), self._settings.attach_timeout_s
        receiver = self._receiver(offer.dialect, target)
        thread = self._thread(lambda: backend.join(offer.address, offer.secret, timeout_s), receiver.failed)
        # The thread needs `receiver.failed` and the receiver needs the thread, so one of them is set afterwards.
        receiver.thread = thread
        try:
            async with asyncio.timeout(timeout_s):
                # A timeout must not cancel the future, which the pair's thread resolves later.
                await asyncio.shield(thread.opened)
        except TimeoutError as exc:
            receiver.close()
            raise TransportUnavailable(f"{backend.name}: the two ends did not meet within {timeout_s:g} s") from exc
        except asyncio.CancelledError:
            receiver.close()
            raise
        attached: Receiver = receiver
        return attached

    async def close(self) -> None:
        for thread in self._threads:
            thread.close()

    def _check_secrecy(self, peer: Host) -> None:
        """Raise `TransportUnavailable` if `peer` is on another machine and the cluster has a key, that is, must
        encrypt: collective libraries encrypt nothing.
        """
        if self._settings.curve_secret_key and peer.boot_id != self._here.boot_id:
            raise TransportUnavailable(
                "it is not encrypted and the peer is on another machine, while this cluster has a key: "
                "use zeromq between machines, or run without the key inside a network that encrypts"
            )

    def _find(self) -> list[Backend]:
        if self._memory.host_view is not None:
            return host_backends(self._settings.oneccl_library)
        self._blocks = _blocks_of(self._memory)
        return device_backends(self._blocks)

    def _receiver(self, dialect: str, target: ReceiveTarget) -> Any:
        """Return the consumer's end for this dialect and destination: a `PairReceiver` for host memory, or a
        `StagedReceiver` or `DirectReceiver` for a device. Raises `TransportUnavailable` if a device's blocks would need
        a conversion.
        """
        if self._blocks is None:
            if target.converter is None:
                return PairReceiver(FrameReceiver(host_blocks(target.memory)), target.block_bytes)
            module = importlib.import_module("baton_serve.kvtransfer.conversion.receivers")
            return PairReceiver(module.ConvertingFrameReceiver(target.converter), target.block_bytes)
        if target.converter is not None:
            raise TransportUnavailable("blocks of a device change their layout on other transports only")
        module = _device_module()
        return (module.StagedReceiver if dialect.endswith(module.STAGED) else module.DirectReceiver)(
            _blocks_of(target.memory)
        )

    def _choose(self, dialects: Sequence[str]) -> Backend:
        # The order of this node decides; its backends are sorted best first.
        for name, backend in self._backends.items():
            if name in dialects:
                return backend
        raise TransportUnavailable(f"no common backend: {', '.join(self._backends)} here, {', '.join(dialects)} there")

    def _thread(self, join: Callable[[], Pair], on_failed: Callable[[str], None]) -> PairThread:
        self._threads = [thread for thread in self._threads if thread.is_running]
        # A closed thread that still runs is stuck in the library, and nothing can end it.
        if sum(thread.is_closed for thread in self._threads) >= MAX_STUCK:
            raise TransportUnavailable(f"{MAX_STUCK} pairs never came back from the library: restart this process")
        thread = PairThread(join, on_failed=on_failed, stall_timeout_s=self._settings.stall_timeout_s)
        self._threads.append(thread)
        return thread


def _blocks_of(memory: BlockMemory) -> Any:
    """Return `devicecopy.DeviceBlocks`, the access to the device's blocks in `memory`. It imports torch."""
    return importlib.import_module("baton_serve.kvtransfer.transports.devicecopy").DeviceBlocks(memory)


def _device_module() -> ModuleType:
    """Import and return the module for blocks in a device's memory, which needs torch."""
    return importlib.import_module("baton_serve.kvtransfer.transports.oneccl.device_ends")


def _host_of(settings: TransferSettings) -> str:
    """Return an address of this machine that other instances can reach: the one to advertise, or the one that the node
    is bound to.
    """
    bound = settings.bind.partition("://")[2].rpartition(":")[0].strip("[]")
    return settings.advertise_host or ("127.0.0.1" if bound in ("*", "0.0.0.0") else bound)
