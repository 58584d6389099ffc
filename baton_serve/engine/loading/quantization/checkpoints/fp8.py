"""Decodes FP8 checkpoints (`quant_method` "fp8"): `weight` float8 [outputs, inputs] and a scale.

`weight_scale_inv` [outputs / 128, inputs / 128] multiplies blocks, as in DeepSeek-V3 (arXiv 2412.19437, section 3.3). A
single number, in this tensor or in `weight_scale`, multiplies all. Scales of activations are ignored: activations keep
the model's dtype.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from baton_serve.engine.errors import UnsupportedModelError
from baton_serve.engine.kernels.quantized_weights import Codebook, QuantizedWeight
from baton_serve.engine.loading.quantization.checkpoints.checkpoint_format import DecodedWeight, StoredTensors, one_of

FLOAT8: dict[torch.dtype, Codebook] = {torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2"}


@dataclass(frozen=True, slots=True)
class Fp8:
    """The fp8 format of quantized checkpoints: float8 weights with one scale for each block, or one for the whole
    layer."""

    block: tuple[int, int] | None
    """Outputs and inputs that share a scale; None: one scale for a layer."""

    method: ClassVar[str] = "fp8"
    parts: ClassVar[tuple[str, ...]] = (
        ".weight", ".weight_scale_inv", ".weight_scale", ".input_scale", ".activation_scale",
    )  # fmt: skip
    marks: ClassVar[tuple[str, ...]] = (".weight_scale_inv", ".weight_scale")
    target: ClassVar[str] = ".weight"

    @property
    def label(self) -> str:
        return "fp8 per tensor" if self.block is None else f"fp8 in blocks of {self.block[0]} x {self.block[1]}"

    def read(self, parts: StoredTensors) -> DecodedWeight:
        scales = parts.get(".weight_scale_inv", parts.get(".weight_scale"))
        if scales is None:
            raise KeyError(".weight_scale_inv")
        return DecodedWeight(float8(parts[".weight"], scales.float(), self.block))


def fp8(config: Mapping[str, Any]) -> Fp8:
    """Return the fp8 format with the parameters in `config`, the `quantization_config` of config.json. Raises
    `UnsupportedModelError` for parameters that are not supported."""
    one_of(config, "fmt", ("e4m3", "float8_e4m3fn", "e5m2"), "fp8", default="e4m3")
    one_of(config, "activation_scheme", ("dynamic", "static"), "fp8", default="dynamic")
    block = config.get("weight_block_size")
    if block is None:
        return Fp8(None)
    return Fp8(block_of(block, "fp8"))


def block_of(stated: Any, method: str) -> tuple[int, int]:
    """Return the outputs and inputs of a block that shares a scale, from the value `stated` in a config. Raises
    `UnsupportedModelError` if it is not two positive integers. `method` names the format in the message."""
    if not isinstance(stated, (list, tuple)) or len(stated) != 2 or not all(type(n) is int and n > 0 for n in stated):
        raise UnsupportedModelError(
            f"the checkpoint is quantized by {method} in blocks of {stated!r}; they must be two positive numbers"
        )
    return stated[0], stated[1]


def float8(codes: Tensor, scales: Tensor, block: tuple[int, int] | None) -> QuantizedWeight:
    """Make a quantized weight of float8 codes [outputs, inputs] and their scales: one number, [outputs, 1], or one for
    each block. `block` are the outputs and inputs of a block; None: without blocks.

    Raises `ValueError` if codes and scales do not fit each other.
    """
    if codes.dtype not in FLOAT8 or codes.dim() != 2:
        raise ValueError(f"a weight of {codes.dtype} and shape {list(codes.shape)}, not a matrix of float8")
    per_row, group = spread(scales, codes.shape[0], codes.shape[1], block)
    return QuantizedWeight(FLOAT8[codes.dtype], codes.shape[1], group, codes.contiguous(), per_row)


def spread(scales: Tensor, outputs: int, inputs: int, block: tuple[int, int] | None) -> tuple[Tensor, int]:
    """Repeat scales that several rows share, so that each row has its own. Return the scales [outputs, groups], and the
    number of inputs that share a scale. `block` are the outputs and inputs that share a scale in `scales`; None: one
    scale for each row, or for all.

    Raises `ValueError` for another number of scales.
    """
    if scales.numel() == 1:
        return scales.reshape(1, 1).expand(outputs, 1).contiguous(), inputs
    rows, columns = (1, inputs) if block is None else (block[0], min(block[1], inputs))
    expected = (-(-outputs // rows), -(-inputs // columns))
    if scales.numel() != expected[0] * expected[1]:
        raise ValueError(f"scales of shape {list(scales.shape)}, not {list(expected)}")
    # Kernels have scales per row, so each row of a block gets the block's scale.
    return scales.reshape(expected).repeat_interleave(rows, dim=0)[:outputs].contiguous(), columns
