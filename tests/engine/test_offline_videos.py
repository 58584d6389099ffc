"""Videos in prompts of the offline API: greedy tokens equal those of transformers for the same frames."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from baton_serve import LLM, SamplingParams
from baton_serve.contracts.media import Clip, MediaHeader, with_header
from baton_serve.engine import ConfigError
from baton_serve.engine.model.vision.image_reader import HFImageReader
from tests.e2e.test_videos import write_model
from tests.engine.test_videos import COUNT, SETTINGS, Model
from tests.images import family_of, picture
from tests.videos import frame, video

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "kv_cache_memory_bytes": 8 << 20,
    "max_num_seqs": 8,
    "max_model_len": 1024,
}
TEXT = "see <video> now"
FRAMES = np.stack([frame(1, moment, (64, 48)) for moment in range(8)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("offline-videos")
    write_model("qwen2_5_vl", folder)
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    limits = {"image": 2, "video": 2}
    with LLM(str(folder), **OPTIONS, mm_processor_kwargs=SETTINGS, limit_mm_per_prompt=limits) as loaded:
        yield loaded


def ask(llm: LLM, data: dict[str, Any], text: str = TEXT, **more: Any) -> list[int]:
    prompt: Any = {"prompt": text, "multi_modal_data": data, **more}
    return list(llm.generate([prompt], GREEDY, use_tqdm=False)[0].outputs[0].token_ids)


def test_frames_of_callers_are_those_that_transformers_sees(llm: LLM, folder: Path) -> None:
    model, images = Model("qwen2_5_vl", folder), HFImageReader(folder, family_of(folder))
    before, after = (model.tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("see ", " now"))

    def wanted(indexes: list[int], fps: float) -> list[int]:
        model.clip = Clip(width=64, height=48, num_frames=8, fps=fps, indexes=indexes, is_raw=True)
        raw = with_header(FRAMES[indexes].tobytes(), MediaHeader(SETTINGS, model.clip))
        return model.answer(images, [*before, raw, *after], seen_fps=len(indexes) / 8 * fps)

    whole = wanted(list(range(8)), 24.0)
    assert ask(llm, {"video": FRAMES}) == ask(llm, {"video": [list(map(Image.fromarray, FRAMES))]}) == whole
    some = wanted([0, 2, 4, 6], 4.0)
    assert ask(llm, {"video": (FRAMES, {"fps": 4.0})}) == some != whole
    given = {"fps": 4.0, "total_num_frames": 8, "frames_indices": [0, 2, 4, 6]}
    assert ask(llm, {"video": [(FRAMES[::2], given)]}) == some
    fewer = {**SETTINGS, "num_frames": 4}
    assert ask(llm, {"video": (FRAMES, {"fps": 4.0})}, mm_processor_kwargs=fewer) == some


def test_files_images_and_uuids(llm: LLM) -> None:
    pytest.importorskip("av")
    data = {"image": picture(1), "video": video(1)}
    text = "a <video> b <image> c"
    first = ask(llm, data, text, multi_modal_uuids={"image": ["my picture"], "video": ["my video"]})
    names = {"image": "my picture", "video": ["my video"]}
    assert ask(llm, {"image": None, "video": [None]}, text, multi_modal_uuids=names) == first
    assert ask(llm, {"image": picture(2), "video": video(1)}, text) != first
    parts = [{"type": "video_url", "uuid": "my video"}, {"type": "text", "text": " what?"}]
    answers = [
        llm.chat([{"role": "user", "content": shown}], GREEDY, use_tqdm=False)
        for shown in (parts, [{"type": "video", "video": video(1)}, parts[1]])
    ]
    assert answers[0][0].outputs[0].token_ids == answers[1][0].outputs[0].token_ids


def test_what_is_refused_says_why(llm: LLM) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"video": np.zeros((4, 9, 9))}, "frames uint8"),
        ({"video": []}, "frames uint8"),
        ({"video": (FRAMES, {"frames_indices": [1]})}, "1 entries for 8 frames"),
        ({"video": (FRAMES, {"speed": 2})}, "'speed' is not known"),
        ({"video": [FRAMES] * 3}, "3 videos, limit_mm_per_prompt is 2"),
        ({"depth": b""}, "depth is not supported"),
    ]
    for data, why in wrong:
        with pytest.raises(ConfigError, match=why):
            ask(llm, data)
    with pytest.raises(ConfigError, match="there is no video 'other' here"):
        ask(llm, {"video": None}, multi_modal_uuids={"video": "other"})
    with pytest.raises(ConfigError, match="'colour' is not a setting"):
        ask(llm, {"video": FRAMES}, mm_processor_kwargs={"colour": 1})
