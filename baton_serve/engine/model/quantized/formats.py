"""Defines the weight formats of `--quantization` (FP8, INT8, INT4, NF4, MX), and rounds a weight to each. No
calibration data is used.

Scales of groups are bfloat16, those of whole rows and of NF4 float32. Codes are chosen for the scale as it is stored.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from baton_serve.engine.config import Fp8Dtype, Quantization
from baton_serve.engine.kernels.quantized_weights import Codebook, QuantizedWeight, code_bits, code_values, pack_codes

GROUPS = (128, 64, 32)
"""Numbers of inputs per scale that all kernels support, the largest first."""
MX_GROUP = 32
"""Group size that the MX specification prescribes."""
NF4_GROUP = 64
"""Block size of bitsandbytes' NF4. Its scales are the largest weights of the blocks, in float32."""
MX_EXPONENT_OF_LARGEST = 2  # of E2M1: 6 = 1.5 * 2 ** 2
MAX_CODE_VALUE = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0, "int8": 127.0, "int4": 7.0, "fp6": 7.5}
"""Largest value of a code, by format; scales map the largest weight of a group to it."""
FLOAT8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
ROWS_AT_ONCE = 1 << 24  # weights that are rounded together, in float32: 64 MiB per copy


@dataclass(frozen=True, slots=True)
class Scheme:
    """How weights are quantized: the format of the codes, and `group`, the number of inputs that share a scale; None:
    one scale for a whole row.
    """

    codebook: Codebook
    group: int | None

    @property
    def label(self) -> str:
        """Short name such as "int4:128", for logs and the model's fingerprint."""
        return f"{self.codebook}:{self.group or 'row'}"


def scheme(name: Quantization, *, fp8_dtype: Fp8Dtype, group_size: int) -> Scheme:
    """Return how weights are quantized for the value `name` of --quantization. `group_size` is used by int4 and fp6
    formats only. Raises `ValueError` for formats that only checkpoints have.
    """
    match name:
        case "fp8":
            return Scheme("fp8_e4m3" if fp8_dtype == "e4m3" else "fp8_e5m2", None)
        case "fp8_e4m3" | "fp8_e5m2" | "int8":
            return Scheme(name, None)
        case "sym_int4":
            return Scheme("int4", group_size)
        case "asym_int4":
            return Scheme("uint4", group_size)
        case "fp6":
            return Scheme("fp6", group_size)
        case "bitsandbytes":
            return Scheme("nf4", NF4_GROUP)
        case "mxfp4":
            return Scheme("fp4", MX_GROUP)
        case _:
            raise ValueError(f"{name} is a format of checkpoints")


def fitting_group(group: int | None, inputs: int) -> int | None:
    """Return the largest supported group size up to `group` that divides a row of `inputs` weights; None if none does.
    With `group` None (one scale for each row) it is `inputs`.
    """
    if group is None:
        return inputs
    return next((size for size in GROUPS if size <= group and inputs % size == 0), None)


def quantize(weight: Tensor, how: Scheme) -> QuantizedWeight | None:
    """Round a weight [outputs, inputs] to codes and scales, on its device. Return None if its rows cannot be divided
    into groups.
    """
    group = fitting_group(how.group, weight.shape[1])
    if group is None:
        return None
    step = max(1, ROWS_AT_ONCE // weight.shape[1])
    parts = [_round(weight[start : start + step].float(), how, group) for start in range(0, len(weight), step)]
    codes = torch.cat([part.codes.view(torch.uint8) for part in parts]).view(parts[0].codes.dtype)
    zeros = None if parts[0].zeros is None else torch.cat([part.zeros for part in parts if part.zeros is not None])
    return QuantizedWeight(how.codebook, weight.shape[1], group, codes, torch.cat([p.scales for p in parts]), zeros)


def _round(weight: Tensor, how: Scheme, group: int) -> QuantizedWeight:
    """Quantize some rows of a weight, float32 [outputs, inputs], with `group` inputs for each scale."""
    outputs, inputs = weight.shape
    grouped = weight.view(outputs, -1, group)
    zeros: Tensor | None = None
    if how.codebook == "uint4":
        scales, zeros = _asymmetric(grouped)
    else:
        scales = _scales(grouped, how)
    # A group of zeros has scale 0; its codes are 0 with any divisor.
    divisor = scales.float()
    scaled = grouped / torch.where(divisor == 0, 1.0, divisor)[:, :, None]
    if zeros is not None:
        scaled = scaled + zeros.float()[:, :, None]
    return QuantizedWeight(
        how.codebook, inputs, group, _codes(scaled.view(outputs, inputs), how.codebook), scales, zeros
    )


def _scales(grouped: Tensor, how: Scheme) -> Tensor:
    """Return the scales [outputs, groups] for a weight [outputs, groups, group], by the largest weight of each
    group.
    """
    largest = grouped.abs().amax(dim=2)
    if how.codebook == "fp4":  # scales are powers of two (OCP MX specification 1.0, section 6.3)
        exponent = torch.floor(torch.log2(largest.clamp(min=2.0**-100))) - MX_EXPONENT_OF_LARGEST
        return torch.exp2(exponent).to(torch.bfloat16)
    if how.codebook == "nf4":
        return largest
    scales = largest / MAX_CODE_VALUE[how.codebook]
    # codes -8 to 7: the one without opposite takes the largest weight, with a negative scale if needed
    if how.codebook == "int4":
        extreme = torch.gather(grouped, 2, grouped.abs().argmax(dim=2, keepdim=True)).squeeze(2)
        scales = extreme / -8.0
    return scales if how.group is None else scales.to(torch.bfloat16)


def _asymmetric(grouped: Tensor) -> tuple[Tensor, Tensor]:
    # The range includes 0, so that weights of 0 stay exactly 0.
    """Return (scales, zero points), both [outputs, groups], with which a weight [outputs, groups, group] is rounded to
    codes from 0 to 15.
    """
    low, high = grouped.amin(dim=2).clamp(max=0.0), grouped.amax(dim=2).clamp(min=0.0)
    scales = ((high - low) / 15.0).to(torch.bfloat16)
    divisor = scales.float()
    zeros = torch.round(-low / torch.where(divisor == 0, 1.0, divisor)).clamp(0, 15)
    return scales, zeros.to(torch.bfloat16)


def _codes(scaled: Tensor, codebook: Codebook) -> Tensor:
    """Return the codes of weights that were divided by their scales, [outputs, inputs], rounded and packed as the
    format stores them.
    """
    match codebook:
        case "int8":
            return scaled.round().clamp(-127, 127).to(torch.int8)
        case "fp8_e4m3" | "fp8_e5m2":
            bound = MAX_CODE_VALUE[codebook]
            return scaled.clamp(-bound, bound).to(FLOAT8[codebook])
        case "int4":
            codes = scaled.round().clamp(-8, 7) + 8
        case "uint4":
            codes = scaled.round().clamp(0, 15)
        case "nf4":
            values = torch.tensor(code_values(codebook), device=scaled.device)  # ascending, from -1 to 1
            codes = torch.bucketize(scaled, (values[1:] + values[:-1]) / 2)
        case _:
            codes = _nearest(scaled, codebook)
    return pack_codes(codes.to(torch.uint8), code_bits(codebook))


def _nearest(scaled: Tensor, codebook: Codebook) -> Tensor:
    """Return the nearest code of each number for a format with a sign bit and a magnitude, such as fp4. Ties go to the
    even code, as in hardware.
    """
    values = code_values(codebook)
    half = len(values) // 2
    positive = torch.tensor(values[:half], device=scaled.device)
    middles = (positive[1:] + positive[:-1]) / 2
    magnitude = scaled.abs()
    code = torch.bucketize(magnitude, middles)  # a tie takes the lower code
    on_tie = (code < half - 1) & (magnitude == middles[code.clamp(max=half - 2)])
    code = code + (on_tie & (code % 2 == 1))
    return code + (scaled < 0) * half
