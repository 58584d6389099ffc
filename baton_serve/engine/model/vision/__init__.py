"""Images in prompts: files to pixels (`image_reader`), pixels to embeddings (`tower`), embeddings to rows of a step
(`prompt_images`).

Instances that compute no prompts load only the decoder (`text_part`). `image_types` has the types that the engine uses.
"""

import logging

import torch
from torch import Tensor

from baton_serve.contracts.model_path import model_folder
from baton_serve.contracts.vision import image_family, why_unread
from baton_serve.contracts.vision.model_files import ModelFacts
from baton_serve.engine.config import EngineConfig
from baton_serve.engine.model.loaded_model import LoadedModel
from baton_serve.engine.model.vision.image_types import PromptImages
from baton_serve.engine.model.vision.text_part import family_of

__all__ = ["load_images", "no_images"]

logger = logging.getLogger(__name__)


def load_images(
    config: EngineConfig, target: torch.device, dtype: torch.dtype, *, max_image_tokens: int
) -> PromptImages | None:
    """Load the model's vision tower to the device `target`. Return None if the model has none that is supported, or
    with a pipeline. With several ranks, only rank 0 loads it.

    `max_image_tokens` is the largest number of tokens of an image that a single step must compute. Raises `ModelError`
    or `ConfigError`.
    """
    folder = model_folder(config.model)
    if reason := why_unread(ModelFacts.of(folder)):
        logger.warning("images and audio are not read, only text: %s", reason)
        return None
    if family_of(folder) is not None and config.pipeline_parallel_size > 1:
        logger.warning("images need an instance of one stage: this one accepts text only")
        return None
    from baton_serve.engine.model.vision.prompt_images import (
        VisionPromptImages as Images,  # imports Pillow and transformers, which only models with a tower need
    )
    from baton_serve.engine.model.vision.tower import load_tower

    tower = load_tower(config, target, dtype)
    return None if tower is None else Images(tower, max_image_tokens)


def no_images(config: EngineConfig, model: LoadedModel, device: torch.device) -> Tensor | None:
    """Return an empty tensor [0, width] like the image embeddings that captured graphs accept. Return None if this
    instance reads no images, or if their tokens attend to each other in both directions.

    All ranks get the same width, though only rank 0 loads the tower.
    """
    facts = ModelFacts.of(model_folder(config.model))
    family = None if not config.reads_images or why_unread(facts) else image_family(facts)
    if family is None or family.attends_both_ways or config.pipeline_parallel_size > 1:
        return None
    vision = facts.config.get("vision_config")
    layers = vision.get("deepstack_visual_indexes") if isinstance(vision, dict) else None
    return torch.empty((0, model.hidden_size * (1 + len(layers or ()))), dtype=model.dtype, device=device)
