"""Calls oneCCL through its C API (libccl.so.2, from 2021.17 on), which torch's xccl calls underneath.

It also runs on CPUs, on host memory and on SYCL USM. Its calls block; they have no deadline and cannot be aborted.
"""

import ctypes
import functools
import logging
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from baton_serve.kvtransfer.block_memory import address_of
from baton_serve.kvtransfer.errors import TransportUnavailable
from baton_serve.kvtransfer.transports.oneccl.pair import PairBrokenError

logger = logging.getLogger(__name__)

INT8 = 0
UNIQUE_ID_BYTES = 4096
MAX_PAIRS = 256
"""Largest number of pairs of a process: each keeps seven open files until the process ends."""
LIBRARY = "libccl.so.2"
NEEDED_FIRST = (
    *("libintlc.so.5", "libimf.so", "libirng.so", "libsvml.so", "libumf.so.1", "libur_loader.so.0", "libsycl.so.8"),
    *("libfabric.so.1", LIBRARY, "libccl.so.1", "libccl_legacy_cpu.so", "libccl_legacy.so"),
)
"""Libraries to load, in the order of their dependencies. Wheels install them in one folder that the loader does not
search.
"""
ENVIRONMENT = {
    "CCL_ATL_TRANSPORT": "ofi",
    "FI_PROVIDER": "tcp",  # shm hangs with the second pair of a process
    "CCL_YIELD": "sched_yield",  # the default spins: a hundredth of the speed where cores are shared
    "CCL_LOG_LEVEL": "error",
    "CCL_ZE_CACHE_OPEN_IPC_HANDLES": "0",
}
"""Environment variables that are set unless the user has set them. oneCCL reads them when it is loaded."""
OPENCL = "libintelocl.so"
"""Intel's OpenCL for CPUs. With it, the SYCL build of oneCCL finds a device, which its groups of calls need."""


class OneCclUniqueId(ctypes.Structure):
    """The C struct `onecclUniqueId` of oneCCL's API: the id by which two processes find each other."""

    _fields_ = [("data", ctypes.c_char * UNIQUE_ID_BYTES)]


def find_library(folder: str = "") -> Path | None:
    """Return the path of oneCCL's library in `folder` or, if `folder` is empty, where pip installs the library for this
    Python. Return None if it is not there.
    """
    for place in (Path(folder),) if folder else (Path(sys.prefix, "lib"),):
        if (place / LIBRARY).exists():
            return place / LIBRARY
    return None


class LibraryBackend:
    """Connects two processes by oneCCL's own library (dialect `libccl`), for blocks in host memory."""

    name = "libccl"

    def __init__(self, library: Path) -> None:
        self._path = library
        self._api: Api | None = None

    def load(self) -> None:
        self._api = load_api(self._path)

    def meet(self, host: str) -> "LibraryMeeting":
        return LibraryMeeting(self._loaded())

    def join(self, address: bytes, secret: bytes, timeout_s: float) -> "LibraryPair":
        api = self._loaded()
        return LibraryPair(api, api.join(OneCclUniqueId.from_buffer_copy(secret), rank=1, timeout_s=timeout_s))

    def _loaded(self) -> "Api":
        if self._api is None:
            raise TransportUnavailable("oneCCL is not loaded")
        return self._api


class LibraryMeeting:
    """The producer's half of connecting two processes by oneCCL's library. `secret` is the unique id that the consumer
    needs; it contains the address, so `address` is empty.
    """

    address = b""

    def __init__(self, api: "Api") -> None:
        self._api = api
        self._id = api.unique_id()
        self.secret = bytes(self._id)

    def join(self, timeout_s: float) -> "LibraryPair":
        return LibraryPair(self._api, self._api.join(self._id, rank=0, timeout_s=timeout_s))


class LibraryPair:
    """A connection of two processes: a communicator of two ranks of oneCCL's library. It is never destroyed, because
    oneccl 2021.17 aborts the process if the peer is dead; a few open files and a thread stay.
    """

    def __init__(self, api: "Api", communicator: ctypes.c_void_p) -> None:
        self._api = api
        self._communicator = communicator
        self._is_abandoned = False

    def send(self, parts: Sequence[memoryview]) -> None:
        self._run("onecclSend", parts, 1)

    def receive(self, parts: Sequence[memoryview]) -> None:
        self._run("onecclRecv", parts, 0)

    def abandon(self) -> None:
        self._is_abandoned = True

    def _run(self, function: str, parts: Sequence[memoryview], peer: int) -> None:
        if not self._is_abandoned:
            self._api.exchange(function, parts, peer, self._communicator)
        if self._is_abandoned:
            raise PairBrokenError("the pair was given up")


@functools.cache
def load_api(path: Path) -> "Api":
    """Load oneCCL's library at `path` and return its functions. Later calls return the same object, because the library
    keeps its state in globals. Raises `TransportUnavailable` if it cannot be loaded.
    """
    return Api(path)


def _environment(folder: Path) -> dict[str, str]:
    """Return the environment variables to set before oneCCL's library in `folder` is loaded."""
    places = {"CCL_ROOT": str(folder.parent), "FI_PROVIDER_PATH": str(folder)}
    if not (folder / OPENCL).exists():
        return {**ENVIRONMENT, **places, "CCL_PLUGIN": "ONECCL_LEGACY_CPU"}
    return {**ENVIRONMENT, **places, "CCL_PLUGIN": "ONECCL_LEGACY", "OCL_ICD_FILENAMES": str(folder / OPENCL)}


class Api:
    """The functions of oneCCL's C library. Each raises `PairBrokenError` if its call fails."""

    def __init__(self, path: Path) -> None:
        folder = path.parent
        libc = ctypes.CDLL(None)
        for name, value in _environment(folder).items():
            # The library reads the environment of C. Overwrite 0: the user's values stay.
            libc.setenv(name.encode(), value.encode(), 0)
        try:
            for name in NEEDED_FIRST:
                if (folder / name).exists():
                    ctypes.CDLL(str(folder / name), ctypes.RTLD_GLOBAL)
            self._library = library = ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
        except OSError as exc:
            raise TransportUnavailable(f"oneCCL cannot be loaded: {exc}") from exc
        self._has_groups = True
        self._num_pairs = 0
        self._joining = threading.Lock()
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        library.onecclGetErrorString.restype = ctypes.c_char_p
        library.onecclCommInitRank.argtypes = [ctypes.POINTER(pointer), size, OneCclUniqueId, number]
        for transfer in (library.onecclSend, library.onecclRecv):
            transfer.argtypes = [pointer, size, number, number, pointer, pointer]

    def unique_id(self) -> OneCclUniqueId:
        """Return a new id, which both ranks of a pair must know."""
        made = OneCclUniqueId()
        self._check("onecclGetUniqueId", self._library.onecclGetUniqueId(ctypes.byref(made)))
        return made

    def join(self, unique_id: OneCclUniqueId, *, rank: int, timeout_s: float) -> ctypes.c_void_p:
        """Connect to the other process that knows `unique_id`: create a communicator of two ranks, of which this
        process is number `rank`. Wait for it without a deadline. Only one call runs at a time, for whose turn it waits
        up to `timeout_s`: the library aborts the process if several peers die while it waits for them.
        """
        if not self._joining.acquire(timeout=timeout_s):
            raise PairBrokenError("oneCCL still waits for the peer of another pair")
        try:
            self._num_pairs += 1
            # Pairs are never destroyed, so their open files would exhaust the limit of the process.
            if self._num_pairs > MAX_PAIRS:
                raise PairBrokenError(f"this process has made {MAX_PAIRS} pairs: restart it")
            made = ctypes.c_void_p()
            self._check("onecclCommInitRank", self._library.onecclCommInitRank(ctypes.byref(made), 2, unique_id, rank))
            return made
        finally:
            self._joining.release()

    def exchange(self, function: str, parts: Sequence[memoryview], peer: int, communicator: ctypes.c_void_p) -> None:
        """Send the buffers `parts` to rank `peer` of `communicator`, or receive them from it; `function` is the name of
        oneCCL's function. The calls for all parts form one group if the library can group calls, which needs a SYCL
        device.
        """
        call = getattr(self._library, function)
        is_group = len(parts) > 1 and self._has_groups
        # The first failure shows that this build cannot group calls: do not try again.
        if is_group and self._library.onecclGroupStart():
            logger.info("oneCCL cannot group calls here (no SYCL device): each part is a call of its own")
            is_group = self._has_groups = False
        status = 0
        try:
            for part in parts:
                self._check(function, call(address_of(part), len(part), INT8, peer, communicator, None))
        finally:
            if is_group:
                status = self._library.onecclGroupEnd()
        self._check("onecclGroupEnd", status)

    def _check(self, what: str, status: int) -> None:
        if status:
            text = self._library.onecclGetErrorString(status)
            raise PairBrokenError(f"{what}: {text.decode() if text else status}")
