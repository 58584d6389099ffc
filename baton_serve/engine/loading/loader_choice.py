"""Loads a model: dense decoders by this project's own code, all others through transformers."""

from dataclasses import replace

import torch

from baton_serve.engine.collectives.shard import UNSHARDED, Shard
from baton_serve.engine.config import EngineConfig
from baton_serve.engine.loading.fingerprint import versioned
from baton_serve.engine.loading.native.loader import load_dense
from baton_serve.engine.model.loaded_model import LoadedModel, LoadProgress


def load(config: EngineConfig, target: torch.device, progress: LoadProgress, shard: Shard = UNSHARDED) -> LoadedModel:
    """Load a model, or a rank's part of it. Raises `ModelError` (`UnsupportedModelError`) or `ConfigError`."""
    model = _load(config, target, progress, shard)
    return replace(model, fingerprint=versioned(model.fingerprint, config.weights_version))


def _load(config: EngineConfig, target: torch.device, progress: LoadProgress, shard: Shard) -> LoadedModel:
    dense = load_dense(config, target, progress) if shard.is_whole else None
    if dense is not None:
        return dense
    from baton_serve.engine.loading.model_loader import (
        load_model,  # imports transformers, which takes seconds
    )

    return load_model(config, target, progress, shard)
