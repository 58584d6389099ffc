"""Connects two processes for tensors of a device, by torch.distributed or NCCL's own API.

The channel of a pair is a group of torch.distributed, or a communicator of NCCL's own API.
"""

import ctypes
import threading
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from baton_serve.kvtransfer.transports.devicecopy import DeviceBlocks
from baton_serve.kvtransfer.transports.oneccl.nccl import NcclChannel, load_api
from baton_serve.kvtransfer.transports.oneccl.pair import PairBrokenError
from baton_serve.kvtransfer.transports.oneccl.torch_pair import Group, TorchMeeting, join_store, make_group, translated

WARM_UP_BYTES = 1 << 20
"""Bytes that each new pair exchanges first: they connect it, and show whether it delivers the right bytes."""
ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # by default torch ends the process when a peer is gone
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "CCL_ZE_CACHE_OPEN_IPC_HANDLES": "0",  # a cached handle faults after the peer has freed and reallocated its memory
    "CCL_ATL_TRANSPORT": "ofi",
}
"""Environment variables that are set unless the user has set them."""


NCCL = "libnccl"
"""Dialect that uses NCCL's own API."""


class DeviceChannel(Protocol):
    """A connection of two processes (ranks) in a collective library, which one of them sends over and the other
    receives from. Both must exchange messages of the same sizes in the same order.
    """

    def exchange(self, parts: Sequence[Tensor], *, is_send: bool, stream: Any) -> Sequence[Any] | None:
        """Send the tensors `parts` as one message, or receive one into them. On a device it is queued on `stream`,
        which must be the current one, and None is returned. On the CPU (`stream` is None), return the objects whose
        `wait` ends with the message.
        """
        ...

    def abort(self) -> None:
        """End the channel. Calls that wait for the other process end with an error, if the library can do that."""
        ...


class TorchChannel:
    """A `DeviceChannel` over a process group of torch.distributed."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def exchange(self, parts: Sequence[Tensor], *, is_send: bool, stream: Any) -> Sequence[Any] | None:
        call, peer = (self._group.send, 1) if is_send else (self._group.recv, 0)
        if stream is None:
            return [call([part], peer, 0) for part in parts]
        # One group of calls is one kernel on the device.
        self._group._start_coalescing()
        for part in parts:
            call([part], peer, 0)
        work = self._group._end_coalescing()
        if work is not None:
            work.wait()
        return None

    def abort(self) -> None:
        self._group.abort()


class DeviceBackend:
    """Connects two processes by one dialect of the transport `oneccl`: the library libnccl, nccl, xccl or ccl, or gloo
    for tensors of the CPU, perhaps with the suffix `+staging` (receive only into staging memory).
    """

    def __init__(self, name: str, blocks: DeviceBlocks) -> None:
        self.name = name
        self._library = name.partition("+")[0]
        self._blocks = blocks
        libc = ctypes.CDLL(None)
        for variable, value in ENVIRONMENT.items():
            libc.setenv(variable.encode(), value.encode(), 0)

    def load(self) -> None:
        """Load NCCL's own library if this dialect uses it. The libraries that belong to torch were loaded with this
        module.
        """
        if self._library == NCCL:
            load_api()

    def meet(self, host: str) -> TorchMeeting:
        return TorchMeeting(host, lambda store, timeout_s: self._pair(store, 0, host, timeout_s))

    def join(self, address: bytes, secret: bytes, timeout_s: float) -> "DevicePair":
        store, local = join_store(address, timeout_s)
        return self._pair(store, 1, local, timeout_s)

    def _pair(self, store: Any, rank: int, host: str, timeout_s: float) -> "DevicePair":
        with translated():
            self._blocks.stream()  # sets the current device of this thread
            channel: DeviceChannel
            if self._library == NCCL:
                channel = NcclChannel(store, rank)
            else:
                channel = TorchChannel(make_group(self._library, store, rank, host, timeout_s))
            pair = DevicePair(channel, self._blocks, store)
        # Rank 0 sends sevens and rank 1 starts with ones, so that untouched memory cannot look like a success.
        probe = torch.full((WARM_UP_BYTES,), 7 - 6 * rank, dtype=torch.uint8, device=self._blocks.device)
        pair.exchange_all([[probe]], is_send=rank == 0)
        if rank == 1 and not bool((probe == 7).all()):
            raise PairBrokenError(f"{self.name} delivered other bytes than were sent")
        return pair


class DevicePair:
    """A connection of two processes through a collective library, for tensors in device memory. Only one thread uses
    it, except for `abandon`. `store` is the torch key-value store through which the two processes found each other.
    """

    def __init__(self, channel: DeviceChannel, blocks: DeviceBlocks, store: Any) -> None:
        self._channel = channel
        self._blocks = blocks
        self._store = store  # the channel needs the store as long as it lives
        self._is_abandoned = threading.Event()

    def post(self, parts: Sequence[Tensor], *, is_send: bool, stream: Any) -> "Wait":
        """Queue the sending or receiving of the tensors `parts` as one message, behind all earlier work of `stream`,
        which must be the current stream (None on the CPU). Call the returned `Wait` to wait until the message is
        complete; on a device, call `Wait.until` before that. Waiting raises `PairBrokenError` if the pair breaks.
        """
        if self._is_abandoned.is_set():
            raise PairBrokenError("the pair was given up")
        with translated():
            works = self._channel.exchange(parts, is_send=is_send, stream=stream) or ()
        return Wait(works, parts, self._is_abandoned, is_ordered=stream is not None)

    def exchange_all(self, messages: Sequence[Sequence[Tensor]], *, is_send: bool) -> None:
        """Send or receive several messages, each a list of tensors, on the calling thread's stream, and wait for all of
        them. Raises `PairBrokenError` if the pair breaks.
        """
        with self._blocks.on_stream():
            waits = [self.post(message, is_send=is_send, stream=self._blocks.stream()) for message in messages]
            waits[-1].until(self._blocks.mark())
        for wait in waits:
            wait()

    def abandon(self) -> None:
        """Give up the connection; any thread may call this, and it does not wait. NCCL ends the running messages. Other
        libraries may not, and then a thread that waits for a message never returns.
        """
        if not self._is_abandoned.is_set():
            self._is_abandoned.set()
            # In a thread of its own: aborting may wait for a call of the library that is running.
            threading.Thread(target=self._abort, name="baton-pair-abort", daemon=True).start()

    def _abort(self) -> None:
        with translated():
            self._channel.abort()

    def send(self, parts: Sequence[memoryview]) -> None:
        raise PairBrokenError("a device's pair carries tensors")

    receive = send


class Wait:
    """Waits, when it is called, until a message is complete: for an event of the device, or for the library's work on
    the CPU. If `is_ordered` is true, work that is queued later on the stream of `DevicePair.post` also waits for the
    message, so the host need not wait before it queues such work. If it is false, only this wait shows when the message
    is complete.
    """

    def __init__(
        self, works: Sequence[Any], parts: Sequence[Tensor], is_abandoned: threading.Event, *, is_ordered: bool
    ) -> None:
        self.is_ordered = is_ordered
        self._works = works
        self._parts = parts  # keeps the tensors alive while the library uses them
        self._event: Any = None
        self._is_abandoned = is_abandoned

    def until(self, event: Any) -> None:
        """Set the event to wait for, recorded on the stream behind the message and the work that follows it; None on
        the CPU. This call does not wait.
        """
        self._event = event

    def __call__(self) -> None:
        with translated():
            works, self._works = self._works, []
            for work in works:
                if work is not None:
                    work.wait()
            if self._event is not None:
                self._event.synchronize()
        if self._is_abandoned.is_set():
            raise PairBrokenError("the pair was given up")
