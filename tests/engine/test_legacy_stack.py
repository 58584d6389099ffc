"""Older Arc installs: intel-extension-for-pytorch gives torch its device, oneccl_bindings_for_pytorch its collectives.

Neither runs here: modules that do what those do on import stand in for them.
"""

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
import torch

from baton_serve.engine import device
from baton_serve.kvtransfer.transports.oneccl import torch_pair


@pytest.fixture
def extension(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Importing it makes `torch.xpu` available."""
    xpu = SimpleNamespace(is_available=lambda: False, device_count=lambda: 1, set_device=lambda chosen: None)
    monkeypatch.setattr(torch, "xpu", xpu)
    monkeypatch.setattr(torch, "get_device_module", lambda chosen: xpu)
    module = ModuleType("intel_extension_for_pytorch")
    module.__spec__ = ModuleSpec(module.__name__, None)
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def imported(name: str) -> ModuleType:
        assert name == module.__name__
        xpu.is_available = lambda: True
        return module

    monkeypatch.setattr(importlib, "import_module", imported)
    return module


@pytest.mark.usefixtures("extension")
def test_the_extension_is_imported_where_torch_has_no_xpu_of_its_own() -> None:
    assert device.select_device("auto").type == "xpu"


def test_without_the_extension_the_cpu_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "xpu", SimpleNamespace(is_available=lambda: False))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device.select_device("auto").type == "cpu"


def test_a_native_xpu_needs_no_extension(monkeypatch: pytest.MonkeyPatch, extension: ModuleType) -> None:
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(importlib, "import_module", lambda name: pytest.fail(f"imported {name}"))
    assert device.select_device("xpu").type == "xpu"


def test_a_group_over_the_bindings_is_made_as_they_registered_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[object, ...]] = []

    def create(*arguments: object) -> str:
        made.append(arguments)
        return "a group"

    plugins = {"CCL": SimpleNamespace(creator_fn=create)}
    fake = SimpleNamespace(PrefixStore=lambda prefix, store: (prefix, store), Backend=SimpleNamespace(_plugins=plugins))
    monkeypatch.setattr(torch_pair, "dist", fake)
    monkeypatch.setitem(sys.modules, "oneccl_bindings_for_pytorch", ModuleType("oneccl_bindings_for_pytorch"))
    assert torch_pair.make_group("ccl", "store", 1, "127.0.0.1", 5.0) == "a group"
    ((store, rank, size, _),) = made
    assert (store, rank, size) == (("pair", "store"), 1, 2)
