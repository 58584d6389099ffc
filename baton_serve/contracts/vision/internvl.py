"""Decides the image tokens of InternVL 2.5 to 3.5 in transformers' form. A tile is a fixed number of tokens."""

from typing import ClassVar

import msgspec

from baton_serve.contracts.vision.family import ImageFamily
from baton_serve.contracts.vision.framewise_videos import frame_rules
from baton_serve.contracts.vision.media_text import Parts
from baton_serve.contracts.vision.model_files import ModelFacts
from baton_serve.contracts.vision.tiles import TileRules, tile_rules


class InternVLImages(ImageFamily, frozen=True):
    """How InternVL models read images: a fixed number of tokens for each tile, all in a row between a start and an end
    mark."""

    READS: ClassVar = frozenset({"min_patches", "max_patches"})

    tiles: TileRules
    tokens_per_tile: int
    start: str
    end: str

    @property
    def is_fixed(self) -> bool:
        """Return whether each image has the same number of tokens: it is not cut into tiles."""
        return not self.tiles.cuts

    @property
    def least(self) -> Parts:
        """Return what stands for an image that is one tile: the number of its tokens, between the texts of two
        marks."""
        return (self.start, self.tokens_per_tile, self.end)

    def parts(self, *, width: int, height: int) -> Parts:
        """Return what stands for an image of this size in pixels: the number of its tokens, between the texts of two
        marks."""
        return (self.start, self.tokens_per_tile * self.tiles.count(width=width, height=height), self.end)


class _Config(msgspec.Struct, frozen=True):
    image_token_id: int = 151667
    image_seq_length: int = 256


class _Tokens(msgspec.Struct, frozen=True):
    start_image_token: str = "<img>"
    end_image_token: str = "</img>"
    video_token: str = "<video>"


def family(facts: ModelFacts) -> ImageFamily:
    """Return how an InternVL model whose files are `facts` reads images."""
    known, tokens = msgspec.convert(facts.config, _Config), msgspec.convert(facts.tokenizer, _Tokens)
    return InternVLImages(
        image_token_id=known.image_token_id,
        video=frame_rules(
            facts,
            token_id=known.image_token_id,
            placeholder=tokens.video_token,
            tokens=known.image_seq_length,
            label=(f"Frame{{}}: {tokens.start_image_token}", tokens.end_image_token),
        ),
        # The processor of the whole model cuts images, whatever preprocessor_config.json says.
        processor_settings={"crop_to_patches": True},
        tiles=tile_rules(facts, cuts=True),
        tokens_per_tile=known.image_seq_length,
        start=tokens.start_image_token,
        end=tokens.end_image_token,
    )
