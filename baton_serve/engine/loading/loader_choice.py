"""Chooses a model's loader: `native` for known dense decoders, else transformers, which decide its class; refuses
weights that do not fit.
"""

import json
import math
from dataclasses import replace

import torch

from baton_serve.contracts.model_path import gguf_parts, model_folder
from baton_serve.engine import device as devices
from baton_serve.engine.collectives.shard import UNSHARDED, Shard
from baton_serve.engine.collectives.stage_layers import WHOLE_PIPELINE, Stage
from baton_serve.engine.config import EngineConfig
from baton_serve.engine.errors import CapacityError
from baton_serve.engine.loading.gguf_weights import gguf_file
from baton_serve.engine.loading.native.loader import load_dense
from baton_serve.engine.model.fingerprint import versioned
from baton_serve.engine.model.loaded_model import LoadedModel, LoadProgress
from baton_serve.engine.model_folder import read_config, weight_files


def count_layers(config: EngineConfig) -> int:
    """Return the number of a decoder's layers as its config.json states it. Raises `ModelError` if the config cannot be
    read."""
    folder = model_folder(config.model)
    # In the config of an encoder with a decoder, the other names are those of the encoder.
    names = ("decoder_layers", "num_hidden_layers", "n_layer", "num_layers")
    try:
        stated = json.loads((folder / "config.json").read_text())
        text = stated.get("text_config") or stated
        found = [text[name] for name in names if isinstance(text.get(name), int)]
    except (OSError, ValueError, AttributeError):
        found = []  # `read_config` says what is wrong
    # A config may leave out what is the default of its class.
    return found[0] if found else int(read_config(folder, config).get_text_config().num_hidden_layers)


def load(
    config: EngineConfig,
    target: torch.device,
    progress: LoadProgress,
    shard: Shard = UNSHARDED,
    stage: Stage = WHOLE_PIPELINE,
) -> LoadedModel:
    """Load a model that generates text, or one rank's part of it, onto the device `target`: without transformers if
    possible. `shard` and `stage` are the part by tensor and by pipeline parallelism.

    Raises `ModelError` for broken files, `UnsupportedModelError` or `ConfigError` for a model or settings that are not
    supported, and `CapacityError` if the weights are larger than the device's memory.
    """
    try:
        model = _load(config, target, progress, shard, stage)
    except torch.OutOfMemoryError as exc:
        size = _file_bytes(config) // config.num_ranks
        raise CapacityError(_too_large(config, size, devices.memory(target).total_bytes)) from exc
    return replace(model, fingerprint=versioned(model.fingerprint, config.weights_version))


def _too_large(config: EngineConfig, num_bytes: int, total_bytes: int) -> str:
    """Return the message for weights that do not fit on a device. `num_bytes` is the size of one rank's part as it is
    stored, and `total_bytes` the memory of one device. It names settings with which they would fit."""
    # The largest step and a short KV cache need about a fifth of the device.
    usable = max(1, total_bytes * 4 // 5)
    ranks = max(config.num_ranks + 1, -(-num_bytes * config.num_ranks // usable))
    ways = ["set quantization sym_int4"] if config.rounding is None else []
    ways.append(f"divide the model over {ranks} such devices (tensor_parallel_size or pipeline_parallel_size)")
    missing = max(1, num_bytes - usable)
    ways.append(f"set cpu_offload_gb {math.ceil(config.cpu_offload_gb + missing / (1 << 30))}, which is slower")
    return (
        f"the weights of {config.model} ({num_bytes / (1 << 30):.1f} GiB for each device, as they are stored) do not"
        f" fit on a device with {total_bytes / (1 << 30):.1f} GiB: {'; or '.join(ways)}"
    )


def _file_bytes(config: EngineConfig) -> int:
    """Return the size in bytes of the files from which a model's weights are read."""
    folder, gguf = model_folder(config.model), gguf_file(config)
    files = weight_files(folder, config.load_format, config.loader.pattern) if gguf is None else gguf_parts(gguf)
    return sum(file.stat().st_size for file in files)


def _load(
    config: EngineConfig, target: torch.device, progress: LoadProgress, shard: Shard, stage: Stage
) -> LoadedModel:
    dense = load_dense(config, target, progress, stage) if shard.is_whole else None
    if dense is not None:
        return dense
    from baton_serve.engine.loading.transformers_loader import (
        load_model,  # imports transformers, which takes seconds
    )

    return load_model(config, target, progress, shard, stage)
