"""One forward pass of a model over a padded batch, through transformers: hidden states, or the logits of classes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
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


@dataclass(frozen=True, slots=True)
class PaddedBatch:
    """Padded on the right. `token_type_ids` is None where the model or the inputs have none."""

    input_ids: Tensor  # int64 [num_inputs, longest]
    attention_mask: Tensor  # int64 [num_inputs, longest]
    lengths: Tensor  # int64 [num_inputs]
    token_type_ids: Tensor | None


class Network(Protocol):
    def __call__(self, batch: PaddedBatch) -> Tensor: ...


class HiddenStates:
    """[num_inputs, longest, hidden_size] of a model without a head."""

    def __init__(self, module: nn.Module, *, is_decoder: bool) -> None:
        self._module = module
        self._extra = {"use_cache": False} if is_decoder else {}

    def __call__(self, batch: PaddedBatch) -> Tensor:
        return cast(Tensor, self._module(**_arguments(batch), **self._extra).last_hidden_state)


class EncoderLogits:
    """[num_inputs, num_labels] of an encoder, whose head transformers knows."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, batch: PaddedBatch) -> Tensor:
        return cast(Tensor, self._module(**_arguments(batch)).logits)


class LastTokenLogits:
    """[num_inputs, num_labels] of a decoder. Not through transformers' own head, which looks for padding by token id:
    a text may end with that very token."""

    def __init__(self, states: HiddenStates, weight: Tensor, bias: Tensor | None) -> None:
        """`weight` [num_labels, hidden_size]."""
        self._states, self._weight, self._bias = states, weight, bias

    def __call__(self, batch: PaddedBatch) -> Tensor:
        hidden = self._states(batch)
        last = hidden[torch.arange(len(hidden), device=hidden.device), batch.lengths - 1]
        return nn.functional.linear(last, self._weight, self._bias)


def _arguments(batch: PaddedBatch) -> dict[str, Any]:
    arguments = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
    if batch.token_type_ids is not None:
        arguments["token_type_ids"] = batch.token_type_ids
    return arguments
