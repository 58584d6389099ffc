"""Images on their way into a decoder: files to pixels (`reader`), pixels to embeddings (`tower`), embeddings to the
rows of a step (`prompt`). Where prompts are not read, only the decoder is loaded (`decoder`)."""

import torch

from engine.config import EngineConfig
from engine.vision.given import PromptImages

__all__ = ["load_images"]


def load_images(config: EngineConfig, target: torch.device, dtype: torch.dtype) -> PromptImages | None:
    """None: the model reads no images, or several ranks compute it. Raises `engine.errors`."""
    from engine.vision.prompt import PromptImages as Images  # Pillow and transformers, that only these need
    from engine.vision.tower import load_tower

    tower = load_tower(config, target, dtype)
    return None if tower is None else Images(tower)
