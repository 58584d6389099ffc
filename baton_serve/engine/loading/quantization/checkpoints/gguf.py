"""Decodes GGUF's blocks of codes (Q4_K, Q8_0, …), and decides which types keep their codes and which are rounded to
int8.

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

from baton_serve.engine.kernels.quantized_weights import STRETCH, QuantizedWeight, concatenate, pack_codes
from baton_serve.engine.loading.quantization.checkpoints.checkpoint_format import DecodedWeight, StoredTensors

GROUP = 32
"""Number of inputs that share a scale."""
GROUPS_PER_STRETCH = STRETCH // GROUP
"""Number of groups whose codes are packed together."""
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types whose tensors are floats, and their dtypes."""
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
    """The format of quantized layers in GGUF files. Each layer is one stored tensor, named `.TYPE`, or `.TYPE/int8` if
    it is rounded to eight bits while it is loaded: uint8 [outputs, bytes of a row]."""

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
    """Return a name for the form in which layers of the GGUF type `kind` are kept in memory. Only layers with equal
    names can be joined to one matrix product."""
    return {"Q4_K": "Q4_1", "Q5_K": "Q5_1"}.get(kind, kind) if kind in _BLOCK_BYTES else ROUNDED


def numbers(rows: Tensor, kind: str) -> Iterator[Tensor]:
    """Decode rows of a quantized GGUF tensor, uint8 [outputs, bytes], of type `kind`. Yield float32 tensors [some
    outputs, inputs], some rows at a time."""
    import gguf  # an optional dependency

    used = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[used]
    step = max(1, MAX_CHUNK_ELEMENTS // (rows.shape[1] // size * block))
    for start in range(0, len(rows), step):
        piece = rows[start : start + step].cpu().numpy()
        yield torch.from_numpy(gguf.quants.dequantize(piece, used)).to(rows.device)


def _rounded(rows: Tensor, kind: str) -> QuantizedWeight:
    """Decode a layer of the GGUF type `kind`, uint8 [outputs, bytes], and round it to eight bits, for a type that no
    kernel reads."""
    whole = concatenate([_round(piece) for piece in numbers(rows, kind)])
    assert whole is not None
    return whole


def _round(weight: Tensor) -> QuantizedWeight:
    """Round rows of a weight, float32 [outputs, inputs], to eight bits with one float16 scale for each group of
    inputs."""
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
    """Return a layer of the GGUF type `kind`, uint8 [outputs, bytes], with the codes of the file. None if no kernel
    reads this type, or if float16 cannot hold its scales."""
    if kind not in _BLOCK_BYTES:
        return None
    blocks = rows.reshape(len(rows), -1, _BLOCK_BYTES[kind])
    # The layouts of blocks are the structs in ggml-common.h of llama.cpp.
    match kind:
        case "Q4_0":
            scales, inputs = _floats(blocks[..., :2]).squeeze(2), GROUP * blocks.shape[1]
            return QuantizedWeight("int4", inputs, GROUP, _words(blocks[..., 2:]), scales)
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
            return _affine_nibbles(blocks[..., 4:], step, low)
        case "Q5_1":
            step, low = _floats(blocks[..., :2]).float(), _floats(blocks[..., 2:4]).float()
            return _affine_fives(_nibbles(blocks[..., 8:]) | _bits(blocks[..., 4:8]) << 4, step, low)
        case "Q4_K":
            return _affine_nibbles(_halves(blocks[..., 16:]), *_factors(blocks))
        case _:
            high = blocks[..., None, 16:48] >> torch.arange(8, dtype=torch.uint8, device=rows.device)[:, None] & 1
            low = _nibbles(_fours(blocks[..., 48:]))
            return _affine_fives(low | high.flatten(2) << 4, *_factors(blocks))


def _words(packed: Tensor) -> Tensor:
    """Reorder 4-bit codes for the kernels. `packed` is uint8 [outputs, groups, 16]; byte `j` of a group has the codes
    of its inputs `j` and `j + 16`. Return int32 words, [outputs, words].

    Four groups form a stretch: its word `j` has byte `j` of each of them, so bytes only change places.
    """
    outputs, groups, _ = packed.shape
    padded = torch.nn.functional.pad(packed, (0, 0, 0, -groups % GROUPS_PER_STRETCH))
    turned = padded.view(outputs, -1, GROUPS_PER_STRETCH, GROUP // 2).transpose(2, 3).contiguous()
    return turned.view(torch.int32).view(outputs, -1)


def _halves(packed: Tensor) -> Tensor:
    """Reorder the 4-bit codes of GGUF blocks of 256 inputs, uint8 [outputs, blocks, 128], into groups as `_words`
    expects them, [outputs, groups, 16].

    In the file, the low halves of 32 bytes are one group, and the high halves the next.
    """
    first, second = packed.reshape(*packed.shape[:2], 4, 2, GROUP // 2).unbind(3)
    groups = torch.stack([first & 15 | second << 4, first >> 4 | second & 240], dim=3)
    return groups.view(len(packed), -1, GROUP // 2)


def _affine_nibbles(packed: Tensor, step: Tensor, low: Tensor) -> QuantizedWeight | None:
    """Make a quantized weight with values `step * code + low` from 4-bit codes in groups (see `_words`) and the groups'
    steps and lowest values. None if float16 cannot hold the scales."""
    step, low = step.flatten(1), low.flatten(1)
    if (factors := _scales(step, low)) is None:
        return None
    is_flat = step == 0
    # Rare: such a group has equal numbers.
    if bool(is_flat.any()):
        packed = torch.where(is_flat[:, :, None], 0, packed)
    words = _words(packed)
    return QuantizedWeight("uint4", GROUP * step.shape[1], GROUP, words, *factors)


def _affine_fives(codes: Tensor, step: Tensor, low: Tensor) -> QuantizedWeight | None:
    """Make a quantized weight with values `step * code + low` from 5-bit codes [outputs, blocks, inputs] and the
    groups' steps and lowest values. None if float16 cannot hold the scales."""
    step, low, inputs = step.flatten(1), low.flatten(1), _inputs(codes)
    # (code - 16) / 8 is an E2M3 number.
    if (factors := _scales(8 * step, low + 16 * step)) is None:
        return None
    grouped = _eighths(codes.flatten(1).view(len(codes), -1, GROUP))
    words = pack_codes(torch.where((step == 0)[:, :, None], 0, grouped).view(len(codes), inputs), 6)
    return QuantizedWeight("fp6", inputs, GROUP, words, *factors)


def _scales(step: Tensor, low: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return scales and zeros, float16 [outputs, groups], with which `(code - zero) * scale` equals `step * code +
    low`. None if float16 cannot hold them.

    `step` and `low` are float32 [outputs, groups]. If a step is zero, all values of the group equal `low`.
    """
    is_flat = step == 0
    # A flat group has the scale `low` and the zero -1 with codes of 0: (0 - -1) * low.
    scales = torch.where(is_flat, low, step)
    zeros = torch.where(is_flat, -1.0, -low / torch.where(is_flat, 1.0, step))
    if bool(((scales != 0) & (scales.abs() < SMALLEST_NORMAL)).any()) or bool((zeros.abs() > LARGEST_ZERO).any()):
        return None
    return scales.to(torch.float16), zeros.to(torch.float16)


def _factors(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Read the groups' steps and lowest values, each float32 [outputs, blocks, 8], from GGUF blocks of 256 inputs
    (types Q4_K and Q5_K).

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
    """Convert 5-bit codes to the E2M3 codes (a 6-bit float) of (code - 16) / 8, for which there is a kernel.

    Magnitudes up to 2 are multiples of an eighth.
    """
    return torch.where(codes >= 16, codes - 16, 16 - codes | 32)


def _nibbles(packed: Tensor) -> Tensor:
    """Unpack two 4-bit codes from each byte: [outputs, blocks, (parts,) bytes] to [outputs, blocks, inputs]. The low
    halves of all bytes of a part come first, then the high halves."""
    return torch.cat([packed & 15, packed >> 4], dim=-1).flatten(2)


def _fours(packed: Tensor) -> Tensor:
    """Divide the 128 bytes of each block into four parts: [outputs, blocks, 128] to [outputs, blocks, 4, 32]."""
    return packed.reshape(*packed.shape[:2], 4, 32)


def _bits(packed: Tensor) -> Tensor:
    """Unpack bytes [outputs, blocks, bytes] to bits [outputs, blocks, 8 * bytes], the lowest bit of a byte first."""
    return (packed[..., None] >> torch.arange(8, dtype=torch.uint8, device=packed.device) & 1).flatten(2)


def _floats(pairs: Tensor) -> Tensor:
    """Read each pair of bytes in the last dimension as a float16 number."""
    return pairs.contiguous().view(torch.float16)


def _inputs(codes: Tensor) -> int:
    """Return the number of inputs of codes [outputs, blocks, inputs of a block]."""
    return codes.shape[1] * codes.shape[2]
