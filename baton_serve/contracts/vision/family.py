"""The port of a family of models that read images: what an image of some size becomes in a prompt."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from baton_serve.contracts.media import TokenGrid

Parts = Sequence[str | int]
"""The text of one image in a prompt: texts, and numbers of image tokens in a row. Each image token is replaced by
one embedding of the tower; the texts are tokenized with the text around them, as transformers does."""


class UnfitImageError(ValueError):
    """An image of this size cannot be read by the model."""


class ImageFamily(msgspec.Struct, frozen=True, kw_only=True):
    """How one model reads images. Subclasses say what an image becomes; they are values, made from JSON files."""

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
        """Return whether all images become the same, so that prompts can be counted without their images."""
        return False

    @property
    def least(self) -> Parts:
        """Return parts with at most as many tokens as those of any image. A prompt that is too long even with them is
        refused before its images are read.
        """
        return self.parts(width=1, height=1)

    def parts(self, *, width: int, height: int) -> Parts:
        """Return what an image of this size in pixels becomes. Raises `UnfitImageError` if the model cannot read it."""
        raise NotImplementedError

    def token_grid(self, *, width: int, height: int) -> TokenGrid | None:
        """Return how the tokens lie in such an image if their positions have three parts; None: they are as text's."""
        return None
