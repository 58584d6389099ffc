"""What the formats of quantized checkpoints share: a layer's stored tensors in, a weight of the engine's out."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from baton_serve.engine.errors import UnsupportedModelError
from baton_serve.engine.kernels.quantized import QuantizedWeight, StackedWeight, dequantize, pack_codes

StoredTensors = Mapping[str, Tensor]
"""One layer's stored tensors, by the ends of their names."""


@dataclass(frozen=True, slots=True)
class DecodedWeight:
    """`weight` is quantized (stacked: of experts), or numbers where the engine has no codes for it. `order` [inputs]:
    column `i` of the weight multiplies input `order[i]`; None: they are in order."""

    weight: QuantizedWeight | StackedWeight | Tensor
    order: Tensor | None = None

    def dense(self, dtype: torch.dtype) -> Tensor:
        """[outputs, inputs], inputs in order; of experts [experts, inputs, outputs], as their models have them."""
        if isinstance(self.weight, StackedWeight):
            stacked = dequantize(self.weight.weight, dtype)
            return stacked.view(self.weight.count, self.weight.outputs, -1).transpose(1, 2).contiguous()
        numbers = self.weight.to(dtype) if isinstance(self.weight, Tensor) else dequantize(self.weight, dtype)
        return numbers if self.order is None else numbers[:, torch.argsort(self.order)]


class CheckpointFormat(Protocol):
    """How a checkpoint stores a layer. Frozen dataclasses fit; they are made of `quantization_config` alone."""

    @property
    def method(self) -> str:
        """The checkpoint's `quant_method`, as `--quantization` takes it."""
        ...

    @property
    def label(self) -> str:
        """For messages and the fingerprint."""
        ...

    @property
    def parts(self) -> tuple[str, ...]:
        """Ends of names: a layer's name and one of these is a tensor of that layer."""
        ...

    @property
    def marks(self) -> tuple[str, ...]:
        """A layer is quantized if it has one of these parts."""
        ...

    @property
    def target(self) -> str:
        """The layer's name and this is the model's own parameter."""
        ...

    def read(self, parts: StoredTensors) -> DecodedWeight:
        """Where the parts lie. Raises `ValueError` or `KeyError` for parts that do not fit each other."""
        ...


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """int32 [..., n] -> uint8 [..., n * 32 / bits], the lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    return ((words[..., None] >> shifts) & ((1 << bits) - 1)).to(torch.uint8).flatten(-2)


def from_unsigned(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, *, bits: int, group: int | None
) -> QuantizedWeight:
    """`(code - zero) * scale`. codes uint8 [outputs, inputs]; scales [outputs, groups]; zeros of the codes' range, of
    the scales' shape, or None for the middle of that range; group None: one scale per row."""
    inputs = codes.shape[1]
    size = inputs if group is None else min(group, inputs)
    expected = (codes.shape[0], -(-inputs // size))
    if tuple(scales.shape) != expected or (zeros is not None and tuple(zeros.shape) != expected):
        raise ValueError(f"scales or zeros of shape {tuple(scales.shape)}, not {expected} (groups of {size})")
    if bits == 4:
        kept = None if zeros is None else zeros.to(scales.dtype)
        return QuantizedWeight("int4" if zeros is None else "uint4", inputs, size, pack_codes(codes, 4), scales, kept)
    signed = (codes.to(torch.int16) - 128).to(torch.int8)
    kept = None if zeros is None else (zeros.to(torch.int16) - 128).to(scales.dtype)
    return QuantizedWeight("int8", inputs, size, signed, scales, kept)


def order_of(group_of_input: Tensor | None, inputs: int, group: int | None) -> Tensor | None:
    """Inputs sorted by their group, as `DecodedWeight` has it; None if each group's inputs lie together, in the order
    of the groups. Raises `ValueError` if the groups are not all of size `group`."""
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
    """`config[key]`. Raises `UnsupportedModelError` if it is something else."""
    value = config.get(key, default)
    if value not in allowed:
        raise UnsupportedModelError(
            f"the checkpoint is quantized by {method} with {key} {value!r}; served:"
            f" {', '.join(repr(choice) for choice in allowed)}"
        )
    return value


def group_of(config: Mapping[str, Any], method: str, key: str = "group_size") -> int | None:
    """None: whole rows, which checkpoints state as -1. Raises `UnsupportedModelError`."""
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or (value != -1 and value < 1):
        raise UnsupportedModelError(
            f"the checkpoint is quantized by {method} with {key} {value!r}; it must be -1 or a positive number"
        )
    return None if value == -1 else value
