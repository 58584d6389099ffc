"""oneCCL itself, through its C API (libccl.so.2, 2021.17 and later): what torch's xccl calls underneath.

It runs on CPUs too, on memory of the host and on SYCL USM. Its calls block; they know no deadline and no abort.
"""

import ctypes
import functools
import logging
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from baton_serve.kvtransfer.errors import TransportUnavailable
from baton_serve.kvtransfer.memory import address_of
from baton_serve.kvtransfer.transports.oneccl.pair import PairBrokenError

logger = logging.getLogger(__name__)

INT8 = 0
UNIQUE_ID_BYTES = 4096
MAX_PAIRS = 256
"""Each keeps seven open files for ever."""
LIBRARY = "libccl.so.2"
NEEDED_FIRST = (
    *("libintlc.so.5", "libimf.so", "libirng.so", "libsvml.so", "libumf.so.1", "libur_loader.so.0", "libsycl.so.8"),
    *("libfabric.so.1", LIBRARY, "libccl.so.1", "libccl_legacy_cpu.so", "libccl_legacy.so"),
)
"""In the order of their dependencies: wheels put them into one folder that the loader does not search."""
ENVIRONMENT = {
    "CCL_ATL_TRANSPORT": "ofi",
    "FI_PROVIDER": "tcp",  # shm hangs with the second pair of a process
    "CCL_YIELD": "sched_yield",  # the default spins: a hundredth of the speed where cores are shared
    "CCL_LOG_LEVEL": "error",
    "CCL_ZE_CACHE_OPEN_IPC_HANDLES": "0",
}
"""Only what the user has not set. oneCCL reads it when it is loaded."""
OPENCL = "libintelocl.so"
"""Intel's OpenCL for CPUs: with it the SYCL build of oneCCL finds a device, which its groups of calls need."""


class OneCclUniqueId(ctypes.Structure):
    _fields_ = [("data", ctypes.c_char * UNIQUE_ID_BYTES)]


def find_library(folder: str = "") -> Path | None:
    """In `folder`, else where pip puts it for this Python."""
    for place in (Path(folder),) if folder else (Path(sys.prefix, "lib"),):
        if (place / LIBRARY).exists():
            return place / LIBRARY
    return None


class LibraryBackend:
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
    address = b""

    def __init__(self, api: "Api") -> None:
        self._api = api
        self._id = api.unique_id()
        self.secret = bytes(self._id)

    def join(self, timeout_s: float) -> "LibraryPair":
        return LibraryPair(self._api, self._api.join(self._id, rank=0, timeout_s=timeout_s))


class LibraryPair:
    """Never destroyed: oneccl 2021.17 aborts the process when the peer is dead. A few files and a thread stay."""

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
    """Once per process: the library keeps its state in globals."""
    return Api(path)


def _environment(folder: Path) -> dict[str, str]:
    places = {"CCL_ROOT": str(folder.parent), "FI_PROVIDER_PATH": str(folder)}
    if not (folder / OPENCL).exists():
        return {**ENVIRONMENT, **places, "CCL_PLUGIN": "ONECCL_LEGACY_CPU"}
    return {**ENVIRONMENT, **places, "CCL_PLUGIN": "ONECCL_LEGACY", "OCL_ICD_FILENAMES": str(folder / OPENCL)}


class Api:
    """The functions of the library. Raises `PairBrokenError` when one of them fails."""

    def __init__(self, path: Path) -> None:
        folder = path.parent
        libc = ctypes.CDLL(None)
        for name, value in _environment(folder).items():
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
        made = OneCclUniqueId()
        self._check("onecclGetUniqueId", self._library.onecclGetUniqueId(ctypes.byref(made)))
        return made

    def join(self, unique_id: OneCclUniqueId, *, rank: int, timeout_s: float) -> ctypes.c_void_p:
        """One at a time: the library aborts the process when several peers die while it waits for them."""
        if not self._joining.acquire(timeout=timeout_s):
            raise PairBrokenError("oneCCL still waits for the peer of another pair")
        try:
            self._num_pairs += 1
            if self._num_pairs > MAX_PAIRS:
                raise PairBrokenError(f"this process has made {MAX_PAIRS} pairs: restart it")
            made = ctypes.c_void_p()
            self._check("onecclCommInitRank", self._library.onecclCommInitRank(ctypes.byref(made), 2, unique_id, rank))
            return made
        finally:
            self._joining.release()

    def exchange(self, function: str, parts: Sequence[memoryview], peer: int, communicator: ctypes.c_void_p) -> None:
        """All parts as one group, where the library can: it needs a SYCL device for that."""
        call = getattr(self._library, function)
        is_group = len(parts) > 1 and self._has_groups
        if is_group and self._library.onecclGroupStart():
            logger.info("oneCCL makes no groups of calls here: one call at a time")
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
