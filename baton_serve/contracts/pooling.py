"""What a model that answers with vectors may be asked, and what an instance of one tells about itself. vLLM's names."""

from typing import Literal

import msgspec

PoolingTask = Literal["embed", "token_embed", "classify"]
"""A vector for an input, one for each of its tokens, or the scores of classes."""


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True):
    """None leaves it to the model: whether vectors are normalised, or scores go through the model's activation."""

    task: PoolingTask
    dimensions: int | None = None
    normalize: bool | None = None
    activation: bool | None = None


class PoolingInput(msgspec.Struct, frozen=True):
    """`token_type_ids` tell the two texts of a pair apart, for models that want it."""

    token_ids: list[int]
    token_type_ids: list[int] | None = None


class PoolingProfile(msgspec.Struct, frozen=True, kw_only=True):
    """`dimensions` is the size of an embedding; 0 for a classifier. `labels` are its classes, in their order."""

    tasks: list[PoolingTask]
    dimensions: int = 0
    is_matryoshka: bool = False
    """Embeddings may be cut to their first dimensions."""
    matryoshka_dimensions: list[int] = []
    """Sizes that they may be cut to; empty: any."""
    labels: list[str] = []
