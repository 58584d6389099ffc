"""Every family and every weight format gives the same tokens on several ranks as on one."""

from collections.abc import Iterator

import pytest

from baton_serve.engine import Engine
from tests.engine.conftest import References
from tests.engine.driving import make_engine, make_work, run
from tests.engine.rank_threads import use_threads

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    use_threads(monkeypatch)
    yield


def answers_of(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    for number, prompt in enumerate(prompts):
        engine.add(make_work(engine, str(number), prompt))
    answers = run(engine)
    return [answers[str(number), 0] for number in range(len(prompts))]


FUSED = [
    "cohere",
    "cohere_norms",
    "cwm",
    "ernie4_5_moe",
    "exaone4",
    "gemma2",
    "gemma3",
    "glm4",
    "glm4_moe",
    "gpt_oss",
    "granitemoe",
    "helium",
    "mixtral",
    "olmo3",
    "olmoe",
    "phi3",
    "phimoe",
    "qwen2_moe",
    "qwen3_moe",
    "smollm3",
    "stablelm",
    "starcoder2",
    "vaultgemma",
]
"""Families of which each differs from Llama in another way."""


@pytest.mark.parametrize(("family", "size"), [*((family, 2) for family in FUSED), ("llama", 4), ("olmo3", 4)])
def test_greedy_tokens_equal_transformers(family: str, size: int, references: References) -> None:
    reference = references(family)
    with make_engine(reference.folder, tensor_parallel_size=size, max_num_batched_tokens=48) as engine:
        assert answers_of(engine, reference.prompts) == reference.answers
