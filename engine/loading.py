"""A model's folder becomes a loaded model: dense decoders by our own reading, all others through transformers."""

import torch

from engine.config import EngineConfig
from engine.model import LoadedModel, Progress
from engine.native.loader import load_dense
from engine.parallel.shard import WHOLE, Shard


def load(config: EngineConfig, target: torch.device, progress: Progress, shard: Shard = WHOLE) -> LoadedModel:
    """Raises `ModelError` (`UnsupportedModelError`) or `ConfigError`."""
    dense = load_dense(config, target, progress) if shard.is_whole else None
    if dense is not None:
        return dense
    from engine.model_loader import load_model  # transformers: seconds that only other models should cost

    return load_model(config, target, progress, shard)
