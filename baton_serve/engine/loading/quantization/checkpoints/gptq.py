"""Decodes GPTQ checkpoints (arXiv 2210.17323) as AutoGPTQ and GPTQModel store them.

`qweight` is int32 [inputs / codes per word, outputs], `qzeros` int32 [groups, outputs / codes per word], `scales`
[groups, outputs], `g_idx` [inputs] the group of each input. With `checkpoint_format` "gptq", zeros are stored less one.
With `desc_act`, the inputs of a group are not neighbours: the weight's columns are sorted by group, and the inputs are
reordered in the same way.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from baton_serve.engine.errors import UnsupportedModelError
from baton_serve.engine.loading.quantization.checkpoints.checkpoint_format import (
    DecodedWeight,
    StoredTensors,
    from_unsigned,
    group_of,
    one_of,
    order_of,
    unpack_words,
)


@dataclass(frozen=True, slots=True)
class Gptq:
    """The GPTQ format of quantized checkpoints. `group` is the number of inputs that share a scale; None: all inputs of
    an output."""

    bits: int
    group: int | None
    is_symmetric: bool
    zeros_offset: int
    """Number to add to a stored zero."""

    method: ClassVar[str] = "gptq"
    parts: ClassVar[tuple[str, ...]] = (".qweight", ".qzeros", ".scales", ".g_idx")
    marks: ClassVar[tuple[str, ...]] = (".qweight",)
    target: ClassVar[str] = ".weight"

    @property
    def label(self) -> str:
        return f"gptq {self.bits} bit, group {self.group or 'row'}"

    def read(self, parts: StoredTensors) -> DecodedWeight:
        codes = unpack_words(parts[".qweight"].T.contiguous(), self.bits)  # [outputs, inputs]
        stored = unpack_words(parts[".qzeros"], self.bits).T  # [outputs, groups]
        # The sum wraps around within the bits of a code, as in AutoGPTQ.
        zeros = (stored.int() + self.zeros_offset) & ((1 << self.bits) - 1)
        scales = parts[".scales"].T.contiguous()  # [outputs, groups]
        order = order_of(parts.get(".g_idx"), codes.shape[1], self.group)
        if order is not None:
            codes = codes[:, order]
        # With all zeros in the middle, the symmetric kernel can be used, which is faster.
        is_centred = self.is_symmetric and bool((zeros == 1 << self.bits - 1).all())
        kept = None if is_centred else zeros[: len(scales)].contiguous()
        return DecodedWeight(from_unsigned(codes, scales, kept, bits=self.bits, group=self.group), order)


def gptq(config: Mapping[str, Any]) -> Gptq:
    """Return the GPTQ format with the parameters in `config`, the `quantization_config` of config.json. Raises
    `UnsupportedModelError` for parameters that are not supported."""
    bits = one_of(config, "bits", (4, 8), "gptq")
    layout = one_of(config, "checkpoint_format", ("gptq", "gptq_v2"), "gptq", default="gptq")
    if config.get("is_marlin_format"):
        raise UnsupportedModelError("the checkpoint is quantized by gptq in Marlin's layout; supported: gptq, gptq_v2")
    # Entries that begin with "-:" leave layers out; others give them settings of their own.
    if others := [name for name in config.get("dynamic") or {} if not name.startswith("-:")]:
        raise UnsupportedModelError(
            f"the checkpoint is quantized by gptq with settings of their own for some layers ({others[0]}); supported:"
            " one setting for all, and layers left out"
        )
    offset = 1 if layout == "gptq" else 0
    return Gptq(bits, group_of(config, "gptq"), is_symmetric=bool(config.get("sym", True)), zeros_offset=offset)
