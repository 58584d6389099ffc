"""Computes pixel values for Qwen-VL and GLM-V by a table instead of transformers' processor, if both give the same
bits.

The image processors of transformers scale, normalize and reorder whole images in several passes of float64 and float32.
A pixel's result depends on its value and color alone, so a table gives the same bits several times faster.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from baton_serve.contracts.vision import ImageFamily
from baton_serve.engine.model_folder import LOAD_ERRORS

_COLORS, _VALUES = 3, 256
_GRIDS = (8, 16, 32)
"""Rows and columns of tokens of images from which a table is made: one that the model does not scale is needed."""
_TRIED = ((5, 11), (-40, 63), (-150, -201))
"""The table is tried with images that are so much wider and higher than that one, in pixels."""


class PixelTable:
    """Turns images into patches with the settings of a processor of transformers. Callable from any thread."""

    def __init__(self, processor: Any, values: Tensor) -> None:
        """`values` are those of all pixels for the tower, [3 * 256], by color and then by the pixel's 8 bits."""
        self._values = values
        self._resample = Image.Resampling(int(processor.resample))
        self._side, self._joined = int(processor.patch_size), int(processor.merge_size)
        self._frames = int(processor.temporal_patch_size)

    def patches(self, image: Image.Image, family: ImageFamily) -> dict[str, Tensor]:
        """Return what the processor returns for an RGB image: `pixel_values` [patches, 3 * frames * side * side] in the
        dtype of the table, and `image_grid_thw` [1, 3].

        Raises `UnfitImageError` if the model cannot read such an image.
        """
        grid = family.token_grid(width=image.width, height=image.height)
        assert grid is not None, "a table is made only for families with grids"
        rows, columns, side, joined = grid.rows, grid.columns, self._side, self._joined
        size = columns * joined * side, rows * joined * side
        scaled = image if image.size == size else image.resize(size, self._resample)
        pixels = torch.from_numpy(np.array(scaled)).view(rows, joined, side, columns, joined, side, _COLORS)
        # Patches lie token by token, and the pixels of a patch color by color.
        places = pixels.permute(0, 3, 1, 4, 6, 2, 5).to(torch.int32, memory_format=torch.contiguous_format)
        places = places.view(-1, _COLORS, side * side)
        places += torch.arange(0, _COLORS * _VALUES, _VALUES, dtype=torch.int32)[:, None]
        found = self._values.index_select(0, places.flatten()).view(-1, _COLORS, 1, side * side)
        # The tower reads an image as several equal frames.
        found = found.expand(-1, -1, self._frames, -1).reshape(len(found), -1)
        shape = torch.tensor([[1, rows * joined, columns * joined]])
        return {"pixel_values": found, "image_grid_thw": shape}


def pixel_table(processor: Any, family: ImageFamily, dtype: torch.dtype) -> PixelTable | None:
    """Make the table of a processor of transformers. Return None unless it gives the same bits as the processor."""
    side = _side_of(family)
    if side is None:
        return None
    try:
        table = PixelTable(processor, _values(processor, side, family.processor_settings).to(dtype))
        draw = np.random.default_rng(1)
        for wider, higher in _TRIED:
            shape = max(7, side + higher), max(5, side + wider), _COLORS
            image = Image.fromarray(draw.integers(0, _VALUES, shape, dtype=np.uint8))
            wanted = processor(images=image, return_tensors="pt", **family.processor_settings)
            found = table.patches(image, family)
            if not (
                torch.equal(found["pixel_values"], wanted["pixel_values"].to(dtype))
                and torch.equal(found["image_grid_thw"], wanted["image_grid_thw"])
                and found.keys() == {name for name, value in wanted.items() if isinstance(value, Tensor)}
            ):
                return None
    # Processors of other families have other attributes, or patches of other shapes.
    except (*LOAD_ERRORS, IndexError):
        return None
    return table


def _side_of(family: ImageFamily) -> int | None:
    """Return the width and height of an image that the model does not scale; None if its images have no grids."""
    side: int | None = getattr(family, "token_side", None)
    if side is None:
        return None
    for count in _GRIDS:
        grid = family.token_grid(width=side * count, height=side * count)
        if grid is not None and grid.rows == grid.columns == count:
            return side * count
    return None


def _values(processor: Any, side: int, settings: Mapping[str, Any]) -> Tensor:
    """Return the values [3 * 256] of all pixels, float32, from an image of `side` x `side` that has them all."""
    counted = (np.arange(side * side) % _VALUES).astype(np.uint8).reshape(side, side, 1)
    image = Image.fromarray(np.repeat(counted, _COLORS, axis=2))
    unscaled = {**settings, "do_rescale": False, "do_normalize": False}
    raw, values = (
        processor(images=image, return_tensors="pt", **given)["pixel_values"].unflatten(1, (_COLORS, -1))
        for given in (unscaled, settings)
    )
    # A value that is missing would fail the comparison.
    found = torch.full((_COLORS, _VALUES), torch.nan)
    for color in range(_COLORS):
        found[color, raw[:, color].flatten().long()] = values[:, color].flatten().to(torch.float32)
    return found.flatten()
