"""Which models read images, and how many tokens of the prompt an image becomes: a rule that router and engine share.

Two families are served, whose tokens stand one behind the other like those of a text. LLaVA cuts all images to one
size, so that each is the same number of tokens. LLaVA-NeXT adds tiles in the arrangement that fits an image's shape
best, and a token at the end of each row of them. What others have (positions in two dimensions) is not known here.
"""

from collections.abc import Sequence
from math import inf

import msgspec

_CLASS_TOKENS = {"clip_vision_model": 1, "siglip_vision_model": 0}
"""Towers, and how many of their outputs are of no patch."""
_DEFAULTS = {"clip_vision_model": (224, 32), "siglip_vision_model": (224, 16)}
TEXT_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Decoders that take an embedding as it is: others scale it, and would scale an image's too."""
MODEL_TYPES = frozenset({"llava", "llava_next"})
SERVED = "LLaVA and LLaVA-NeXT with a CLIP or SigLIP tower before Llama, Mistral, Qwen 2 or Qwen 3 are served"
PINPOINTS = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
"""LLaVA-NeXT's, where a config says nothing."""

Size = tuple[int, int]
"""Height and width."""


class VisionProfile(msgspec.Struct, frozen=True, kw_only=True):
    """`tokens_per_image` at least: all of an image where there is no `grid`, the sizes that tiles may make together."""

    image_token_id: int
    tokens_per_image: int
    grid: Sequence[Size] = ()
    tile_size: int = 0
    patch_size: int = 1

    def tokens_of(self, *, width: int, height: int) -> int:
        """Of an image of so many pixels."""
        if not self.grid:
            return self.tokens_per_image
        tall, wide = _best(self.grid, height, width)
        per_tile = self.tile_size // self.patch_size
        rows, columns = per_tile * (tall // self.tile_size), per_tile * (wide // self.tile_size)
        # What was padded to get the arrangement's shape is cut off again: as transformers' `unpad_image`.
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
    """Of what config.json says. None: it reads no images, or not in a way that is known here."""
    try:
        known = msgspec.convert(config, _Config)
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
        count -= 1  # the first output is left out, whatever it is of
    token_id = known.image_token_id if known.image_token_id is not None else known.image_token_index
    return VisionProfile(
        image_token_id=32000 if token_id is None else token_id,
        tokens_per_image=count,
        grid=(known.image_grid_pinpoints or PINPOINTS) if known.model_type == "llava_next" else (),
        tile_size=size,
        patch_size=patch,
    )


def _stated(tower: _Tower) -> tuple[int | None, int | None]:
    return tower.image_size, tower.patch_size


def _best(grid: Sequence[Size], height: int, width: int) -> Size:
    """The arrangement that shows most of an image, and of those the one that wastes least: as transformers'
    `select_best_resolution`."""
    best, most, least = grid[0], 0, inf
    for tall, wide in grid:
        scale = min(wide / width, tall / height)
        shown = min(int(width * scale) * int(height * scale), width * height)
        wasted = wide * tall - shown
        if shown > most or (shown == most and wasted < least):
            best, most, least = (tall, wide), shown, wasted
    return best
