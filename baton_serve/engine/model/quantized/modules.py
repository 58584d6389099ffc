"""Modules that take the place of linear layers and embeddings with quantized weights."""

from collections.abc import Callable, Iterator, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from baton_serve.engine.kernels import LayerKernels, QuantizedWeight, Weight
from baton_serve.engine.kernels.quantized_weights import concatenate


class EmptyLinear(nn.Linear):
    """A linear layer whose weight torch does not initialize, because it is read from a file afterwards."""

    def reset_parameters(self) -> None:
        """Do nothing, instead of filling the weight with random numbers: it is read from a file afterwards."""


class EmptyEmbedding(nn.Embedding):
    """An embedding whose weight torch does not initialize, because it is read from a file afterwards."""

    def reset_parameters(self) -> None:
        """Do nothing, instead of filling the weight with random numbers: it is read from a file afterwards."""


class QuantizedLinear(nn.Module):
    """A linear layer with a quantized weight.

    Until `install` gives it kernels it returns zeros, which is enough for the run at load that finds out a model's
    shapes.
    """

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None) -> None:
        super().__init__()
        self.weight: Weight = weight
        self.bias = bias
        self.in_features, self.out_features = weight.inputs, weight.outputs
        self.kernels: LayerKernels | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.kernels is None:
            return x.new_zeros(*x.shape[:-1], self.out_features)
        rows = self.kernels.linear(x.reshape(-1, x.shape[-1]), self.weight, self.bias)
        return rows.view(*x.shape[:-1], self.out_features)


class ReorderedLinear(nn.Module):
    """A quantized linear layer whose columns are stored in another order than its inputs (GPTQ's act-order): column `i`
    multiplies input `order[i]`.

    A rank may hold some of the columns, but they need inputs of all ranks: then `gather` returns the inputs of all
    ranks.
    """

    def __init__(self, linear: QuantizedLinear, order: Tensor) -> None:
        super().__init__()
        self.linear = linear
        self.order = order
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.gather: Callable[[Tensor], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.linear.kernels is None:
            return x.new_zeros(*x.shape[:-1], self.out_features)
        whole = x if self.gather is None else self.gather(x)
        return cast(Tensor, self.linear(whole[..., self.order]))


class QuantizedEmbedding(nn.Module):
    """An embedding that reads its rows from the quantized weight of the output head, to which it is tied."""

    def __init__(self, head: QuantizedLinear, dtype: torch.dtype) -> None:
        super().__init__()
        self._heads = [head]  # in a list, or torch would register the head as a child of this module too
        self._dtype = dtype

    def forward(self, token_ids: Tensor) -> Tensor:
        head = self._heads[0]
        if head.kernels is None:
            return torch.zeros((*token_ids.shape, head.in_features), dtype=self._dtype, device=token_ids.device)
        return head.kernels.embed(token_ids, head.weight, self._dtype)


def quantized_layers(module: nn.Module) -> Iterator[QuantizedLinear]:
    """Iterate over all `QuantizedLinear` layers of a model."""
    return (part for part in module.modules() if isinstance(part, QuantizedLinear))


def install(module: nn.Module, kernels: LayerKernels) -> None:
    """Give the quantized layers of a model the kernels by which they compute. Call it once, after `merge`: kernels may
    bring weights into another order in memory.
    """
    for layer in quantized_layers(module):
        if layer.kernels is None and isinstance(layer.weight, QuantizedWeight):
            layer.weight, layer.kernels = kernels.pack(layer.weight), kernels


def can_merge(parts: Sequence[nn.Module]) -> bool:
    """Return whether linear layers can be joined into one: all are quantized with the same format and groups, or none
    is quantized.
    """
    weights = [part.weight for part in parts if isinstance(part, QuantizedLinear)]
    if not weights:
        return True
    kinds = {
        (w.codebook, w.inputs, w.group, w.scales.dtype, w.zeros is None)
        for w in weights
        if isinstance(w, QuantizedWeight)
    }
    return len(weights) == len(parts) and len(kinds) == 1


def merge(parts: Sequence[QuantizedLinear]) -> QuantizedLinear:
    """Return one quantized layer with the outputs of all `parts`, one after another, and free their own weights. Call
    it only if `can_merge`.
    """
    weights = [part.weight for part in parts if isinstance(part.weight, QuantizedWeight)]
    whole = concatenate(weights)
    assert whole is not None and len(weights) == len(parts)
    biases = [part.bias for part in parts if part.bias is not None]
    merged = QuantizedLinear(whole, torch.cat(biases) if biases else None)
    for part in parts:
        part.weight = torch.empty(0)
    return merged
