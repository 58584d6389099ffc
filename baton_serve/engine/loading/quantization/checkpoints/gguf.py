"""GGUF's blocks of codes (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md) as weights of this engine.

A block of 32 inputs, or an eighth of a block of 256, is a group with a scale and, in some types, a lowest value. Codes
of four, five and eight bits are kept: five bits as E2M3 codes, which contain all eighths from -2 to 2. Q4_0, Q5_0 and
Q8_0 keep exactly their values. In the other types a scale is the product of two factors and is rounded to float16,
whose error is smaller than bfloat16's. All types not listed here are rounded to eight bits in groups of 32.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from baton_serve.engine.kernels.quantized import Codebook, QuantizedWeight, code_bits, concatenate, pack_codes
from baton_serve.engine.loading.quantization.checkpoints.layout import DecodedWeight, StoredTensors

GROUP = 32
"""Number of inputs that share a scale."""
FLOATS = ("F64", "F32", "F16", "BF16")
"""Types whose tensors are floats."""
ROUNDED = "/int8"
"""Suffix of a part that is to be rounded to eight bits, whatever its type."""
MAX_CHUNK_ELEMENTS = 1 << 24
"""Number of weights that are converted to float32 together."""
SMALLEST_NORMAL, LARGEST_ZERO = 2.0**-14, 32768.0
"""Smallest scale that float16 stores with full precision, and largest zero that is used.

Weights beyond these limits are rounded to eight bits instead.
"""


@dataclass(frozen=True, slots=True)
class Gguf:
    """The GGUF format. A layer has one part, `.TYPE` or `.TYPE/int8`: uint8 [outputs, bytes of a row]."""

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
    """Return a name that is equal for types whose layers can be joined."""
    return {"Q4_K": "Q4_1", "Q5_K": "Q5_1"}.get(kind, kind) if kind in _BLOCK_BYTES else ROUNDED


def numbers(rows: Tensor, kind: str) -> Iterator[Tensor]:
    """Return iterators over the values of rows of blocks, uint8 [outputs, bytes]: float32, some rows at a time."""
    import gguf  # an optional dependency

    used = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[used]
    step = max(1, MAX_CHUNK_ELEMENTS // (rows.shape[1] // size * block))
    for start in range(0, len(rows), step):
        piece = rows[start : start + step].cpu().numpy()
        yield torch.from_numpy(gguf.quants.dequantize(piece, used)).to(rows.device)


def _rounded(rows: Tensor, kind: str) -> QuantizedWeight:
    """Round the values of a layer to eight bits."""
    whole = concatenate([_round(piece) for piece in numbers(rows, kind)])
    assert whole is not None
    return whole


def _round(weight: Tensor) -> QuantizedWeight:
    """Round some rows, given in float32, to eight bits with a float16 scale for each group."""
    outputs, inputs = weight.shape
    grouped = weight.view(outputs, -1, GROUP)
    scales = (grouped.abs().amax(dim=2) / 127.0).to(torch.float16)
    divisor = scales.float()
    scaled = grouped / torch.where(divisor == 0, 1.0, divisor)[:, :, None]
    codes = scaled.round().clamp(-127, 127).to(torch.int8).view(outputs, inputs)
    return QuantizedWeight("int8", inputs, GROUP, codes, scales)


_BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34, "Q4_K": 144, "Q5_K": 176}
"""Bytes of a block, by the types whose codes are kept."""


def _kept(rows: Tensor, kind: str) -> QuantizedWeight | None:
    """Return a weight with the file's codes; None for other types, or if float16 cannot hold the scales."""
    if kind not in _BLOCK_BYTES:
        return None
    blocks = rows.reshape(len(rows), -1, _BLOCK_BYTES[kind])
    # The layouts of blocks are the structs in ggml-common.h of llama.cpp.
    match kind:
        case "Q4_0":
            codes, scales = _nibbles(blocks[..., 2:]), _floats(blocks[..., :2])
            return QuantizedWeight("int4", _inputs(codes), GROUP, pack_codes(codes.flatten(1), 4), scales.squeeze(2))
        case "Q8_0":
            codes, scales = blocks[..., 2:].contiguous().view(torch.int8), _floats(blocks[..., :2])
            return QuantizedWeight("int8", _inputs(codes), GROUP, codes.flatten(1), scales.squeeze(2))
        case "Q5_0":
            codes = _nibbles(blocks[..., 6:]) | _bits(blocks[..., 2:6]) << 4
            # E2M3 codes count in eighths, so the scale is eight times larger.
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
    """Return a weight of values `step * code + low`, or None if float16 cannot hold its scales.

    `codes` are [outputs, blocks, inputs]; `step` and `low` are float32 [outputs, blocks, groups]. If a step is zero,
    all values of the group are its lowest.
    """
    step, low, inputs = step.flatten(1), low.flatten(1), _inputs(codes)
    is_flat = step == 0
    codes = codes.flatten(1).view(len(codes), -1, GROUP)
    if bits == 5:  # (code - 16) / 8 is an E2M3 number
        low, step = low + 16 * step, 8 * step
        codes = torch.where(is_flat[:, :, None], torch.zeros_like(codes), _eighths(codes))
    else:
        codes = torch.where(is_flat[:, :, None], torch.zeros_like(codes), codes)
    # A flat group has the scale `low` and the zero -1 with codes of 0: (0 - -1) * low.
    scales = torch.where(is_flat, low, step)
    zeros = torch.where(is_flat, -1.0, -low / torch.where(is_flat, 1.0, step))
    if bool(((scales != 0) & (scales.abs() < SMALLEST_NORMAL)).any()) or bool((zeros.abs() > LARGEST_ZERO).any()):
        return None
    book: Codebook = "fp6" if bits == 5 else "uint4"
    words = pack_codes(codes.view(len(codes), inputs), code_bits(book))
    return QuantizedWeight(book, inputs, GROUP, words, scales.to(torch.float16), zeros.to(torch.float16))


def _factors(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the step and the lowest value of each group, [outputs, blocks, 8], of blocks of 256 inputs.

    Each is a number of six bits, times a factor of its block. The six bits are spread over twelve bytes as in ggml.
    """
    packed = blocks[..., 4:16].view(*blocks.shape[:2], 3, 4)
    first, second, rest = packed.unbind(2)
    steps = torch.cat([first & 63, rest & 15 | first >> 2 & 48], dim=2)
    lows = torch.cat([second & 63, rest >> 4 | second >> 2 & 48], dim=2)
    # ggml subtracts the lowest value.
    factor, low_factor = _floats(blocks[..., :2]).float(), _floats(blocks[..., 2:4]).float()
    return factor * steps.float(), -low_factor * lows.float()


def _eighths(codes: Tensor) -> Tensor:
    """Convert codes of five bits to the E2M3 codes of (code - 16) / 8.

    Magnitudes up to 2 are multiples of an eighth.
    """
    return torch.where(codes >= 16, codes - 16, 16 - codes | 32)


def _nibbles(packed: Tensor) -> Tensor:
    """Unpack [outputs, blocks, (parts,) bytes] to [outputs, blocks, inputs]: the low nibbles of a part, then its high
    ones.
    """
    return torch.cat([packed & 15, packed >> 4], dim=-1).flatten(2)


def _fours(packed: Tensor) -> Tensor:
    """Divide the bytes of a block into its four parts."""
    return packed.reshape(*packed.shape[:2], 4, 32)


def _bits(packed: Tensor) -> Tensor:
    """Unpack [outputs, blocks, bytes] to bits, the lowest bit first."""
    return (packed[..., None] >> torch.arange(8, dtype=torch.uint8, device=packed.device) & 1).flatten(2)


def _floats(pairs: Tensor) -> Tensor:
    """Read bytes as float16."""
    return pairs.contiguous().view(torch.float16)


def _inputs(codes: Tensor) -> int:
    """Return the number of inputs of unpacked codes."""
    return codes.shape[1] * codes.shape[2]
