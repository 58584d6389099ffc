"""Defines which models accept images, videos and audio, and what these become in their prompts.

Router and engine share these rules. `registry` lists the families, and each file beside it describes one. A family
needs only JSON files of the model's folder (`model_files`), so that a router can count and hash prompts without torch.
"""

from baton_serve.contracts.vision.audio_rules import SoundRules
from baton_serve.contracts.vision.embedders import READERS, TEXT_ALONE, EmbedderImages, embedder_images
from baton_serve.contracts.vision.family import ImageFamily
from baton_serve.contracts.vision.media_text import MediaText, Parts, UnfitImageError, num_embeddings
from baton_serve.contracts.vision.placeholders import expand_runs, media_spans, write_parts, write_parts_as_tokens
from baton_serve.contracts.vision.registry import (
    HEARD,
    SERVED,
    configured,
    default_template,
    image_family,
    why_unread,
)

__all__ = [
    "HEARD",
    "READERS",
    "SERVED",
    "TEXT_ALONE",
    "EmbedderImages",
    "ImageFamily",
    "MediaText",
    "Parts",
    "SoundRules",
    "UnfitImageError",
    "configured",
    "default_template",
    "embedder_images",
    "expand_runs",
    "image_family",
    "media_spans",
    "num_embeddings",
    "why_unread",
    "write_parts",
    "write_parts_as_tokens",
]
