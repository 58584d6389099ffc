"""Decides the image tokens of Qwen2-VL to Qwen3.5 and GLM-4.1V to GLM-4.6V: a grid in the image's own shape, with
M-RoPE. An image becomes a grid of tokens in its own shape, whose positions have three parts.

An image is scaled to sides that are multiples of a token's side, and to a number of pixels between two limits.
"""

from collections.abc import Mapping
from math import ceil
from typing import Any, ClassVar

import msgspec

from baton_serve.contracts.media import Embedded, TokenGrid
from baton_serve.contracts.vision.audio_families import sound_rules
from baton_serve.contracts.vision.family import ImageFamily
from baton_serve.contracts.vision.media_text import Parts, UnfitImageError
from baton_serve.contracts.vision.model_files import ModelFacts
from baton_serve.contracts.vision.scaling import scaled_grid
from baton_serve.contracts.vision.videos import video_rules

_QWEN_LIMITS, _GLM_LIMITS = (56 * 56, 28 * 28 * 1280), (112 * 112, 28 * 28 * 15000)
"""Limits of transformers' processors in pixels, for models that do not state them."""
_IMAGE_TOKENS = {"qwen3_5": 248056, "qwen3_5_moe": 248056, "glm4v": 151343, "glm46v": 151343, "glm4v_moe": 151363}
"""Image tokens of transformers' configs, for configs that do not state them."""


class ImageGrid(ImageFamily, frozen=True):
    """How Qwen-VL and GLM-V models read images: they scale an image so that its pixels are between two limits, and its
    tokens form a grid.

    GLM counts the pixels of an image once for each of the `frames` that its tower reads together, and enlarges images
    that are smaller than a token before anything else.
    """

    READS: ClassVar = frozenset({"min_pixels", "max_pixels", "size"})

    token_side: int
    """Width and height in pixels that one token shows."""
    min_pixels: int
    max_pixels: int
    joined: int = 2
    """Patches of the tower, in each direction, that are joined to one token."""
    frames: int = 1
    enlarges_first: bool = False

    @property
    def least(self) -> Parts:
        """Return what stands for the image with the fewest tokens that the limits allow: a single number of image
        tokens."""
        # Scaling down loses less than half of each side.
        is_safe = self.min_pixels <= self.max_pixels / 4
        return (ceil(self.min_pixels / self.frames / self.token_side**2) if is_safe else 1,)

    def parts(self, *, width: int, height: int) -> Parts:
        """Return what stands for an image of this size in pixels: a single number of image tokens, without text."""
        grid = self.token_grid(width=width, height=height)
        return (grid.rows * grid.columns,)

    def token_grid(self, *, width: int, height: int) -> TokenGrid:
        """Return the grid of an image of this size in pixels."""
        rows, columns = scaled_grid(
            width,
            height,
            self.token_side,
            (self.min_pixels, self.max_pixels),
            frames=(self.frames, self.frames),
            enlarges_first=self.enlarges_first,
        )
        # An image is one frame, although the tower reads it as two equal ones.
        return TokenGrid(1, rows, columns)

    def grid_of_rows(self, rows: Embedded) -> TokenGrid:
        """Return the grid of these embeddings. Raises `UnfitImageError` unless they state one that has as many
        tokens."""
        if rows.grid is None:
            raise UnfitImageError("embeddings of this model need their image_grid_thw")
        frames, tall, wide = rows.grid
        is_whole = frames == 1 and tall > 0 and wide > 0 and not (tall % self.joined or wide % self.joined)
        if not is_whole or (tall // self.joined) * (wide // self.joined) != rows.num_rows:
            raise UnfitImageError(
                f"image_grid_thw {list(rows.grid)} is not that of one image with {rows.num_rows} embeddings, which"
                f" join {self.joined} x {self.joined} patches each"
            )
        return TokenGrid(1, tall // self.joined, wide // self.joined)

    def call_settings(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the limits as the processor takes them in calls."""
        size = {"shortest_edge": self.min_pixels, "longest_edge": self.max_pixels}
        return {**self.processor_settings, **({"size": size} if settings else {})}


class _Config(msgspec.Struct, frozen=True):
    model_type: str = ""
    image_token_id: int | None = None
    image_token_index: int | None = None


class _Processor(msgspec.Struct, frozen=True):
    patch_size: int = 14
    merge_size: int = 2
    temporal_patch_size: int = 2
    do_resize: bool | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    size: Mapping[str, int | None] = {}


def qwen(facts: ModelFacts) -> ImageFamily | None:
    """Return the family of a Qwen model that reads images, or None if it does not scale them."""
    processor = msgspec.convert(facts.images, _Processor)
    size, limits = processor.size, _QWEN_LIMITS
    # Older folders have `min_pixels` and `max_pixels`, newer ones have the limits within `size`.
    low = processor.min_pixels or size.get("shortest_edge") or limits[0]
    high = processor.max_pixels or size.get("longest_edge") or limits[1]
    return _grid(facts, processor, low, high)


def glm(facts: ModelFacts) -> ImageFamily | None:
    """Return the family of a GLM model that reads images, or None if it does not scale them."""
    processor = msgspec.convert(facts.images, _Processor)
    low, high = (
        processor.size.get(name) or limit
        for name, limit in zip(("shortest_edge", "longest_edge"), _GLM_LIMITS, strict=True)
    )
    return _grid(facts, processor, low, high, frames=processor.temporal_patch_size)


def _grid(
    facts: ModelFacts, processor: _Processor, low: int, high: int, *, frames: int | None = None
) -> ImageGrid | None:
    # Images that are not scaled may have sides that are not multiples of a token's side: then only text is served.
    if processor.do_resize is False:
        return None
    known = msgspec.convert(facts.config, _Config)
    token_id = known.image_token_index if known.image_token_id is None else known.image_token_id
    if token_id is None:
        token_id = _IMAGE_TOKENS.get(known.model_type, 151655)
    return ImageGrid(
        image_token_id=token_id,
        video=video_rules(facts, token_id),
        audio=sound_rules(facts),
        token_side=processor.patch_size * processor.merge_size,
        joined=processor.merge_size,
        min_pixels=low,
        max_pixels=high,
        frames=frames or 1,
        enlarges_first=frames is not None,
    )
