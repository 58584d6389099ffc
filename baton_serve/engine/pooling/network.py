"""One forward pass of a model over a padded batch, through transformers: hidden states, or the logits of classes."""

from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn


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
