"""Decodes bitsandbytes checkpoints: four bits (NF4, FP4) and eight, as its tools and transformers save them.

Four bits: `weight` is uint8 with two codes per byte, the first in the high bits, over all rows one after another.
`weight.absmax` are the scales of blocks of codes. With double quantization they are bytes: each is an index into
`weight.nested_quant_map`, multiplied by the `weight.nested_absmax` of its block, plus an offset.
`weight.quant_state.bitsandbytes__nf4` is a JSON text.

Eight bits (LLM.int8): `weight` is int8 [outputs, inputs] and `SCB` the largest absolute value of each output, float32.
`weight_format` is 0 for this order of the codes; others were made for single GPUs.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from baton_serve.engine.kernels.quantized_weights import Codebook, QuantizedWeight, code_values, pack_codes
from baton_serve.engine.loading.quantization.checkpoints.checkpoint_format import DecodedWeight, StoredTensors, one_of
from baton_serve.engine.loading.quantization.checkpoints.fp8 import spread

STATES: dict[str, Codebook] = {
    ".weight.quant_state.bitsandbytes__nf4": "nf4",
    ".weight.quant_state.bitsandbytes__fp4": "bnb_fp4",
}
"""Codebooks by the name of the tensor with the state, which also marks a quantized layer."""


@dataclass(frozen=True, slots=True)
class BitsAndBytes:
    """The 4-bit format of bitsandbytes in quantized checkpoints; `kind` is nf4 or fp4."""

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


@dataclass(frozen=True, slots=True)
class BitsAndBytes8:
    """The 8-bit format of bitsandbytes in quantized checkpoints. Activations are not rounded here, so
    `llm_int8_threshold` is not needed."""

    method: ClassVar[str] = "bitsandbytes"
    label: ClassVar[str] = "bitsandbytes int8"
    parts: ClassVar[tuple[str, ...]] = (".weight", ".SCB", ".weight_format")
    marks: ClassVar[tuple[str, ...]] = (".SCB",)
    target: ClassVar[str] = ".weight"

    def read(self, parts: StoredTensors) -> DecodedWeight:
        weight, order = parts[".weight"], parts.get(".weight_format")
        if weight.dtype != torch.int8 or (order is not None and int(order)):
            raise ValueError(f"codes of {weight.dtype} in the order {order}; supported is torch.int8 by rows")
        outputs, inputs = weight.shape
        scales, group = spread(parts[".SCB"].float().view(-1, 1) / 127, outputs, inputs, None)
        return DecodedWeight(QuantizedWeight("int8", inputs, group, weight.contiguous(), scales))


def bitsandbytes(config: Mapping[str, Any]) -> BitsAndBytes | BitsAndBytes8:
    """Return the bitsandbytes format with the parameters in `config`, the `quantization_config` of config.json. Raises
    `UnsupportedModelError` for parameters that are not supported."""
    if not config.get("load_in_4bit"):
        return BitsAndBytes8()
    return BitsAndBytes(one_of(config, "bnb_4bit_quant_type", ("nf4", "fp4"), "bitsandbytes", default="fp4"))


def _scales(parts: StoredTensors, state: Mapping[str, Any]) -> Tensor:
    """Return the scales of one layer, float32, one for each block of weights. They may be quantized themselves; `state`
    is the layer's stored JSON state."""
    absmax = parts[".weight.absmax"]
    if ".weight.nested_absmax" not in parts:
        return absmax.float()
    outer = parts[".weight.nested_absmax"].float().repeat_interleave(int(state["nested_blocksize"]))[: len(absmax)]
    return parts[".weight.nested_quant_map"].float()[absmax.int()] * outer + float(state["nested_offset"])
