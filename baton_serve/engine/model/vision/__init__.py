"""Images on their way into a decoder: files to pixels (`reader`), pixels to embeddings (`tower`), embeddings to the
rows of a step (`prompt`). Where prompts are not read, only the decoder is loaded (`decoder`)."""

import logging

import torch

from baton_serve.contracts.model_path import model_folder
from baton_serve.engine.config import EngineConfig
from baton_serve.engine.model.vision.decoder import reads_images
from baton_serve.engine.model.vision.placeholders import PromptImages

__all__ = ["load_images"]

logger = logging.getLogger(__name__)


def load_images(config: EngineConfig, target: torch.device, dtype: torch.dtype) -> PromptImages | None:
    """None: the model reads no images, or several ranks compute it. Raises `engine.errors`."""
    if reads_images(model_folder(config.model)) and config.tensor_parallel_size > 1:
        logger.warning("images are read by instances of one rank: this one has several, and reads text alone")
        return None
    from baton_serve.engine.model.vision.prompt import (
        VisionPromptImages as Images,  # Pillow and transformers, that only these need
    )
    from baton_serve.engine.model.vision.tower import load_tower

    tower = load_tower(config, target, dtype)
    return None if tower is None else Images(tower)
