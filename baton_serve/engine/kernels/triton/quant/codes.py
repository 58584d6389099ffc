"""Functions that the Triton products of quantized weights share: they decode words of codes, and collect the constants
of a launch.

With four and six bits, nibble `i` of a word is `16 * i` inputs behind its nibble 0 (`quantized_weights`), so that one
shift of a row of words gives runs of 16 neighbouring inputs. Twins: `quantized_weights.numbers` and `dequantize`.
"""
# mypy: disable-error-code="misc,no-untyped-def,no-untyped-call,untyped-decorator"

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_serve.engine.kernels.quantized_weights import (
    HIGH_WORDS,
    LOW_WORDS,
    Codebook,
    QuantizedWeight,
    code_bits,
    code_values,
)

KINDS = {"int4": 0, "uint4": 0, "fp4": 1, "fp6": 2, "nf4": 3, "bnb_fp4": 3}
"""The way in which `values` decodes each codebook."""


@lru_cache(maxsize=16)
def table_of(codebook: Codebook, device: torch.device) -> Tensor:
    """Return the values of all codes of a codebook, such as nf4, as a float32 tensor on the device, for kernels that
    look them up.
    """
    return torch.tensor(code_values(codebook), device=device)


def word_arguments(weight: QuantizedWeight) -> dict[str, int | bool]:
    """Return the compile-time arguments, by name, of a kernel that reads the packed codes of this weight."""
    six = code_bits(weight.codebook) == 6
    return {
        "inputs": weight.inputs,
        "row_words": weight.codes.shape[1],
        "stretch_words": LOW_WORDS + HIGH_WORDS if six else LOW_WORDS,
        "kind": KINDS[weight.codebook],
        "centre": 8 if weight.codebook == "int4" else 0,
        "group": weight.group,
        "groups": weight.scales.shape[1],
        "has_zeros": weight.zeros is not None,
    }


@triton.jit
def values(low, high, column, nibble: tl.constexpr, table, kind: tl.constexpr):
    """Return the float32 values of the codes in nibble `nibble` of the words `low`. Words `high` hold the upper bits of
    six-bit codes, and `column` counts words within a run of 128 inputs.

    For `kind` 0 (int4 and uint4) the result is the code plus 128, which the caller subtracts together with the zero.
    """
    if kind == 0:  # the code becomes the low bits of a float32 mantissa: a number between 128 and 256
        bits = low << (16 - 4 * nibble) if nibble < 4 else low >> (4 * nibble - 16)
        number = ((bits & 0x000F0000) | 0x43000000).to(tl.float32, bitcast=True)
    else:
        code = (low >> (4 * nibble)) & 15
        if kind == 1:  # E2M1 becomes a float16; 2 ** 14 makes up for the difference of the exponents' biases
            half = (((code & 7) << 9) | ((code & 8) << 12)).to(tl.int16).to(tl.float16, bitcast=True)
            number = half.to(tl.float32) * 16384.0
        elif kind == 2:  # E2M3
            code = code | (((high >> (2 * (nibble + 8 * (column // 8)))) & 3) << 4)
            half = (((code & 31) << 7) | ((code & 32) << 10)).to(tl.int16).to(tl.float16, bitcast=True)
            number = half.to(tl.float32) * 16384.0
        else:
            number = tl.load(table + code)
    return number


@triton.jit
def both_values(low, nibble: tl.constexpr, kind: tl.constexpr, centre: tl.constexpr, dtype: tl.constexpr):
    """Return the values of the nibbles `nibble` and `nibble + 4` of the words `low`, minus `centre`, exactly, in a
    16-bit `dtype`. Both are built in one word, so that one instruction serves two weights.
    """
    shifted = low >> (4 * nibble)
    if kind == 0:  # the codes become the last bits of numbers from 128 (bfloat16) or 1024 (float16)
        offset: tl.constexpr = 128.0 + centre if dtype == tl.bfloat16 else 1024.0 + centre
        both = (shifted & 0x000F000F) | (0x43004300 if dtype == tl.bfloat16 else 0x64006400)
        first = both.to(tl.int16).to(dtype, bitcast=True) - offset
        second = (both >> 16).to(tl.int16).to(dtype, bitcast=True) - offset
    else:  # E2M1; the factor makes up for the difference of the exponents' biases, 126 in bfloat16 and 14 in float16
        left: tl.constexpr = 6 if dtype == tl.bfloat16 else 9
        factor: tl.constexpr = 2.0**126 if dtype == tl.bfloat16 else 2.0**14
        both = ((shifted & 0x00070007) << left) | ((shifted & 0x00080008) << 12)
        first = both.to(tl.int16).to(dtype, bitcast=True) * factor
        second = (both >> 16).to(tl.int16).to(dtype, bitcast=True) * factor
    return first, second


@triton.jit
def offset_of(kind: tl.constexpr, centre: tl.constexpr):
    """Return the constant by which the results of `values` are too large, without the weight's zero point."""
    return 128.0 + centre if kind == 0 else 0.0
