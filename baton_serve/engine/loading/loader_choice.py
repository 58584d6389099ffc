"""Loads a model: dense decoders by this project's own code, all others through transformers."""

import json
from dataclasses import replace

import torch

from baton_serve.contracts.model_path import model_folder
from baton_serve.engine.collectives.shard import UNSHARDED, Shard
from baton_serve.engine.collectives.stage import WHOLE_PIPELINE, Stage
from baton_serve.engine.config import EngineConfig
from baton_serve.engine.loading.native.loader import load_dense
from baton_serve.engine.model.fingerprint import versioned
from baton_serve.engine.model.loaded_model import LoadedModel, LoadProgress
from baton_serve.engine.model_folder import read_config


def count_layers(config: EngineConfig) -> int:
    """Return the number of a decoder's layers as its config.json states it. Raises `ModelError` if the config cannot be
    read."""
    folder = model_folder(config.model)
    names = ("num_hidden_layers", "n_layer", "num_layers")
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

    Raises `ModelError` for broken files, and `UnsupportedModelError` or `ConfigError` for a model or settings that are
    not supported.
    """
    model = _load(config, target, progress, shard, stage)
    return replace(model, fingerprint=versioned(model.fingerprint, config.weights_version))


def _load(
    config: EngineConfig, target: torch.device, progress: LoadProgress, shard: Shard, stage: Stage
) -> LoadedModel:
    dense = load_dense(config, target, progress, stage) if shard.is_whole else None
    if dense is not None:
        return dense
    from baton_serve.engine.loading.model_loader import (
        load_model,  # imports transformers, which takes seconds
    )

    return load_model(config, target, progress, shard, stage)
