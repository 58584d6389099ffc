"""Videos in prompts: what transformers makes of the same frames, and its greedy tokens in float32."""

import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import msgspec
import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer
from transformers.video_utils import VideoMetadata

from baton_serve.contracts.media import Clip, MediaHeader, MediaSpan, digest_of, split_header, with_header
from baton_serve.contracts.messages import Work
from baton_serve.contracts.vision import (
    ImageFamily,
    configured,
    expand_runs,
    image_family,
    media_spans,
    write_parts_as_tokens,
)
from baton_serve.contracts.vision.model_files import ModelFacts
from baton_serve.contracts.vision.videos import VideoRules
from baton_serve.engine import Engine
from baton_serve.engine.errors import RequestError
from baton_serve.engine.model.vision.image_types import DecodedImage
from tests.engine.driving import hand_over, make_engine, make_work, run
from tests.engine.test_vision import TEXT, reader
from tests.images import family_of, picture
from tests.videos import frame, video
from tools.model_verdicts import generating_families
from tools.tiny_families import write_family

pytestmark = pytest.mark.slow

COUNT = 8
LIMITS: dict[str, Any] = {"max_model_len": 512}
SETTINGS = {"min_pixels": 16, "max_pixels": 64 * 48 * 4}
THEIRS = {
    "qwen2_vl": ("Qwen2VLVideoProcessor", ""),
    "qwen3_vl": ("Qwen3VLVideoProcessor", "Qwen3VLProcessor"),
    "glm4v": ("Glm4vVideoProcessor", "Glm4vProcessor"),
    "glm46v": ("Glm46VVideoProcessor", "Glm46VProcessor"),
}
"""Of a family: the class of transformers' video processor, and that of its processor of texts if it writes times."""


def theirs_of(kind: str) -> tuple[Any, Any, Any]:
    """The module and class of the video processor, and the processor of texts. Their methods need no torchvision."""
    with pytest.MonkeyPatch.context() as patch:
        parts = ["torchvision", "transforms", "v2", "functional"]
        for number in range(4):
            # The modules import it, and these methods do not use it.
            patch.setitem(sys.modules, ".".join(parts[: number + 1]), MagicMock())
        module = import_module(f"transformers.models.{kind}.video_processing_{kind}")
    texts = import_module(f"transformers.models.{kind}.processing_{kind}")
    videos, processor = THEIRS[kind]
    return module, getattr(module, videos), getattr(texts, processor, None)


def family(kind: str, **videos: Any) -> ImageFamily:
    found = image_family(ModelFacts(config={"model_type": kind}, images={"patch_size": 14}, videos=videos))
    assert found is not None and found.video is not None
    return found


@pytest.mark.parametrize("kind", THEIRS)
def test_the_frames_that_are_seen_are_those_of_transformers(kind: str) -> None:
    _, theirs, _ = theirs_of(kind)
    names = ("min_frames", "max_frames", "max_duration", "temporal_patch_size", "num_frames")
    own = SimpleNamespace(**{one: getattr(theirs, one, None) for one in names}, fps=2)
    rules = family(kind).video
    assert rules is not None
    for total in (2, 5, 24, 89, 90, 331, 900, 2999, 24000):
        for fps in (1.0, 7.5, 24.0, 29.97002997, 60.0):
            metadata = VideoMetadata(total_num_frames=total, fps=fps, duration=total / fps)
            wanted = theirs.sample_frames(own, metadata, fps=None if kind == "glm46v" else 2)
            if not len(wanted):
                continue
            assert rules.sample(total, fps) == [index for index in wanted if index < total], (total, fps)


class _Processor:
    """The attributes that methods of transformers' processor of texts use."""

    image_token = video_token = "|"
    vision_start_token, vision_end_token = "<|vision_start|>", "<|vision_end|>"
    video_processor = SimpleNamespace(merge_size=2, temporal_patch_size=2)

    def __init__(self, kind: Any) -> None:
        self._kind = kind

    def _calculate_timestamps(self, *given: Any) -> Any:
        return self._kind._calculate_timestamps(self, *given)

    def replace_frame_token_id(self, second: float, num_image_tokens: int) -> Any:
        return self._kind.replace_frame_token_id(self, second, num_image_tokens)


@pytest.mark.parametrize("kind", THEIRS)
def test_grids_and_times_are_those_of_transformers(kind: str) -> None:
    module, theirs, processor = theirs_of(kind)
    known = family(kind)
    assert isinstance(known.video, VideoRules)
    limits = theirs.size
    for width, height, count in ((640, 480, 24), (1920, 1080, 9), (90, 40, 7), (20, 600, 4), (3000, 100, 30)):
        indexes = [7 * number for number in range(count)]
        clip = Clip(width=width, height=height, num_frames=7 * count, fps=29.97, indexes=indexes)
        more = {} if kind == "qwen2_vl" else {"num_frames": count}
        side = known.video.side
        low, high = limits["shortest_edge"], limits["longest_edge"]
        tall, wide = module.smart_resize(
            height=height, width=width, factor=side, min_pixels=low, max_pixels=high, **more
        )
        grid = known.video.grid(clip)
        assert (grid.frames, grid.rows, grid.columns) == (-(-count // 2), tall // side, wide // side)
        if processor is None:
            continue
        tokens = _Processor(processor)
        shape = torch.tensor([[grid.frames, tall // side * 2, wide // side * 2]])
        metadata = VideoMetadata(total_num_frames=7 * count, fps=29.97, frames_indices=list(indexes))
        wanted = processor.replace_video_token(tokens, {"video_grid_thw": shape, "video_metadata": [metadata]}, 0)
        parts = known.text_of(width=1, height=1, clip=clip).parts
        assert "".join("|" * part if isinstance(part, int) else part for part in parts) == wanted


def test_settings_replace_the_processors_and_others_are_refused_by_name() -> None:
    known = family("qwen2_5_vl")
    changed = configured(known, {"fps": 1, "max_pixels": 28 * 28 * 16, "size": {"shortest_edge": 784}})
    assert isinstance(changed.video, VideoRules) and known.video is not None
    assert len(known.video.sample(240, 24.0)) == 20 and len(changed.video.sample(240, 24.0)) == 10
    assert changed.video.max_pixels == 28 * 28 * 16 and changed.video.min_pixels == 784
    assert changed.processor_settings == {"size": {"shortest_edge": 784, "longest_edge": 28 * 28 * 16}}
    assert configured(known, {}) is known
    wrong: list[tuple[dict[str, Any], str]]
    wrong = [({"foo": 1}, "'foo' is not a setting"), ({"fps": 0}, "fps is out of bounds"), ({"size": 3}, "edges")]
    wrong += [({"num_frames": 10**6}, "out of bounds"), ({"fps": 1, "num_frames": 4}, "exclude"), ({"fps": "2"}, "fps")]
    for settings, why in wrong:
        with pytest.raises(ValueError, match=why):
            configured(known, settings)


class Model:
    """A tiny model, and what transformers answers to prompts with videos."""

    def __init__(self, kind: str, folder: Path) -> None:
        """Take the folder of a tiny model of `write_family`."""
        self.folder = folder
        self.kind = kind
        self.family = configured(family_of(folder), SETTINGS)
        assert self.family.video is not None
        indexes = self.family.video.sample(24, 8.0)
        self.clip = Clip(width=64, height=48, num_frames=24, fps=8.0, indexes=indexes)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
        self._model.generation_config.eos_token_id = None

    def file(self, number: int, **more: Any) -> bytes:
        """A video of 24 frames, of which the model sees some, with its header."""
        return self.with_header(video(number, **more))

    def with_header(self, file: bytes) -> bytes:
        return with_header(file, MediaHeader(SETTINGS, self.clip))

    def prompt(self, pieces: Sequence[int | bytes]) -> tuple[list[int], list[MediaSpan], list[bytes]]:
        """Tokens, spans and files. Each video stands where its placeholder was."""
        files = [piece for piece in pieces if isinstance(piece, bytes)]
        clips = [split_header(file)[0].clip for file in files]
        texts = [self.family.text_of(width=64, height=48, clip=clip) for clip in clips]
        marks = iter([text.placeholder for text in texts])
        tokens: Any = [next(marks) if isinstance(piece, bytes) else piece for piece in pieces]
        written = write_parts_as_tokens(
            tokens, texts, lambda text: list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        )
        expanded, places = expand_runs(written, texts)
        return expanded, media_spans(places, texts, [digest_of(file) for file in files]), files

    def answer(self, images: Any, pieces: Sequence[int | bytes], seen_fps: float | None = None) -> list[int]:
        """Return transformers' greedy answer to the pixels that `images`, an engine's reader, returns."""
        tokens, spans, files = self.prompt(pieces)
        rules = self.family.video
        assert isinstance(rules, VideoRules)
        given: dict[str, Any] = {}
        types = torch.zeros(1, len(tokens), dtype=torch.int32)
        pixels = images.read(files)
        shapes: list[Any] = []
        for span in spans:
            read = pixels[span.digest].inputs
            is_video = "pixel_values_videos" in read
            types[0, span.start : span.end] = 2 if is_video else 1
            for name, value in read.items():
                given[name] = torch.cat([given[name], value]) if name in given else value
            shapes += [read["video_grid_thw"]] if is_video else []
        if rules.stamps:
            # transformers has one grid for the groups of a video; all videos of a prompt here are alike.
            frames = rules.grid(self.clip).frames
            given["video_grid_thw"] = torch.tensor([[frames, *shapes[0][0, 1:].tolist()]] * (len(shapes) // frames))
        elif self.kind == "qwen2_5_vl":
            seen_fps = seen_fps or len(self.clip.indexes) / 24 * 8.0
            given["second_per_grid_ts"] = torch.tensor([2 / seen_fps] * len(shapes))
        ids = torch.tensor([tokens])
        found = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=types, max_new_tokens=COUNT, do_sample=False,
            pad_token_id=0, **given,
        )  # fmt: skip
        return [int(token) for token in found[0, len(tokens) :]]

    def work(self, engine: Engine, name: str, pieces: Sequence[int | bytes], generated: Sequence[int] = ()) -> Work:
        tokens, spans, _ = self.prompt(pieces)
        values: dict[str, Any] = {"max_tokens": COUNT, "ignore_eos": True, "num_prompt_tokens": len(tokens)}
        return msgspec.structs.replace(make_work(engine, name, [*tokens, *generated], **values), media=spans)

    def pixels(self, engine: Engine, pieces: Sequence[int | bytes]) -> Any:
        assert engine.image_reader is not None
        return engine.image_reader.read([piece for piece in pieces if isinstance(piece, bytes)])


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    pytest.importorskip("av")
    folder = tmp_path_factory.mktemp(request.param)
    write_family(request.param, generating_families()[request.param], folder)
    yield Model(request.param, folder)


def test_tokens_equal_transformers_whole_split_replayed_and_cached(model: Model) -> None:
    first, other, last = model.file(1), model.file(2), model.file(3)
    prompts: list[list[int | bytes]] = [
        [*TEXT[:10], first, *TEXT[20:35]],
        [*TEXT[:10], other, *TEXT[20:35]],
        [*TEXT[30:37], first, *TEXT[3:5], last, 9],
    ]
    with reader(model.folder, **LIMITS) as engine, reader(model.folder, **LIMITS, max_num_batched_tokens=24) as chunks:
        wanted = [model.answer(engine.image_reader, prompt) for prompt in prompts]
        assert wanted[0] != wanted[1], "an engine that ignores videos would pass"
        for _ in range(2):
            for number, prompt in enumerate(prompts):
                engine.add(model.work(engine, str(number), prompt), pixels=model.pixels(engine, prompt))
            answers = run(engine)
            assert [answers[str(number), 0] for number in range(len(prompts))] == wanted
        assert engine.stats().prefix_hit_tokens > 100
        for number, prompt in enumerate(prompts):
            replayed = model.work(engine, f"r{number}", prompt, wanted[number][:3])
            chunks.add(replayed, pixels=model.pixels(chunks, prompt))
        answers = run(chunks)
        assert [answers[f"r{number}", 0] for number in range(len(prompts))] == [answer[3:] for answer in wanted]
        with make_engine(model.folder, **LIMITS) as sink:
            work = model.work(chunks, "handed over", prompts[2])
            found = hand_over(chunks, sink, work, model.pixels(chunks, prompts[2]))
            assert found[work.request_id, 0] == wanted[2]


def test_a_video_beside_an_image(model: Model) -> None:
    if model.kind == "glm4v":
        pytest.skip("transformers takes both kinds for one: they have the same token")
    prompt: list[int | bytes] = [*TEXT[:4], with_header(picture(4, size=(64, 48)), MediaHeader(SETTINGS))]
    prompt += [*TEXT[5:9], model.file(1), *TEXT[9:12]]
    with reader(model.folder, **LIMITS) as engine:
        engine.add(model.work(engine, "both", prompt), pixels=model.pixels(engine, prompt))
        assert run(engine)["both", 0] == model.answer(engine.image_reader, prompt)


def test_frames_as_they_are_and_frames_of_a_file_become_the_same_pixels(model: Model) -> None:
    rules = model.family.video
    assert rules is not None
    clip = Clip(width=64, height=48, num_frames=8, fps=8.0, indexes=[0, 3, 4, 7], is_raw=True)
    raw = b"".join(frame(1, moment, (64, 48)).tobytes() for moment in clip.indexes)
    with reader(model.folder, **LIMITS) as engine:
        assert engine.image_reader is not None
        found = engine.image_reader.read([with_header(raw, MediaHeader(SETTINGS, clip))])
        pictures = [one for one in found.values() if isinstance(one, DecodedImage)]
        assert sum(len(one.inputs["pixel_values_videos"]) for one in pictures) > 0
        for wrong in (raw[:-1], b""):
            with pytest.raises(RequestError, match="does not have the frames"):
                engine.image_reader.read([with_header(wrong, MediaHeader(SETTINGS, clip))])
        cut = video(1)
        whole = Clip(width=64, height=48, num_frames=24, fps=8.0, indexes=[0, 23])
        for file, why in ((cut[: len(cut) // 2], "cannot be read"), (b"text", "its format"), (b"", "cannot be read")):
            with pytest.raises(RequestError, match=why):
                engine.image_reader.read([with_header(file, MediaHeader(SETTINGS, whole))])
