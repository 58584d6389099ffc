"""The interface of quantized checkpoint formats, and functions that they share."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from baton_serve.engine.errors import UnsupportedModelError
from baton_serve.engine.kernels.quantized import QuantizedWeight, StackedWeight, dequantize, pack_codes

StoredTensors = Mapping[str, Tensor]
"""The stored tensors of one layer, by the ends of their names."""


@dataclass(frozen=True, slots=True)
class DecodedWeight:
    """A decoded layer: quantized (stacked, for experts), or floats if the engine has no codes for it.

    Column `i` of the weight multiplies input `order[i]`; None: the columns are in order.
    """

    weight: QuantizedWeight | StackedWeight | Tensor
    order: Tensor | None = None

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the weight as floats [outputs, inputs], with inputs in order; of experts
        [experts, inputs, outputs].
        """
        if isinstance(self.weight, StackedWeight):
            stacked = dequantize(self.weight.weight, dtype)
            return stacked.view(self.weight.count, self.weight.outputs, -1).transpose(1, 2).contiguous()
        numbers = self.weight.to(dtype) if isinstance(self.weight, Tensor) else dequantize(self.weight, dtype)
        return numbers if self.order is None else numbers[:, torch.argsort(self.order)]


class CheckpointFormat(Protocol):
    """How a checkpoint stores layers. Frozen dataclasses implement it, made from `quantization_config` alone."""

    @property
    def method(self) -> str:
        """The checkpoint's `quant_method`, as `--quantization` accepts it."""
        ...

    @property
    def label(self) -> str:
        """Description for messages and for the model's fingerprint."""
        ...

    @property
    def parts(self) -> tuple[str, ...]:
        """Ends of names: a layer's name followed by one of these is a tensor of the layer."""
        ...

    @property
    def marks(self) -> tuple[str, ...]:
        """Ends of the names of tensors by which a quantized layer is recognized; it has at least one of them."""
        ...

    @property
    def target(self) -> str:
        """The end of the parameter's name in the model, after the layer's name, such as `.weight`."""
        ...

    def read(self, parts: StoredTensors) -> DecodedWeight:
        """Decode a layer on the device of its parts.

        Raises `ValueError` or `KeyError` if they do not fit each other.
        """
        ...


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """Unpack int32 [..., n] to uint8 [..., n * 32 / bits], the lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    return ((words[..., None] >> shifts) & ((1 << bits) - 1)).to(torch.uint8).flatten(-2)


def from_unsigned(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, *, bits: int, group: int | None
) -> QuantizedWeight:
    """Return a weight of values `(code - zero) * scale`.

    `codes` are uint8 [outputs, inputs], `scales` [outputs, groups]. `zeros` have the shape of the scales; None stands
    for the middle of the codes' range. `group` None: one scale per row. Raises `ValueError` for other shapes.
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
    """Return the inputs sorted by group, as `DecodedWeight.order`; None if they are in order already.

    Raises `ValueError` if the groups do not all have the size `group`.
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
    """Return `config[key]`. Raises `UnsupportedModelError` if its value is not one of `allowed`."""
    value = config.get(key, default)
    if value not in allowed:
        raise UnsupportedModelError(
            f"the checkpoint is quantized by {method} with {key} {value!r}; supported:"
            f" {', '.join(repr(choice) for choice in allowed)}"
        )
    return value


def group_of(config: Mapping[str, Any], method: str, key: str = "group_size") -> int | None:
    """Return the group size; None for whole rows, which checkpoints state as -1. Raises `UnsupportedModelError`."""
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or (value != -1 and value < 1):
        raise UnsupportedModelError(
            f"the checkpoint is quantized by {method} with {key} {value!r}; it must be -1 or a positive number"
        )
    return None if value == -1 else value
