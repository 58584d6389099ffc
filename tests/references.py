"""transformers' own greedy answers of tiny models, made once for each family and test session."""

import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING

from tests.tiny_models import FAMILIES, load_reference, write_tiny_model

ANSWER_TOKENS = 12


@dataclass(frozen=True)
class Reference:
    """A tiny model, prompts, and their answers, some of which end early. `unended` are the answers to requests that
    ignore the end."""

    folder: Path
    prompts: list[list[int]]
    answers: list[list[int]]
    unended: list[list[int]]


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
        ends = set(model.generation_config.eos_token_id)
        # Then no token ends an answer, and none is forbidden.
        model.generation_config.eos_token_id = None
        draw = random.Random(family)
        prompts = [[draw.randrange(256) for _ in range(length)] for length in (5, 16, 33, 100, 64)]
        unended = [greedy_answer(model, prompt) for prompt in prompts]
        return Reference(folder, prompts, [ended(answer, ends) for answer in unended], unended)


def references_of(session: pytest.TempPathFactory) -> References:
    """Return the references of a test session, for the fixtures of several folders."""
    return _references(session.getbasetemp() / "references")


@cache
def _references(root: Path) -> References:
    return References(root)


def greedy_answer(model: torch.nn.Module, prompt: list[int], num_tokens: int = ANSWER_TOKENS) -> list[int]:
    ids = torch.tensor([prompt])
    output = model.generate(  # type: ignore[operator]
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False, pad_token_id=0
    )
    answer: list[int] = output[0, len(prompt) :].tolist()
    return answer


def ended(answer: list[int], ends: set[int]) -> list[int]:
    """Return an answer up to the first token that ends it."""
    lengths = [number + 1 for number, token in enumerate(answer) if token in ends]
    return answer[: min(lengths, default=len(answer))]
