"""Computes the forward pass of pooling models over a padded batch, and pools its output as `pooling_config.py` says."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from baton_serve.contracts.pooling import PoolingSpec
from baton_serve.engine.pooling.pooling_config import PoolingType

Activation = Callable[[Tensor], Tensor]


def pool(hidden: Tensor, lengths: Tensor, how: PoolingType) -> Tensor:
    """Turn the hidden states of all tokens, [num_inputs, longest, size] and padded on the right, into one vector for
    each input, float32 [num_inputs, size]. `how` takes the first token, the last one or the mean; `lengths` are the
    inputs' numbers of tokens. With "model" the model has pooled them itself: `hidden` is [num_inputs, size]."""
    if how == "model":
        return hidden.float()
    if how == "cls":
        return hidden[:, 0].float()
    if how == "last":
        return hidden[torch.arange(len(hidden), device=hidden.device), lengths - 1].float()
    # Mean over the tokens of each input, without padding.
    is_token = torch.arange(hidden.shape[1], device=hidden.device)[None] < lengths[:, None]
    total = (hidden.float() * is_token[..., None]).sum(1)
    return total / lengths[:, None]


def embedding(vectors: Tensor, params: PoolingSpec, *, normalize: bool) -> Tensor:
    """Cut vectors [..., size] to the dimensions that the request asks for, and then normalize them to length 1.
    `normalize` is the model's default, which the request may change."""
    # Matryoshka models are trained so that the first dimensions are an embedding of their own.
    if params.dimensions is not None:
        vectors = vectors[..., : params.dimensions]
    wanted = normalize if params.normalize is None else params.normalize
    return functional.normalize(vectors, dim=-1) if wanted else vectors


def scores(logits: Tensor, params: PoolingSpec, activation: Activation) -> Tensor:
    """Return the scores of classes, float32, from `logits` [..., num_labels]: `activation` of the logits, or the logits
    themselves if the request asks for that."""
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
"""Activation functions by the name of torch's module, as configs state it."""


@dataclass(frozen=True, slots=True)
class PaddedBatch:
    """Inputs of one forward pass, padded on the right to equal lengths. `token_type_ids` is None if the model or the
    inputs have none."""

    input_ids: Tensor  # int64 [num_inputs, longest]
    attention_mask: Tensor  # int64 [num_inputs, longest]
    lengths: Tensor  # int64 [num_inputs]
    token_type_ids: Tensor | None
    images: Mapping[str, Tensor] = field(default_factory=dict)
    """Tensors of the images of the inputs, by the names of the model's arguments; empty without images."""


def padded_batch(
    token_ids: NDArray[np.int64],
    lengths: NDArray[np.int64],
    token_types: NDArray[np.int64] | None,
    device: torch.device,
) -> PaddedBatch:
    """Copy a batch to the device: inputs and token types [num_inputs, longest], padded on the right, and the inputs'
    numbers of tokens."""
    mask = (np.arange(token_ids.shape[1]) < lengths[:, None]).astype(np.int64)
    return PaddedBatch(
        torch.from_numpy(token_ids).to(device),
        torch.from_numpy(mask).to(device),
        torch.from_numpy(lengths).to(device),
        None if token_types is None else torch.from_numpy(token_types).to(device),
    )


class Network(Protocol):
    """The interface of the model: it computes, for a batch of inputs, the hidden states to be pooled, or the logits of
    classes."""

    def __call__(self, batch: PaddedBatch) -> Tensor: ...


class HiddenStates:
    """Computes the hidden states of all tokens, [num_inputs, longest, hidden_size], with a model without head."""

    def __init__(self, module: nn.Module, *, is_decoder: bool) -> None:
        self._module = module
        # Only decoders have a cache, which one pass does not need.
        self._extra = {"use_cache": False} if is_decoder else {}

    def __call__(self, batch: PaddedBatch) -> Tensor:
        return cast(Tensor, self._module(**_arguments(batch), **self._extra).last_hidden_state)


class EncoderLogits:
    """Computes the logits of classes, [num_inputs, num_labels], with an encoder and the classification head of
    transformers."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, batch: PaddedBatch) -> Tensor:
        return cast(Tensor, self._module(**_arguments(batch)).logits)


class LastTokenLogits:
    """Computes the logits of classes, [num_inputs, num_labels], from the hidden state of each input's last token in a
    decoder.

    transformers' own head would look for padding by token id, but a text may end with that same token.
    """

    def __init__(self, states: HiddenStates, weight: Tensor, bias: Tensor | None) -> None:
        """`states` computes the hidden states; `weight` [num_labels, hidden_size] and `bias` [num_labels] are the
        classification head."""
        self._states, self._weight, self._bias = states, weight, bias

    def __call__(self, batch: PaddedBatch) -> Tensor:
        hidden = self._states(batch)
        last = hidden[torch.arange(len(hidden), device=hidden.device), batch.lengths - 1]
        return nn.functional.linear(last, self._weight, self._bias)


def _arguments(batch: PaddedBatch) -> dict[str, Any]:
    arguments = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask, **batch.images}
    if batch.token_type_ids is not None:
        arguments["token_type_ids"] = batch.token_type_ids
    return arguments


class TwoTowers:
    """Computes the vectors of inputs, [num_inputs, size], with a model that has a tower for texts and one for images. A
    batch has either texts or images.
    """

    def __init__(self, module: nn.Module, *, text_tokens: int | None, pad_id: int) -> None:
        """`text_tokens` is the number of tokens to which all texts are padded with `pad_id`; None: they are not."""
        self._module = cast(Any, module)
        self._text_tokens = text_tokens
        self._pad_id = pad_id

    def __call__(self, batch: PaddedBatch) -> Tensor:
        if batch.images:
            return cast(Tensor, self._module.get_image_features(**batch.images).pooler_output)
        if self._text_tokens is None:
            found = self._module.get_text_features(input_ids=batch.input_ids, attention_mask=batch.attention_mask)
        else:
            # SigLIP was trained with texts of one length, whose padding it sees: the last one is pooled.
            missing = self._text_tokens - batch.input_ids.shape[1]
            ids = functional.pad(batch.input_ids, (0, missing), value=self._pad_id)
            found = self._module.get_text_features(input_ids=ids)
        return cast(Tensor, found.pooler_output)


class TokenVectors:
    """Computes one vector for each token, [num_inputs, longest, size], with a model for late interaction, such as
    ColPali or ColQwen2.
    """

    def __init__(self, module: nn.Module, *, attends_both_ways: bool) -> None:
        """`attends_both_ways` says whether the tokens of an input attend to each other in both directions."""
        self._module = module
        self._attends_both_ways = attends_both_ways

    def __call__(self, batch: PaddedBatch) -> Tensor:
        arguments = _arguments(batch)
        # These models pad the patches of each image to those of the largest one, and count no positions by them.
        if arguments.pop("mm_token_type_ids", None) is not None:
            arguments["pixel_values"] = arguments["pixel_values"][None]
        if self._attends_both_ways:
            arguments["token_type_ids"] = torch.zeros_like(batch.input_ids)
        return cast(Tensor, self._module(**arguments, use_cache=False).embeddings)
