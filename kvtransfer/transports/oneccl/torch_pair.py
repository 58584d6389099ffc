"""Connects two processes by torch.distributed for host memory: a group of two ranks with a store of its own.

`xccl`, `nccl` and `gloo` belong to torch; oneccl_bindings_for_pytorch registers `ccl`. Each pair has its own TCPStore,
on a port that the producer's machine chooses.
"""

import importlib
import socket
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from baton_serve.kvtransfer.transports.oneccl.pair import Pair, PairBrokenError

dist: Any = importlib.import_module("torch.distributed")
"""`torch.distributed` as Any, because much of what is used here has no type annotations."""
Store = Any
Group = Any
"""A torch ProcessGroup backend of two ranks."""


class TorchBackend:
    """Connects two processes by gloo, torch's collective library for CPUs, for blocks in host memory."""

    def __init__(self, name: str = "gloo") -> None:
        self.name = name

    def load(self) -> None:
        """Do nothing: importing this module has loaded gloo."""

    def meet(self, host: str) -> "TorchMeeting":
        return TorchMeeting(host, lambda store, timeout_s: TorchPair(make_group(self.name, store, 0, host, timeout_s)))

    def join(self, address: bytes, secret: bytes, timeout_s: float) -> "TorchPair":
        store, local = join_store(address, timeout_s)
        with translated():
            return TorchPair(make_group(self.name, store, 1, local, timeout_s))


class TorchMeeting:
    """The producer's half of connecting two processes by torch.distributed: a TCPStore (key-value store over TCP) that
    the consumer connects to.
    """

    secret = b""

    def __init__(self, host: str, make: Callable[[Store, float], Pair]) -> None:
        with translated():
            self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self._make = make
        self.address = f"{host}:{self._store.port}".encode()

    def join(self, timeout_s: float) -> Pair:
        with translated():
            self._store.set_timeout(timedelta(seconds=timeout_s))
            return self._make(self._store, timeout_s)


class TorchPair:
    """A connection of two processes through torch.distributed, for host memory. The tensors that it sends and receives
    are views of the caller's buffers, so nothing is copied here.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._is_abandoned = threading.Event()

    def send(self, parts: Sequence[memoryview]) -> None:
        self._run([self._group.send([_tensor(part)], 1, 0) for part in parts])

    def receive(self, parts: Sequence[memoryview]) -> None:
        self._run([self._group.recv([_tensor(part)], 0, 0) for part in parts])

    def abandon(self) -> None:
        self._is_abandoned.set()
        self._group.abort()

    def _run(self, works: Sequence[Any]) -> None:
        with translated():
            for work in works:
                work.wait()
        if self._is_abandoned.is_set():
            raise PairBrokenError("the pair was given up")


def make_group(name: str, store: Store, rank: int, host: str, timeout_s: float) -> Group:
    """Create a process group of two ranks of torch's library `name`, of which this process is number `rank`. The two
    find each other through `store`. `host` is an address of this machine, on which gloo listens. `timeout_s` is the
    deadline of gloo's and ccl's calls; the other libraries get none.
    """
    store = dist.PrefixStore("pair", store)
    timeout = timedelta(seconds=timeout_s)
    match name:
        case "gloo":
            options = dist.ProcessGroupGloo._Options()
            options._timeout = timeout
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
            return dist.ProcessGroupGloo(store, rank, 2, options)
        case "nccl" | "xccl":
            kind = getattr(dist, f"ProcessGroup{name.upper()}")
            options = kind.Options()
            options._timeout = timedelta(days=1)  # `PairThread` has the deadlines; torch's would end the process
            return kind(store, rank, 2, options)
        case "ccl":
            importlib.import_module("oneccl_bindings_for_pytorch")  # registers itself with torch
            make = dist.Backend._plugins["CCL"].creator_fn
            return make(store, rank, 2, timeout)
        case _:
            raise PairBrokenError(f"torch has no backend {name!r}")


def join_store(address: bytes, timeout_s: float) -> tuple[Store, str]:
    """Connect to the producer's key-value store at `address`, within `timeout_s`. Return the store, and the local
    address by which this machine reaches the producer.
    """
    host, _, port = address.decode().rpartition(":")
    with translated():
        # The local address of a connection to the peer is the one by which the peer can reach gloo here.
        with socket.create_connection((host, int(port)), timeout=timeout_s) as probe:
            local = probe.getsockname()[0]
        store = dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=timeout_s))
    return store, local


class translated:  # noqa: N801 - used as a statement
    """A context manager that turns errors of torch (RuntimeError, OSError, ValueError) into `PairBrokenError`."""

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError | OSError | ValueError):
            raise PairBrokenError(str(error).splitlines()[0] if str(error) else type(error).__name__) from error


def _tensor(part: memoryview) -> torch.Tensor:
    return torch.frombuffer(part, dtype=torch.uint8)
