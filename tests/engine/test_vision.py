"""Images in prompts: greedy tokens equal those of transformers' own LLaVA in float32, however the KV came to be."""

import itertools
import shutil
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlavaNextProcessor

from baton_serve.contracts.identity import BlockHash, RequestId
from baton_serve.contracts.messages import Work
from baton_serve.contracts.vision.llava import PINPOINTS
from baton_serve.contracts.vision.llava import Llava as LlavaFamily
from baton_serve.contracts.vision.media_text import MediaText
from baton_serve.engine import Engine, EngineConfig
from baton_serve.engine.collectives.shard import Shard
from baton_serve.engine.errors import ModelError, RequestError
from baton_serve.engine.loading.transformers_loader import load_model
from baton_serve.engine.model.vision.image_types import DecodedImage
from baton_serve.engine.model.vision.prompt_images import FeatureCache
from baton_serve.engine.model.vision.tower import VisionTower
from tests.engine.conftest import FakeCapture
from tests.engine.driving import Answers, copy_block, hand_over, make_engine, make_work, run
from tests.engine.rank_threads import use_threads
from tests.images import Piece, Reference, picture, prompt_of, tokens_of
from tests.tiny_models import IMAGE_ID, IMAGE_TOKENS, write_tiny_llava

pytestmark = pytest.mark.slow

COUNT = 10
TEXT = [7 + (31 * i + i * i) % 200 for i in range(60)]
ONE: list[Piece] = [*TEXT[:10], picture(1), *TEXT[20:35]]
OTHER: list[Piece] = [*TEXT[:10], picture(2), *TEXT[20:35]]
TWO: list[Piece] = [*TEXT[:21], picture(3), picture(4), *TEXT[30:37], picture(3), 9]
FIRST: list[Piece] = [picture(5), *TEXT[:5]]
LAST: list[Piece] = [*TEXT[:40], picture(6)]
PROMPTS: list[list[Piece]] = [ONE, OTHER, TWO, FIRST, LAST, [*TEXT]]


class Llava:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        reference = Reference(folder)
        self.answers = [reference.answer(prompt, COUNT) for prompt in PROMPTS]


@pytest.fixture(scope="module", params=["llama/clip", "qwen2/siglip"])
def llava(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Llava]:
    text, _, tower = str(request.param).partition("/")
    yield Llava(write_tiny_llava(tmp_path_factory.mktemp("llava"), text, tower))


def reader(folder: Path, **settings: Any) -> Engine:
    return make_engine(folder, reads_images=True, **settings)


def work_of(engine: Engine, name: str, pieces: Sequence[Piece], **more: Any) -> Work:
    tokens, spans = prompt_of(pieces, more.pop("folder", None))
    generated = more.pop("generated", [])
    values = {"max_tokens": COUNT, "ignore_eos": True, "num_prompt_tokens": len(tokens), **more}
    return msgspec.structs.replace(make_work(engine, name, tokens + generated, **values), media=spans)


def add(engine: Engine, work: Work, pieces: Sequence[Piece], **how: Any) -> None:
    assert engine.image_reader is not None
    images = [piece for piece in pieces if isinstance(piece, bytes)]
    engine.add(work, pixels=engine.image_reader.read(images), **how)


def ask_all(engine: Engine) -> list[list[int]]:
    for number, prompt in enumerate(PROMPTS):
        add(engine, work_of(engine, str(number), prompt), prompt)
    answers = run(engine)
    return [answers[str(number), 0] for number in range(len(PROMPTS))]


def test_the_reference_sees_the_images(llava: Llava) -> None:
    """If this failed, an engine that ignores images would pass the other tests."""
    assert llava.answers[0] != llava.answers[1]


def test_in_one_batch_and_again_from_the_prefix_cache(llava: Llava) -> None:
    with reader(llava.folder) as engine:
        assert ask_all(engine) == llava.answers
        first = engine.stats().prefix_hit_tokens
        assert ask_all(engine) == llava.answers
        assert engine.stats().prefix_hit_tokens > first + 100


@pytest.mark.parametrize("step", [5, 16, 24])
def test_with_chunks_that_end_within_an_image(llava: Llava, step: int) -> None:
    with reader(llava.folder, max_num_batched_tokens=step, max_num_seqs=4) as engine:
        assert ask_all(engine) == llava.answers


def test_with_blocks_that_end_within_an_image_and_begin_it_again(llava: Llava) -> None:
    """With blocks of eight tokens, each image lies in several, and a prompt's cached prefix ends within one."""
    with reader(llava.folder, block_size=8) as engine:
        short = ONE[:11]  # its last block ends within the image
        add(engine, work_of(engine, "short", short, max_tokens=1), short)
        run(engine)
        for _ in range(2):
            assert ask_all(engine) == llava.answers
        assert engine.stats().prefix_hit_tokens > 0


def test_prompts_with_images_replay_graphs(llava: Llava, captured: FakeCapture) -> None:
    """Also from inside an image, where the cached prefix ends."""
    with reader(llava.folder, block_size=8) as engine:
        for number, prompt in enumerate((ONE[:11], ONE, OTHER, TWO)):
            before, replays = engine.stats().prefix_hit_tokens, [graph.replays for graph in captured.graphs]
            work = work_of(engine, str(number), prompt, max_tokens=1)
            add(engine, work, prompt)
            answer = run(engine)[str(number), 0]
            assert prompt not in PROMPTS or answer == llava.answers[PROMPTS.index(prompt)][:1]
            hits = engine.stats().prefix_hit_tokens - before
            assert (work.media[0].start < hits < work.media[0].end) == (number == 1)
            assert sum(graph.replays for graph in captured.graphs) == sum(replays) + 1
        assert ask_all(engine) == llava.answers


def test_another_image_shares_the_text_before_it_alone(llava: Llava) -> None:
    with reader(llava.folder, block_size=4) as engine:
        for name, prompt, hits in (("a", ONE, 0), ("b", OTHER, 8), ("c", ONE, 40)):
            before = engine.stats().prefix_hit_tokens
            add(engine, work_of(engine, name, prompt), prompt)
            assert run(engine)[name, 0] == llava.answers[prompt is OTHER]
            assert engine.stats().prefix_hit_tokens - before == hits


def test_with_steps_launched_before_tokens_are_known(llava: Llava) -> None:
    with reader(llava.folder, async_scheduling=True, max_num_batched_tokens=24) as engine:
        for _ in range(2):
            assert ask_all(engine) == llava.answers


def test_an_image_is_encoded_once_also_where_the_cached_prefix_ends_within_it(
    llava: Llava, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[DecodedImage] = []
    encode = VisionTower.encode

    def counted(tower: VisionTower, picture: DecodedImage) -> torch.Tensor:
        encoded.append(picture)
        return encode(tower, picture)

    monkeypatch.setattr(VisionTower, "encode", counted)
    with reader(llava.folder) as engine:
        encoded.clear()  # of the start
        for number in range(3):
            work = work_of(engine, str(number), TWO)
            if number == 2:  # another tenant's must not be quicker for having been seen
                work = msgspec.structs.replace(work, root=BlockHash(b"another tenant's"))
            add(engine, work, TWO)
            assert run(engine)[str(number), 0] == llava.answers[2]
            assert len(encoded) == (4 if number == 2 else 2)


def test_embeddings_that_are_kept_are_bounded() -> None:
    kept, names = FeatureCache(100), [(BlockHash(b""), bytes([number])) for number in range(4)]
    for name in names[:3]:
        kept.keep(name, torch.zeros(10))
    kept.keep(names[1], torch.zeros(10))
    kept.keep(names[3], torch.zeros(10))
    assert [kept.find(name) is not None for name in names] == [False, True, False, True]
    kept.keep(names[0], torch.zeros(26))
    assert [kept.find(name) is not None for name in names] == [False] * 4


def test_by_handoff_to_an_engine_without_a_tower(llava: Llava) -> None:
    with reader(llava.folder, max_num_batched_tokens=24) as source, make_engine(llava.folder) as sink:
        assert sink.image_reader is None
        assert source.layout == sink.layout
        for attempt in range(2):
            for number, prompt in enumerate(PROMPTS):
                work = work_of(source, f"{attempt}-{number}", prompt)
                assert hand_over_images(source, sink, work, prompt)[work.request_id, 0] == llava.answers[number]
        assert source.stats().prefix_hit_tokens > 0
        assert sink.stats().free_blocks == sink.stats().total_blocks


def hand_over_images(source: Engine, sink: Engine, work: Work, prompt: Sequence[Piece]) -> Answers:
    assert source.image_reader is not None
    pixels = source.image_reader.read([piece for piece in prompt if isinstance(piece, bytes)])
    return hand_over(source, sink, work, pixels=pixels)


def test_by_replay_after_some_tokens(llava: Llava) -> None:
    with reader(llava.folder) as engine:
        for number, (prompt, answer) in enumerate(zip(PROMPTS, llava.answers, strict=True)):
            work = work_of(engine, str(number), prompt, generated=answer[:4])
            add(engine, work, prompt)
        answers = run(engine)
        assert [answers[str(n), 0] for n in range(len(PROMPTS))] == [answer[4:] for answer in llava.answers]


def test_with_preemption_where_images_are_read(llava: Llava) -> None:
    with reader(llava.folder, num_gpu_blocks_override=23, max_model_len=80, block_size=4) as engine:
        for name, prompt in (("one", ONE), ("other", OTHER)):
            add(engine, work_of(engine, name, prompt), prompt)
        assert run(engine) == {("one", 0): llava.answers[0], ("other", 0): llava.answers[1]}
        assert engine.stats().preemptions > 0


def test_where_they_are_not_a_prompt_goes_on_from_blocks_that_are_there_or_is_given_back(llava: Llava) -> None:
    with (
        reader(llava.folder, block_size=4) as source,
        make_engine(llava.folder, block_size=4, num_gpu_blocks_override=23, max_model_len=80) as sink,
    ):
        work, gone = work_of(source, "here", ONE), work_of(source, "gone", OTHER)
        hand_over_images(source, sink, work, ONE)  # its blocks stay in the cache
        assert sink.reserve(work) is not None
        sink.admit_locally(work.request_id)
        assert run(sink)[work.request_id, 0] == llava.answers[0]
        assert sink.reserve(gone) is not None  # and none of it comes
        sink.admit_locally(gone.request_id)
        failed: list[tuple[str, str]] = []
        assert run(sink, lambda result: failed.extend((f.request_id, f.code) for f in result.failed)) == {}
        assert failed == [("gone", "overloaded")]
        assert sink.stats().free_blocks == sink.stats().total_blocks


def test_preempted_where_they_are_not_no_answer_is_wrong(llava: Llava) -> None:
    with (
        reader(llava.folder, block_size=4) as source,
        make_engine(llava.folder, block_size=4, num_gpu_blocks_override=23, max_model_len=80) as sink,
    ):
        answers: Answers = {}
        failed: list[str] = []
        for name, prompt in (("one", ONE), ("other", OTHER)):
            work = work_of(source, name, prompt)
            answers |= begin(source, sink, work, prompt)
        rest = run(sink, lambda result: failed.extend(f.request_id for f in result.failed))
        assert sink.stats().preemptions > 0
        for number, name in enumerate(("one", "other")):
            reported = answers[name, 0] + rest.get((name, 0), [])
            assert reported == llava.answers[number][: len(reported)]
            assert len(reported) == COUNT or name in failed
        assert sink.stats().free_blocks == sink.stats().total_blocks


def test_images_whose_kv_is_cached_need_not_be_sent(llava: Llava) -> None:
    """If the KV is not there any more the request fails, and the router sends it with all images."""
    prompt: list[Piece] = [*TEXT[:21], picture(3), picture(4), *TEXT[30:50]]
    wanted = Reference(llava.folder).answer(prompt, COUNT)
    with reader(llava.folder, block_size=4) as engine:
        first, second = work_of(engine, "x", prompt).media

        def ask(name: str, sent: Sequence[Piece], num_unsent_tokens: int) -> None:
            work = msgspec.structs.replace(work_of(engine, name, prompt), num_unsent_tokens=num_unsent_tokens)
            add(engine, work, sent)

        ask("all", prompt, 0)
        assert run(engine)["all", 0] == wanted
        with pytest.raises(RequestError, match="was not sent"):
            ask("too few", [], second.end - 1)
        ask("the second", [picture(4)], first.end)
        ask("none", [], second.end)
        assert run(engine) == {("the second", 0): wanted, ("none", 0): wanted}
        assert engine.reset_prefix_cache()
        ask("evicted", [picture(4)], first.end)
        failed: list[tuple[str, str]] = []
        assert run(engine, lambda result: failed.extend((f.request_id, f.code) for f in result.failed)) == {}
        assert failed == [("evicted", "overloaded")]
        assert engine.stats().free_blocks == engine.stats().total_blocks


def test_preempted_without_their_images_no_answer_is_wrong(llava: Llava) -> None:
    """A preempted sequence goes on from its cached blocks, or fails if they are gone."""
    prompts = {"one": (ONE, 0), "other": (OTHER, 1)}
    with reader(llava.folder, num_gpu_blocks_override=22, max_model_len=80, block_size=4) as engine:
        for name, (prompt, _) in prompts.items():
            add(engine, work_of(engine, f"{name} before", prompt, max_tokens=1), prompt)
        run(engine)
        for name, (prompt, _) in prompts.items():
            work = work_of(engine, name, prompt)
            add(engine, msgspec.structs.replace(work, num_unsent_tokens=work.media[0].end), [])
        failed: list[str] = []
        answers = run(engine, lambda result: failed.extend(f.request_id for f in result.failed))
        assert engine.stats().preemptions > 0
        for name, (_, number) in prompts.items():
            answer = answers.get((RequestId(name), 0), [])
            assert answer == llava.answers[number][: len(answer)]
            assert len(answer) == COUNT or name in failed
        assert engine.stats().free_blocks == engine.stats().total_blocks


@pytest.mark.parametrize(("is_async", "step", "block_size"), [(False, 64, 4), (True, 64, 4), (False, 7, 16)])
def test_tokens_before_an_image_are_computed_before_it_comes(
    llava: Llava, is_async: bool, step: int, block_size: int
) -> None:
    """Meanwhile the engine serves others, and has nothing to do without them."""
    settings = {"max_num_batched_tokens": step, "max_num_seqs": 4, "async_scheduling": is_async}
    with reader(llava.folder, block_size=block_size, **settings) as engine:
        assert engine.can_await_images and engine.image_reader is not None
        work, digests = work_of(engine, "x", TWO), [span.digest for span in work_of(engine, "x", TWO).media]
        files = [piece for piece in TWO if isinstance(piece, bytes)]
        pixels = engine.image_reader.read(files)
        given, late = digests[:2]
        engine.add(work, mode="prefill", pixels={given: pixels[given]}, awaited={late})
        while engine.has_work():
            assert not engine.step().tokens
        assert engine.stats().prompt_tokens == work.media[1].start
        add(engine, work_of(engine, "other", ONE), ONE)
        assert run(engine)["other", 0] == llava.answers[0]
        with pytest.raises(RequestError, match="placeholder tokens"):
            engine.supply_images(RequestId("x"), {late: DecodedImage({}, 1, 1, text_of(3))})
        engine.supply_images(RequestId("x"), {late: pixels[late]})
        engine.supply_images(RequestId("unknown"), {late: pixels[late]})
        assert run(engine)["x", 0] == llava.answers[2][:1]
        engine.release(RequestId("x"))
        assert engine.stats().free_blocks == engine.stats().total_blocks


def text_of(count: int) -> MediaText:
    return MediaText(parts=(count,), token_id=IMAGE_ID, placeholder=IMAGE_ID)


def test_a_preempted_prompt_waits_again_and_a_cancelled_one_leaves_nothing(llava: Llava) -> None:
    with reader(llava.folder, num_gpu_blocks_override=23, max_model_len=80, block_size=4) as engine:
        assert engine.image_reader is not None
        add(engine, work_of(engine, "one", ONE), ONE)
        work = work_of(engine, "late", OTHER)
        engine.add(work, awaited={work.media[0].digest})
        answers: Answers = {}
        while engine.has_work():
            for output in engine.step().tokens:
                answers.setdefault((output.request_id, 0), []).extend(output.token_ids)
        assert answers == {("one", 0): llava.answers[0]}
        engine.supply_images(RequestId("late"), engine.image_reader.read([picture(2)]))
        assert run(engine)["late", 0] == llava.answers[1]
        gone = work_of(engine, "gone", OTHER)
        engine.reset_prefix_cache()
        engine.add(gone, awaited={gone.media[0].digest})
        while engine.has_work():
            engine.step()
        assert engine.stats().free_blocks < engine.stats().total_blocks
        engine.cancel(RequestId("gone"))
        assert engine.stats().free_blocks == engine.stats().total_blocks


def begin(source: Engine, sink: Engine, work: Work, prompt: Sequence[Piece]) -> Answers:
    """A handoff up to the first step of `sink`."""
    reservation = sink.reserve(work)
    assert reservation is not None and source.image_reader is not None
    where: dict[bytes, int] = {}
    pixels = source.image_reader.read([piece for piece in prompt if isinstance(piece, bytes)])
    source.add(work, mode="prefill", pixels=pixels)
    answers = run(source, lambda result: where.update(b for done in result.completed for b in done.blocks))
    for name, block in reservation.missing:
        copy_block(source, where[name], sink, block)
    sink.mark_received(work.request_id, [name for name, _ in reservation.missing])
    source.release(work.request_id)
    sink.admit(work.request_id, {0: answers[work.request_id, 0][0]})
    return answers


def test_an_engine_without_a_tower_reads_text_alone(llava: Llava) -> None:
    with make_engine(llava.folder) as engine:
        engine.add(work_of(engine, "text", TEXT))
        assert run(engine)["text", 0] == llava.answers[-1]
        with pytest.raises(RequestError, match="no vision tower"):
            engine.add(work_of(engine, "image", ONE))


@pytest.mark.parametrize("moved", [1, -1])
def test_places_that_are_not_those_of_images_are_refused(llava: Llava, moved: int) -> None:
    with reader(llava.folder) as engine:
        work = work_of(engine, "moved", ONE)
        span = msgspec.structs.replace(work.media[0], start=work.media[0].start + moved)
        with pytest.raises(RequestError, match="placeholder tokens of an image"):
            add(engine, msgspec.structs.replace(work, media=[span]), ONE)
        with pytest.raises(RequestError, match="was not sent"):
            add(engine, work, OTHER)
        assert engine.image_reader is not None
        with pytest.raises(RequestError, match="cannot be read"):
            engine.image_reader.read([b"no image", picture(1)])
        with pytest.raises(RequestError, match="are a strip"):  # not turned into a gigabyte first
            engine.image_reader.read([picture(1, size=(1, 101))])
        assert not engine.has_work()


def answer(engine: Engine, prompt: Sequence[Piece]) -> list[int]:
    add(engine, work_of(engine, "x", prompt), prompt)
    return run(engine)["x", 0]


def test_layers_of_transformers_own_read_them_too(tmp_path: Path) -> None:
    """Models whose layers are not fused read images, too; here because of another activation function."""
    write_tiny_llava(tmp_path, "mistral", hidden_act="gelu")
    with reader(tmp_path) as engine:
        assert answer(engine, TWO) == Reference(tmp_path).answer(TWO, COUNT)


def test_adapters_lie_beside_them(llava: Llava) -> None:
    with reader(llava.folder, enable_lora=True) as engine:
        assert answer(engine, TWO) == llava.answers[2]


SHAPES = [(24, 18), (60, 20), (20, 60), (33, 31), (90, 7), (7, 50)]
TILED: list[list[Piece]] = [
    [*TEXT[:10], picture(1, size=SHAPES[0]), *TEXT[20:35]],
    [*TEXT[:10], picture(2, size=SHAPES[1]), *TEXT[20:25], picture(3, size=SHAPES[2]), 9],
    [*(picture(number, size=shape) for number, shape in enumerate(SHAPES[3:])), *TEXT[:7]],
]


def ask_tiled(engine: Engine, folder: Path) -> list[list[int]]:
    for number, prompt in enumerate(TILED):
        add(engine, work_of(engine, str(number), prompt, folder=folder), prompt)
    answers = run(engine)
    return [answers[str(number), 0] for number in range(len(TILED))]


def test_tiles_of_llava_next(tmp_path: Path) -> None:
    write_tiny_llava(tmp_path, "mistral", tiles=True)
    reference = Reference(tmp_path)
    expected = [reference.answer(prompt, COUNT) for prompt in TILED]
    assert len({tokens_of(tmp_path, picture(1, size=shape)) for shape in SHAPES}) > 3
    for step in (1000, 20):
        with reader(tmp_path, max_num_batched_tokens=step, max_num_seqs=4) as engine:
            assert [ask_tiled(engine, tmp_path) for _ in range(2)] == [expected] * 2
            assert engine.stats().prefix_hit_tokens > 100
    with reader(tmp_path) as source, make_engine(tmp_path) as sink:
        for number, prompt in enumerate(TILED):
            work = work_of(source, str(number), prompt, folder=tmp_path)
            assert hand_over_images(source, sink, work, prompt)[work.request_id, 0] == expected[number]


def test_how_many_tokens_tiles_are_is_what_transformers_says() -> None:
    family = LlavaFamily(image_token_id=1, tokens_per_image=576, grid=PINPOINTS, tile_size=336, patch_size=14)
    processor = SimpleNamespace(patch_size=14, num_additional_image_tokens=1)
    processor.image_processor = SimpleNamespace(image_grid_pinpoints=[list(size) for size in PINPOINTS])
    processor._get_unpadded_features = partial(LlavaNextProcessor._get_unpadded_features, processor)
    sizes = [1, 2, 13, 50, 333, 336, 337, 500, 671, 672, 1000, 1333, 2048, 5000]
    for width, height in itertools.product(sizes, sizes):
        theirs = LlavaNextProcessor._get_number_of_features(processor, height, width, 336, 336) - 1
        assert family.parts(width=width, height=height) == (theirs,), (width, height)


def test_weights_in_few_bits_and_random_ones_are_the_decoders_alone(llava: Llava) -> None:
    for settings in ({"quantization": "int8"}, {"load_format": "dummy"}):
        with reader(llava.folder, **settings) as source, make_engine(llava.folder, **settings) as sink:
            whole = answer(source, TWO)
            assert whole != answer(source, [*TWO[:21], picture(9), *TWO[22:]])
            work = work_of(source, "y", TWO)
            assert hand_over_images(source, sink, work, TWO)["y", 0] == whole


def test_checkpoints_name_the_decoder_in_several_ways(llava: Llava, tmp_path: Path) -> None:
    shutil.copytree(llava.folder, tmp_path, dirs_exist_ok=True)
    stored = load_file(tmp_path / "model.safetensors")
    newer = {newer_name(name): tensor for name, tensor in stored.items()}
    assert set(newer) != set(stored)
    save_file(newer, tmp_path / "model.safetensors", {"format": "pt"})
    with reader(tmp_path) as engine:
        assert answer(engine, TWO) == llava.answers[2]


def test_a_checkpoint_without_its_tower_is_refused_by_name(llava: Llava, tmp_path: Path) -> None:
    shutil.copytree(llava.folder, tmp_path, dirs_exist_ok=True)
    stored = load_file(tmp_path / "model.safetensors")
    some = {name: tensor for name, tensor in stored.items() if "vision_tower.encoder.layers.1" not in name}
    save_file(some, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match="weights of its vision tower, such as vision_tower"):
        reader(tmp_path)


def newer_name(name: str) -> str:
    """Return the name of a weight as transformers 4.52 to 4.57 wrote it."""
    if name.startswith("language_model.lm_head."):
        return name.removeprefix("language_model.")
    return "model." + name.replace("language_model.model.", "language_model.")


def test_graphs_of_several_ranks_have_the_embeddings_of_rank_0(
    llava: Llava, captured: FakeCapture, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_threads(monkeypatch)
    with reader(llava.folder, tensor_parallel_size=2) as engine:
        before = sum(graph.replays for graph in captured.graphs)
        add(engine, work_of(engine, "one", ONE, max_tokens=1), ONE)
        assert run(engine)["one", 0] == llava.answers[0][:1]
        assert sum(graph.replays for graph in captured.graphs) == before + 2
        assert ask_all(engine) == llava.answers


def test_several_ranks_have_the_embeddings_of_rank_0(llava: Llava, monkeypatch: pytest.MonkeyPatch) -> None:
    use_threads(monkeypatch)
    with reader(llava.folder, tensor_parallel_size=2, max_num_batched_tokens=24) as engine:
        assert ask_all(engine) == llava.answers
    config = EngineConfig(model=str(llava.folder), reads_images=True, tensor_parallel_size=2)
    model = load_model(config, torch.device("cpu"), lambda what, fraction: None, Shard(rank=1, size=2))
    assert not any("vision" in name for name, _ in model.module.named_parameters())


def test_a_processor_that_does_not_fit_the_tower_is_found_at_the_start(tmp_path: Path) -> None:
    write_tiny_llava(tmp_path)
    file = tmp_path / "preprocessor_config.json"
    settings = msgspec.json.decode(file.read_bytes())
    file.write_bytes(msgspec.json.encode({**settings, "crop_size": {"height": 12, "width": 12}}))
    with pytest.raises(ModelError, match="does not fit"):
        reader(tmp_path)
    assert IMAGE_TOKENS == 16
