"""From hidden states or logits to what a client asked for. Everything here is computed in float32."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from baton_serve.contracts.pooling import PoolingParams
from baton_serve.engine.pooling.recipe import PoolingType

Activation = Callable[[Tensor], Tensor]


def pool(hidden: Tensor, lengths: Tensor, how: PoolingType) -> Tensor:
    """`hidden` [num_inputs, longest, size], padded on the right; returns [num_inputs, size]."""
    if how == "cls":
        return hidden[:, 0].float()
    if how == "last":
        return hidden[torch.arange(len(hidden), device=hidden.device), lengths - 1].float()
    is_token = torch.arange(hidden.shape[1], device=hidden.device)[None] < lengths[:, None]
    total = (hidden.float() * is_token[..., None]).sum(1)
    return total / lengths[:, None]


def embedding(vectors: Tensor, params: PoolingParams, *, normalize: bool) -> Tensor:
    """`vectors` [..., size], cut to the dimensions asked for, then normalised."""
    if params.dimensions is not None:
        vectors = vectors[..., : params.dimensions]
    wanted = normalize if params.normalize is None else params.normalize
    return functional.normalize(vectors, dim=-1) if wanted else vectors


def scores(logits: Tensor, params: PoolingParams, activation: Activation) -> Tensor:
    """`logits` [..., num_labels]."""
    return logits.float() if params.activation is False else activation(logits.float())


def identity(values: Tensor) -> Tensor:
    return values


def softmax(values: Tensor) -> Tensor:
    return torch.softmax(values, dim=-1)


ACTIVATIONS: dict[str, Activation] = {
    "GELU": functional.gelu,
    "Identity": identity,
    "ReLU": functional.relu,
    "Sigmoid": torch.sigmoid,
    "SiLU": functional.silu,
    "Softmax": softmax,
    "Tanh": torch.tanh,
}
"""By the name of torch's module, as configs spell it."""
