"""Four-bit weights of bitsandbytes (NF4 and its own FP4), as its tools and transformers save them.

`weight` is uint8 with two codes per byte, the first in the high bits, over all rows one after another. `weight.absmax`
are the scales of blocks of codes. With double quantization they are bytes: each is an index into
`weight.nested_quant_map`, multiplied by the `weight.nested_absmax` of its block, plus an offset.
`weight.quant_state.bitsandbytes__nf4` is a JSON text.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from baton_serve.engine.errors import UnsupportedModelError
from baton_serve.engine.kernels.quantized import Codebook, QuantizedWeight, code_values, pack_codes
from baton_serve.engine.loading.quantization.checkpoints.layout import DecodedWeight, StoredTensors, one_of

STATES: dict[str, Codebook] = {
    ".weight.quant_state.bitsandbytes__nf4": "nf4",
    ".weight.quant_state.bitsandbytes__fp4": "bnb_fp4",
}
"""Codebooks by the name of the tensor with the state, which also marks a quantized layer."""


@dataclass(frozen=True, slots=True)
class BitsAndBytes:
    """The bitsandbytes format; `kind` is nf4 or fp4."""

    kind: str

    method: ClassVar[str] = "bitsandbytes"
    parts: ClassVar[tuple[str, ...]] = (
        ".weight", ".weight.absmax", ".weight.quant_map", ".weight.nested_absmax", ".weight.nested_quant_map", *STATES,
    )  # fmt: skip
    marks: ClassVar[tuple[str, ...]] = tuple(STATES)
    target: ClassVar[str] = ".weight"

    @property
    def label(self) -> str:
        return f"bitsandbytes {self.kind}"

    def read(self, parts: StoredTensors) -> DecodedWeight:
        end, codebook = next((end, codebook) for end, codebook in STATES.items() if end in parts)
        # The JSON text is stored as a tensor of bytes.
        state = json.loads(bytes(parts[end].cpu().tolist()))
        outputs, inputs = (int(size) for size in state["shape"])
        block = int(state["blocksize"])
        packed = parts[".weight"].view(torch.uint8).flatten()
        codes = torch.stack([packed >> 4, packed & 15], dim=1).flatten()[: outputs * inputs].view(outputs, inputs)
        scales = _scales(parts, state)
        # Blocks that go over the end of a row cannot be groups of a row: such weights become floats.
        if inputs % block == 0:
            weight = QuantizedWeight(codebook, inputs, block, pack_codes(codes, 4), scales.view(outputs, -1))
            return DecodedWeight(weight)
        values = torch.tensor(code_values(codebook), device=codes.device)[codes.int()].flatten()
        return DecodedWeight((values * scales.repeat_interleave(block)[: len(values)]).view(outputs, inputs))


def bitsandbytes(config: Mapping[str, Any]) -> BitsAndBytes:
    """Return the format that a config states. Raises `UnsupportedModelError`."""
    if not config.get("load_in_4bit"):
        raise UnsupportedModelError(
            "the checkpoint is quantized by bitsandbytes in 8 bits; supported: 4 bits (nf4, fp4)"
        )
    return BitsAndBytes(one_of(config, "bnb_4bit_quant_type", ("nf4", "fp4"), "bitsandbytes", default="fp4"))


def _scales(parts: StoredTensors, state: Mapping[str, Any]) -> Tensor:
    """Return the scales, float32, one per block."""
    absmax = parts[".weight.absmax"]
    if ".weight.nested_absmax" not in parts:
        return absmax.float()
    outer = parts[".weight.nested_absmax"].float().repeat_interleave(int(state["nested_blocksize"]))[: len(absmax)]
    return parts[".weight.nested_quant_map"].float()[absmax.int()] * outer + float(state["nested_offset"])
