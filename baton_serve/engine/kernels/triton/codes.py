"""Codes of one byte as operands of a matrix product, exactly.

Matrix units want 16-bit operands, and devices move those between their memories in one go where they would move bytes
one by one: so a pair of neighbouring codes is read as one int16, and the first codes of all pairs make one operand,
the second ones another. Twin: a cast of torch.
"""
# mypy: disable-error-code="misc,no-untyped-def,no-untyped-call,untyped-decorator"

import torch
import triton
import triton.language as tl

CODE_KINDS = {torch.int8: 0, torch.float8_e4m3fn: 1, torch.float8_e5m2: 2}
"""How `code_numbers` reads a code."""


@triton.jit
def code_numbers(pairs, second: tl.constexpr, kind: tl.constexpr, dtype: tl.constexpr):
    """The first or second codes of int16 `pairs`, in `dtype`, which is float16 or float32: every code is one of its
    numbers."""
    code = pairs >> 8 if second else pairs
    if dtype == tl.float32:
        numbers = code_numbers(pairs, second, kind, tl.float16).to(tl.float32)
    elif kind == 0:  # a float16 between 1024 and 1279
        numbers = (((code & 0xFF) ^ 0x80) | 0x6400).to(tl.int16).to(tl.float16, bitcast=True) - 1152.0
    elif kind == 1:
        numbers = code.to(tl.int8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        numbers = ((pairs & -0x100) if second else (pairs << 8)).to(tl.int16).to(tl.float16, bitcast=True)
    return numbers


@triton.jit
def code_half(codes, dtype: tl.constexpr):
    """int8 or float8 `codes` in `dtype`, float16 or float32, by way of float16."""
    if codes.dtype == tl.int8:  # integers are converted slowly: a float16 between 1024 and 1279
        bits = (codes.to(tl.uint8, bitcast=True) ^ 0x80).to(tl.uint16) | 0x6400
        return (bits.to(tl.float16, bitcast=True) - 1152.0).to(dtype)
    return codes.to(tl.float16).to(dtype)


@triton.jit
def code_operand(codes, dtype: tl.constexpr):
    """int8 or float8 `codes` in `dtype`."""
    if dtype == tl.bfloat16 and codes.dtype == tl.float8e4nv:  # this way devices have fast instructions
        return codes.to(tl.float16).to(tl.float32).to(dtype)
    return codes.to(dtype)


@triton.jit
def code_float(codes):
    """int8 or float8 `codes` in float32."""
    if codes.dtype == tl.int8:  # integers are converted slowly: the last bits of a number from 2 ** 23
        bits = ((codes.to(tl.int32) & 0xFF) ^ 0x80) | 0x4B000000
        return bits.to(tl.float32, bitcast=True) - 8388736.0
    return codes.to(tl.float32)
