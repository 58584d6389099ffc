"""Models whose layers with a sliding window keep only the blocks that a token sees: the tokens equal those of
transformers.generate, and the cache holds longer sequences.
"""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from baton_serve.contracts.block_layout import KVWindow, obstacle
from baton_serve.engine import Engine
from baton_serve.engine.errors import CapacityError
from baton_serve.engine.kv.cache_groups import divide_layers
from tests.engine.conftest import FakeCapture, greedy_answer
from tests.engine.driving import hand_over, make_engine, make_work, run
from tests.families import SLIDING_WINDOW
from tests.tiny_models import load_reference, write_tiny_model

pytestmark = pytest.mark.slow

SMALL: dict[str, Any] = {"max_num_batched_tokens": 40}
"""Chunks that are longer than the window of 24 tokens, and not a multiple of a block of 16."""


@dataclass
class Model:
    folder: Path
    module: torch.nn.Module

    def __post_init__(self) -> None:
        draw = random.Random(5)
        self.prompt = [draw.randrange(256) for _ in range(430)]
        self._answers: dict[tuple[int, ...], list[int]] = {}

    def answer(self, prompt: list[int]) -> list[int]:
        return self._answers.setdefault(tuple(prompt), greedy_answer(self.module, prompt))


@pytest.fixture(scope="module", params=["gemma3", "gpt_oss", "ministral"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = write_tiny_model(tmp_path_factory.mktemp(request.param) / "model", request.param)
    return Model(folder, load_reference(folder))


def ask(engine: Engine, prompts: list[list[int]], attempt: int = 0) -> list[list[int]]:
    for number, prompt in enumerate(prompts):
        engine.add(make_work(engine, f"{attempt}-{number}", prompt))
    answers = run(engine)
    return [answers[f"{attempt}-{number}", 0] for number in range(len(prompts))]


@pytest.mark.parametrize("is_ahead", [False, True])
def test_long_prompts_in_chunks(model: Model, captured: FakeCapture, is_ahead: bool) -> None:
    """In one batch with short ones, by graphs and without."""
    prompts = [model.prompt, model.prompt[100:300], model.prompt[50:83], model.prompt[7:12]]
    with make_engine(model.folder, async_scheduling=is_ahead, enforce_eager=not is_ahead, **SMALL) as engine:
        assert engine.layout.window == KVWindow(2, SLIDING_WINDOW)
        assert ask(engine, prompts) == [model.answer(prompt) for prompt in prompts]
        assert bool(captured.graphs) == is_ahead


def test_prefixes_that_end_before_in_and_behind_a_window(model: Model) -> None:
    with make_engine(model.folder, **SMALL) as engine:
        ask(engine, [model.prompt[:300]])
        for number, shared in enumerate([10, 20, 40, 170, 299], 1):
            prompt = [*model.prompt[:shared], *model.prompt[310:330]]
            before = engine.stats().prefix_hit_tokens
            assert ask(engine, [prompt], number) == [model.answer(prompt)]
            assert engine.stats().prefix_hit_tokens - before == shared // 16 * 16


def test_preemption_and_forks_in_a_small_cache(model: Model) -> None:
    """A block of the override has the KV of all layers: 22 are as much as 66 blocks of a group."""
    prompts = [model.prompt[at : at + 150] for at in range(0, 240, 40)]
    settings = {"num_gpu_blocks_override": 22, "max_model_len": 220, **SMALL}
    with make_engine(model.folder, async_scheduling=True, **settings) as engine:
        for number, prompt in enumerate(prompts):
            engine.add(make_work(engine, str(number), prompt, sequences=2, max_tokens=40))
        answers = run(engine)
        for number, prompt in enumerate(prompts):
            expected = greedy_answer(model.module, prompt, 40)
            assert answers[str(number), 0] == answers[str(number), 1] == expected
        assert engine.stats().preemptions > 0


def test_a_handoff_sends_what_the_next_token_sees(model: Model) -> None:
    prompt = model.prompt[:300]
    with make_engine(model.folder, **SMALL) as source, make_engine(model.folder, **SMALL) as sink:
        work = make_work(source, "there", prompt)
        assert list(hand_over(source, sink, work).values()) == [model.answer(prompt)]
        # 19 blocks of full attention, and in two groups the blocks of tokens 277 to 300.
        longer = sink.reserve(make_work(sink, "next", [*prompt, 1]))
        assert longer is not None
        assert len(longer.names) == 19 + 2 * 2
        assert len(longer.missing) == 1 + 2


def test_a_sequence_that_would_not_fit_whole(model: Model) -> None:
    """The blocks of groups with a window are freed while the prompt and the answer are computed."""
    settings = {"num_gpu_blocks_override": 14, "max_model_len": 470, **SMALL}
    with make_engine(model.folder, **settings) as engine:
        assert ask(engine, [model.prompt]) == [model.answer(model.prompt)]
        stats = engine.stats()
        assert stats.total_blocks == 3 * 14
        assert stats.for_tokens(stats.total_blocks) * 16 > 470
    with pytest.raises(CapacityError, match="largest max_model_len that fits is 224"):
        make_engine(model.folder, disable_hybrid_kv_cache_manager=True, **settings)


def test_blocks_from_the_host_tier(model: Model) -> None:
    settings = {"num_gpu_blocks_override": 14, "max_model_len": 300, "host_kv_bytes": 8 << 20, **SMALL}
    prompts = [model.prompt[:150], model.prompt[150:400]]
    with make_engine(model.folder, async_scheduling=True, **settings) as engine:
        for attempt in range(3):
            for number, prompt in enumerate(prompts):
                assert ask(engine, [prompt], 10 * attempt + number) == [model.answer(prompt)]
        assert engine.stats().host_hit_tokens > 0


def test_the_call_of_all_layers_reads_the_blocks_of_each_group(model: Model) -> None:
    """In bfloat16 one call of C++ computes all layers of a dense model, if this machine has the instructions."""
    answers: list[list[list[int]]] = []
    for is_whole in (True, False):
        with make_engine(model.folder, dtype="bfloat16", disable_hybrid_kv_cache_manager=is_whole, **SMALL) as engine:
            assert (engine.layout.num_groups == 1) == is_whole
            answers.append(ask(engine, [model.prompt, model.prompt[30:90]]))
    assert answers[0] == answers[1]


@pytest.mark.usefixtures("threaded_ranks")
def test_two_ranks_hold_half_of_the_heads(model: Model) -> None:
    prompts = [model.prompt[:200], model.prompt[30:90]]
    with make_engine(model.folder, tensor_parallel_size=2, **SMALL) as two, make_engine(model.folder, **SMALL) as one:
        assert ask(two, prompts) == [model.answer(prompt) for prompt in prompts]
        assert one.layout == two.layout
        answers = hand_over(two, one, make_work(two, "over", model.prompt))
        assert list(answers.values()) == [model.answer(model.prompt)]


def test_layers_are_divided_by_their_windows() -> None:
    gemma = [1024, 1024, 1024, 1024, 1024, None] * 8
    groups = divide_layers(gemma, 8192)
    assert groups[:7] == (1, 1, 1, 1, 1, 0, 1) and groups.count(0) == 8
    assert [groups.count(group) for group in range(6)] == [8] * 6
    assert divide_layers(gemma, 1024) == ()
    assert divide_layers([None] * 8, 8192) == divide_layers([4096] * 8, 32768) == ()
    # The last group has a place that no layer uses.
    assert divide_layers([512, 512, 512, None] * 2 + [512], 8192) == (1, 1, 2, 0, 2, 3, 3, 0, 4)


def test_groups_are_exchanged_between_equal_layouts_only(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", "gemma3")
    with make_engine(folder) as grouped, make_engine(folder, disable_hybrid_kv_cache_manager=True) as whole:
        assert obstacle(grouped.layout, grouped.layout) is None
        assert "--disable-hybrid-kv-cache-manager" in str(obstacle(whole.layout, grouped.layout))
        # A token has the KV of all three layers in both.
        assert grouped.layout.token_bytes == whole.layout.token_bytes
