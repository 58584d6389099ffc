"""Two ranks, each a process with half of the heads, give the tokens of transformers.generate."""

import itertools
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from baton_serve.engine import Engine, EngineConfig
from baton_serve.engine.collectives.backends import TorchCollectives
from baton_serve.engine.collectives.shard import Shard
from baton_serve.engine.collectives.world import RankPlace, World
from baton_serve.engine.errors import ConfigError, EngineError, ModelError, UnsupportedModelError
from baton_serve.engine.loading.unsupported_models import named_division
from baton_serve.engine.parallel import ranks
from baton_serve.engine.parallel.tp_executor import TPExecutor
from tests.devices import DEVICE
from tests.engine.conftest import References
from tests.engine.driving import hand_over, make_engine, make_work, run
from tests.forked_ranks import as_program
from tests.tiny_models import write_tiny_model

pytestmark = pytest.mark.slow


def ask(engine: Engine, prompts: list[list[int]], **sampling: Any) -> list[list[int]]:
    for number, prompt in enumerate(prompts):
        engine.add(make_work(engine, str(number), prompt, **sampling))
    answers = run(engine)
    return [answers[str(number), 0] for number in range(len(prompts))]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_greedy_tokens_equal_transformers_on_both_ends_of_a_handoff(family: str, references: References) -> None:
    reference = references(family)
    with make_engine(reference.folder, tensor_parallel_size=2, max_num_batched_tokens=24) as two:
        assert ask(two, reference.prompts) == reference.answers
        with make_engine(reference.folder) as one:
            assert one.layout == two.layout
            for source, sink in ((one, two), (two, one)):
                answers = hand_over(source, sink, make_work(source, "over", reference.prompts[3]))
                assert answers["over", 0] == reference.answers[3]


def test_steps_launched_ahead_sampled_and_forked(references: References) -> None:
    """The other ranks continue with the tokens chosen on rank 0, and blocks are copied on all ranks."""
    prompts = references("llama").prompts[:3]
    folder = references("llama").folder
    two_ranks = make_engine(folder, tensor_parallel_size=2, async_scheduling=True)
    with make_engine(folder) as one, two_ranks as two:
        found = []
        for engine in (one, two):
            for number, prompt in enumerate(prompts):
                engine.add(make_work(engine, f"s{number}", prompt, sequences=2, temperature=0.9, top_p=0.9))
            engine.add(make_work(engine, "greedy", prompts[0]))
            found.append(run(engine))
    assert found[0] == found[1]
    assert found[1]["greedy", 0] == references("llama").answers[0]


@pytest.mark.skipif(DEVICE != "cpu", reason="a device that waits for a dead rank ends with its process only")
def test_an_engine_ends_with_its_ranks(references: References, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank is a program, as it is for users; those of the other tests are forks."""
    monkeypatch.setattr(ranks, "_start", as_program)
    heard: list[str] = []
    reported = threading.Event()

    def on_lost(why: str) -> None:
        heard.append(why)
        reported.set()

    folder = references("llama").folder
    config = EngineConfig(model=str(folder), device="cpu", kv_cache_bytes=4 << 20, tensor_parallel_size=2)
    with Engine(config, on_lost=on_lost) as engine:
        (rank,) = engine._ranks._processes
        os.kill(rank.pid, signal.SIGKILL)
        assert reported.wait(10)
        assert heard == ["rank 1 of 2 has exited; its error is in the log above"]
        engine.add(make_work(engine, "a", references("llama").prompts[0]))
        with pytest.raises((EngineError, RuntimeError)):
            run(engine)
    assert rank.poll() == -signal.SIGKILL


def test_ranks_that_are_no_longer_together_end(references: References, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that lacks memory has left the others in the middle of a step: nothing more may be computed with them."""

    def lacks_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    # The other rank waits for a step that never comes.
    monkeypatch.setattr("baton_serve.engine.parallel.ranks.END_TIMEOUT_S", 0.5)
    with make_engine(references("llama").folder, tensor_parallel_size=2, async_scheduling=True) as engine:
        (rank,) = engine._ranks._processes
        assert isinstance(engine._executor, TPExecutor)
        monkeypatch.setattr(engine._executor._own, "compute", lacks_memory)
        engine.add(make_work(engine, "a", references("llama").prompts[0]))
        with pytest.raises(EngineError, match=r"cannot go on together.*max_num_batched_tokens.*2 GiB"):
            run(engine)
    assert rank.poll() is not None


def test_a_process_maps_memory_for_one_group_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton_serve.engine.collectives.backends._groups_that_map", itertools.count())
    cpu = torch.device("cpu")
    worlds = [World(str(tmp_path / f"store-{number}"), RankPlace(Shard(0, 1)), cpu) for number in range(2)]
    groups = [TorchCollectives(world._stage_group(), Shard(0, 1), cpu) for world in worlds]
    assert [group._are_first(cpu) for group in groups] == [True, False]


@pytest.mark.parametrize(
    ("family", "size", "error", "words"),
    [
        ("llama", 3, ConfigError, r"does not divide the attention heads \(4\) .* that works is 2"),
        ("qwen3_5", 3, ConfigError, r"does not divide the heads of linear attention \(2\) .* that works is 2"),
        ("zamba2", 2, UnsupportedModelError, "share weights .* the largest number that works is 1"),
        ("mamba", 2, UnsupportedModelError, "whose kinds are not divided; the largest number that works is 1"),
        ("llama", 0, ConfigError, "tensor_parallel_size is 0"),
    ],
)
def test_what_cannot_be_split_is_refused(
    family: str, size: int, error: type[Exception], words: str, references: References
) -> None:
    with pytest.raises(error, match=words):
        make_engine(references(family).folder, tensor_parallel_size=size)


def test_a_layer_that_reads_what_other_ranks_hold_is_refused_with_the_number_that_works() -> None:
    for shard, words in ((Shard(0, 2), "the largest number that works is 1"), (Shard(), "^sizes differ$")):
        with pytest.raises(UnsupportedModelError, match=words), named_division("BitNet", shard):
            raise UnsupportedModelError("sizes differ")


def test_a_checkpoint_with_a_hole_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be loaded"):
        make_engine(folder, tensor_parallel_size=2)
