"""The last blocks of a prompt are told of in groups of layers: each is complete when it is told, the next is not."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engine import CompletedPart
from engine.tail import parts_of
from tests.engine.driving import make_engine, make_work, run
from tests.tiny_models import write_tiny_model

PROMPT = [5 + (7 * i * i + i) % 200 for i in range(75)]
TOKENS = {"max_tokens": 3, "ignore_eos": True}
PARTS = 4


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_part_is_told_when_its_layers_are_computed(tmp_path: Path, family: str, kv_cache_dtype: str) -> None:
    """Llama's layers are fused, Gemma's are transformers' own."""
    folder = write_tiny_model(tmp_path, family, num_hidden_layers=PARTS)
    settings: dict[str, Any] = {"kv_cache_dtype": kv_cache_dtype, "max_num_batched_tokens": 32, "tail_parts": PARTS}
    with make_engine(folder, **settings) as engine:
        assert engine.tail_parts == PARTS
        told: list[tuple[CompletedPart, torch.Tensor]] = []

        def blocks_of(part: CompletedPart) -> list[int]:
            return [block for completed in part.blocks for _, block in completed.blocks]

        engine.on_tail(lambda part: told.append((part, engine.kv.device_tensor[blocks_of(part)].clone())))
        completed = []
        engine.add(make_work(engine, "w", PROMPT, **TOKENS), mode="prefill")
        run(engine, lambda result: completed.extend(result.completed))
        assert [part.part for part, _ in told] == list(range(PARTS))
        assert len(completed) == 3  # two chunks of two blocks, and what was told of in parts
        for number, (part, then) in enumerate(told):
            assert part.blocks == [completed[-1]]
            final = engine.kv.device_tensor[blocks_of(part)]
            size = final.shape[1] // PARTS
            assert torch.equal(then[:, : (number + 1) * size], final[:, : (number + 1) * size])
            if number + 1 < PARTS:
                assert not torch.equal(then[:, (number + 1) * size :], final[:, (number + 1) * size :])


def test_only_prompts_that_are_handed_on_have_a_tail(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "llama", num_hidden_layers=2)
    with make_engine(folder, tail_parts=2) as engine:
        told: list[CompletedPart] = []
        engine.on_tail(told.append)
        engine.add(make_work(engine, "w", PROMPT, **TOKENS))
        run(engine)
        assert told == []


def test_parts_are_equal_groups_of_layers() -> None:
    assert [parts_of(32, asked) for asked in (1, 3, 8, 12, 64)] == [1, 2, 8, 8, 32]
    assert parts_of(28, 8) == 7
    assert parts_of(61, 8) == 1
