"""Every family that reads images: prompts and greedy answers equal transformers' own, in float32."""

import itertools
import shutil
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from baton_serve import LLM, SamplingParams
from baton_serve.contracts.media import MAX_ASPECT, MediaSpan, digest_of
from baton_serve.contracts.messages import Work, with_prompt_root
from baton_serve.contracts.vision import ImageFamily, UnfitImageError, image_family, num_embeddings
from baton_serve.contracts.vision.model_files import ModelFacts
from baton_serve.engine import Engine, EngineConfig
from baton_serve.engine.errors import ConfigError, RequestError
from baton_serve.engine.model.vision import load_images
from baton_serve.engine.model.vision.image_types import DecodedImage
from baton_serve.engine.model.vision.tower import load_tower
from tests.engine.driving import hand_over, make_engine, make_work, run
from tests.images import picture
from tests.vision_families import FAMILIES, VisionReference, write_vision_model

pytestmark = pytest.mark.slow

COUNT = 6
GREEDY = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
SIZES = [(24, 18), (1, 1), (70, 9), (8, 61), (47, 50), (33, 16)]


class Chat(NamedTuple):
    text: str
    images: list[bytes]


def chats_of(placeholder: str, smallest: int) -> list[Chat]:
    """Return prompts with 0 to 5 images of many shapes, some of them equal, some in a later turn."""
    a, b, c, d, e, f = (
        picture(number, size=(max(width, smallest), max(height, smallest)))
        for number, (width, height) in enumerate(SIZES)
    )
    mark = placeholder
    return [
        Chat(f"<|im_start|>user\n{mark}what is it?<|im_end|>\n<|im_start|>assistant\n", [a]),
        Chat(f"<|im_start|>user\n{mark}what is it?<|im_end|>\n<|im_start|>assistant\n", [b]),
        Chat(f"the river {mark}{mark} and in the end {mark}", [c, d, c]),
        Chat(f"{mark}the and {mark} in {mark}\n\n{mark}or{mark}.", [b, e, f, a, d]),
        Chat(
            f"<|im_start|>user\n{mark}what is it?<|im_end|>\n<|im_start|>assistant\na boat<|im_end|>\n{mark}?", [a, e]
        ),
        Chat("no image at all, only the river and the boat", []),
    ]


class Tiny:
    def __init__(self, name: str, folder: Path) -> None:
        self.least_step = FAMILIES[name].least_step
        self.folder = write_vision_model(folder, FAMILIES[name])
        self.chats = chats_of(FAMILIES[name].placeholder, FAMILIES[name].smallest)
        reference = VisionReference(folder, FAMILIES[name])
        self.answers = [reference.answer(*chat, COUNT) for chat in self.chats]


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiny]:
    yield Tiny(request.param, tmp_path_factory.mktemp(request.param))


def work_of(engine: Engine, name: str, tokens: list[int], spans: Sequence[MediaSpan], **more: Any) -> Work:
    values = {"max_tokens": COUNT, "ignore_eos": True, "num_prompt_tokens": len(tokens), **more}
    generated = values.pop("generated", [])
    work = make_work(engine, name, tokens + generated, **values)
    return with_prompt_root(msgspec.structs.replace(work, media=list(spans)), engine.layout)


def spans_of(tiny: Tiny, number: int) -> list[MediaSpan]:
    """Return the places of a prompt's images: what transformers' tokens say, read by the family's rules."""
    family = image_family(ModelFacts.of(tiny.folder))
    assert family is not None
    sizes = [Image.open(BytesIO(image)).size for image in tiny.chats[number].images]
    counts = [num_embeddings(family.parts(width=width, height=height)) for width, height in sizes]
    where = [at for at, token in enumerate(tiny.answers[number][0]) if token == family.image_token_id]
    ends = list(itertools.accumulate(counts))
    return [
        MediaSpan(where[end - count], where[end - 1] + 1 - where[end - count], digest_of(image))
        for count, end, image in zip(counts, ends, tiny.chats[number].images, strict=True)
    ]


def loaded(folder: Path, **settings: Any) -> LLM:
    options: dict[str, Any] = {"kv_cache_memory_bytes": 4 << 20, "max_num_seqs": 4, "max_model_len": 1024, **settings}
    return LLM(str(folder), device="cpu", dtype="float32", **options)


def ask(llm: LLM, chats: list[Chat]) -> list[tuple[list[int], list[int]]]:
    prompts: list[Any] = [{"prompt": chat.text, "multi_modal_data": {"image": chat.images}} for chat in chats]
    found = llm.generate(prompts, GREEDY, use_tqdm=False)
    return [(list(one.prompt_token_ids or ()), list(one.outputs[0].token_ids)) for one in found]


def test_the_reference_sees_the_images(tiny: Tiny) -> None:
    assert tiny.answers[0][1] != tiny.answers[1][1]


@pytest.mark.parametrize("step", [1024, 29], ids=["whole", "chunks"])
def test_prompts_and_answers_equal_transformers(tiny: Tiny, step: int) -> None:
    with loaded(tiny.folder, max_num_batched_tokens=max(step, tiny.least_step), block_size=8) as llm:
        for _ in range(2):  # the second time with hits in the prefix cache, which may end within images
            assert ask(llm, tiny.chats) == tiny.answers
        again: Any = {"prompt": tiny.chats[4].text, "multi_modal_data": {"image": tiny.chats[4].images}}
        assert llm.generate([again], GREEDY, use_tqdm=False)[0].num_cached_tokens > 16


@pytest.mark.parametrize(
    "tiny",
    ["gemma3", "gemma4", "internvl", "idefics3", "mistral3", "llava_onevision", "deepseek_vl", "paligemma2"],
    indirect=True,
)
def test_two_ranks(tiny: Tiny) -> None:
    """Of tokens that see each other, of tiles, and of images with marks among their embeddings."""
    settings: dict[str, Any] = {"block_size": 8, "max_num_seqs": 4, "max_model_len": 1024}
    two_ranks = make_engine(
        tiny.folder,
        reads_images=True,
        tensor_parallel_size=2,
        max_num_batched_tokens=max(29, tiny.least_step),
        **settings,
    )
    with two_ranks as engine:
        assert engine.image_reader is not None
        for name in ("first", "again"):
            for number, (chat, (tokens, _)) in enumerate(zip(tiny.chats, tiny.answers, strict=True)):
                work = work_of(engine, f"{name} {number}", tokens, spans_of(tiny, number))
                engine.add(work, pixels=engine.image_reader.read(chat.images))
            answers = run(engine)
            assert [answers[f"{name} {number}", 0] for number in range(6)] == [answer for _, answer in tiny.answers]


@pytest.mark.parametrize("tiny", ["gemma3", "idefics3", "mistral3", "paligemma", "paligemma2"], indirect=True)
def test_handoff_replay_and_preemption(tiny: Tiny) -> None:
    settings: dict[str, Any] = {"block_size": 8, "max_model_len": 512}
    step = max(40, tiny.least_step)
    with (
        make_engine(tiny.folder, reads_images=True, max_num_batched_tokens=step, max_num_seqs=4, **settings) as source,
        make_engine(tiny.folder, **settings) as sink,
    ):
        assert source.image_reader is not None and sink.image_reader is None
        for number, (chat, (tokens, answer)) in enumerate(zip(tiny.chats, tiny.answers, strict=True)):
            pixels, spans = source.image_reader.read(chat.images), spans_of(tiny, number)
            work = work_of(source, f"p/d {number}", tokens, spans)
            assert hand_over(source, sink, work, pixels=pixels)[work.request_id, 0] == answer
        for number, (chat, (tokens, answer)) in enumerate(zip(tiny.chats, tiny.answers, strict=True)):
            work = work_of(source, f"again {number}", tokens, spans_of(tiny, number), generated=answer[:3])
            source.add(work, pixels=source.image_reader.read(chat.images))
        replayed = run(source)
        assert [replayed[f"again {number}", 0] for number in range(6)] == [answer[3:] for _, answer in tiny.answers]
    lengths = [len(tiny.answers[number][0]) for number in (0, 4)]
    room = sum(-(-length // 4) for length in lengths) + 1  # too little for the answers of both
    tight = {"num_gpu_blocks_override": room, "block_size": 4, "max_model_len": max(lengths) + COUNT}
    # Cache groups would make room for both.
    with make_engine(tiny.folder, reads_images=True, disable_hybrid_kv_cache_manager=True, **tight) as engine:
        assert engine.image_reader is not None
        for number in (0, 4):
            tokens, pixels = tiny.answers[number][0], engine.image_reader.read(tiny.chats[number].images)
            engine.add(work_of(engine, str(number), tokens, spans_of(tiny, number)), pixels=pixels)
        assert run(engine) == {(str(number), 0): tiny.answers[number][1] for number in (0, 4)}
        assert engine.stats().preemptions > 0


@pytest.mark.parametrize("tiny", ["mistral3", "internvl", "gemma3", "paligemma"], indirect=True)
@pytest.mark.parametrize("prefix", ["", "model."])
def test_towers_are_found_under_all_names_and_beside_quantized_decoders(
    tiny: Tiny, prefix: str, tmp_path: Path
) -> None:
    shutil.copytree(tiny.folder, tmp_path, dirs_exist_ok=True)
    stored = load_file(tmp_path / "model.safetensors")
    named = {prefix + name.removeprefix("model."): tensor for name, tensor in stored.items() if "language" not in name}
    save_file(named, tmp_path / "model.safetensors", {"format": "pt"})
    config = msgspec.json.decode((tmp_path / "config.json").read_bytes())
    rules = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
    (tmp_path / "config.json").write_bytes(msgspec.json.encode({**config, "quantization_config": rules}))
    tower = load_tower(EngineConfig(model=str(tmp_path), reads_images=True), torch.device("cpu"), torch.float32)
    plain = load_tower(EngineConfig(model=str(tiny.folder), reads_images=True), torch.device("cpu"), torch.float32)
    assert tower is not None and plain is not None
    (seen,) = plain.reader.read(tiny.chats[0].images).values()
    assert isinstance(seen, DecodedImage)
    torch.testing.assert_close(tower.encode(seen), plain.encode(seen))


@pytest.mark.parametrize(
    ("stated", "reason"),
    [
        ({"model_type": "ovis2"}, "models of type ovis2 are served as text; images are read by"),
        ({"model_type": "gemma3"}, "the folder has no image processor"),
        ({"model_type": "llava", "vision_config": {"model_type": "other"}}, "a tower or a processor"),
    ],
)
def test_a_tower_that_is_not_read_is_named_at_the_start(
    stated: dict[str, Any], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "config.json").write_bytes(msgspec.json.encode({"vision_config": {"hidden_size": 8}, **stated}))
    if stated["model_type"] == "llava":
        (tmp_path / "preprocessor_config.json").write_text('{"size": 16}')
    config = EngineConfig(model=str(tmp_path), reads_images=True)
    assert load_images(config, torch.device("cpu"), torch.float32, max_image_tokens=16) is None
    assert reason in caplog.text


@pytest.mark.parametrize("tiny", ["gemma3"], indirect=True)
def test_an_image_that_no_step_has_room_for_is_refused(tiny: Tiny) -> None:
    with loaded(tiny.folder, max_num_batched_tokens=19) as llm, pytest.raises(RequestError, match="max_num_batched"):
        ask(llm, tiny.chats[:1])


def test_images_of_any_shape_are_bounded_tokens_and_pixels(tiny: Tiny) -> None:
    """The router accepts these shapes; what the processor and the tower are given must not grow with them."""
    family = image_family(ModelFacts.of(tiny.folder))
    assert family is not None
    with make_engine(tiny.folder, reads_images=True) as engine:
        assert engine.image_reader is not None
        for size in [(1, 1), (MAX_ASPECT, 1), (1, MAX_ASPECT), (1500, 15), (15, 1500), (1200, 1000)]:
            if counted(family, size) == 0:
                continue
            assert counted(family, size) <= 200
            file = BytesIO()
            Image.new("RGB", size, (3, 200, 90)).save(file, "PNG")
            ((_, found),) = engine.image_reader.read([file.getvalue()]).items()
            assert isinstance(found, DecodedImage)
            assert sum(tensor.nbytes for tensor in found.inputs.values()) < 1 << 20
    assert max(counted(family, size) for size in [(5792, 5792), (57900, 579), (579, 57900)]) <= 200  # 2^25 pixels


def counted(family: ImageFamily, size: tuple[int, int]) -> int:
    """Return how many embeddings an image takes; 0 for one that is refused."""
    try:
        return num_embeddings(family.parts(width=size[0], height=size[1]))
    except UnfitImageError:
        return 0


CROPS: dict[str, Any] = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 8, "pan_and_scan_max_num_crops": 3}


@pytest.mark.parametrize("step", [1024, 29], ids=["whole", "chunks"])
def test_crops_of_pan_and_scan_equal_transformers(tmp_path: Path, step: int) -> None:
    """Each crop sees itself in both directions, and crops of one image may be in different steps."""
    family = FAMILIES["gemma3"]
    folder = write_vision_model(tmp_path, family)
    shapes = [(40, 12), (12, 60), (20, 20), (9, 100)]
    images = [picture(number, size=size) for number, size in enumerate(shapes)]
    mark = family.placeholder
    chats = [
        Chat(f"<|im_start|>user\n{mark}what is it?", images[:1]),
        Chat(f"{mark}the and {mark} in {mark}\n\n{mark}or", [images[1], images[2], images[3], images[1]]),
    ]
    reference = VisionReference(folder, family)
    answers = [reference.answer(chat.text, chat.images, COUNT, **CROPS) for chat in chats]
    plain = reference.answer(*chats[0], COUNT)
    with loaded(folder, max_num_batched_tokens=step, block_size=8) as llm:
        prompts: list[Any] = [
            {"prompt": chat.text, "multi_modal_data": {"image": chat.images}, "mm_processor_kwargs": CROPS}
            for chat in chats
        ]
        for _ in range(2):
            found = llm.generate(prompts, GREEDY, use_tqdm=False)
            assert [(list(one.prompt_token_ids or ()), list(one.outputs[0].token_ids)) for one in found] == answers
        assert ask(llm, chats[:1]) == [plain]
        assert len(answers[0][0]) > len(plain[0])
        with pytest.raises(RequestError, match="too small for 16 crops"):
            tiny = {**CROPS, "pan_and_scan_min_crop_size": 1, "pan_and_scan_max_num_crops": 16}
            data = {"image": picture(1, size=(1, 20))}
            strip: Any = {"prompt": mark, "multi_modal_data": data, "mm_processor_kwargs": tiny}
            llm.generate(strip, GREEDY, use_tqdm=False)
        with pytest.raises(ConfigError, match="max_num_crops is out of bounds"):
            many = {**CROPS, "pan_and_scan_max_num_crops": 17}
            wide: Any = {**prompts[0], "mm_processor_kwargs": many}
            llm.generate(wide, GREEDY, use_tqdm=False)
