"""Decides the image tokens of Gemma 4: as many as fit into a budget in the image's own shape, between two marks. An
image keeps its shape and becomes as many tokens as fit into a budget, between two marks.
"""

from math import floor, sqrt
from typing import ClassVar, Literal

import msgspec

from baton_serve.contracts.vision.family import ImageFamily
from baton_serve.contracts.vision.media_text import Parts, UnfitImageError
from baton_serve.contracts.vision.model_files import ModelFacts

Budget = Literal[70, 140, 280, 560, 1120]
"""Numbers of tokens for which transformers' processor can scale an image."""


class Gemma4Images(ImageFamily, frozen=True):
    """How Gemma 4 models read images: each is scaled to at most `budget` squares of `side` pixels, one for each
    token."""

    READS: ClassVar = frozenset({"max_soft_tokens"})

    budget: int
    side: int
    start: str
    end: str

    @property
    def least(self) -> Parts:
        """Return what stands for the image with the fewest tokens, a long strip: one token, between two marks."""
        return (self.start, 1, self.end)

    def parts(self, *, width: int, height: int) -> Parts:
        """Return what stands for an image of this size in pixels: the number of its tokens, between the texts of two
        marks. Raises `UnfitImageError` if nothing of it would be left."""
        # The steps and their roundings are those of `get_aspect_ratio_preserving_size` in transformers, whose budget is
        # one of patches: several make a token.
        factor = sqrt(self.budget * self.side**2 / (height * width))
        rows, columns = floor(factor * height / self.side), floor(factor * width / self.side)
        if rows == columns == 0:
            raise UnfitImageError(f"an image of {width} x {height} pixels is too small for this model")
        if rows == 0:
            rows, columns = 1, min(width // height, self.budget)
        elif columns == 0:
            rows, columns = min(height // width, self.budget), 1
        return (self.start, rows * columns, self.end)


class _Text(msgspec.Struct, frozen=True):
    use_bidirectional_attention: str | None = None


class _Config(msgspec.Struct, frozen=True):
    text_config: _Text = _Text()
    image_token_id: int = 258_880


class _Images(msgspec.Struct, frozen=True):
    patch_size: int = 16
    pooling_kernel_size: int = 3
    max_soft_tokens: Budget = 280
    do_resize: bool | None = None


class _Tokens(msgspec.Struct, frozen=True):
    boi_token: str = "<|image>"
    eoi_token: str = "<image|>"


def family(facts: ModelFacts) -> ImageFamily | None:
    """Return how a Gemma 4 model whose files are `facts` reads images; None if it does not scale them."""
    known, images = msgspec.convert(facts.config, _Config), msgspec.convert(facts.images, _Images)
    tokens = msgspec.convert(facts.tokenizer, _Tokens)
    if images.do_resize is False:
        return None
    return Gemma4Images(
        image_token_id=known.image_token_id,
        # Smaller models read images from left to right. Larger ones read them both ways in layers with a window.
        attends_both_ways=known.text_config.use_bidirectional_attention == "vision",
        budget=images.max_soft_tokens,
        side=images.patch_size * images.pooling_kernel_size,
        start=tokens.boi_token,
        end=tokens.eoi_token,
    )
