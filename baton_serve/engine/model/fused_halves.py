"""Computes large steps of several ranks in two halves, so that the sum over the ranks of one half is exchanged while
the other half is computed.

Attention reads keys and values of all rows, so it is computed for the whole step. Everything between two attentions
(output projection, norms, MLP and the projections to query, key and value) treats each row alone, and is divided:

    compute    output(A)  output(B)  MLP(A)  MLP(B)   QKV(A)  QKV(B)  attention
    exchange              sum A      sum B   sum A    sum B
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from baton_serve.engine.collectives.backends import Collectives
from baton_serve.engine.kernels import Activations, LayerKernels
from baton_serve.engine.model.fused_layers import Layer, ResidualSum

MIN_ROWS = 2048
"""Fewest rows of a step that is computed in halves. Small steps are captured in graphs, which cannot contain exchanges
beside them, and halves of few rows would not fill the device."""

Mix = Callable[[int, Tensor], Tensor]
"""Returns the input of the output projection from a layer's number and its query, key and value of all rows."""


@dataclass(frozen=True, slots=True)
class HalvedLayers:
    """The layers of a decoder whose weights are divided over ranks, computed in two halves of the rows."""

    layers: list[Layer]
    kernels: LayerKernels
    collectives: Collectives
    mlp: Callable[[Layer, Activations], Tensor]
    """Returns this rank's summand of the output of a layer's MLP."""
    joined: Callable[[Tensor, Tensor, ResidualSum], Activations]
    """Adds a sum over the ranks to the residual in place, and returns the normed residual."""

    def run(self, hidden: Tensor, residual: Tensor, mix: Mix, last_rows: Tensor | None) -> Activations:
        """Compute all layers. `hidden` is the normed `residual`, both [num_rows, hidden]; `residual` is updated in
        place. Return the normed residual after the last layer, of the rows `last_rows` alone if they are given.
        """
        half = len(residual) // 2
        parts = residual[:half], residual[half:]
        heads = [self._heads(rows, self.layers[0]) for rows in (hidden[:half], hidden[half:])]
        for number, layer in enumerate(self.layers):
            attended, product = mix(number, torch.cat(heads)), layer.output
            sums = [
                self.collectives.start_all_reduce(self.kernels.linear(rows, product.weight, product.bias))
                for rows in (attended[:half], attended[half:])
            ]
            sums = [
                self.collectives.start_all_reduce(self.mlp(layer, self.joined(wait(), part, layer.after_attention)))
                for wait, part in zip(sums, parts, strict=True)
            ]
            if number + 1 == len(self.layers):
                break
            following = self.layers[number + 1]
            heads = [
                self._heads(self.joined(wait(), part, layer.after_mlp), following)
                for wait, part in zip(sums, parts, strict=True)
            ]
        output = torch.cat([wait() for wait in sums])
        if last_rows is not None:
            output, residual = output[last_rows], residual[last_rows]
        return self.joined(output, residual, self.layers[-1].after_mlp)

    def _heads(self, hidden: Activations, layer: Layer) -> Tensor:
        """Return query, key and value of the rows `hidden`, side by side."""
        return self.kernels.linear(hidden, layer.qkv.weight, layer.qkv.bias)
