"""Decides the image tokens of Idefics3 and SmolVLM: labelled tiles in rows, and an overview. Large images become
labelled tiles in rows, and an overview.
"""

from math import ceil
from typing import ClassVar

import msgspec

from baton_serve.contracts.media import Embedded, TokenGrid
from baton_serve.contracts.vision.family import ImageFamily
from baton_serve.contracts.vision.media_text import Parts, UnfitImageError
from baton_serve.contracts.vision.model_files import ModelFacts

_MAX_EDGE = 4096
"""Longest side in pixels to which images are scaled, whatever the settings say."""


class Idefics3Images(ImageFamily, frozen=True):
    """How Idefics 3 and SmolVLM models read images: a fixed number of tokens for each tile of `tile` x `tile` pixels.
    An image is first scaled so that its longer side has `longest_edge` pixels."""

    READS: ClassVar = frozenset({"size", "do_image_splitting"})

    tokens_per_tile: int
    tile: int
    longest_edge: int
    splits: bool
    around: str
    overview: str

    @property
    def is_fixed(self) -> bool:
        """Return whether each image has the same number of tokens: it is not cut into tiles."""
        return not self.splits

    @property
    def least(self) -> Parts:
        """Return what stands for an image that is not cut into tiles: the number of its tokens, between the texts of
        marks."""
        return (f"{self.around}{self.overview}", self.tokens_per_tile, self.around)

    def parts(self, *, width: int, height: int) -> Parts:
        """Return what stands for an image of this size in pixels: for each tile the text of its mark and its number of
        tokens, and at the end the overview."""
        rows, columns = self._grid(width, height)
        return self.least if not self.splits or (rows, columns) == (1, 1) else self._tiles(rows, columns)

    def parts_of_rows(self, rows: Embedded) -> Parts:
        """Return what stands for these embeddings: those of one tile, or of several in the rows and columns of a grid,
        with the overview behind them. Raises `UnfitImageError`."""
        frames, tall, wide = rows.grid or (1, 1, 1)
        count = tall * wide + (tall * wide > 1)
        if frames != 1 or tall < 1 or wide < 1 or rows.num_rows != count * self.tokens_per_tile:
            raise UnfitImageError(
                f"an image of this model has {self.tokens_per_tile} embeddings for each tile and for the overview, and"
                " image_grid_thw [1, rows, columns] says how several tiles lie"
            )
        return self.least if count == 1 else self._tiles(tall, wide)

    def grid_of_rows(self, rows: Embedded) -> TokenGrid | None:
        """Return None: tokens have positions like text."""
        return None

    def _tiles(self, rows: int, columns: int) -> Parts:
        found: list[str | int] = []
        line = ""
        for row in range(rows):
            for column in range(columns):
                found += [f"{line}{self.around}<row_{row + 1}_col_{column + 1}>", self.tokens_per_tile]
                line = ""
            # transformers ends each row with a line break. Here it begins the next text, since `write_parts_as_tokens`
            # would tokenize two texts in a row apart from each other.
            line = "\n"
        return [*found, f"\n\n{self.around}{self.overview}", self.tokens_per_tile, self.around]

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """Return into how many rows and columns of tiles an image of this size in pixels is cut."""
        long_edge = min(self.longest_edge, _MAX_EDGE)
        # The steps and their roundings are those of transformers' processor: one formula for all of them would give
        # another grid for some sizes.
        width, height = _scaled(width, height, self.longest_edge)
        if max(width, height) > _MAX_EDGE:
            ratio = width / height
            width, height = (long_edge, int(long_edge / ratio)) if ratio >= 1 else (int(long_edge * ratio), long_edge)
        ratio = width / height
        # The longer side becomes whole tiles first, and the shorter one follows it.
        if width >= height:
            wide = ceil(width / self.tile) * self.tile
            tall = ceil(int(wide / ratio) / self.tile) * self.tile
        else:
            tall = ceil(height / self.tile) * self.tile
            wide = ceil(int(tall * ratio) / self.tile) * self.tile
        return max(tall // self.tile, 1), max(wide // self.tile, 1)


def _scaled(width: int, height: int, longest: int) -> tuple[int, int]:
    """Return the width and height in pixels of an image after scaling: the longer side is `longest`, the shorter one an
    even number."""
    ratio = width / height
    if width >= height:
        short = int(longest / ratio)
        return longest, max(short + short % 2, 1)
    short = int(longest * ratio)
    return max(short + short % 2, 1), longest


class _Tower(msgspec.Struct, frozen=True):
    image_size: int = 224
    patch_size: int = 32


class _Config(msgspec.Struct, frozen=True):
    vision_config: _Tower
    image_token_id: int = 128257
    scale_factor: int = 2


class _Edge(msgspec.Struct, frozen=True):
    longest_edge: int


class _Images(msgspec.Struct, frozen=True):
    size: _Edge = _Edge(4 * 364)
    max_image_size: _Edge = _Edge(364)
    do_image_splitting: bool = True


class _Tokens(msgspec.Struct, frozen=True):
    fake_image_token: str = "<fake_token_around_image>"
    global_image_token: str = "<global-img>"


def family(facts: ModelFacts) -> ImageFamily:
    """Return how an Idefics 3 or SmolVLM model whose files are `facts` reads images."""
    known, images = msgspec.convert(facts.config, _Config), msgspec.convert(facts.images, _Images)
    tower, tokens = known.vision_config, msgspec.convert(facts.tokenizer, _Tokens)
    return Idefics3Images(
        image_token_id=known.image_token_id,
        # The connector joins squares of `scale_factor` patches on each side to one token (pixel shuffle).
        tokens_per_tile=int((tower.image_size // tower.patch_size) ** 2 / known.scale_factor**2),
        tile=images.max_image_size.longest_edge,
        longest_edge=images.size.longest_edge,
        splits=images.do_image_splitting,
        around=tokens.fake_image_token,
        overview=tokens.global_image_token,
    )
