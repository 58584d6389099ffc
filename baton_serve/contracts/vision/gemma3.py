"""Gemma 3. All images have one size; their tokens attend to each other in both directions."""

import msgspec

from baton_serve.contracts.vision.facts import ModelFacts
from baton_serve.contracts.vision.family import ImageFamily
from baton_serve.contracts.vision.media_text import Parts


class Gemma3Images(ImageFamily, frozen=True):
    """How Gemma 3 models read images: the same number of tokens, between two marks, stands for each image."""

    parts_of_all: Parts

    @property
    def is_fixed(self) -> bool:
        """Return True: all images have the same number of tokens. Pan and scan, which adds crops of wide images, is off
        as in transformers."""
        return True

    def parts(self, *, width: int, height: int) -> Parts:
        """Return what stands for an image of any size: the number of its tokens, between the texts of two marks."""
        return self.parts_of_all


class _Config(msgspec.Struct, frozen=True):
    mm_tokens_per_image: int = 256
    image_token_id: int | None = None
    image_token_index: int = 262144


class _Tokens(msgspec.Struct, frozen=True):
    boi_token: str = "<start_of_image>"
    eoi_token: str = "<end_of_image>"


def family(facts: ModelFacts) -> ImageFamily:
    """Return how a Gemma 3 model whose files are `facts` reads images."""
    known, tokens = msgspec.convert(facts.config, _Config), msgspec.convert(facts.tokenizer, _Tokens)
    return Gemma3Images(
        image_token_id=known.image_token_index if known.image_token_id is None else known.image_token_id,
        # The chat template writes this mark for an image, and the parts contain it again.
        placeholder=tokens.boi_token,
        attends_both_ways=True,
        parts_of_all=(f"\n\n{tokens.boi_token}", known.mm_tokens_per_image, f"{tokens.eoi_token}\n\n"),
    )
