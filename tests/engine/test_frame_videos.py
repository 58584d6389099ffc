"""Videos of models that see each frame as a picture: greedy tokens equal transformers' for the same frames."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForImageTextToText, AutoTokenizer

from baton_serve import LLM, SamplingParams
from baton_serve.contracts.vision import UnfitImageError, configured
from baton_serve.contracts.vision.framewise_videos import FrameRules
from baton_serve.services.router.settings import RouterSettings
from baton_serve.services.router.text.served_model import ServedModel
from tests.images import family_of
from tests.videos import frame
from tests.vision_families import FAMILIES, processor_of, write_vision_model

pytestmark = pytest.mark.slow

COUNT = 6
GREEDY = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
FRAMES = np.stack([frame(1, moment, (40, 24)) for moment in range(5)])
OTHER = np.stack([frame(2, moment, (24, 40)) for moment in range(2)])
_MEAN, _STD = ([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711])


class Tiny:
    """A tiny model, and transformers' answers to prompts with videos."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = write_vision_model(folder, FAMILIES[name])
        self._model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
        self._model.generation_config.eos_token_id = None
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        processor = SimpleNamespace(image_seq_length=4)
        self._processor: Any = processor_of(FAMILIES[name], processor, self._tokenizer)

    @torch.inference_mode()
    def answer(self, text: str, videos: list[Any]) -> tuple[list[int], list[int]]:
        """Return the tokens of a prompt with a `<video>` for each of these frames, and the answer to it."""
        pixels = []
        for video in videos:
            frames = torch.from_numpy(video.transpose(0, 3, 1, 2).copy())
            scaled = F.interpolate(frames, size=(16, 16), mode="bicubic", align_corners=False, antialias=True)
            mean, std = (torch.tensor(values)[:, None, None] * 255 for values in (_MEAN, _STD))
            pixels.append((scaled.float() - mean) / std)
        given = {"pixel_values_videos": pixels}
        for number in range(len(videos)):
            text = text.replace(
                "<video>", self._processor.replace_video_token(given, number).replace("<video>", "~"), 1
            )
        ids = self._tokenizer(text.replace("~", "<video>"), return_tensors="pt", add_special_tokens=False)["input_ids"]
        read: dict[str, Any] = {"pixel_values": torch.cat(pixels)}
        if self.name == "llava_onevision":
            read = {"pixel_values_videos": pixels[0][None]}
        found = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=COUNT, do_sample=False, pad_token_id=0, **read
        )
        return ids[0].tolist(), found[0, ids.shape[1] :].tolist()


@pytest.fixture(scope="module", params=["internvl", "llava_onevision"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiny]:
    yield Tiny(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("step", [1024, 17], ids=["whole", "chunks"])
def test_answers_equal_transformers(tiny: Tiny, step: int) -> None:
    asked: list[tuple[str, list[Any]]] = [("see <video> now", [FRAMES]), ("<video>the river", [OTHER])]
    if tiny.name == "internvl":
        asked.append(("<video> and <video>?", [OTHER, FRAMES]))
    with LLM(
        str(tiny.folder),
        device="cpu",
        dtype="float32",
        kv_cache_memory_bytes=4 << 20,
        max_num_seqs=4,
        max_model_len=512,
        max_num_batched_tokens=step,
        block_size=8,
    ) as llm:
        for text, videos in asked:
            for _ in range(2):  # the second time from the prefix cache
                prompt: Any = {"prompt": text, "multi_modal_data": {"video": list(videos)}}
                (found,) = llm.generate(prompt, GREEDY, use_tqdm=False)
                wanted = tiny.answer(text, videos)
                assert (list(found.prompt_token_ids or ()), list(found.outputs[0].token_ids)) == wanted


def test_frames_are_from_the_middles_of_equal_parts(tiny: Tiny) -> None:
    family = family_of(tiny.folder)
    assert isinstance(family.video, FrameRules)
    assert family.video.sample(8, 4.0) == list(range(8)) and len(family.video.sample(1000, 25.0)) == 32
    eight = configured(family, {"num_frames": 8}).video
    assert eight is not None
    for total in (8, 9, 31, 100, 333, 1001):
        step = total / 8
        assert eight.sample(total, 25.0) == torch.arange(step / 2, total, step).int().tolist()
    with pytest.raises(UnfitImageError, match="8 frames of a video of 3"):
        eight.sample(3, 25.0)
    each = configured(family, {"fps": 2}).video
    assert each is not None and each.sample(100, 25.0) == torch.arange(6.25, 100, 12.5).int().tolist()


def test_the_router_writes_the_models_mark(tiny: Tiny) -> None:
    model = ServedModel.from_settings(RouterSettings(model=str(tiny.folder)))
    assert model.media_placeholders["video_url"] == "<video>"
