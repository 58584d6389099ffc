"""Decodes AWQ checkpoints (arXiv 2306.00978) in AutoAWQ's GEMM layout.

`qweight` is int32 [inputs, outputs / 8] and `qzeros` int32 [groups, outputs / 8]; nibble `i` of a word belongs to
output `ORDER[i]` of its eight. `scales` are [groups, outputs].
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from baton_serve.engine.loading.quantization.checkpoints.checkpoint_format import (
    DecodedWeight,
    StoredTensors,
    from_unsigned,
    group_of,
    one_of,
    unpack_words,
)

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Outputs of a word, from its lowest nibble; kernels of AutoAWQ unpack two at a time."""


@dataclass(frozen=True, slots=True)
class Awq:
    """The AWQ format of quantized checkpoints. `group` is the number of inputs that share a scale; None: all inputs of
    an output."""

    group: int | None
    has_zeros: bool

    method: ClassVar[str] = "awq"
    parts: ClassVar[tuple[str, ...]] = (".qweight", ".qzeros", ".scales")
    marks: ClassVar[tuple[str, ...]] = (".qweight",)
    target: ClassVar[str] = ".weight"

    @property
    def label(self) -> str:
        return f"awq 4 bit, group {self.group or 'row'}"

    def read(self, parts: StoredTensors) -> DecodedWeight:
        codes = _outputs_in_order(parts[".qweight"])  # [outputs, inputs]
        scales = parts[".scales"].T.contiguous()
        zeros = _outputs_in_order(parts[".qzeros"]) if self.has_zeros else None
        return DecodedWeight(from_unsigned(codes, scales, zeros, bits=4, group=self.group))


def awq(config: Mapping[str, Any]) -> Awq:
    """Return the AWQ format with the parameters in `config`, the `quantization_config` of config.json. Raises
    `UnsupportedModelError` for parameters that are not supported."""
    one_of(config, "bits", (4,), "awq", default=4)
    one_of({"version": str(config.get("version", "gemm")).lower()}, "version", ("gemm",), "awq")
    group = group_of({"group_size": config.get("group_size", 128)}, "awq")
    return Awq(group, has_zeros=bool(config.get("zero_point", True)))


def _outputs_in_order(words: Tensor) -> Tensor:
    """Unpack AWQ's 4-bit codes, int32 [rows, outputs / 8], to uint8 [outputs, rows]. AWQ stores the eight outputs of a
    word in an order of its own; here they are in order."""
    nibbles = unpack_words(words, 4).view(len(words), -1, 8)
    place = [ORDER.index(output) for output in range(8)]
    return nibbles[:, :, place].reshape(len(words), -1).T.contiguous()
