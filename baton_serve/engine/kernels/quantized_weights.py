"""Defines how quantized weights lie in memory, what their codes mean, and the plain-torch product with them.

A weight is `(value(code) - zero) * scale`, with one scale (and zero) for each output row and each group of `group`
inputs. Codes of eight bits are bytes in order. Codes of four bits lie in int32 words: a stretch of 128 inputs has 16
words, and nibble `i` of word `j` is input `16 * i + j`, so that one shift yields 16 neighbours. Codes of six bits have
8 more words in each stretch: field `f` (two high bits) of word `j` belongs to input `16 * (f % 8) + j + 8 * (f // 8)`.
Rows are padded to whole stretches.

The functions are plain torch and run on any device. They are the specification, the test oracle and the fallback of
every kernel that reads such weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

Codebook = Literal["int8", "fp8_e4m3", "fp8_e5m2", "int4", "uint4", "fp6", "fp4", "nf4", "bnb_fp4"]

STRETCH = 128
"""Number of inputs whose codes are packed together."""
LOW_WORDS, HIGH_WORDS = 16, 8
"""Words of a stretch that hold the low four bits, and words that hold the two high bits of six-bit codes."""

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of E2M1 of the OCP microscaling formats, without the sign."""
BNB_FP4_VALUES = (0.0, 0.0052083333, 0.6666666667, 1.0, 0.3333333333, 0.5, 0.1666666667, 0.25)
"""Values of the four-bit float of bitsandbytes, without the sign."""
NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Quantiles of the normal distribution from QLoRA (arXiv 2305.14314, appendix E)."""


def code_bits(codebook: Codebook) -> int:
    """Return the number of bits of a code in this format, 4, 6 or 8."""
    return {"int8": 8, "fp8_e4m3": 8, "fp8_e5m2": 8, "fp6": 6}.get(codebook, 4)


def code_values(codebook: Codebook) -> tuple[float, ...]:
    """Return the float value of each code of a codebook, in the order of the codes. Raises `ValueError` for codes of
    eight bits, such as int8, which are numbers themselves.
    """
    match codebook:
        case "int4":
            return tuple(float(code - 8) for code in range(16))
        case "uint4":
            return tuple(float(code) for code in range(16))
        case "fp4":
            return (*FP4_VALUES, *(-value for value in FP4_VALUES))
        case "bnb_fp4":
            return (*BNB_FP4_VALUES, *(-value for value in BNB_FP4_VALUES))
        case "nf4":
            return NF4_VALUES
        case "fp6":  # E2M3: steps of 1/8 below 2, then doubling
            positive = [m / 8 if e == 0 else (1 + m / 8) * 2 ** (e - 1) for e in range(4) for m in range(8)]
            return (*positive, *(-value for value in positive))
        case _:
            raise ValueError(f"codes of {codebook} are numbers themselves")


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """One quantized weight matrix. `codes` is [outputs, …] in int8, a float8 of torch, or int32 words of packed codes;
    `scales` and `zeros` are [outputs, groups] of any float dtype.
    """

    codebook: Codebook
    inputs: int
    group: int
    """Number of inputs that share a scale; `inputs` or more means one scale for a row."""
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None

    @property
    def outputs(self) -> int:
        """Return the number of outputs, which are the rows of the matrix."""
        return self.codes.shape[0]

    @property
    def nbytes(self) -> int:
        """Return the size of codes, scales and zeros together, in bytes."""
        return sum(part.nbytes for part in (self.codes, self.scales, self.zeros) if part is not None)

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def to(self, device: torch.device) -> "QuantizedWeight":
        """Return a copy of the weight whose tensors are on `device`."""
        zeros = None if self.zeros is None else self.zeros.to(device)
        return replace(self, codes=self.codes.to(device), scales=self.scales.to(device), zeros=zeros)

    def rows(self, start: int, end: int) -> "QuantizedWeight":
        """Return a view of the outputs (rows) from `start` to `end`."""
        zeros = None if self.zeros is None else self.zeros[start:end]
        return replace(self, codes=self.codes[start:end], scales=self.scales[start:end], zeros=zeros)


@dataclass(frozen=True, slots=True)
class StackedWeight:
    """The quantized weights of all experts of one layer, as a single matrix: the experts' outputs are concatenated."""

    weight: QuantizedWeight
    count: int

    @property
    def outputs(self) -> int:
        """Return the number of output rows of one expert."""
        return self.weight.outputs // self.count

    def expert_view(self, number: int) -> QuantizedWeight:
        return self.weight.rows(number * self.outputs, (number + 1) * self.outputs)


def concatenate(parts: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """Join quantized weights along their outputs. Return None if they differ in codebook, group, dtype of scales or use
    of zeros.
    """
    first = parts[0]
    kinds = {(p.codebook, p.inputs, p.group, p.scales.dtype, p.zeros is None) for p in parts}
    if len(kinds) > 1:
        return None
    zeros = None if first.zeros is None else torch.cat([p.zeros for p in parts if p.zeros is not None])
    return replace(
        first, codes=_cat([p.codes for p in parts]), scales=torch.cat([p.scales for p in parts]), zeros=zeros
    )


def numbers(weight: QuantizedWeight) -> Tensor:
    """Return the value of each code as float32 [outputs, inputs], before zeros and scales are applied."""
    bits = code_bits(weight.codebook)
    if bits == 8:
        return weight.codes[:, : weight.inputs].float()
    codes = unpack_codes(weight.codes, bits)[:, : weight.inputs]
    table = torch.tensor(code_values(weight.codebook), device=codes.device)
    return table[codes.int()]


def dequantize(weight: QuantizedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the weight as floats [outputs, inputs] in `dtype`, computed in float32 and rounded once."""
    values, groups = numbers(weight), weight.scales.shape[1]
    padded = torch.nn.functional.pad(values, (0, groups * weight.group - weight.inputs)) if groups > 1 else values
    grouped = padded.view(len(values), groups, -1)
    if weight.zeros is not None:
        grouped = grouped - weight.zeros.float()[:, :, None]
    return (grouped * weight.scales.float()[:, :, None]).view(len(values), -1)[:, : weight.inputs].to(dtype)


def dequantize_rows(weight: QuantizedWeight, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the rows `rows` of a quantized embedding table as floats [len(rows), inputs]."""
    zeros = None if weight.zeros is None else weight.zeros[rows]
    codes = weight.codes.view(torch.uint8)[rows].view(weight.codes.dtype)  # torch cannot index float8
    return dequantize(replace(weight, codes=codes, scales=weight.scales[rows], zeros=zeros), dtype)


def linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """Multiply x [num_tokens, inputs] by a quantized weight. Return [num_tokens, outputs] in x's dtype. This
    plain-torch implementation is the reference (the twin) of all quantized products.
    """
    return torch.nn.functional.linear(x, dequantize(weight, x.dtype), bias)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Pack uint8 codes [outputs, inputs] of four or six bits into int32 words [outputs, words], as the kernels read
    them.
    """
    outputs, inputs = codes.shape
    stretches = -(-inputs // STRETCH)
    padded = torch.nn.functional.pad(codes, (0, stretches * STRETCH - inputs))
    fields = padded.view(outputs, stretches, 8, 16)
    low = torch.zeros((outputs, stretches, LOW_WORDS), dtype=torch.int32, device=codes.device)
    for nibble in range(8):
        low |= (fields[:, :, nibble] & 15).int() << 4 * nibble
    if bits == 4:
        return low.view(outputs, -1)
    high = torch.zeros((outputs, stretches, HIGH_WORDS), dtype=torch.int32, device=codes.device)
    for field in range(16):
        start = 8 * (field // 8)
        high |= (fields[:, :, field % 8, start : start + 8] >> 4).int() << 2 * field
    return torch.cat([low, high], dim=2).view(outputs, -1)


def unpack_codes(words: Tensor, bits: int) -> Tensor:
    """Return the codes of packed words, uint8 [outputs, inputs padded to a multiple of 128]. It is the inverse of
    `pack_codes`.
    """
    per_stretch = LOW_WORDS if bits == 4 else LOW_WORDS + HIGH_WORDS
    stretches = words.view(len(words), -1, per_stretch)
    codes = torch.empty((*stretches.shape[:2], 8, 16), dtype=torch.uint8, device=words.device)
    for nibble in range(8):
        codes[:, :, nibble] = ((stretches[:, :, :LOW_WORDS] >> 4 * nibble) & 15).to(torch.uint8)
    if bits == 6:
        for field in range(16):
            start = 8 * (field // 8)
            high = (stretches[:, :, LOW_WORDS:] >> 2 * field) & 3
            codes[:, :, field % 8, start : start + 8] |= (high << 4).to(torch.uint8)
    return codes.view(len(words), -1)


def _cat(parts: list[Tensor]) -> Tensor:
    """Concatenate tensors along their first dimension, as bytes if torch cannot do it with their dtype (float8)."""
    return torch.cat([part.view(torch.uint8) for part in parts]).view(parts[0].dtype)
