"""Tiny models with transformers' own greedy answers to compare with, and a way to drive engines."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING

from baton_serve.engine import device
from tests import forked_ranks as forked_ranks
from tests.engine.rank_threads import use_threads
from tests.tiny_models import FAMILIES, load_reference, write_tiny_model

ANSWER_TOKENS = 12


@dataclass(frozen=True)
class Reference:
    folder: Path
    prompts: list[list[int]]
    answers: list[list[int]]


class References:
    """Made once per family and session."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._made: dict[str, Reference] = {}

    def __call__(self, family: str) -> Reference:
        if family not in self._made:
            self._made[family] = self._make(family)
        return self._made[family]

    def _make(self, family: str) -> Reference:
        if FAMILIES[family]["model_type"] not in CONFIG_MAPPING:
            pytest.skip("this version of transformers does not have the family")
        folder = write_tiny_model(self._root / family, family)
        model = load_reference(folder)
        draw = random.Random(family)
        prompts = [[draw.randrange(256) for _ in range(length)] for length in (5, 16, 33, 100, 64)]
        return Reference(folder, prompts, [greedy_answer(model, prompt) for prompt in prompts])


def greedy_answer(model: torch.nn.Module, prompt: list[int], num_tokens: int = ANSWER_TOKENS) -> list[int]:
    ids = torch.tensor([prompt])
    output = model.generate(  # type: ignore[operator]
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False
    )
    answer: list[int] = output[0, len(prompt) :].tolist()
    return answer


class FakeGraph:
    """Stands in for a captured graph on the CPU: it calls the recorded function again."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.replays = 0
        self._call = call

    def replay(self) -> None:
        self.replays += 1
        self._call()


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
    return References(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def threaded_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    use_threads(monkeypatch)
