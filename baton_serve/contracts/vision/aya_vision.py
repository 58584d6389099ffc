"""Decides the image tokens of Aya Vision: tiles as InternVL's, each behind a label that is text. Tiles as InternVL's,
each behind a label that is text.
"""

from typing import ClassVar

import msgspec

from baton_serve.contracts.media import Embedded
from baton_serve.contracts.vision.family import ImageFamily
from baton_serve.contracts.vision.media_text import Parts, UnfitImageError
from baton_serve.contracts.vision.model_files import ModelFacts
from baton_serve.contracts.vision.tiles import TileRules, tile_rules


class AyaImages(ImageFamily, frozen=True):
    """How Aya Vision models read images: a fixed number of tokens for each tile, and for the overview, which comes
    last."""

    READS: ClassVar = frozenset({"min_patches", "max_patches"})

    tiles: TileRules
    tokens_per_tile: int

    @property
    def least(self) -> Parts:
        """Return what stands for an image that is one tile: the number of its tokens, between the texts of marks."""
        return ("<|START_OF_IMG|>TILE_GLOBAL", self.tokens_per_tile, "<|END_OF_IMG|>")

    def parts(self, *, width: int, height: int) -> Parts:
        """Return what stands for an image of this size in pixels: for each tile its label and its number of tokens,
        between the texts of two marks."""
        return self._tiles(self.tiles.count(width=width, height=height))

    def parts_of_rows(self, rows: Embedded) -> Parts:
        """Return what stands for these embeddings, those of the overview last. Raises `UnfitImageError`."""
        count, rest = divmod(rows.num_rows, self.tokens_per_tile)
        # Two tiles would be one beside its own overview, which no image has.
        if rest or count == 2 or count > self.tiles.max_tiles + 1:
            raise UnfitImageError(
                f"an image of this model has {self.tokens_per_tile} embeddings for each of up to"
                f" {self.tiles.max_tiles} tiles, and for the overview behind several, not {rows.num_rows}"
            )
        return self._tiles(count)

    def _tiles(self, count: int) -> Parts:
        """Return what stands for so many tiles, of which the last one is the overview."""
        found: list[str | int] = []
        mark = "<|START_OF_IMG|>"
        # With several tiles the count includes the overview, which has a label without a number.
        for tile in range(1, count):
            found += [f"{mark}TILE_{tile}", self.tokens_per_tile]
            # The mark stands once in an image, before its first label.
            mark = ""
        return [*found, f"{mark}TILE_GLOBAL", self.tokens_per_tile, "<|END_OF_IMG|>"]


class _Tower(msgspec.Struct, frozen=True):
    image_size: int = 364
    patch_size: int = 14


class _Config(msgspec.Struct, frozen=True):
    vision_config: _Tower = _Tower()
    image_token_id: int | None = None
    image_token_index: int = 255036
    downsample_factor: int = 2


def family(facts: ModelFacts) -> ImageFamily:
    """Return how an Aya Vision model whose files are `facts` reads images."""
    known = msgspec.convert(facts.config, _Config)
    tower = known.vision_config
    return AyaImages(
        image_token_id=known.image_token_index if known.image_token_id is None else known.image_token_id,
        placeholder="<image>",
        # The processor of the whole model cuts images, whatever preprocessor_config.json says.
        processor_settings={"crop_to_patches": True},
        tiles=tile_rules(facts, cuts=True),
        # The projector joins squares of this many patches on each side to one token.
        tokens_per_tile=(tower.image_size // (tower.patch_size * known.downsample_factor)) ** 2,
    )
