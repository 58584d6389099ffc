"""Lists the names of devices, dtypes, `--load-format` and quantization methods that flags accept."""

from typing import Literal

DeviceName = Literal["auto", "cpu", "cuda", "xpu"]
DtypeName = Literal["auto", "float32", "float16", "bfloat16"]
LoadFormat = Literal[
    "auto", "safetensors", "pt", "npcache", "sharded_state", "bitsandbytes", "gguf", "dummy",
]  # fmt: skip
_STREAMED = "use safetensors, whose files several threads read: `baton pull` downloads a model"
REFUSED_LOAD_FORMATS = {
    "tensorizer": "convert the model to safetensors, which needs no library of its own",
    "runai_streamer": _STREAMED,
    "runai_streamer_sharded": _STREAMED,
    "fastsafetensors": _STREAMED,
    "mistral": "use auto with the Hugging Face files of the same repository (config.json and model*.safetensors)",
}
"""Formats of vLLM that are not read, with what to use instead."""
