"""Formats of quantized checkpoints: which one config.json states, and how its tensors are decoded.

One file for each.
"""

from collections.abc import Callable, Mapping
from typing import Any

from baton_serve.engine.errors import UnsupportedModelError
from baton_serve.engine.loading.quantization.checkpoints.awq import awq
from baton_serve.engine.loading.quantization.checkpoints.bitsandbytes import bitsandbytes
from baton_serve.engine.loading.quantization.checkpoints.checkpoint_format import CheckpointFormat
from baton_serve.engine.loading.quantization.checkpoints.compressed import compressed
from baton_serve.engine.loading.quantization.checkpoints.fp8 import fp8
from baton_serve.engine.loading.quantization.checkpoints.gptq import gptq
from baton_serve.engine.loading.quantization.checkpoints.mxfp4 import mxfp4

__all__ = ["FORMATS", "CheckpointFormat", "checkpoint_format"]

FORMATS: dict[str, Callable[[Mapping[str, Any]], CheckpointFormat]] = {
    "awq": awq,
    "bitsandbytes": bitsandbytes,
    "compressed-tensors": compressed,
    "fp8": fp8,
    "gptq": gptq,
    "mxfp4": mxfp4,
}
"""Formats by the `quant_method` of config.json. A new format is one file in this folder and one entry here."""


def checkpoint_format(quantization_config: Mapping[str, Any]) -> CheckpointFormat:
    """Return the format of a quantized checkpoint, from `quantization_config` in its config.json. Raises
    `UnsupportedModelError` for an unknown format or unsupported parameters."""
    method = quantization_config.get("quant_method")
    make = FORMATS.get(str(method))
    if make is None:
        raise UnsupportedModelError(
            f"the checkpoint is quantized by {method!r}, which is not supported; supported:"
            f" {', '.join(sorted(FORMATS))}"
        )
    return make(quantization_config)
