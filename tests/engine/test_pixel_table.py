"""Pixels by a table equal those of the image processor bit by bit, for every family whose patches lie in a grid."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from baton_serve.contracts.vision import configured, image_family
from baton_serve.contracts.vision.model_files import ModelFacts
from baton_serve.engine.model.vision import image_reader
from baton_serve.engine.model.vision.image_reader import HFImageReader

QWEN = {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 1280, "patch_size": 14, "merge_size": 2}
PROCESSORS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"image_processor_type": "Qwen2VLImageProcessor", **QWEN, "image_std": [0.2, 0.3, 0.4]},
    "qwen3_vl": {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "size": {"shortest_edge": 65536, "longest_edge": 1 << 20},
        "patch_size": 16,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
    },
    "glm4v": {
        "image_processor_type": "Glm4vImageProcessor",
        "size": {"shortest_edge": 112 * 112, "longest_edge": 1 << 20},
        "patch_size": 14,
        "merge_size": 2,
        "temporal_patch_size": 2,
    },
}
SIZES = [(64, 64), (224, 224), (1, 3), (9, 640), (1500, 90), (333, 777), (2000, 1400)]


def readers(folder: Path, kind: str, dtype: torch.dtype, **changed: Any) -> tuple[HFImageReader, HFImageReader]:
    """One that uses the processor alone, and one with a table."""
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    (folder / "preprocessor_config.json").write_text(json.dumps({**PROCESSORS[kind], **changed}))
    family = image_family(ModelFacts.of(folder))
    assert family is not None
    plain, fast = HFImageReader(folder, family), HFImageReader(folder, family)
    plain.dtype = dtype
    fast.use_dtype(dtype)
    return plain, fast


def noise(width: int, height: int) -> Image.Image:
    draw = np.random.default_rng(width * 10000 + height)
    return Image.fromarray(draw.integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", PROCESSORS)
def test_all_bits_are_those_of_the_processor(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    plain, fast = readers(tmp_path, kind, dtype)
    assert fast._table is not None, "the test must not compare the processor with itself"
    family = image_family(ModelFacts.of(tmp_path))
    assert family is not None
    smaller = configured(family, {"size": {"shortest_edge": 65536, "longest_edge": 1 << 18}})
    for width, height in SIZES:
        for chosen in (None, smaller):
            wanted = plain.picture_of(noise(width, height), chosen)
            found = fast.picture_of(noise(width, height), chosen)
            assert found.inputs.keys() == wanted.inputs.keys()
            for name, value in wanted.inputs.items():
                assert torch.equal(found.inputs[name], value), (name, width, height)


def test_a_processor_of_another_kind_is_used_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that gave other bits would be found when it is made."""

    class Rounding:
        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        def __call__(self, **given: Any) -> Any:
            found = self._inner(**given)
            # The value of a pixel depends on its neighbours: no table can have it.
            found["pixel_values"] = found["pixel_values"] + found["pixel_values"].roll(1, dims=1)
            return found

    own = image_reader._processor_of
    monkeypatch.setattr(image_reader, "_processor_of", lambda folder: Rounding(own(folder)))
    _, fast = readers(tmp_path, "qwen2_5_vl", torch.float32)
    assert fast._table is None
