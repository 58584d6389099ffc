"""Computes M-RoPE positions with three rows: frame, row and column of image tokens; for text all three are equal.

They follow from the grids in `Work.media` alone, so every instance computes the same ones for any part of a sequence,
also without the images. Behind a prompt only a shift is left, so decode steps have one row, like those of all models.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from baton_serve.contracts.media import MediaSpan, TokenGrid, position_shift, within
from baton_serve.engine.core.scheduler import ScheduledBatch, ScheduledChunk


def first_shifts(plan: ScheduledBatch) -> NDArray[np.int64]:
    """Return, int64 [num_chunks], the M-RoPE position of each chunk's first token minus its index in the sequence. The
    first token must be text.
    """
    return np.array([_first_shift(chunk) for chunk in plan.chunks], dtype=np.int64)


def _first_shift(chunk: ScheduledChunk) -> int:
    request = chunk.sequence.request
    if not request.work.media or chunk.start >= request.work.num_prompt_tokens:
        return request.answer_shift
    return position_shift(request.work.media, chunk.start)


def step_positions(
    plan: ScheduledBatch, indexes: NDArray[np.int64], query_starts: NDArray[np.int32]
) -> NDArray[np.int64]:
    """Return the positions of a step's tokens for rotary embeddings: int64 [num_tokens], or [3, num_tokens] if some
    tokens stand for images of a model with M-RoPE.

    `indexes` [num_tokens] are the tokens' indexes in their sequences; they are also the result if no sequence has such
    images.
    """
    placed = [
        (int(first), chunk)
        # `query_starts` has one entry more than there are chunks: the end of the last one.
        for chunk, first in zip(plan.chunks, query_starts, strict=False)
        if any(span.grid for span in chunk.sequence.request.work.media)
    ]
    if not placed:
        return indexes
    if not any(_holds_images(chunk) for _, chunk in placed):
        # All tokens of a chunk without images have one shift, so their three rows are equal and one is enough.
        lengths = np.diff(query_starts)
        return indexes + np.repeat(first_shifts(plan), lengths)
    # Sequences without grids keep their indexes in all three rows.
    rows = _three_rows(indexes)
    for first, chunk in placed:
        _place(rows[:, first : first + chunk.length], chunk.sequence.request.work.media, chunk.start)
    return rows


def _holds_images(chunk: ScheduledChunk) -> bool:
    # Text behind an image has another shift than text before it: such a chunk holds the image itself.
    return bool(within(chunk.sequence.request.work.media, chunk.start, chunk.start + chunk.length))


def positions_of(media: Sequence[MediaSpan], start: int, end: int) -> NDArray[np.int64]:
    """Return the M-RoPE positions of the tokens [start, end) of a sequence with the images `media`, int64 [3, end -
    start].
    """
    rows = _three_rows(np.arange(start, end))
    _place(rows, media, start)
    return rows


def _three_rows(indexes: NDArray[np.int64]) -> NDArray[np.int64]:
    rows = np.empty((3, len(indexes)), dtype=np.int64)
    rows[:] = indexes
    return rows


def _place(rows: NDArray[np.int64], media: Sequence[MediaSpan], start: int) -> None:
    """Replace the indexes of tokens in `rows` [3, count], of which the first is `start`, by their M-RoPE positions."""
    end = start + rows.shape[1]
    shift = position_shift(media, start)
    at = 0
    for span in within(media, start, end):
        if span.grid is None:
            continue
        # The range may begin or end within an image.
        begin, stop = max(span.start, start) - start, min(span.end, end) - start
        rows[:, at:begin] += shift
        shown = begin + start - span.start
        # Frame, row and column count from the image's first position, which is that of text at its place.
        np.add(
            _places(span.grid, span.length)[:, shown : shown + stop - begin],
            span.start + shift,
            out=rows[:, begin:stop],
        )
        at = stop
        # As `position_shift` has it; if the range ends within the image, no text follows.
        shift += max(span.grid.rows, span.grid.columns) - span.length
    rows[:, at:] += shift


# Images of one size have one grid. An entry takes 24 bytes for each token.
@lru_cache(maxsize=32)
def _places(grid: TokenGrid, count: int) -> NDArray[np.int64]:
    """Return frame, row and column, [3, count], of an image's `count` tokens, which are numbered row by row within its
    grid. Do not change the result, which later calls return too.
    """
    tokens = np.arange(count)
    size = grid.rows * grid.columns
    # Rounded as transformers does, which multiplies in float32.
    frames = (tokens // size).astype(np.float32) * np.float32(grid.frame_step)
    return np.stack([frames.astype(np.int64), tokens % size // grid.columns, tokens % grid.columns])
