import importlib.util
from pathlib import Path

import pytest

from baton_serve.bench import plots
from baton_serve.bench.transfer.cases import clear, fill, is_filled
from baton_serve.bench.transfer.peers import PeerError, chosen
from baton_serve.bench.transfer.results import Point
from baton_serve.kvtransfer import HostMemory


@pytest.fixture
def only_mooncake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == "mooncake" else None)


@pytest.mark.usefixtures("only_mooncake")
def test_peers_that_are_installed_are_taken_unless_named() -> None:
    assert [peer.engine for peer in chosen(None)] == ["mooncake"]
    assert [peer.engine for peer in chosen(["mooncake"])] == ["mooncake"]
    assert chosen([]) == []


@pytest.mark.usefixtures("only_mooncake")
def test_a_named_peer_that_is_missing_is_an_error_with_the_remedy() -> None:
    with pytest.raises(PeerError, match=r"not installed: nixl \(pip install 'baton-serve\[peers\]'\)"):
        chosen(["nixl", "mooncake"])


def test_a_row_stands_beside_its_fastest_peer() -> None:
    own, slow, fast = (Point(name, 256, 4, speed, 20e9) for name, speed in (("usm", 10e9), ("a", 3e9), ("b", 5e9)))
    row = own.row([fast, slow])
    assert (row.value, row.limit, row.ratio, row.peer, row.peer_value) == (10.0, 20.0, 0.5, "b", 5.0)
    assert own.row().peer is None


def test_one_wrong_byte_anywhere_is_seen() -> None:
    memory = HostMemory(2, 4096)
    fill(memory)
    assert is_filled(memory, 2)
    memory.block(1)[4095] ^= 1
    assert is_filled(memory, 1)
    assert not is_filled(memory, 2)
    clear(memory)
    assert not is_filled(memory, 1)
    memory.close()


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    points = [
        Point(name, kib, count, 1e9 * count, 20e9) for name in ("usm", "a") for kib in (256, 8192) for count in (4, 1)
    ]
    plots.transfers(tmp_path / "kv.png", points)
    assert (tmp_path / "kv.png").read_bytes().startswith(b"\x89PNG")
