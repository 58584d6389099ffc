"""Defines which models accept images, and what an image becomes in their prompts. Router and engine share these rules.

`registry` lists the families, and each file beside it describes one. A family needs only JSON files of the model's
folder (`facts`), so that a router can count and hash prompts without torch.
"""

from baton_serve.contracts.vision.family import ImageFamily, Parts, UnfitImageError
from baton_serve.contracts.vision.placeholders import expand_runs, num_embeddings, write_parts, write_parts_as_tokens
from baton_serve.contracts.vision.registry import SERVED, image_family, why_unread

__all__ = [
    "SERVED",
    "ImageFamily",
    "Parts",
    "UnfitImageError",
    "expand_runs",
    "image_family",
    "num_embeddings",
    "why_unread",
    "write_parts",
    "write_parts_as_tokens",
]
