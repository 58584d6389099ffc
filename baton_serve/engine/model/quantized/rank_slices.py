"""Cuts quantized weights for tensor-parallel ranks, so that codes and scales are those of the whole weight. A rank's
codes and scales are those of the whole weight.

So all numbers of ranks compute with the same rounded weights. If a cut falls between two groups of codes, nothing
changes; if it falls into a group, all groups become smaller and repeat their scales.
"""

import logging
import math
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from baton_serve.engine.errors import UnsupportedModelError
from baton_serve.engine.kernels.quantized_weights import (
    QuantizedWeight,
    StackedWeight,
    code_bits,
    concatenate,
    dequantize,
    pack_codes,
    unpack_codes,
)
from baton_serve.engine.model.attention_parts import is_linear
from baton_serve.engine.model.quantized.experts import WEIGHTS, QuantizedExperts
from baton_serve.engine.model.quantized.modules import EmptyLinear, QuantizedLinear, ReorderedLinear
from baton_serve.engine.model.rank_parts import GROUP_STEP, RankParts, TensorPart

logger = logging.getLogger(__name__)

BITS_OF_BYTE = 8


def split_module(module: nn.Module, parts: RankParts) -> None:
    """Cut all weights of a model, quantized or not, to the parts that a tensor-parallel rank holds."""
    # A list, because the loop replaces layers while it runs.
    for name, part in list(module.named_modules()):
        # The inner layer of a reordered one has no part of its own.
        if isinstance(part, (QuantizedLinear, ReorderedLinear, QuantizedExperts)):
            split_layer(module, name, parts)
    split_parameters(module, parts)


def split_parameters(module: nn.Module, parts: RankParts) -> None:
    """Cut the plain parameters of a model to a rank's parts; those of quantized layers are left to `split_layer`."""
    tied = {id(parameter): name for name, parameter in module.named_parameters()}
    for name, parameter in list(module.named_parameters(remove_duplicate=False)):
        if name in parts.tensors or name in parts.zeros:
            own = parts.of(name, parameter.data)
            # A tied head stays a view. Other parts must not keep the memory of the whole.
            set_part(module, name, own if tied[id(parameter)] != name else own.clone())


def split_layer(module: nn.Module, name: str, parts: RankParts) -> None:
    """Cut the quantized linear layer or experts `name`, with their biases, to a rank's part."""
    split_weights(module, name, parts)
    # It is looked up here and not above, because `split_weights` may have replaced the layer.
    found = module.get_submodule(name)
    layer = found.linear if isinstance(found, ReorderedLinear) else found
    biases = [(leaf, bias.data) for leaf, bias in layer.named_parameters(recurse=False)]
    if isinstance(layer, QuantizedLinear) and layer.bias is not None:
        biases = [("bias", layer.bias)]
    for leaf, bias in biases:
        own = parts.of(f"{name}.{leaf}", bias).clone()
        setattr(layer, leaf, own if isinstance(layer, QuantizedLinear) else nn.Parameter(own, requires_grad=False))


def split_weights(
    module: nn.Module, name: str, parts: RankParts, *, has_rows: bool = False, only: str | None = None
) -> None:
    """Cut the weights of the quantized layer `name`, without its biases, to a rank's part. `has_rows` says that its
    outputs are cut already; `only` names the one weight of experts that is cut (None: both). Raises
    `UnsupportedModelError` for experts whose groups of inputs would become too small.
    """
    found = module.get_submodule(name)
    if isinstance(found, QuantizedExperts):
        for leaf in WEIGHTS if only is None else (only,):
            if (part := parts.tensors.get(f"{name}.{leaf}")) is not None:
                found.weights[leaf] = _expert_part(found.weights[leaf], part, name, is_transposed=found.is_transposed)
        return
    part = parts.tensors.get(f"{name}.weight")
    if part is None or (has_rows and part.dim == 0):
        return
    order = found.order if isinstance(found, ReorderedLinear) else None
    layer = found.linear if isinstance(found, ReorderedLinear) else found
    assert isinstance(layer, QuantizedLinear) and isinstance(layer.weight, QuantizedWeight)
    cut = weight_part(layer.weight, part)
    if isinstance(cut, QuantizedWeight):
        linear = QuantizedLinear(cut, layer.bias)
        # These are columns in the order in which they are stored: they multiply inputs of all ranks.
        own = order if order is None or part.dim == 0 else part.of(order[None])[0]
        module.set_submodule(name, linear if own is None else ReorderedLinear(linear, own))
    else:
        if order is not None:
            # The stored column i belongs to input order[i], so `argsort` puts the columns into the order of the inputs.
            cut = part.of(dequantize(layer.weight)[:, torch.argsort(order)])
        logger.info("%s is not quantized: the ranks cut its groups", name)
        module.set_submodule(name, _linear(cut.to(next(module.parameters()).dtype), layer.bias))


def share_embedding(module: nn.Module, embedding: str, parts: RankParts) -> None:
    """Let the output head use the weight of the embedding to which it is tied, or this rank's rows of it."""
    set_part(module, "lm_head.weight", parts.of("lm_head.weight", module.get_parameter(f"{embedding}.weight").data))


def set_part(module: nn.Module, name: str, value: Tensor) -> None:
    """Replace the parameter `name` by a rank's part of it, and correct the sizes in the attributes of its linear
    layer.
    """
    owner, _, leaf = name.rpartition(".")
    layer = module.get_submodule(owner)
    setattr(layer, leaf, nn.Parameter(value, requires_grad=False))
    if isinstance(layer, nn.Linear) and leaf == "weight":
        layer.out_features, layer.in_features = value.shape
    elif is_linear(layer) and leaf == "weight":
        cast(Any, layer).nf = value.shape[1]


def weight_part(weight: QuantizedWeight, part: TensorPart) -> QuantizedWeight | Tensor:
    """Return a rank's part of a quantized weight [outputs, inputs]. Return it dequantized, as floats, if its groups of
    inputs would become too small for kernels.
    """
    if part.dim == 0:
        whole = concatenate([_copied(weight.rows(rows.start, rows.stop)) for rows in part.ranges])
        assert whole is not None  # all are of one weight
        return whole
    ((start, stop),) = ((columns.start, columns.stop) for columns in part.ranges)
    # One scale for a row: it is the scale of each part of the row too.
    if weight.group >= weight.inputs:
        return replace(weight, inputs=stop - start, group=stop - start, codes=_columns(weight, start, stop))
    # No new group may lie in two old ones, because it has one scale.
    group = math.gcd(weight.group, start, stop)
    if group < GROUP_STEP:
        return dequantize(weight)[:, start:stop]
    repeats, groups = weight.group // group, slice(start // group, stop // group)

    def of_groups(values: Tensor) -> Tensor:
        return values.repeat_interleave(repeats, 1)[:, groups].contiguous()

    zeros = None if weight.zeros is None else of_groups(weight.zeros)
    codes = _columns(weight, start, stop)
    return QuantizedWeight(weight.codebook, stop - start, group, codes, of_groups(weight.scales), zeros)


def _expert_part(whole: StackedWeight, part: TensorPart, name: str, *, is_transposed: bool) -> StackedWeight:
    """Return a rank's part of the quantized weights of all experts. `part` counts dimensions as the parameter does:
    [experts, outputs, inputs], or with the last two exchanged if `is_transposed`.
    """
    if part.dim == 0:
        # The codes of all experts are one matrix [experts * outputs, inputs], so experts are ranges of its rows.
        ranges = tuple(slice(own.start * whole.outputs, own.stop * whole.outputs) for own in part.ranges)
        cut = weight_part(whole.weight, TensorPart(0, ranges))
        count = part.size
    elif part.dim == (2 if is_transposed else 1):
        # Each expert gives the same part of its own rows.
        starts = (number * whole.outputs for number in range(whole.count))
        rows = tuple(slice(own.start + start, own.stop + start) for start in starts for own in part.ranges)
        cut, count = weight_part(whole.weight, TensorPart(0, rows)), whole.count
    else:
        cut, count = weight_part(whole.weight, TensorPart(1, part.ranges)), whole.count
    if not isinstance(cut, QuantizedWeight):
        raise UnsupportedModelError(
            f"the ranks would cut the experts {name} into groups of less than {GROUP_STEP} inputs; use a smaller"
            " tensor_parallel_size, or enable_expert_parallel, which keeps experts whole"
        )
    return StackedWeight(cut, count)


def _columns(weight: QuantizedWeight, start: int, stop: int) -> Tensor:
    """Return the packed codes of the inputs `start` to `stop` of a quantized weight."""
    bits = code_bits(weight.codebook)
    # Words of fewer bits hold inputs that are far from each other, so their codes are packed again.
    if bits == BITS_OF_BYTE:
        return weight.codes[:, start:stop].contiguous()
    return pack_codes(unpack_codes(weight.codes, bits)[:, start:stop].contiguous(), bits)


def _copied(weight: QuantizedWeight) -> QuantizedWeight:
    """Return a copy of a quantized weight in memory of its own, so that the weight of which it was a view can be
    freed.
    """
    zeros = None if weight.zeros is None else weight.zeros.clone()
    return replace(weight, codes=weight.codes.clone(), scales=weight.scales.clone(), zeros=zeros)


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    with torch.device("meta"):  # which allocates nothing for the weight that is replaced immediately
        layer = EmptyLinear(weight.shape[1], weight.shape[0], bias=bias is not None)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer
