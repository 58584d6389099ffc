"""Positions with three rows: those of transformers, for any part of a prompt."""

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers import Glm4vModel, Qwen2_5_VLModel, Qwen2VLModel, Qwen3VLModel

from baton_serve.contracts.media import MediaSpan, TokenGrid, position_shift
from baton_serve.engine.model.position_rows import positions_of

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
