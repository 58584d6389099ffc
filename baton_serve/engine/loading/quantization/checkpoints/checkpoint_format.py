"""Defines the interface of quantized checkpoint formats, and unpacks and converts codes for AWQ, GPTQ and others."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from baton_serve.engine.errors import UnsupportedModelError
from baton_serve.engine.kernels.quantized_weights import QuantizedWeight, StackedWeight, dequantize, pack_codes

StoredTensors = Mapping[str, Tensor]
"""The stored tensors of one layer, by the ends of their names."""


@dataclass(frozen=True, slots=True)
class DecodedWeight:
    """One layer as read from a quantized checkpoint: a quantized weight (stacked, for the experts of a mixture), or
    floats if the kernels cannot compute with its codes.

    Column `i` of the weight multiplies input `order[i]`; None: the columns are in order.
    """

    weight: QuantizedWeight | StackedWeight | Tensor
    order: Tensor | None = None

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the weight converted to floats, [outputs, inputs] with the inputs in order; for the experts of a
        mixture [experts, inputs, outputs]."""
        if isinstance(self.weight, StackedWeight):
            stacked = dequantize(self.weight.weight, dtype)
            return stacked.view(self.weight.count, self.weight.outputs, -1).transpose(1, 2).contiguous()
        numbers = self.weight.to(dtype) if isinstance(self.weight, Tensor) else dequantize(self.weight, dtype)
        return numbers if self.order is None else numbers[:, torch.argsort(self.order)]


class CheckpointFormat(Protocol):
    """How a quantized checkpoint stores its layers. Each format is a frozen dataclass, made from `quantization_config`
    alone."""

    @property
    def method(self) -> str:
        """The name of the format: `quant_method` in the checkpoint's config, which `--quantization` accepts too."""
        ...

    @property
    def label(self) -> str:
        """The format with its parameters, as text for messages and for the model's fingerprint."""
        ...

    @property
    def parts(self) -> tuple[str, ...]:
        """The ends of the names of a quantized layer's tensors, such as `.qweight`: a tensor is named by its layer and
        one of these."""
        ...

    @property
    def marks(self) -> tuple[str, ...]:
        """The ends of tensor names by which a quantized layer is recognized; each quantized layer has at least one such
        tensor."""
        ...

    @property
    def target(self) -> str:
        """The end of the name of the model's parameter that a layer becomes, such as `.weight`."""
        ...

    def read(self, parts: StoredTensors) -> DecodedWeight:
        """Decode one layer from its stored tensors `parts`, which are given by the ends of their names. The result is
        on their device.

        Raises `ValueError` or `KeyError` if a tensor is missing or the tensors do not fit each other.
        """
        ...


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """Unpack codes of `bits` bits from int32 words [..., n] to uint8 [..., n * 32 / bits], the lowest bits of a word
    first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    return ((words[..., None] >> shifts) & ((1 << bits) - 1)).to(torch.uint8).flatten(-2)


def from_unsigned(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, *, bits: int, group: int | None
) -> QuantizedWeight:
    """Make a quantized weight with values `(code - zero) * scale`.

    `codes` are uint8 [outputs, inputs] of `bits` bits, and `scales` [outputs, groups]. `zeros` have the shape of the
    scales; None stands for the middle of the codes' range. `group` is the number of inputs that share a scale; None:
    all inputs of a row. Raises `ValueError` for other shapes.
    """
    inputs = codes.shape[1]
    size = inputs if group is None else min(group, inputs)
    expected = (codes.shape[0], -(-inputs // size))
    if tuple(scales.shape) != expected or (zeros is not None and tuple(zeros.shape) != expected):
        raise ValueError(f"scales or zeros of shape {tuple(scales.shape)}, not {expected} (groups of {size})")
    if bits == 4:
        kept = None if zeros is None else zeros.to(scales.dtype)
        return QuantizedWeight("int4" if zeros is None else "uint4", inputs, size, pack_codes(codes, 4), scales, kept)
    # The kernels have signed codes of eight bits, so codes and zeros move by half of the range.
    signed = (codes.to(torch.int16) - 128).to(torch.int8)
    kept = None if zeros is None else (zeros.to(torch.int16) - 128).to(scales.dtype)
    return QuantizedWeight("int8", inputs, size, signed, scales, kept)


def order_of(group_of_input: Tensor | None, inputs: int, group: int | None) -> Tensor | None:
    """Return an order of the inputs in which the members of each group, which share a scale, are neighbours
    (`DecodedWeight.order`); None if they are neighbours already. `group_of_input` [inputs] is the number of each
    input's group, and `group` the size of a group.

    Raises `ValueError` if not all groups have this size.
    """
    # Some tools fill g_idx with -1 if inputs are not reordered.
    if group_of_input is None or group is None or bool((group_of_input < 0).all()):
        return None
    if len(group_of_input) != inputs:
        raise ValueError(f"g_idx of {len(group_of_input)} inputs, not {inputs}")
    expected = torch.arange(inputs, device=group_of_input.device) // group
    order = torch.argsort(group_of_input, stable=True)
    if not torch.equal(group_of_input[order].long(), expected):
        raise ValueError(f"g_idx does not divide the inputs into groups of {group}")
    return None if torch.equal(group_of_input.long(), expected) else order


def one_of(config: Mapping[str, Any], key: str, allowed: tuple[Any, ...], method: str, default: Any = None) -> Any:
    """Return the value of `key` in a checkpoint's `quantization_config`, or `default` if it is missing. Raises
    `UnsupportedModelError` if the value is not one of `allowed`; `method` names the format in the message."""
    value = config.get(key, default)
    if value not in allowed:
        raise UnsupportedModelError(
            f"the checkpoint is quantized by {method} with {key} {value!r}; supported:"
            f" {', '.join(repr(choice) for choice in allowed)}"
        )
    return value


def group_of(config: Mapping[str, Any], method: str, key: str = "group_size") -> int | None:
    """Return the number of inputs that share a scale, which `quantization_config` states under `key`; None: all inputs
    of a row, which checkpoints state as -1. Raises `UnsupportedModelError` for other values; `method` names the format
    in the message."""
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or (value != -1 and value < 1):
        raise UnsupportedModelError(
            f"the checkpoint is quantized by {method} with {key} {value!r}; it must be -1 or a positive number"
        )
    return None if value == -1 else value
