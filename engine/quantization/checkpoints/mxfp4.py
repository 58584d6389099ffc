"""gpt-oss's experts in MXFP4 (OCP Microscaling specification 1.0), which become numbers while loading.

`…_blocks` uint8 [experts, outputs, inputs / 32, 16]: two E2M1 codes a byte, the earlier in the low bits; `…_scales`
uint8 [experts, outputs, inputs / 32]: exponents of two, 127 more. The model multiplies by [experts, inputs, outputs].
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from engine.kernels.quantized import code_values
from engine.quantization.checkpoints.layout import Made, Parts

BIAS = 127


@dataclass(frozen=True, slots=True)
class Mxfp4:
    method: ClassVar[str] = "mxfp4"
    parts: ClassVar[tuple[str, ...]] = ("_blocks", "_scales")
    marks: ClassVar[tuple[str, ...]] = ("_blocks",)
    target: ClassVar[str] = ""

    @property
    def label(self) -> str:
        return "mxfp4"

    def read(self, parts: Parts) -> Made:
        blocks, scales = parts["_blocks"], parts["_scales"]
        if blocks.dim() != 4 or blocks.shape[:3] != scales.shape:
            raise ValueError(f"blocks of shape {list(blocks.shape)} with scales of shape {list(scales.shape)}")
        return Made(torch.stack([_numbers(*expert) for expert in zip(blocks, scales, strict=True)]))


def mxfp4(config: Mapping[str, Any]) -> Mxfp4:
    return Mxfp4()


def _numbers(blocks: Tensor, scales: Tensor) -> Tensor:
    """Of one expert: bfloat16 [inputs, outputs], exactly."""
    codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
    table = torch.tensor(code_values("fp4"), dtype=torch.bfloat16, device=blocks.device)
    powers = torch.exp2(scales.float() - BIAS).to(torch.bfloat16)
    return (table[codes.int()] * powers[..., None]).flatten(1).T.contiguous()
