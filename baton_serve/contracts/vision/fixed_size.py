"""Decides the image tokens of models that resize every image to one size, without marks: ViP-LLaVA and DeepSeek-VL."""

import msgspec

from baton_serve.contracts.vision.family import ImageFamily
from baton_serve.contracts.vision.media_text import Parts
from baton_serve.contracts.vision.model_files import ModelFacts


class FixedImages(ImageFamily, frozen=True):
    """How some models read images: the same number of tokens stands for each image, whatever its size."""

    count: int

    @property
    def is_fixed(self) -> bool:
        """Return True: the number of tokens is the same for all images."""
        return True

    def parts(self, *, width: int, height: int) -> Parts:
        """Return what stands for an image of any size: a single number of image tokens, without text."""
        return (self.count,)


class _Tower(msgspec.Struct, frozen=True):
    image_size: int = 384
    patch_size: int = 16


class _Config(msgspec.Struct, frozen=True):
    vision_config: _Tower = _Tower()
    image_token_id: int | None = None
    image_token_index: int | None = None
    image_seq_length: int | None = None


def family(facts: ModelFacts) -> ImageFamily:
    """Return how a model whose files are `facts` reads images. If its config states no number of tokens, each patch of
    an image has one token."""
    known = msgspec.convert(facts.config, _Config)
    token_id = known.image_token_index if known.image_token_id is None else known.image_token_id
    # Configs of ViP-LLaVA state the number. Those of DeepSeek-VL do not.
    count = known.image_seq_length or (known.vision_config.image_size // known.vision_config.patch_size) ** 2
    return FixedImages(image_token_id=32000 if token_id is None else token_id, count=count)
