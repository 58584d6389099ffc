"""Decodes checkpoints of compressed-tensors: `pack-quantized`, `int-quantized`, `float-quantized`, `naive-quantized`.

Packed weights: `weight_packed` int32 [outputs, inputs / codes per word] of codes from 0, `weight_scale` [outputs,
groups], `weight_zero_point` int32 packed along outputs, `weight_shape`, `weight_g_idx`. Other weights are int8 or
float8 in `weight`. Activations keep the model's dtype; `input_activations` is ignored.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from baton_serve.engine.errors import UnsupportedModelError
from baton_serve.engine.kernels.quantized_weights import QuantizedWeight
from baton_serve.engine.loading.quantization.checkpoints.checkpoint_format import (
    DecodedWeight,
    StoredTensors,
    from_unsigned,
    group_of,
    one_of,
    order_of,
    unpack_words,
)
from baton_serve.engine.loading.quantization.checkpoints.fp8 import block_of, float8, spread

METHOD = "compressed-tensors"
PACKED = "pack-quantized"
FORMATS = (PACKED, "int-quantized", "float-quantized", "naive-quantized")
"""Formats that are supported."""
STRATEGIES = ("tensor", "channel", "group", "block")
"""Sets of weights that share a scale."""


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    """The format compressed-tensors of quantized checkpoints, with the parameters for all its layers.

    At most one of `group` (inputs that share a scale) and `block` (outputs and inputs that share one) is set; with
    neither, each row or the whole layer has one scale.
    """

    form: str
    bits: int
    is_symmetric: bool
    group: int | None
    block: tuple[int, int] | None

    method: ClassVar[str] = METHOD
    parts: ClassVar[tuple[str, ...]] = (
        ".weight", ".weight_packed", ".weight_scale", ".weight_zero_point", ".weight_shape", ".weight_g_idx",
        ".input_scale", ".input_zero_point", ".output_scale", ".output_zero_point",
    )  # fmt: skip
    marks: ClassVar[tuple[str, ...]] = (".weight_scale",)
    target: ClassVar[str] = ".weight"

    @property
    def label(self) -> str:
        return f"{METHOD} {self.form} {self.bits} bit, group {self.group or self.block or 'row'}"

    def read(self, parts: StoredTensors) -> DecodedWeight:
        scales = parts[".weight_scale"]
        if ".weight_packed" in parts:
            return self._packed(parts, scales)
        weight, zeros = parts[".weight"], parts.get(".weight_zero_point")
        if weight.is_floating_point():
            return DecodedWeight(float8(weight, scales.float(), self._shared()))
        return self._integers(weight, scales, zeros)

    def _shared(self) -> tuple[int, int] | None:
        """Return how many outputs and inputs share a scale; None: all inputs of a row, or the whole layer."""
        return self.block if self.group is None else (1, self.group)

    def _packed(self, parts: StoredTensors, scales: Tensor) -> DecodedWeight:
        """Decode a layer of integers that are packed into int32 words. `parts` are its stored tensors, by the ends of
        their names."""
        outputs, inputs = (int(size) for size in parts[".weight_shape"])
        codes = unpack_words(parts[".weight_packed"], self.bits)[:outputs, :inputs].contiguous()
        scales = spread(scales, outputs, inputs, None)[0] if scales.numel() == 1 else scales.contiguous()
        zeros: Tensor | None = None
        if not self.is_symmetric:
            zeros = unpack_words(parts[".weight_zero_point"].T.contiguous(), self.bits).T[:outputs].contiguous()
        # Activation reordering of GPTQ: the inputs of a group are not neighbours.
        order = order_of(parts.get(".weight_g_idx"), inputs, self.group)
        if order is not None:
            codes = codes[:, order]
        return DecodedWeight(from_unsigned(codes, scales, zeros, bits=self.bits, group=self.group), order)

    def _integers(self, weight: Tensor, scales: Tensor, zeros: Tensor | None) -> DecodedWeight:
        """Decode a layer with int8 weights [outputs, inputs], their `scales`, and their `zeros` (None: all are 0).
        Raises `ValueError` for weights of another dtype."""
        if weight.dtype != torch.int8:
            raise ValueError(f"a weight of {weight.dtype}, not int8")
        outputs, inputs = weight.shape
        per_row, group = spread(scales, outputs, inputs, self._shared())
        # Most symmetric checkpoints store zeros of 0, which need no shift.
        shifts: Tensor | None = None
        if zeros is not None and bool(zeros.any()):
            shifts = spread(zeros, outputs, inputs, self._shared())[0].to(per_row.dtype)
        return DecodedWeight(QuantizedWeight("int8", inputs, group, weight.contiguous(), per_row, shifts))


def compressed(config: Mapping[str, Any]) -> CompressedTensors:
    """Return the format compressed-tensors with the parameters in `config`, the `quantization_config` of config.json.
    Raises `UnsupportedModelError` for parameters that are not supported, or if layers have different ones."""
    groups = list((config.get("config_groups") or {}).values())
    if not groups:
        raise UnsupportedModelError(f"the checkpoint is quantized by {METHOD} without config_groups")
    for key in ("transform_config", "sparsity_config"):
        stated = config.get(key) or {}
        if stated and stated.get("format") != "dense":
            raise UnsupportedModelError(
                f"the checkpoint is quantized by {METHOD} with a {key}, which is not supported; supported: dense"
                f" weights in {', '.join(FORMATS)}"
            )
    schemes = [_scheme(group, config) for group in groups]
    if len(set(schemes)) > 1:
        raise UnsupportedModelError(
            f"the checkpoint is quantized by {METHOD} in several ways ({', '.join(sorted(s.label for s in schemes))});"
            " supported: one way for all layers, and layers left out"
        )
    return schemes[0]


def _scheme(group: Mapping[str, Any], config: Mapping[str, Any]) -> CompressedTensors:
    """Return the parameters of one entry of `config_groups` in `quantization_config`. Raises `UnsupportedModelError`
    for a format that is not supported."""
    form = one_of({"format": group.get("format") or config.get("format")}, "format", FORMATS, METHOD)
    weights = group.get("weights") or {}
    kind = one_of(weights, "type", ("float",) if form == "float-quantized" else ("int", "float"), METHOD)
    bits = one_of(weights, "num_bits", (4, 8) if form == PACKED and kind == "int" else (8,), METHOD)
    strategy = one_of(weights, "strategy", STRATEGIES, METHOD)
    return CompressedTensors(
        form,
        bits,
        is_symmetric=bool(weights.get("symmetric", True)),
        group=group_of(weights, METHOD) if strategy == "group" else None,
        block=block_of(weights.get("block_structure"), METHOD) if strategy == "block" else None,
    )
