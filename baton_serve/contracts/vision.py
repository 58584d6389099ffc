"""Defines which models accept images, and how many prompt tokens an image becomes. Router and engine share this rule.

Two families are supported; the tokens of an image have consecutive positions like those of text. LLaVA resizes all
images to one size, so that each has the same number of tokens. LLaVA-NeXT adds tiles in the arrangement that fits the
shape of the image best, and one token at the end of each row. Models with other rules, such as two-dimensional
positions, are not supported.
"""

from collections.abc import Sequence
from math import inf

import msgspec

_CLASS_TOKENS = {"clip_vision_model": 1, "siglip_vision_model": 0}
"""Supported vision towers, and how many of their outputs do not belong to a patch."""
_DEFAULTS = {"clip_vision_model": (224, 32), "siglip_vision_model": (224, 16)}
"""Image size and patch size of each tower in transformers, for configs that do not state them."""
TEXT_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Supported decoders. They use input embeddings unchanged; others scale them, and would scale image embeddings too."""
MODEL_TYPES = frozenset({"llava", "llava_next"})
SERVED = "LLaVA and LLaVA-NeXT with a CLIP or SigLIP tower before Llama, Mistral, Qwen 2 or Qwen 3 are served"
PINPOINTS = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
"""Tile arrangements of LLaVA-NeXT in transformers, for configs that do not state them."""

Size = tuple[int, int]
"""Height and width in pixels."""


class VisionProfile(msgspec.Struct, frozen=True, kw_only=True):
    """How many tokens a model uses for an image. `tokens_per_image` is the number for one image, or with a `grid` the
    number for its reduced overview, to which the tokens of the tiles are added. `grid` lists the sizes in pixels that
    the tiles may form together.
    """

    image_token_id: int
    tokens_per_image: int
    grid: Sequence[Size] = ()
    tile_size: int = 0
    patch_size: int = 1

    def tokens_of(self, *, width: int, height: int) -> int:
        """Return the number of tokens of an image with this size in pixels."""
        if not self.grid:
            return self.tokens_per_image
        tall, wide = _best(self.grid, height, width)
        per_tile = self.tile_size // self.patch_size
        rows, columns = per_tile * (tall // self.tile_size), per_tile * (wide // self.tile_size)
        # The tiles are padded to the shape of the arrangement, and transformers' `unpad_image` removes the tokens of
        # the padding again.
        if width / height > columns / rows:
            rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
        else:
            columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
        return self.tokens_per_image + rows * columns + rows


class _Tower(msgspec.Struct, frozen=True):
    model_type: str = "clip_vision_model"
    image_size: int | None = None
    patch_size: int | None = None


class _Text(msgspec.Struct, frozen=True):
    model_type: str = "llama"


class _Config(msgspec.Struct, frozen=True):
    model_type: str = ""
    vision_config: _Tower | None = None
    text_config: _Text | None = None
    image_token_index: int | None = None
    image_token_id: int | None = None
    image_grid_pinpoints: list[Size] | None = None
    vision_feature_select_strategy: str = "default"


def vision_profile(config: object) -> VisionProfile | None:
    """Return the profile of a model from its config.json, or None if it does not accept images in a supported way."""
    try:
        known = msgspec.convert(config, _Config)
    # Another model may use these keys with other types: then it is not one of these families.
    except msgspec.ValidationError:
        return None
    tower, text = known.vision_config, known.text_config or _Text()
    if known.model_type not in MODEL_TYPES or tower is None:
        return None
    if tower.model_type not in _CLASS_TOKENS or text.model_type not in TEXT_TYPES:
        return None
    size, patch = (given or default for given, default in zip(_stated(tower), _DEFAULTS[tower.model_type], strict=True))
    count = (size // patch) ** 2 + _CLASS_TOKENS[tower.model_type]
    if known.vision_feature_select_strategy == "default":
        # The "default" strategy drops the tower's first output, even if it belongs to a patch.
        count -= 1
    token_id = known.image_token_id if known.image_token_id is not None else known.image_token_index
    return VisionProfile(
        image_token_id=32000 if token_id is None else token_id,
        tokens_per_image=count,
        grid=(known.image_grid_pinpoints or PINPOINTS) if known.model_type == "llava_next" else (),
        tile_size=size,
        patch_size=patch,
    )


def _stated(tower: _Tower) -> tuple[int | None, int | None]:
    """Return image size and patch size as stated in the config, each None if missing."""
    return tower.image_size, tower.patch_size


def _best(grid: Sequence[Size], height: int, width: int) -> Size:
    """Return the arrangement that shows the most pixels of an image, and among equal ones the one with the least
    padding.

    Same as transformers' `select_best_resolution`.
    """
    best, most_shown, least_wasted = grid[0], 0, inf
    for tall, wide in grid:
        scale = min(wide / width, tall / height)
        shown = min(int(width * scale) * int(height * scale), width * height)
        wasted = wide * tall - shown
        if shown > most_shown or (shown == most_shown and wasted < least_wasted):
            best, most_shown, least_wasted = (tall, wide), shown, wasted
    return best
