"""`oneccl`: how parcels are cut, and which backend is chosen from what is installed."""

import ctypes
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_serve.kvtransfer.control_messages import Piece
from baton_serve.kvtransfer.errors import TransportUnavailable
from baton_serve.kvtransfer.transports.oneccl.backends import LEGACY_BINDINGS, device_backend, host_backends
from baton_serve.kvtransfer.transports.oneccl.device_pair import DeviceBackend
from baton_serve.kvtransfer.transports.oneccl.host_ends import Region, groups


def pieces(*sources: int) -> list[Piece]:
    return [Piece(index, source, None) for index, source in enumerate(sources)]


def test_neighbours_are_one_message() -> None:
    assert groups(pieces(3, 4, 5), 10, limit=100) == [[Region(30, 30)]]
    assert groups(pieces(3, 5, 4), 10, limit=100) == [[Region(30, 10), Region(50, 10), Region(40, 10)]]


def test_no_group_is_larger_than_the_limit() -> None:
    assert groups(pieces(0, 1, 2), 10, limit=16) == [[Region(0, 16)], [Region(16, 14)]]
    assert groups(pieces(0, 7), 10, limit=16) == [[Region(0, 10), Region(70, 6)], [Region(76, 4)]]


@given(
    sources=st.lists(st.integers(0, 30), min_size=1, max_size=20),
    block_bytes=st.integers(1, 40),
    limit=st.integers(1, 100),
)
def test_the_bytes_come_in_the_order_of_the_pieces(sources: list[int], block_bytes: int, limit: int) -> None:
    made = groups(pieces(*sources), block_bytes, limit)
    flat = [byte for group in made for region in group for byte in range(region.offset, region.offset + region.size)]
    assert flat == [source * block_bytes + i for source in sources for i in range(block_bytes)]
    sizes = [sum(region.size for region in group) for group in made]
    assert all(size == limit for size in sizes[:-1]) and 0 < sizes[-1] <= limit


@pytest.fixture
def torch_with(monkeypatch: pytest.MonkeyPatch) -> "list[str]":
    """Names of the backends that torch has; changed by the test."""
    backends: list[str] = []
    distributed = ModuleType("torch.distributed")
    distributed.__dict__.update(
        is_nccl_available=lambda: "nccl" in backends,
        is_xccl_available=lambda: "xccl" in backends,
    )
    monkeypatch.setitem(sys.modules, "torch.distributed", distributed)
    return backends


def test_native_backends_come_first(torch_with: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    install_bindings(monkeypatch)
    torch_with += ["xccl", "nccl"]
    assert (device_backend("xpu"), device_backend("cuda")) == ("xccl", "nccl")


def test_the_older_bindings_serve_where_torch_has_no_xccl(
    torch_with: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TransportUnavailable, match="xpu"):
        device_backend("xpu")
    install_bindings(monkeypatch)
    assert device_backend("xpu") == "ccl"
    del sys.modules["torch.distributed"].is_xccl_available
    assert device_backend("xpu") == "ccl"  # torch before 2.8 knows no such function


def test_hosts_prefer_the_library_itself(tmp_path: Path) -> None:
    assert "libccl" not in [backend.name for backend in host_backends(str(tmp_path))]
    (tmp_path / "libccl.so.2").touch()
    assert host_backends(str(tmp_path))[0].name == "libccl"
    with pytest.raises(TransportUnavailable, match="oneCCL"):
        host_backends(str(tmp_path))[0].load()


def install_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    bindings = ModuleType(LEGACY_BINDINGS)
    bindings.__spec__ = ModuleSpec(LEGACY_BINDINGS, None)
    monkeypatch.setitem(sys.modules, LEGACY_BINDINGS, bindings)


def test_oneccl_exchanges_messages_by_libfabric_unless_the_user_chooses_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    no_blocks: Any = None
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_char_p
    for chosen, expected in ((None, b"ofi"), ("mpi", b"mpi")):
        with monkeypatch.context() as environ:
            # Setting it first makes the context restore it afterwards, also for C.
            environ.setenv("CCL_ATL_TRANSPORT", chosen or "")
            if chosen is None:
                environ.delenv("CCL_ATL_TRANSPORT")
            DeviceBackend("gloo", no_blocks)
            assert libc.getenv(b"CCL_ATL_TRANSPORT") == expected
