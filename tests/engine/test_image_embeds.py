"""Embeddings of images in prompts: the answer is that to the picture whose embeddings they are."""

from collections.abc import Iterator
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from baton_serve import LLM, SamplingParams
from baton_serve.engine import ConfigError, EngineConfig, RequestError
from baton_serve.engine.model.vision.tower import VisionTower, load_tower
from tests.images import picture
from tests.tiny_models import write_tiny_llava
from tests.vision_families import FAMILIES, write_vision_model
from tools.model_verdicts import generating_families
from tools.tiny_families import write_family

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_memory_bytes": 8 << 20, "max_num_seqs": 4}


class Loaded:
    """A tiny model with its tower, which tests ask for embeddings."""

    def __init__(self, folder: Path, llm: LLM) -> None:
        self.llm = llm
        tower = load_tower(EngineConfig(model=str(folder), dtype="float32"), torch.device("cpu"), torch.float32)
        assert tower is not None
        self._tower: VisionTower = tower

    def encoded(self, number: int) -> tuple[Tensor, Tensor | None]:
        """Return the embeddings of a picture, and the grid of its patches."""
        image = self._tower.reader.picture_of(Image.open(BytesIO(picture(number))).convert("RGB"))
        return self._tower.encode(image), image.inputs.get("image_grid_thw")

    def with_grid(self, file: bytes, name: str) -> Any:
        """Return the embeddings of a picture as a client sends them, with the grid that the family asks for."""
        opened = Image.open(BytesIO(file)).convert("RGB")
        image = self._tower.reader.picture_of(opened)
        rows = self._tower.encode(image)
        if name == "aya_vision":
            return rows
        family: Any = self._tower.family
        if name in ("idefics3", "smolvlm"):
            grid = family._grid(opened.width, opened.height)
        else:
            grid = [int(side) // 4 for side in image.inputs["image_sizes"][0]]
        return {"image_embeds": rows, "image_grid_thw": torch.tensor([[1, *grid]])}

    def ask(self, images: Any, count: int = 1, placeholder: int | None = None) -> list[int]:
        mark = self._tower.family.image_token_id if placeholder is None else placeholder
        tokens = [7, 9, *[mark] * count, 20, 30]
        prompt: Any = {"prompt_token_ids": tokens, "multi_modal_data": {"image": images}}
        return list(self.llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].token_ids)


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    folder = write_tiny_llava(tmp_path_factory.mktemp("embeds") / "llava")
    with LLM(str(folder), enable_mm_embeds=True, **OPTIONS) as llm:
        yield Loaded(folder, llm)


def test_tensors_of_one_and_of_several_images(llava: Loaded) -> None:
    (one, _), (two, _) = (llava.encoded(number) for number in (1, 2))
    answers = llava.ask(picture(1)), llava.ask([picture(1), picture(2)], 2)
    assert llava.ask(one) == llava.ask(one[None]) == llava.ask([one]) == answers[0] != llava.ask(two)
    assert llava.ask(torch.stack([one, two]), 2) == llava.ask([one, picture(2)], 2) == answers[1]


def test_what_cannot_be_embeddings_is_refused(llava: Loaded) -> None:
    rows, _ = llava.encoded(1)
    wrong: list[tuple[Any, str]] = [
        (rows[:, :-1], "have 64 values, not 63"),
        (rows[:-1], "embeddings, not"),
        (rows * torch.nan, "contain NaN"),
    ]
    for value, why in wrong:
        with pytest.raises(RequestError, match=why):
            llava.ask(value)
    for value, why in [
        (rows[0], "floats"),
        (rows.long(), "floats"),
        ({"image_embeds": rows}, "a dict of the tensors"),
        ({"image_embeds": rows, "image_grid_thw": torch.tensor([[1, 3, 7]] * 2)}, "in equal parts"),
    ]:
        with pytest.raises(ConfigError, match=why):
            llava.ask(value)
    assert llava.llm.llm_engine.get_num_unfinished_requests() == 0


def test_a_grid_gives_positions_and_further_columns_go_to_later_layers(tmp_path: Path) -> None:
    write_family("qwen3_vl", generating_families()["qwen3_vl"], tmp_path)
    with LLM(str(tmp_path), max_model_len=256, **OPTIONS) as llm:
        model = Loaded(tmp_path, llm)
        (one, grid), (two, other) = (model.encoded(number) for number in (1, 2))
        assert grid is not None and other is not None
        both = {"image_embeds": torch.cat([one, two]), "image_grid_thw": torch.cat([grid, other])}
        assert model.ask(both, 2) == model.ask([picture(1), picture(2)], 2)


@pytest.mark.parametrize("name", ["mistral3", "pixtral", "idefics3", "smolvlm", "aya_vision"])
def test_marks_are_written_among_embeddings(tmp_path: Path, name: str) -> None:
    """The marks follow from the rows and columns of patches or of tiles, or from the number of tiles alone."""
    folder = write_vision_model(tmp_path, FAMILIES[name])
    with LLM(str(folder), enable_mm_embeds=True, max_model_len=512, **OPTIONS) as llm:
        model = Loaded(folder, llm)
        files = [picture(1), picture(2, size=(50, 20))]
        placeholder = llm.get_tokenizer().convert_tokens_to_ids(FAMILIES[name].placeholder)
        given = [model.with_grid(file, name) for file in files]
        ask = partial(model.ask, placeholder=placeholder)
        for file, embedded in zip(files, given, strict=True):
            assert ask([file]) == ask([embedded]) == ask(embedded)
        assert ask(files, 2) == ask(given, 2) == ask([files[0], given[1]], 2)
        rows = given[1]["image_embeds"] if isinstance(given[1], dict) else given[1]
        with pytest.raises(RequestError, match=r"this model|leave it out"):
            ask([{"image_embeds": rows[:-1], "image_grid_thw": torch.tensor([[1, 1, len(rows)]])}])
