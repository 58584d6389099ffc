"""A checkpoint that a step stores before a prompt's last tokens equals one of a step that ends there."""

from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from baton_serve.contracts.block_hash import hash_blocks
from baton_serve.contracts.identity import BlockHash
from baton_serve.engine import Engine
from baton_serve.engine.core.checkpoints import NO_INNER, InnerRules
from tests.engine.conftest import References
from tests.engine.driving import make_engine, make_work, run
from tests.families import HYBRIDS
from tests.references import ended, greedy_answer
from tests.tiny_models import load_reference

pytestmark = pytest.mark.slow


class Ways:
    """Computes one prompt again and again in one engine, each time as if it were new."""

    def __init__(self, engine: Engine, prompt: list[int]) -> None:
        self._engine, self._prompt = engine, prompt
        self._checkpoints = engine._table.checkpoints
        self._count = 0

    def compute(self, rules: InnerRules) -> tuple[list[int], int, Tensor]:
        """Return the answer, the number of steps before its first token, and the checkpoint at the prompt's end."""
        self._checkpoints._inner = rules
        self._count += 1
        made = make_work(self._engine, str(self._count), self._prompt)
        work = msgspec.structs.replace(made, root=BlockHash(bytes([self._count] * 16)))
        self._engine.add(work)
        steps: list[bool] = []
        answers = run(self._engine, lambda result: steps.append(bool(result.tokens)))
        size = self._engine.layout.block_tokens
        full = (len(self._prompt) - 1) // size
        cached = self._checkpoints.find(hash_blocks(work.root, self._prompt, size)[full - 1])
        assert len(cached), "the checkpoint was not taken"
        rows = self._engine.kv.whole_blocks[torch.tensor(cached.blocks, device=self._engine.kv.device)]
        return answers[str(self._count), 0], steps.index(True), rows.flatten().view(torch.float32)


@pytest.mark.parametrize("family", HYBRIDS)
def test_checkpoints_and_tokens_are_the_same(family: str, references: References) -> None:
    reference = references(family)
    # Its last full block of 16 tokens ends where devices too can store an inner checkpoint: after 64.
    prompt = max(reference.prompts, key=len)[:70]
    model = load_reference(reference.folder)
    ends = set(model.generation_config.eos_token_id)
    model.generation_config.eos_token_id = None
    compare(reference.folder, prompt, ended(greedy_answer(model, prompt), ends))


def compare(folder: Path, prompt: list[int], answer: list[int]) -> None:
    with make_engine(folder) as engine:
        ways, rules = Ways(engine, prompt), engine._table.checkpoints._inner
        assert rules.step_tokens and rules.num_rows == 2
        inner, num_before, found = ways.compute(rules)
        cut, num_before_cut, expected = ways.compute(NO_INNER)
        assert inner == cut == answer
        assert (num_before, num_before_cut) == (0, 1), "the step at the prompt's end"
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert bool(found.any())


def test_many_prompts_take_turns_with_the_spare_rows(references: References) -> None:
    reference = references("qwen3_next")
    with make_engine(reference.folder, max_num_batched_tokens=1024) as engine:
        for attempt in range(2):
            for number, prompt in enumerate(reference.prompts):
                engine.add(make_work(engine, f"{attempt}-{number}", prompt))
            answers = run(engine)
            assert [answers[f"{attempt}-{n}", 0] for n in range(len(reference.prompts))] == reference.answers
        assert engine.stats().prefix_hit_tokens > 100
