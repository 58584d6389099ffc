"""Tiny models with transformers' own greedy answers to compare with, and a way to drive engines."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from baton_serve.engine import device
from tests import forked_ranks as forked_ranks
from tests.engine.rank_threads import use_threads
from tests.quick_triton import quick_interpreter
from tests.references import ANSWER_TOKENS, Reference, References, greedy_answer, references_of

__all__ = ["ANSWER_TOKENS", "Reference", "References", "greedy_answer"]


class FakeGraph:
    """Stands in for a captured graph on the CPU: it calls the recorded function again."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.replays = 0
        self.call: Any = call

    def replay(self) -> None:
        self.replays += 1
        self.call()


class FakeCapture:
    def __init__(self) -> None:
        self.graphs: list[FakeGraph] = []

    def __call__(self, call: Callable[[], None]) -> FakeGraph:
        call()
        self.graphs.append(FakeGraph(call))
        return self.graphs[-1]


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> FakeCapture:
    capture = FakeCapture()
    monkeypatch.setattr(device, "has_graphs", lambda _: True)
    monkeypatch.setattr(device, "Capturing", lambda _: capture)
    return capture


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    return references_of(tmp_path_factory)


@pytest.fixture(scope="package", autouse=True)
def quick_kernels() -> Iterator[None]:
    with quick_interpreter():
        yield


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def threaded_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    use_threads(monkeypatch)
