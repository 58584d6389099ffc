"""Decides which collective libraries (oneCCL, NCCL, xccl, gloo) the transport `oneccl` can use here, the best first.
Libraries are not loaded unless needed.
"""

import importlib
import importlib.util
from typing import Any

from baton_serve.kvtransfer.errors import TransportUnavailable
from baton_serve.kvtransfer.transports.oneccl.library import LibraryBackend, find_library
from baton_serve.kvtransfer.transports.oneccl.pair import Backend

LEGACY_BINDINGS = "oneccl_bindings_for_pytorch"
"""Intel's older package that adds the backend `ccl` to torch."""


def host_backends(library_folder: str = "") -> list[Backend]:
    """Return the collective libraries that can move blocks in host memory: oneCCL's own library if it is installed (in
    `library_folder`, or where pip installs it), then gloo if torch is installed.
    """
    found: list[Backend] = []
    library = find_library(library_folder)
    if library is not None:
        found.append(LibraryBackend(library))
    if importlib.util.find_spec("torch") is not None:
        found.append(LazyGloo())
    return found


def device_backends(blocks: Any) -> list[Backend]:
    """Return the collective libraries that can move `blocks` (`devicecopy.DeviceBlocks`), best first, one backend for
    each dialect. A library whose calls cannot be interrupted has only the dialect `+staging`, which never receives
    directly into blocks.
    """
    kind = blocks.device.type
    name = "gloo" if kind == "cpu" else device_backend(kind)
    module = importlib.import_module("baton_serve.kvtransfer.transports.oneccl.device_pair")
    dialects = ("libnccl", "nccl", "nccl+staging") if name == "nccl" else (f"{name}+staging",)
    return [module.DeviceBackend(dialect, blocks) for dialect in dialects]


def device_backend(kind: str) -> str:
    """Return the name of the collective library that torch has for the device type `kind`, such as `nccl` for `cuda`.
    Raises `TransportUnavailable` if torch has none.
    """
    distributed: Any = importlib.import_module("torch.distributed")
    if kind == "cuda" and distributed.is_nccl_available():
        return "nccl"
    if kind == "xpu":
        # Older torch releases lack this function: test for the feature and not for the version.
        has_xccl = getattr(distributed, "is_xccl_available", None)
        if has_xccl is not None and has_xccl():
            return "xccl"
        if importlib.util.find_spec(LEGACY_BINDINGS) is not None:
            return "ccl"
    raise TransportUnavailable(f"torch has no collective library for {kind} here")


class LazyGloo:
    """The backend `gloo` for host memory. It imports torch.distributed only when it is loaded, since the import takes
    long.
    """

    name = "gloo"

    def load(self) -> None:
        self._backend()

    def meet(self, host: str) -> Any:
        return self._backend().meet(host)

    def join(self, address: bytes, secret: bytes, timeout_s: float) -> Any:
        return self._backend().join(address, secret, timeout_s)

    def _backend(self) -> Backend:
        module = importlib.import_module("baton_serve.kvtransfer.transports.oneccl.torch_pair")
        backend: Backend = module.TorchBackend()
        return backend
