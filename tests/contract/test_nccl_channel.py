"""NCCL's own API as a pair's channel: how two ranks meet, exchange and end. A queue stands in for the library."""

import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baton_serve.kvtransfer.transports.oneccl import nccl
from baton_serve.kvtransfer.transports.oneccl.nccl import NcclChannel, NcclUniqueId
from baton_serve.kvtransfer.transports.oneccl.pair import PairBrokenError
from baton_serve.kvtransfer.transports.oneccl.torch_pair import dist

STREAM = SimpleNamespace(cuda_stream=5)


class Library:
    """A fake of the NCCL library that both ranks share."""

    def __init__(self) -> None:
        self.joined: list[tuple[bytes, int]] = []
        self.aborted: list[int] = []
        self.wire: Queue[torch.Tensor] = Queue()
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def unique_id(self) -> NcclUniqueId:
        return NcclUniqueId(b"pair 1\xff\x01")

    def join(self, unique_id: NcclUniqueId, rank: int) -> int:
        self.joined.append((unique_id.data, rank))
        return 40 + rank

    def exchange(
        self, parts: Sequence[torch.Tensor], peer: int, communicator: int, stream: Any, *, is_send: bool
    ) -> None:
        assert (stream.value, communicator) == (5, 41 - peer)
        self.may_go_on.wait(5)
        for part in parts:
            if is_send:
                self.wire.put(part.clone())
            else:
                part.copy_(self.wire.get(timeout=5))

    def abort(self, communicator: int) -> None:
        self.aborted.append(communicator)
        self.may_go_on.set()


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    made = Library()
    monkeypatch.setattr(nccl, "load_api", lambda: made)
    yield made


@pytest.fixture
def store() -> Any:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))


def pair(store: Any) -> tuple[NcclChannel, NcclChannel]:
    made: list[NcclChannel] = []
    other = dist.TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=5))
    thread = threading.Thread(target=lambda: made.append(NcclChannel(other, 1)))
    thread.start()
    producer = NcclChannel(store, 0)
    thread.join(5)
    return producer, made[0]


def test_two_ranks_meet_over_their_store_and_bytes_keep_their_order(library: Library, store: Any) -> None:
    producer, consumer = pair(store)
    assert {rank for _, rank in library.joined} == {0, 1} and len({name for name, _ in library.joined}) == 1
    parts = [torch.arange(7, dtype=torch.uint8) + i for i in range(3)]
    places = [torch.zeros(7, dtype=torch.uint8) for _ in parts]
    producer.exchange(parts, is_send=True, stream=STREAM)
    consumer.exchange(places, is_send=False, stream=STREAM)
    assert all(torch.equal(part, place) for part, place in zip(parts, places, strict=True))


def test_without_a_peer_the_wait_ends_with_the_stores_deadline(library: Library) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=0.2))
    with pytest.raises(Exception, match=r"(?i)time"):
        NcclChannel(store, 0)
    assert library.joined == []


def test_after_an_abort_nothing_is_exchanged(library: Library, store: Any) -> None:
    producer, _ = pair(store)
    producer.abort()
    producer.abort()
    assert library.aborted == [40]
    with pytest.raises(PairBrokenError):
        producer.exchange([torch.zeros(1, dtype=torch.uint8)], is_send=True, stream=STREAM)


def test_a_call_that_never_returns_is_aborted_under_its_feet(
    library: Library, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "ABORT_PATIENCE_S", 0.05)
    producer, _ = pair(store)
    library.may_go_on.clear()
    stuck = threading.Thread(
        target=producer.exchange, args=([torch.zeros(1)],), kwargs={"is_send": True, "stream": STREAM}
    )
    stuck.start()
    producer.abort()
    stuck.join(5)
    assert library.aborted == [40] and not stuck.is_alive()
