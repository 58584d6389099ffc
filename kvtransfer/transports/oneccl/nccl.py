"""NCCL through its own C API, as `library` does with oneCCL: the one torch has loaded, without torch around it.

A message costs the host 13 µs instead of 60 (docs/log/block-transfer.md), and no watchdog of torch's can end the
process when the peer is gone.
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
"""A call of the library that is under way gets this long to return before its communicator is aborted under it."""


class NcclUniqueId(ctypes.Structure):
    _fields_ = [("data", ctypes.c_char * UNIQUE_ID_BYTES)]


class NcclChannel:
    """A communicator of two ranks. `store`: a torch Store of this pair alone, over which they agree on its id."""

    def __init__(self, store: Any, rank: int) -> None:
        """Waits for the peer as long as the store does. From there on the library itself knows no deadline."""
        self._api = load_api()
        self._peer = 1 - rank
        self._calling = threading.Lock()
        if rank == 0:
            unique_id = self._api.unique_id()
            store.set("id", bytes(unique_id))
            store.get("joined")
        else:
            unique_id = NcclUniqueId.from_buffer_copy(store.get("id"))
            store.set("joined", b"1")
        self._communicator: ctypes.c_void_p | None = self._api.join(unique_id, rank)

    def exchange(self, parts: Sequence[Tensor], *, is_send: bool, stream: Any) -> None:
        """All parts as one group, on the stream."""
        with self._calling:
            if self._communicator is None:
                raise PairBrokenError("the pair was given up")
            handle = ctypes.c_void_p(stream.cuda_stream)
            self._api.exchange(parts, self._peer, self._communicator, handle, is_send=is_send)

    def abort(self) -> None:
        """Ends its kernels, and calls that wait for the peer."""
        has_lock = self._calling.acquire(timeout=ABORT_PATIENCE_S)
        try:
            communicator, self._communicator = self._communicator, None
            if communicator is not None:
                self._api.abort(communicator)
        finally:
            if has_lock:
                self._calling.release()


class NcclApi:
    """The functions of the library. Raises `PairBrokenError` when one of them fails."""

    def __init__(self) -> None:
        try:
            self._library = library = ctypes.CDLL(LIBRARY)
        except OSError as exc:
            raise TransportUnavailable(f"NCCL cannot be loaded: {exc}") from exc
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        library.ncclGetErrorString.restype = ctypes.c_char_p
        library.ncclCommInitRank.argtypes = [ctypes.POINTER(pointer), number, NcclUniqueId, number]
        library.ncclCommAbort.argtypes = [pointer]
        # Within a group a message is only noted down: giving Python's lock away for that would cost more than it.
        self._noting = noting = ctypes.PyDLL(LIBRARY)
        for transfer in (library.ncclSend, library.ncclRecv, noting.ncclSend, noting.ncclRecv):
            transfer.argtypes = [pointer, size, number, number, pointer, pointer]

    def unique_id(self) -> NcclUniqueId:
        made = NcclUniqueId()
        self._check("ncclGetUniqueId", self._library.ncclGetUniqueId(ctypes.byref(made)))
        return made

    def join(self, unique_id: NcclUniqueId, rank: int) -> ctypes.c_void_p:
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
        self._check("ncclCommAbort", self._library.ncclCommAbort(communicator))

    def _check(self, what: str, status: int) -> None:
        if status:
            text = self._library.ncclGetErrorString(status)
            raise PairBrokenError(f"{what}: {text.decode() if text else status}")


@functools.cache
def load_api() -> NcclApi:
    return NcclApi()
