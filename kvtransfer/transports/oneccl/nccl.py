"""Calls NCCL through its own C API, as `library.py` does with oneCCL. It uses the library that torch has loaded,
without torch.

A message costs the host 13 µs instead of 60 (docs/log/block-transfer.md), and no watchdog of torch can end the process
when the peer is gone.
"""

import ctypes
import functools
import threading
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from baton_serve.kvtransfer.errors import TransportUnavailable
from baton_serve.kvtransfer.transports.oneccl.pair import PairBrokenError

LIBRARY = "libnccl.so.2"
UNIQUE_ID_BYTES = 128
UINT8 = 1
ABORT_PATIENCE_S = 1.0
"""Seconds that a running call of the library gets to return before its communicator is aborted."""


class NcclUniqueId(ctypes.Structure):
    """The C struct `ncclUniqueId` of NCCL's API: the id by which two processes find each other."""

    _fields_ = [("data", ctypes.c_char * UNIQUE_ID_BYTES)]


class NcclChannel:
    """A connection of two processes: a communicator of two ranks of NCCL, used through NCCL's own C API. The processes
    agree on the communicator's id over `store`, a torch Store that only this pair uses.
    """

    def __init__(self, store: Any, rank: int) -> None:
        """Connect to the other process; `rank` is 0 at the producer and 1 at the consumer. Waiting in `store` has the
        store's deadline; NCCL's own calls after it have none.
        """
        self._api = load_api()
        self._peer = 1 - rank
        self._calling = threading.Lock()
        if rank == 0:
            unique_id = self._api.unique_id()
            store.set("id", bytes(unique_id))
            store.get("joined")  # NCCL would wait for ever for a peer that does not come; the store has a deadline
        else:
            unique_id = NcclUniqueId.from_buffer_copy(store.get("id"))
            store.set("joined", b"1")
        self._communicator: ctypes.c_void_p | None = self._api.join(unique_id, rank)

    def exchange(self, parts: Sequence[Tensor], *, is_send: bool, stream: Any) -> None:
        """Queue the sending or receiving of the tensors `parts` as one message on `stream`. Raises `PairBrokenError` if
        it fails or after `abort`.
        """
        with self._calling:
            if self._communicator is None:
                raise PairBrokenError("the pair was given up")
            handle = ctypes.c_void_p(stream.cuda_stream)
            self._api.exchange(parts, self._peer, self._communicator, handle, is_send=is_send)

    def abort(self) -> None:
        """End the communicator: NCCL ends its running kernels and the calls that wait for the other process."""
        # A call that hangs keeps the lock for ever: after the timeout, abort under it, which is what ends the call.
        has_lock = self._calling.acquire(timeout=ABORT_PATIENCE_S)
        try:
            communicator, self._communicator = self._communicator, None
            if communicator is not None:
                self._api.abort(communicator)
        finally:
            if has_lock:
                self._calling.release()


class NcclApi:
    """The functions of NCCL's C library. Each raises `PairBrokenError` if its call fails."""

    def __init__(self) -> None:
        try:
            self._library = library = ctypes.CDLL(LIBRARY)
        except OSError as exc:
            raise TransportUnavailable(f"NCCL cannot be loaded: {exc}") from exc
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        library.ncclGetErrorString.restype = ctypes.c_char_p
        library.ncclCommInitRank.argtypes = [ctypes.POINTER(pointer), number, NcclUniqueId, number]
        library.ncclCommAbort.argtypes = [pointer]
        # Within a group, a call only records a message. Releasing the GIL for it would take longer than the call, so
        # `PyDLL` keeps it.
        self._noting = noting = ctypes.PyDLL(LIBRARY)
        for transfer in (library.ncclSend, library.ncclRecv, noting.ncclSend, noting.ncclRecv):
            transfer.argtypes = [pointer, size, number, number, pointer, pointer]

    def unique_id(self) -> NcclUniqueId:
        """Return a new id, which both ranks of a communicator must know."""
        made = NcclUniqueId()
        self._check("ncclGetUniqueId", self._library.ncclGetUniqueId(ctypes.byref(made)))
        return made

    def join(self, unique_id: NcclUniqueId, rank: int) -> ctypes.c_void_p:
        """Create a communicator of two ranks, of which this process is number `rank`, with the other process that knows
        `unique_id`. It waits for that process without a deadline.
        """
        made = ctypes.c_void_p()
        self._check("ncclCommInitRank", self._library.ncclCommInitRank(ctypes.byref(made), 2, unique_id, rank))
        return made

    def exchange(
        self,
        parts: Sequence[Tensor],
        peer: int,
        communicator: ctypes.c_void_p,
        stream: ctypes.c_void_p,
        *,
        is_send: bool,
    ) -> None:
        """Queue the sending of the tensors `parts` to rank `peer` of `communicator`, or their receiving, on the CUDA
        stream `stream`. Several parts are one group of calls.
        """
        is_group = len(parts) > 1
        library = self._noting if is_group else self._library
        call = library.ncclSend if is_send else library.ncclRecv
        if is_group:
            self._check("ncclGroupStart", library.ncclGroupStart())
        status = 0
        try:
            for part in parts:
                self._check("message", call(part.data_ptr(), part.nbytes, UINT8, peer, communicator, stream))
        finally:
            if is_group:
                status = self._library.ncclGroupEnd()
        self._check("ncclGroupEnd", status)

    def abort(self, communicator: ctypes.c_void_p) -> None:
        """End a communicator, its running kernels, and the calls that wait for the other process."""
        self._check("ncclCommAbort", self._library.ncclCommAbort(communicator))

    def _check(self, what: str, status: int) -> None:
        if status:
            text = self._library.ncclGetErrorString(status)
            raise PairBrokenError(f"{what}: {text.decode() if text else status}")


@functools.cache
def load_api() -> NcclApi:
    return NcclApi()
