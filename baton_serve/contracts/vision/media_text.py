"""Holds the texts and tokens that stand for one image or video in a prompt."""

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from baton_serve.contracts.media import Digest, TokenGrid

Parts = Sequence[str | int]
"""The text of one image in a prompt: texts, and numbers of image tokens in a row. Each image token is replaced by
one embedding of the tower; the texts are tokenized with the text around them, as transformers does."""


class UnfitImageError(ValueError):
    """An image or video of this size cannot be read by the model."""


class MediaText(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of one image or video, and what they replace in a prompt."""

    parts: Parts
    token_id: int
    """The token whose embeddings are replaced by those of the tower. The numbers of `parts` count it."""
    placeholder: str | int
    """The text, or the token of the text, that a chat template writes for the image or video."""
    around: tuple[str, str] = ("", "")
    """Texts before and behind the placeholder that are replaced with it, where a template writes them."""
    grids: Sequence[TokenGrid | None] = (None,)
    """How the tokens lie in the image. A video with several grids has one for each run of `parts`, and then each run is
    a span of its own in the prompt."""


class EmbeddingShape(msgspec.Struct, frozen=True, array_like=True):
    """Describes the embeddings of a span that an encode instance sends: their number, and what the receiver checks the
    prompt by. That is the size of an image in pixels, or the texts and tokens of anything else.
    """

    digest: Digest
    num_rows: Annotated[int, Meta(ge=1)]
    width: int
    height: int
    text: MediaText | None = None
    """None: the texts and tokens follow from the size."""


def num_embeddings(parts: Parts) -> int:
    """Return how many embeddings of the tower an image takes."""
    return sum(part for part in parts if isinstance(part, int))
