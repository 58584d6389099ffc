"""GGUF's blocks of codes (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md) as weights of the engine's.

A block of 32 inputs, or an eighth of a block of 256, is a group with a scale and, in some types, a lowest value. Codes
of four, five and eight bits are kept as they are: five bits as E2M3 codes, which hold all eighths from -2 to 2. Q4_0,
Q5_0 and Q8_0 stand for the same numbers afterwards; scales and zeros that a file makes of two factors are rounded to
float16, which changes a number less than bfloat16 would. Every other type is rounded to eight bits in groups of 32.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from baton_serve.engine.kernels.quantized import Codebook, QuantizedWeight, code_bits, concatenate, pack_codes
from baton_serve.engine.loading.quantization.checkpoints.layout import DecodedWeight, StoredTensors

GROUP = 32
FLOATS = ("F64", "F32", "F16", "BF16")
"""Types whose tensors hold numbers."""
ROUNDED = "/int8"
"""Ends the part of a layer that is to be rounded to eight bits, whatever its type."""
MAX_CHUNK_ELEMENTS = 1 << 24
"""Numbers in float32 at once."""
SMALLEST_NORMAL, LARGEST_ZERO = 2.0**-14, 32768.0
"""Of float16; what is beyond is rounded to eight bits instead."""


@dataclass(frozen=True, slots=True)
class Gguf:
    """A layer has one part, `.TYPE` or `.TYPE/int8`: uint8 [outputs, bytes of a row]."""

    method: ClassVar[str] = "gguf"
    label: ClassVar[str] = "gguf"
    parts: ClassVar[tuple[str, ...]] = ()  # tensors are given by layer, not found by the ends of their names
    marks: ClassVar[tuple[str, ...]] = ()
    target: ClassVar[str] = ".weight"

    def read(self, parts: StoredTensors) -> DecodedWeight:
        ((part, rows),) = parts.items()
        kind = part.removeprefix(".")
        weight = None if kind.endswith(ROUNDED) else _kept(rows, kind)
        return DecodedWeight(_rounded(rows, kind.removesuffix(ROUNDED)) if weight is None else weight)


def kept_as(kind: str) -> str:
    """Layers of a kind can be joined."""
    return {"Q4_K": "Q4_1", "Q5_K": "Q5_1"}.get(kind, kind) if kind in _BLOCK_BYTES else ROUNDED


def numbers(rows: Tensor, kind: str) -> Iterator[Tensor]:
    """What rows of blocks, uint8 [outputs, bytes], stand for: float32, some whole rows of all inputs at a time."""
    import gguf  # an optional dependency

    used = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[used]
    step = max(1, MAX_CHUNK_ELEMENTS // (rows.shape[1] // size * block))
    for start in range(0, len(rows), step):
        piece = rows[start : start + step].cpu().numpy()
        yield torch.from_numpy(gguf.quants.dequantize(piece, used)).to(rows.device)


def _rounded(rows: Tensor, kind: str) -> QuantizedWeight:
    whole = concatenate([_round(piece) for piece in numbers(rows, kind)])
    assert whole is not None
    return whole


def _round(weight: Tensor) -> QuantizedWeight:
    outputs, inputs = weight.shape
    grouped = weight.view(outputs, -1, GROUP)
    scales = (grouped.abs().amax(dim=2) / 127.0).to(torch.float16)
    divisor = scales.float()
    scaled = grouped / torch.where(divisor == 0, 1.0, divisor)[:, :, None]
    codes = scaled.round().clamp(-127, 127).to(torch.int8).view(outputs, inputs)
    return QuantizedWeight("int8", inputs, GROUP, codes, scales)


_BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34, "Q4_K": 144, "Q5_K": 176}


def _kept(rows: Tensor, kind: str) -> QuantizedWeight | None:
    """None: another type, or scales that float16 does not hold."""
    if kind not in _BLOCK_BYTES:
        return None
    blocks = rows.reshape(len(rows), -1, _BLOCK_BYTES[kind])
    match kind:
        case "Q4_0":
            codes, scales = _nibbles(blocks[..., 2:]), _floats(blocks[..., :2])
            return QuantizedWeight("int4", _inputs(codes), GROUP, pack_codes(codes.flatten(1), 4), scales.squeeze(2))
        case "Q8_0":
            codes, scales = blocks[..., 2:].contiguous().view(torch.int8), _floats(blocks[..., :2])
            return QuantizedWeight("int8", _inputs(codes), GROUP, codes.flatten(1), scales.squeeze(2))
        case "Q5_0":
            codes = _nibbles(blocks[..., 6:]) | _bits(blocks[..., 2:6]) << 4
            scales = (_floats(blocks[..., :2]).float() * 8).to(torch.float16).squeeze(2)
            return QuantizedWeight("fp6", _inputs(codes), GROUP, pack_codes(_eighths(codes).flatten(1), 6), scales)
        case "Q4_1":
            step, low = _floats(blocks[..., :2]).float(), _floats(blocks[..., 2:4]).float()
            return _affine(_nibbles(blocks[..., 4:]), step, low)
        case "Q5_1":
            step, low = _floats(blocks[..., :2]).float(), _floats(blocks[..., 2:4]).float()
            return _affine(_nibbles(blocks[..., 8:]) | _bits(blocks[..., 4:8]) << 4, step, low, bits=5)
        case "Q4_K":
            return _affine(_nibbles(_fours(blocks[..., 16:])), *_factors(blocks))
        case _:
            high = blocks[..., None, 16:48] >> torch.arange(8, dtype=torch.uint8, device=rows.device)[:, None] & 1
            low = _nibbles(_fours(blocks[..., 48:]))
            return _affine(low | high.flatten(2) << 4, *_factors(blocks), bits=5)


def _affine(codes: Tensor, step: Tensor, low: Tensor, bits: int = 4) -> QuantizedWeight | None:
    """codes [outputs, blocks, inputs], step and low float32 [outputs, blocks, groups]: `step * code + low`. Where a
    step is zero all of a group are its lowest."""
    step, low, inputs = step.flatten(1), low.flatten(1), _inputs(codes)
    is_flat = step == 0
    codes = codes.flatten(1).view(len(codes), -1, GROUP)
    if bits == 5:  # (code - 16) / 8 is an E2M3 number
        low, step = low + 16 * step, 8 * step
        codes = torch.where(is_flat[:, :, None], torch.zeros_like(codes), _eighths(codes))
    else:
        codes = torch.where(is_flat[:, :, None], torch.zeros_like(codes), codes)
    scales = torch.where(is_flat, low, step)
    zeros = torch.where(is_flat, -1.0, -low / torch.where(is_flat, 1.0, step))
    if bool(((scales != 0) & (scales.abs() < SMALLEST_NORMAL)).any()) or bool((zeros.abs() > LARGEST_ZERO).any()):
        return None
    book: Codebook = "fp6" if bits == 5 else "uint4"
    words = pack_codes(codes.view(len(codes), inputs), code_bits(book))
    return QuantizedWeight(book, inputs, GROUP, words, scales.to(torch.float16), zeros.to(torch.float16))


def _factors(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Of blocks of 256: each group's step and lowest value, of six bits times one factor of the block each."""
    packed = blocks[..., 4:16].view(*blocks.shape[:2], 3, 4)
    first, second, rest = packed.unbind(2)
    steps = torch.cat([first & 63, rest & 15 | first >> 2 & 48], dim=2)
    lows = torch.cat([second & 63, rest >> 4 | second >> 2 & 48], dim=2)
    factor, low_factor = _floats(blocks[..., :2]).float(), _floats(blocks[..., 2:4]).float()
    return factor * steps.float(), -low_factor * lows.float()


def _eighths(codes: Tensor) -> Tensor:
    """Codes of five bits as E2M3 codes of (code - 16) / 8: magnitudes up to 2 are counted in eighths."""
    return torch.where(codes >= 16, codes - 16, 16 - codes | 32)


def _nibbles(packed: Tensor) -> Tensor:
    """[outputs, blocks, (parts,) bytes] -> [outputs, blocks, inputs]: low nibbles of a part, then its high ones."""
    return torch.cat([packed & 15, packed >> 4], dim=-1).flatten(2)


def _fours(packed: Tensor) -> Tensor:
    return packed.reshape(*packed.shape[:2], 4, 32)


def _bits(packed: Tensor) -> Tensor:
    """[outputs, blocks, bytes] -> eight times as many, the lowest bit first."""
    return (packed[..., None] >> torch.arange(8, dtype=torch.uint8, device=packed.device) & 1).flatten(2)


def _floats(pairs: Tensor) -> Tensor:
    return pairs.contiguous().view(torch.float16)


def _inputs(codes: Tensor) -> int:
    return codes.shape[1] * codes.shape[2]
