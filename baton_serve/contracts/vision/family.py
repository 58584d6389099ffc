"""The port of a family of models that read images: what an image of some size becomes in a prompt."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from baton_serve.contracts.media import TokenGrid

Parts = Sequence[str | int]
"""The text of one image in a prompt: texts, and numbers of image tokens in a row. Each image token is replaced by
one embedding of the tower; the texts are tokenized with the text around them, as transformers does."""


class UnfitImageError(ValueError):
    """Reports that the model cannot read an image of this size."""


class ImageFamily(msgspec.Struct, frozen=True, kw_only=True):
    """How a model reads images: which texts and tokens stand for an image of some size in the prompt. Each subclass is
    for one family of models; objects are immutable and made from the files of a model folder."""

    image_token_id: int
    """The token whose embedding is replaced by one of an image."""
    placeholder: str = ""
    """The text that the chat template writes for an image, if that is not the image token."""
    processor_settings: Mapping[str, Any] = {}
    """Arguments of the model's image processor, as transformers' processor of the whole model gives them."""

    attends_both_ways: bool = False
    """True if the tokens of an image attend to each other in both directions. Then one step computes all of them."""

    @property
    def is_fixed(self) -> bool:
        """Return whether all images have the same number of tokens, so that a prompt's tokens can be counted without
        its images."""
        return False

    @property
    def least(self) -> Parts:
        """Return what stands for the image with the fewest tokens. A prompt that is too long even with such images is
        refused before its images are read."""
        return self.parts(width=1, height=1)

    def parts(self, *, width: int, height: int) -> Parts:
        """Return what stands for an image of this size in pixels: texts, and numbers of image tokens. Raises
        `UnfitImageError` if the model cannot read such an image."""
        raise NotImplementedError

    def token_grid(self, *, width: int, height: int) -> TokenGrid | None:
        """Return the rows and columns that the tokens of an image of this size in pixels form, for models whose
        positions have three parts (M-RoPE). None: they have positions like text."""
        return None
