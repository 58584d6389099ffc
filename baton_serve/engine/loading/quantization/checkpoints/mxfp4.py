"""Decodes MXFP4 checkpoints: experts of gpt-oss (OCP Microscaling specification 1.0). Their codes are kept.

`…_blocks` is uint8 [experts, outputs, inputs / 32, 16] with two E2M1 codes per byte, the first in the low bits.
`…_scales` is uint8 [experts, outputs, inputs / 32], exponents of two plus 127. The model itself has [experts, inputs,
outputs].
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from baton_serve.engine.kernels.quantized_weights import QuantizedWeight, StackedWeight, pack_codes
from baton_serve.engine.loading.quantization.checkpoints.checkpoint_format import DecodedWeight, StoredTensors

BIAS = 127
"""Added to the exponents where they are stored."""
GROUP = 32
"""Number of inputs that share a scale."""


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """The MXFP4 format of quantized checkpoints, as of gpt-oss. It has no parameters."""

    method: ClassVar[str] = "mxfp4"
    parts: ClassVar[tuple[str, ...]] = ("_blocks", "_scales")
    marks: ClassVar[tuple[str, ...]] = ("_blocks",)
    target: ClassVar[str] = ""

    @property
    def label(self) -> str:
        return "mxfp4"

    def read(self, parts: StoredTensors) -> DecodedWeight:
        blocks, scales = parts["_blocks"], parts["_scales"]
        if blocks.dim() != 4 or blocks.shape[:3] != scales.shape:
            raise ValueError(f"blocks of shape {list(blocks.shape)} with scales of shape {list(scales.shape)}")
        experts, outputs, groups, _ = blocks.shape
        codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).view(experts * outputs, groups * GROUP)
        # Powers of two are exact in bfloat16.
        powers = torch.exp2(scales.float() - BIAS).to(torch.bfloat16).view(experts * outputs, groups)
        return DecodedWeight(
            StackedWeight(QuantizedWeight("fp4", groups * GROUP, GROUP, pack_codes(codes, 4), powers), experts)
        )


def mxfp4(config: Mapping[str, Any]) -> Mxfp4:
    """Return the MXFP4 format. Its `quantization_config` has nothing to choose."""
    return Mxfp4()
