"""Decides the image tokens of Pixtral, Mistral Small 3 and LightOnOCR: rows of tokens in the image's own shape. An
image keeps its shape and becomes rows of tokens.
"""

from math import floor
from typing import ClassVar

import msgspec

from baton_serve.contracts.media import Embedded, TokenGrid
from baton_serve.contracts.vision.family import ImageFamily
from baton_serve.contracts.vision.media_text import Parts, UnfitImageError
from baton_serve.contracts.vision.model_files import ModelFacts


class PixtralImages(ImageFamily, frozen=True):
    """How Pixtral, Mistral 3 and similar models read images: one token for each square of `side` pixels, with a mark
    behind each row unless the marks are empty.

    The sides of images become multiples of `patch` pixels.
    """

    READS: ClassVar = frozenset({"size"})

    side: int
    patch: int
    longest_edge: int
    joined: int = 1
    """Patches of the tower, in each direction, that are joined to one token."""
    least_tokens: int = 1
    row_end: str = "[IMG_BREAK]"
    image_end: str = "[IMG_END]"

    @property
    def least(self) -> Parts:
        """Return what stands for the smallest image: the number of its tokens, and the text of the mark at its end."""
        return (self.least_tokens, self.image_end) if self.image_end else (self.least_tokens,)

    def parts(self, *, width: int, height: int) -> Parts:
        """Return what stands for an image of this size in pixels: the number of tokens of each row, each followed by
        the text of a mark. Raises `UnfitImageError` if the image is too small."""
        ratio = max(height / self.longest_edge, width / self.longest_edge)
        if ratio > 1:
            height, width = floor(height / ratio), floor(width / ratio)
        # Sides are rounded up to whole patches before tokens are counted. `patch` and `side` are equal in models with
        # marks.
        rows, columns = (-(-pixels // self.patch) * self.patch // self.side for pixels in (height, width))
        if rows * columns < self.least_tokens:
            raise UnfitImageError(f"an image of {width} x {height} pixels is too small for this model")
        return self._rows(rows, columns) if self.row_end else (rows * columns,)

    def parts_of_rows(self, rows: Embedded) -> Parts:
        """Return what stands for these embeddings. Models with marks need the grid of the image's patches, of which a
        token joins a square. Raises `UnfitImageError`."""
        if not self.row_end:
            return super().parts_of_rows(rows)
        frames, tall, wide = rows.grid or (0, 0, 0)
        is_whole = frames == 1 and tall > 0 and wide > 0 and not (tall % self.joined or wide % self.joined)
        if not is_whole or (tall // self.joined) * (wide // self.joined) != rows.num_rows:
            raise UnfitImageError(
                f"embeddings of this model need an image_grid_thw [1, rows, columns] of patches, {self.joined} x"
                f" {self.joined} for each of the {rows.num_rows} embeddings"
            )
        return self._rows(tall // self.joined, wide // self.joined)

    def grid_of_rows(self, rows: Embedded) -> TokenGrid | None:
        """Return None: tokens have positions like text."""
        return None if self.row_end else super().grid_of_rows(rows)

    def _rows(self, rows: int, columns: int) -> Parts:
        # The last row ends with the mark of the whole image instead of the mark of a row.
        marks = [self.row_end] * (rows - 1) + [self.image_end]
        return [part for mark in marks for part in (columns, mark)]


class _Tower(msgspec.Struct, frozen=True):
    patch_size: int = 16


class _Config(msgspec.Struct, frozen=True):
    model_type: str
    vision_config: _Tower
    image_token_id: int | None = None
    image_token_index: int | None = None
    spatial_merge_size: int = 2


class _Images(msgspec.Struct, frozen=True):
    size: dict[str, int] | None = None
    patch_size: int | dict[str, int] = 16


class _Processor(msgspec.Struct, frozen=True):
    image_break_token: str = "[IMG_BREAK]"
    image_end_token: str = "[IMG_END]"


def family(facts: ModelFacts) -> ImageFamily:
    """Return how a model whose files are `facts`, with a Pixtral tower, reads images. In all such models but LLaVA,
    neighbouring patches are joined to one token."""
    known = msgspec.convert(facts.config, _Config)
    images = msgspec.convert(facts.images, _Images)
    size = images.size or {"longest_edge": 1024}
    marks = msgspec.convert(facts.processor, _Processor)
    merged = 1 if known.model_type == "llava" else known.spatial_merge_size
    has_marks = known.model_type != "lighton_ocr"
    token_id = known.image_token_index if known.image_token_id is None else known.image_token_id
    side = patch = known.vision_config.patch_size * merged
    if not has_marks:  # its processor of texts does not change that of images
        patch = images.patch_size if isinstance(images.patch_size, int) else max(images.patch_size.values())
    return PixtralImages(
        image_token_id=10 if token_id is None else token_id,
        processor_settings={"patch_size": patch},
        side=side,
        joined=merged,
        patch=patch,
        # transformers loses the shape of a single token in Mistral 3's projector.
        least_tokens=2 if known.model_type == "mistral3" else 1,
        longest_edge=size.get("longest_edge") or max(size.values()),
        row_end=marks.image_break_token if has_marks else "",
        image_end=marks.image_end_token if has_marks else "",
    )
