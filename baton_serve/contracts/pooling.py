"""Defines requests for vectors (embeddings, classification) and the capabilities of such a model. Named as in vLLM."""

from typing import Literal

import msgspec

from baton_serve.contracts.media import Spans

PoolingTask = Literal["embed", "token_embed", "classify"]
"""`embed`: one vector per input; `token_embed`: one per token; `classify`: the scores of the classes."""


class PoolingSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How to compute the result of an input of a pooling model. `normalize` and `activation` None take the model's
    default; `dimensions` None keeps the embedding's whole size."""

    task: PoolingTask
    dimensions: int | None = None
    normalize: bool | None = None
    activation: bool | None = None


class PoolingInput(msgspec.Struct, frozen=True):
    """The tokens of one input of a pooling model. `token_type_ids` distinguish the two texts of a pair, for models that
    need it. `media` are the places of its images, whose files are sent beside the inputs."""

    token_ids: list[int]
    token_type_ids: list[int] | None = None
    media: Spans = []


class PoolingProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Describes what a pooling model computes. `dimensions` is the size of an embedding, 0 for a classifier; `labels`
    are the names of its classes in their order."""

    tasks: list[PoolingTask]
    dimensions: int = 0
    is_matryoshka: bool = False
    """The model was trained so that embeddings may be truncated to their first dimensions."""
    matryoshka_dimensions: list[int] = []
    """Sizes to which embeddings may be truncated; empty: any size."""
    labels: list[str] = []
