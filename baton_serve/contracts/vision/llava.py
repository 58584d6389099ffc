"""Decides the image tokens of LLaVA and LLaVA-NeXT. LLaVA resizes all images to one size, so that each has the same
number of tokens. LLaVA-NeXT adds tiles in the arrangement that fits the shape of the image best, and one token at the
end of each row.
"""

from collections.abc import Sequence
from math import inf

import msgspec

from baton_serve.contracts.vision import pixtral
from baton_serve.contracts.vision.family import ImageFamily
from baton_serve.contracts.vision.media_text import Parts
from baton_serve.contracts.vision.model_files import ModelFacts

_CLASS_TOKENS = {"clip_vision_model": 1, "siglip_vision_model": 0}
"""Supported vision towers, and how many of their outputs do not belong to a patch."""
_DEFAULTS = {"clip_vision_model": (224, 32), "siglip_vision_model": (224, 16)}
"""Image size and patch size of each tower in transformers, for configs that do not state them."""
PINPOINTS = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
"""Tile arrangements of LLaVA-NeXT in transformers, for configs that do not state them."""

Size = tuple[int, int]
"""Height and width in pixels."""


class Llava(ImageFamily, frozen=True):
    """How models of the LLaVA and LLaVA-NeXT families read images: how many tokens stand for an image.

    `tokens_per_image` is the number for one image, or with a `grid` the number for its reduced overview, to which the
    tokens of the tiles are added. `grid` lists the sizes in pixels that the tiles may form together.
    """

    tokens_per_image: int
    grid: Sequence[Size] = ()
    tile_size: int = 0
    patch_size: int = 1

    @property
    def is_fixed(self) -> bool:
        """Return whether each image has the same number of tokens: it is not cut into tiles."""
        return not self.grid

    @property
    def least(self) -> Parts:
        """Return what stands for the image with the fewest tokens, one without tiles: a single number of image tokens,
        without text."""
        return (self.tokens_per_image,)

    def parts(self, *, width: int, height: int) -> Parts:
        """Return what stands for an image of this size in pixels: a single number of image tokens, without text."""
        if not self.grid:
            return self.least
        tall, wide = best_fit(self.grid, height, width)
        per_tile = self.tile_size // self.patch_size
        rows, columns = per_tile * (tall // self.tile_size), per_tile * (wide // self.tile_size)
        rows, columns = unpadded(rows, columns, width=width, height=height)
        return (self.tokens_per_image + rows * columns + rows,)


class _Tower(msgspec.Struct, frozen=True):
    model_type: str = "clip_vision_model"
    image_size: int | None = None
    patch_size: int | None = None


class _Config(msgspec.Struct, frozen=True):
    model_type: str = ""
    vision_config: _Tower | None = None
    image_token_index: int | None = None
    image_token_id: int | None = None
    image_grid_pinpoints: list[Size] | None = None
    vision_feature_select_strategy: str = "default"


def family(facts: ModelFacts) -> ImageFamily | None:
    """Return how a LLaVA model whose files are `facts` reads images; None if its vision tower is not CLIP, SigLIP or
    Pixtral."""
    known = msgspec.convert(facts.config, _Config)
    tower = known.vision_config
    if tower is not None and tower.model_type == "pixtral":
        return pixtral.family(facts)
    if tower is None or tower.model_type not in _CLASS_TOKENS:
        return None
    size, patch = (given or default for given, default in zip(_stated(tower), _DEFAULTS[tower.model_type], strict=True))
    count = (size // patch) ** 2 + _CLASS_TOKENS[tower.model_type]
    if known.vision_feature_select_strategy == "default":
        # The "default" strategy drops the tower's first output, even if it belongs to a patch.
        count -= 1
    token_id = known.image_token_id if known.image_token_id is not None else known.image_token_index
    return Llava(
        image_token_id=32000 if token_id is None else token_id,
        tokens_per_image=count,
        grid=(known.image_grid_pinpoints or PINPOINTS) if known.model_type != "llava" else (),
        tile_size=size,
        patch_size=patch,
    )


def _stated(tower: _Tower) -> tuple[int | None, int | None]:
    """Return the image size and the patch size in pixels that the config states for the vision tower, each None if
    missing."""
    return tower.image_size, tower.patch_size


def unpadded(rows: int, columns: int, *, width: int, height: int) -> tuple[int, int]:
    """Return how many rows and columns of tokens show the image, if its tiles form `rows` and `columns` of tokens: the
    others are padding. `width` and `height` are those of the image in pixels.

    The tiles are padded to their common shape, and transformers' `unpad_image` removes the tokens of the padding again.
    """
    # Padding is removed in equal parts from both sides, so an even number of rows or columns goes. Rounding to 7 digits
    # comes before `int`, which would make 23 of 23.9999999999.
    if width / height > columns / rows:
        rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
    else:
        columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
    return rows, columns


def best_fit(grid: Sequence[Size], height: int, width: int) -> Size:
    """Return the size (height, width) of `grid` to which an image is scaled: the one that shows most of the image's
    pixels, and among equal ones the one with the least padding.

    Same as transformers' `select_best_resolution`.
    """
    best, most_shown, least_wasted = grid[0], 0, inf
    for tall, wide in grid:
        scale = min(wide / width, tall / height)
        # Enlarging an image shows no more of it than its own pixels.
        shown = min(int(width * scale) * int(height * scale), width * height)
        wasted = wide * tall - shown
        if shown > most_shown or (shown == most_shown and wasted < least_wasted):
            best, most_shown, least_wasted = (tall, wide), shown, wasted
    return best
