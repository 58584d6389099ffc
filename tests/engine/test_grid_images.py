"""Images of models with M-RoPE: greedy tokens equal those of transformers in float32, however the KV came to be."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from baton_serve.engine import Engine
from baton_serve.engine.errors import ModelError, RequestError
from baton_serve.engine.kernels.cpu.build import KernelsUnavailableError, load_kernels
from baton_serve.engine.kernels.cpu.linear import has_packed_linear
from baton_serve.engine.model import fused_cpu, fused_layers
from tests.devices import DEVICE
from tests.engine.conftest import FakeCapture
from tests.engine.driving import Answers, make_engine, run
from tests.engine.rank_threads import use_threads
from tests.engine.test_vision import TEXT, add, begin, hand_over_images, reader, work_of
from tests.images import Piece, Reference, picture
from tools.model_verdicts import generating_families
from tools.tiny_families import write_family

pytestmark = pytest.mark.slow

COUNT = 8
SIZES = {"small": (50, 70), "tall": (20, 300), "wide": (300, 20), "dot": (1, 1), "huge": (900, 1200)}
ONE: list[Piece] = [*TEXT[:10], picture(1, size=SIZES["small"]), *TEXT[20:35]]
OTHER: list[Piece] = [*TEXT[:10], picture(2, size=SIZES["small"]), *TEXT[20:35]]
FIVE: list[Piece] = [*TEXT[30:37]]
for number, size in enumerate(SIZES.values()):
    FIVE += [picture(3, size=size), *TEXT[number : number + 3]]
FIRST: list[Piece] = [picture(5, size=SIZES["tall"]), *TEXT[:5]]
# transformers takes generated tokens for more of an image that ends the prompt, but templates write a token behind it.
LAST: list[Piece] = [*TEXT[:40], picture(6, size=SIZES["wide"]), 9]
PROMPTS: list[list[Piece]] = [ONE, OTHER, FIVE, FIRST, LAST, [*TEXT]]
LIMITS: dict[str, Any] = {"max_model_len": 320}


def _can_pack() -> bool:
    try:
        return DEVICE == "cpu" and has_packed_linear(load_kernels())
    except KernelsUnavailableError:
        return False


def write_idle_adapter(folder: Path, layers: int, hidden: int) -> Path:
    """An adapter whose products are zeros."""
    names = [f"base_model.model.model.layers.{layer}.mlp.down_proj" for layer in range(layers)]
    folder.mkdir()
    tensors = {f"{name}.lora_A.weight": torch.zeros(2, 96) for name in names}
    tensors |= {f"{name}.lora_B.weight": torch.zeros(hidden, 2) for name in names}
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["down_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


class Model:
    """A tiny model and the answers of transformers to `PROMPTS`."""

    def __init__(self, kind: str, folder: Path) -> None:
        write_family(kind, generating_families()[kind], folder)
        self.folder = folder
        self.reference = Reference(folder)
        self.answers = [self.reference.answer(prompt, COUNT) for prompt in PROMPTS]

    def reader(self, **settings: Any) -> Engine:
        return reader(self.folder, **{**LIMITS, **settings})

    def decoder(self, **settings: Any) -> Engine:
        return make_engine(self.folder, **{**LIMITS, **settings})

    def work(self, engine: Engine, name: str, prompt: Sequence[Piece], **more: Any) -> Any:
        return work_of(engine, name, prompt, folder=self.folder, **{"max_tokens": COUNT, **more})

    def ask_all(self, engine: Engine) -> list[list[int]]:
        for number, prompt in enumerate(PROMPTS):
            add(engine, self.work(engine, str(number), prompt), prompt)
        answers = run(engine)
        return [answers[str(number), 0] for number in range(len(PROMPTS))]


def logprobs_of(model: Model, engine: Engine, prompts: list[list[Piece]]) -> torch.Tensor:
    """Return the logprobs of all tokens of prompts, one prompt after another."""
    for number, prompt in enumerate(prompts):
        add(engine, model.work(engine, f"l{number}", prompt, max_tokens=1, prompt_logprobs=0), prompt)
    found: dict[str, list[float]] = {f"l{number}": [] for number in range(len(prompts))}
    while engine.has_work():
        for first in engine.step().first:
            found[first.request_id] += [one.chosen.logprob for one in first.prompt_logprobs or [] if one]
    return torch.tensor([value for values in found.values() for value in values])


# Fused layers with and without features for the first layers, and layers of transformers that rotate neighbours.
@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl", "glm4v"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    yield Model(request.param, tmp_path_factory.mktemp(request.param))


def test_the_reference_sees_the_images(model: Model) -> None:
    """If this failed, an engine that ignores images would pass the other tests."""
    assert model.answers[0] != model.answers[1]


def test_in_one_batch_and_again_from_the_prefix_cache(model: Model) -> None:
    with model.reader() as engine:
        assert model.ask_all(engine) == model.answers
        first = engine.stats().prefix_hit_tokens
        assert model.ask_all(engine) == model.answers
        assert engine.stats().prefix_hit_tokens > first + 100


@pytest.mark.parametrize("step", [7, 24])
def test_with_chunks_that_end_within_an_image(model: Model, step: int) -> None:
    with model.reader(max_num_batched_tokens=step, max_num_seqs=4, async_scheduling=step == 24) as engine:
        assert model.ask_all(engine) == model.answers


def test_with_blocks_that_end_within_and_behind_an_image(model: Model) -> None:
    with model.reader(block_size=8) as engine:
        # The cached prefix of the second prompt ends within its image, and of the third behind it.
        for number, (prompt, count) in enumerate(((ONE[:11], 1), (ONE, COUNT), (ONE[:-4], COUNT))):
            work = model.work(engine, str(number), prompt, max_tokens=count)
            before = engine.stats().prefix_hit_tokens
            add(engine, work, prompt)
            assert run(engine)[str(number), 0] == model.reference.answer(prompt, count)
            assert (engine.stats().prefix_hit_tokens > before) == (number > 0)


def test_images_in_later_turns(model: Model) -> None:
    with model.reader(block_size=4) as engine:
        chat: list[Piece] = []
        turns: list[list[Piece]] = [ONE, [*TEXT[:9]], OTHER, FIRST]
        for turn, pieces in enumerate(turns):
            chat = [*chat, 11, *pieces]
            before = engine.stats().prefix_hit_tokens
            add(engine, model.work(engine, str(turn), chat), chat)
            found = run(engine)[str(turn), 0]
            assert found == model.reference.answer(chat, COUNT)
            assert (engine.stats().prefix_hit_tokens > before) == (turn > 0)
            chat += [token % 250 for token in found]  # no special token is among them


def test_by_handoff_to_an_engine_without_a_tower(model: Model) -> None:
    with model.reader(max_num_batched_tokens=24) as source, model.decoder() as sink:
        assert sink.image_reader is None
        for number, prompt in enumerate(PROMPTS):
            work = model.work(source, str(number), prompt)
            assert hand_over_images(source, sink, work, prompt)[work.request_id, 0] == model.answers[number]


def test_by_replay_after_some_tokens(model: Model) -> None:
    with model.reader() as engine:
        for number, (prompt, answer) in enumerate(zip(PROMPTS, model.answers, strict=True)):
            add(engine, model.work(engine, str(number), prompt, generated=answer[:4]), prompt)
        answers = run(engine)
        assert [answers[str(n), 0] for n in range(len(PROMPTS))] == [answer[4:] for answer in model.answers]


def test_with_preemption(model: Model) -> None:
    """An instance without images gives a sequence back if its blocks are gone."""
    few: dict[str, Any] = {"num_gpu_blocks_override": 20, "max_model_len": 60, "block_size": 4}
    prompts = {"one": ONE, "other": OTHER}
    wanted = {(name, 0): model.answers[number] for number, name in enumerate(prompts)}
    with model.reader(**few) as engine:
        for name, prompt in prompts.items():
            add(engine, model.work(engine, name, prompt), prompt)
        assert run(engine) == wanted
        assert engine.stats().preemptions > 0
    with model.reader(block_size=4) as source, model.decoder(**{**few, "num_gpu_blocks_override": 18}) as sink:
        answers: Answers = {}
        failed: list[str] = []
        for name, prompt in prompts.items():
            answers |= begin(source, sink, model.work(source, name, prompt), prompt)
        rest = run(sink, lambda result: failed.extend(f.request_id for f in result.failed))
        assert sink.stats().preemptions > 0
        for name in prompts:
            reported = answers[name, 0] + rest.get((name, 0), [])
            assert reported == wanted[name, 0][: len(reported)]
            assert len(reported) == COUNT or name in failed


def test_two_ranks_have_the_embeddings_and_positions_of_rank_0(model: Model) -> None:
    """Each has half of the heads. Their blocks are those of one rank, and they take those of one."""
    settings: dict[str, Any] = {"tensor_parallel_size": 2, "max_num_batched_tokens": 24, "async_scheduling": True}
    with model.reader(**settings) as two, model.decoder() as one:
        assert model.ask_all(two) == model.answers
        first = two.stats().prefix_hit_tokens
        assert model.ask_all(two) == model.answers
        assert two.stats().prefix_hit_tokens > first + 100
        work = model.work(two, "over", FIVE)
        assert hand_over_images(two, one, work, FIVE)["over", 0] == model.answers[2]
        # Few tokens of such small models depend on rows and columns. All logprobs of a prompt do.
        of_two = logprobs_of(model, two, [FIVE])
    with model.reader() as one:
        torch.testing.assert_close(of_two, logprobs_of(model, one, [FIVE]), rtol=1e-4, atol=1e-4)


def test_graphs_of_two_ranks(model: Model, captured: FakeCapture, monkeypatch: pytest.MonkeyPatch) -> None:
    use_threads(monkeypatch)
    with model.reader(tensor_parallel_size=2, max_num_batched_tokens=256, block_size=8) as engine:
        assert model.ask_all(engine) == model.answers
        assert bool(captured.graphs) == bool(sum(graph.replays for graph in captured.graphs))


def test_through_captured_graphs(model: Model, captured: FakeCapture) -> None:
    with model.reader(max_num_seqs=8, max_num_batched_tokens=64) as engine:
        assert model.ask_all(engine) == model.answers
        assert bool(captured.graphs) == bool(sum(graph.replays for graph in captured.graphs))


def test_prompts_with_images_replay_graphs(model: Model, captured: FakeCapture) -> None:
    """Also from inside an image, where the cached prefix ends, and with features for several layers."""
    with model.reader(block_size=8, max_num_batched_tokens=256) as engine:
        if not captured.graphs:
            pytest.skip("these layers cannot be captured")
        for number, prompt in enumerate(([*ONE[:11], 9], ONE, [*ONE[:11], 9, 8, picture(2), 7])):
            before, replays = engine.stats().prefix_hit_tokens, [graph.replays for graph in captured.graphs]
            work = model.work(engine, str(number), prompt, max_tokens=1)
            add(engine, work, prompt)
            assert run(engine)[str(number), 0] == model.reference.answer(prompt, 1)
            hits = engine.stats().prefix_hit_tokens - before
            assert work.media[0].start < hits < work.media[0].end if number else not hits
            assert sum(graph.replays for graph in captured.graphs) == sum(replays) + 1


def test_layers_that_are_not_fused(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_layers, "fits", lambda module: False)
    with model.reader() as engine:
        assert model.ask_all(engine) == model.answers


def test_a_grid_that_is_not_the_images_is_refused(model: Model) -> None:
    with model.reader() as engine:
        work = model.work(engine, "turned", ONE)
        grid = work.media[0].grid
        for wrong in (None, msgspec.structs.replace(grid, rows=grid.columns, columns=grid.rows)):
            span = msgspec.structs.replace(work.media[0], grid=wrong)
            with pytest.raises(RequestError, match="not at its place"):
                add(engine, msgspec.structs.replace(work, media=[span]), ONE)


FURTHER = ["qwen2_vl", "qwen3_vl_moe", "glm4v_moe", "glm46v", "glm_ocr", "qwen3_5", "qwen3_5_moe"]
DIVIDED = ["qwen2_vl", "qwen3_vl_moe", "qwen3_5"]
"""Of these, the ones that two ranks divide in the tests: plain layers, experts, and linear attention."""


@pytest.mark.parametrize(("kind", "ranks"), [*((kind, 1) for kind in FURTHER), *((kind, 2) for kind in DIVIDED)])
def test_further_families(kind: str, ranks: int, tmp_path: Path) -> None:
    write_family(kind, generating_families()[kind], tmp_path)
    reference = Reference(tmp_path)
    prompts: list[list[Piece]] = [ONE, FIVE, [*TEXT]]
    several = {"max_num_batched_tokens": 40, "max_num_seqs": 4, "tensor_parallel_size": ranks}
    with reader(tmp_path, **LIMITS, **several) as engine:
        for number, prompt in enumerate(prompts):
            add(engine, work_of(engine, str(number), prompt, folder=tmp_path, max_tokens=COUNT), prompt)
        answers = run(engine)
    assert [answers[str(n), 0] for n in range(len(prompts))] == [reference.answer(one, COUNT) for one in prompts]


@pytest.mark.skipif(not _can_pack(), reason="needs a compiler and a CPU with bf16 dot products")
def test_the_whole_decoder_in_one_call_computes_what_its_layers_do(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def logprobs() -> torch.Tensor:
        with model.reader(dtype="bfloat16", enable_prefix_caching=False) as engine:
            return logprobs_of(model, engine, PROMPTS)

    packed = logprobs()
    monkeypatch.setattr(fused_cpu, "fits", lambda *_: False)
    # Both round to bf16, in different places.
    assert (packed - logprobs()).abs().mean() < 0.05


@pytest.mark.parametrize("has_graphs", [False, True])
def test_an_adapter_that_adds_nothing_changes_no_answer(
    model: Model, has_graphs: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Fused layers with an adapter run product by product, or from slots if graphs are captured."""
    if has_graphs:
        request.getfixturevalue("captured")
    adapter = write_idle_adapter(tmp_path / "idle", layers=4, hidden=64)
    with model.reader(enable_lora=True, lora_modules=(f"idle={adapter}",)) as engine:
        for number, prompt in enumerate(PROMPTS):
            work = model.work(engine, str(number), prompt)
            lora = engine.adapters.records()[0].fingerprint
            add(engine, msgspec.structs.replace(work, lora=lora), prompt)
        answers = run(engine)
    assert [answers[str(number), 0] for number in range(len(PROMPTS))] == model.answers


def test_a_tower_with_features_for_more_layers_than_there_are_is_refused(tmp_path: Path) -> None:
    write_family("qwen3_vl", generating_families()["qwen3_vl"], tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["num_hidden_layers"] = 2
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="features for more layers than the 2 of its decoder"):
        reader(tmp_path, **LIMITS)
