"""Grids of images, and positions with three rows: those of transformers, for all sizes and any part of a prompt."""

import inspect
import itertools
import sys
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers import (
    Glm4vImageProcessorPil,
    Glm4vModel,
    Glm46VImageProcessorPil,
    Qwen2_5_VLModel,
    Qwen2VLImageProcessorPil,
    Qwen2VLModel,
    Qwen3VLModel,
)

from baton_serve.contracts.media import MAX_ASPECT, MediaSpan, TokenGrid, position_shift
from baton_serve.contracts.vision import ImageFamily, image_family, num_embeddings
from baton_serve.contracts.vision.model_files import ModelFacts
from baton_serve.engine.model.mrope_positions import positions_of

MERGE = 2
DIGEST = bytes(32)


def spans_of(pieces: list[int | tuple[int, int]]) -> tuple[list[MediaSpan], int]:
    """Of a prompt that consists of texts of some length, and images of rows and columns. Also its length."""
    spans: list[MediaSpan] = []
    at = 0
    for piece in pieces:
        if isinstance(piece, tuple):
            rows, columns = piece
            spans.append(MediaSpan(at, rows * columns, DIGEST, TokenGrid(1, rows, columns)))
            at = spans[-1].end
        else:
            at += piece
    return spans, at


def by_transformers(kind: Any, spans: list[MediaSpan], length: int) -> tuple[NDArray[np.int64], int]:
    model = SimpleNamespace(
        config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=MERGE, tokens_per_second=2))
    )
    model.get_vision_position_ids = kind.get_vision_position_ids.__get__(model)
    types = torch.zeros((1, length), dtype=torch.int32)
    for span in spans:
        types[0, span.start : span.end] = 1
    grids = [[1, span.grid.rows * MERGE, span.grid.columns * MERGE] for span in spans if span.grid]
    images = torch.tensor(grids) if grids else None
    rows, delta = kind.get_rope_index(model, torch.zeros((1, length), dtype=torch.int64), types, images)
    return rows[:, 0].numpy(), int(delta)


sizes = st.integers(1, 9)
prompts = st.lists(st.one_of(sizes, st.tuples(sizes, sizes)), min_size=1, max_size=9).filter(
    # transformers separates two images by the text between them, which all templates write
    lambda pieces: not any(isinstance(a, tuple) and isinstance(b, tuple) for a, b in itertools.pairwise(pieces))
)


@pytest.mark.parametrize("kind", [Qwen2VLModel, Qwen2_5_VLModel, Qwen3VLModel, Glm4vModel])
@settings(max_examples=40, deadline=None)
@given(pieces=prompts, cut=st.tuples(st.floats(0, 1), st.floats(0, 1)))
def test_the_positions_are_those_of_transformers(
    kind: type, pieces: list[int | tuple[int, int]], cut: tuple[float, float]
) -> None:
    spans, length = spans_of(pieces)
    wanted, delta = by_transformers(kind, spans, length)
    assert np.array_equal(positions_of(spans, 0, length), wanted)
    start, end = sorted(round(part * length) for part in cut)
    assert np.array_equal(positions_of(spans, start, end), wanted[:, start:end])
    assert position_shift(spans, length) == delta
    # Generated tokens go on behind the prompt.
    assert positions_of(spans, length, length + 3).tolist() == [[length + delta + i for i in range(3)]] * 3


SIDES = st.one_of(st.integers(1, 60), st.integers(1, 9000))
PROCESSORS = {
    "qwen2_vl": Qwen2VLImageProcessorPil,
    "qwen3_vl": partial(
        Qwen2VLImageProcessorPil, patch_size=16, size={"shortest_edge": 65536, "longest_edge": 16777216}
    ),
    "qwen2_5_vl": partial(Qwen2VLImageProcessorPil, min_pixels=3136, max_pixels=12845056),
    "qwen3_5": partial(Qwen2VLImageProcessorPil, size={"shortest_edge": 5000, "longest_edge": 6000}),
    "glm4v": Glm4vImageProcessorPil,
    "glm46v": partial(Glm46VImageProcessorPil, size={"shortest_edge": 12544, "longest_edge": 47040000}),
}


@pytest.mark.parametrize("kind", PROCESSORS)
@settings(max_examples=300, deadline=None)
@given(width=SIDES, height=SIDES)
def test_grids_are_those_of_the_processor(kind: str, width: int, height: int) -> None:
    assume(max(width, height) <= MAX_ASPECT * min(width, height))
    family, processor = read_back(kind)
    patches = patches_of(processor, width, height)
    grid = family.token_grid(width=width, height=height)
    assert grid is not None
    assert (grid.rows * processor.merge_size, grid.columns * processor.merge_size) == patches
    count = num_embeddings(family.parts(width=width, height=height))
    assert count == grid.rows * grid.columns
    assert count >= num_embeddings(family.least)


@cache
def read_back(kind: str) -> tuple[ImageFamily, Any]:
    """The family of a folder that transformers has written, and the processor."""
    processor: Any = PROCESSORS[kind]()
    family = image_family(ModelFacts(config={"model_type": kind}, images=processor.to_dict()))
    assert family is not None
    return family, processor


def patches_of(processor: Any, width: int, height: int) -> tuple[int, int]:
    """Rows and columns of patches, by the function that transformers resizes with."""
    resize = sys.modules[type(processor).__module__].smart_resize
    factor = processor.patch_size * processor.merge_size
    sizes = {"height": height, "width": width, "factor": factor}
    limits = {"min_pixels": processor.size["shortest_edge"], "max_pixels": processor.size["longest_edge"]}
    if "temporal_factor" in inspect.signature(resize).parameters:
        frames = processor.temporal_patch_size
        sizes |= {"num_frames": frames, "temporal_factor": frames}
    rows, columns = resize(**sizes, **limits)
    return rows // processor.patch_size, columns // processor.patch_size
