"""Convert one-byte codes to operands of a matrix product, exactly. The twin is a cast of torch.

Matrix units need 16-bit operands. Devices move many of these between their memories by one instruction, but bytes one
by one. Therefore a pair of neighbouring codes is read as one int16; the first codes of all pairs form one operand, the
second codes another.
"""
# mypy: disable-error-code="misc,no-untyped-def,no-untyped-call,untyped-decorator"

import torch
import triton
import triton.language as tl

CODE_KINDS = {torch.int8: 0, torch.float8_e4m3fn: 1, torch.float8_e5m2: 2}
"""Number of each dtype in `code_numbers`."""


@triton.jit
def code_numbers(pairs, second: tl.constexpr, kind: tl.constexpr, dtype: tl.constexpr):
    """Return the first codes (`second` False) or second codes of int16 `pairs` of neighbouring codes as numbers in
    `dtype`. It is float16 or float32, which represents every code exactly.
    """
    code = pairs >> 8 if second else pairs
    if dtype == tl.float32:
        numbers = code_numbers(pairs, second, kind, tl.float16).to(tl.float32)
    elif kind == 0:  # the code becomes the low bits of a float16 between 1024 and 1279
        numbers = (((code & 0xFF) ^ 0x80) | 0x6400).to(tl.int16).to(tl.float16, bitcast=True) - 1152.0
    elif kind == 1:
        numbers = code.to(tl.int8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        numbers = ((pairs & -0x100) if second else (pairs << 8)).to(tl.int16).to(tl.float16, bitcast=True)
    return numbers


@triton.jit
def code_half(codes, dtype: tl.constexpr):
    """Return int8 or float8 `codes` as numbers in `dtype`, float16 or float32. The conversion goes through float16."""
    if codes.dtype == tl.int8:  # devices convert integers slowly: build a float16 between 1024 and 1279 from the bits
        bits = (codes.to(tl.uint8, bitcast=True) ^ 0x80).to(tl.uint16) | 0x6400
        return (bits.to(tl.float16, bitcast=True) - 1152.0).to(dtype)
    return codes.to(tl.float16).to(dtype)


@triton.jit
def code_operand(codes, dtype: tl.constexpr):
    """Return int8 or float8 `codes` as numbers in `dtype`, to be an operand of a matrix product."""
    if dtype == tl.bfloat16 and codes.dtype == tl.float8e4nv:  # devices have fast instructions for this path
        return codes.to(tl.float16).to(tl.float32).to(dtype)
    return codes.to(dtype)


@triton.jit
def code_float(codes):
    """Return int8 or float8 `codes` as float32 numbers."""
    if codes.dtype == tl.int8:  # devices convert integers slowly: the code becomes the last bits of 2 ** 23
        bits = ((codes.to(tl.int32) & 0xFF) ^ 0x80) | 0x4B000000
        return bits.to(tl.float32, bitcast=True) - 8388736.0
    return codes.to(tl.float32)
