"""Decides the image tokens of LLaVA-OneVision. As LLaVA-NeXT, but the tokens of many tiles are reduced to a bounded
number.
"""

from math import sqrt

import msgspec

from baton_serve.contracts.vision.family import ImageFamily
from baton_serve.contracts.vision.framewise_videos import frame_rules, pooled
from baton_serve.contracts.vision.llava import Size, best_fit, unpadded
from baton_serve.contracts.vision.media_text import Parts
from baton_serve.contracts.vision.model_files import ModelFacts


class OneVisionImages(ImageFamily, frozen=True):
    """How LLaVA-OneVision models read images: an overview of `side` x `side` tokens, and tiles, which keep at most
    `max_tiles` times as many tokens.

    transformers reads several images of one message without tiles if they are given as a nested list. Here, as in vLLM,
    each image is read by itself, so that what it becomes does not depend on the others.
    """

    grid: list[Size]
    tile: int
    side: int
    max_tiles: int
    num_dropped: int = 0

    @property
    def least(self) -> Parts:
        """Return what stands for the image with the fewest tokens: the number of tokens of the overview, which every
        image has."""
        return (self.side**2 - self.num_dropped,)

    def parts(self, *, width: int, height: int) -> Parts:
        """Return what stands for an image of this size in pixels: a single number of image tokens, without text."""
        tall, wide = best_fit(self.grid, height, width)
        rows, columns = unpadded(
            self.side * (tall // self.tile), self.side * (wide // self.tile), width=width, height=height
        )
        # The bound and the roundings are those of `pack_image_features` in transformers. Rows and columns are reduced
        # by the same factor, so that the image keeps its shape.
        ratio = sqrt(rows * columns / (self.max_tiles * self.side**2))
        if ratio > 1.1:
            rows, columns = int(rows // ratio), int(columns // ratio)
        # The overview comes first, then the tiles with one more token at the end of each of their rows.
        return (self.side**2 + rows * columns + rows - self.num_dropped,)


class _Tower(msgspec.Struct, frozen=True):
    image_size: int = 384
    patch_size: int = 14


class _Config(msgspec.Struct, frozen=True):
    vision_config: _Tower = _Tower()
    image_token_id: int | None = None
    image_token_index: int = 151646
    video_token_id: int | None = None
    video_token_index: int = 151647
    image_grid_pinpoints: list[Size] | None = None
    vision_aspect_ratio: str = "anyres_max_9"
    vision_feature_select_strategy: str = "full"


class _Images(msgspec.Struct, frozen=True):
    image_grid_pinpoints: list[Size] | None = None


def family(facts: ModelFacts) -> ImageFamily:
    """Return how a LLaVA-OneVision model whose files are `facts` reads images."""
    known = msgspec.convert(facts.config, _Config)
    edges = range(384, 2304 + 1, 384)
    stated = known.image_grid_pinpoints or msgspec.convert(facts.images, _Images).image_grid_pinpoints
    side = known.vision_config.image_size // known.vision_config.patch_size
    video_id = known.video_token_index if known.video_token_id is None else known.video_token_id
    return OneVisionImages(
        image_token_id=known.image_token_index if known.image_token_id is None else known.image_token_id,
        grid=stated or [(tall, wide) for tall in edges for wide in edges],
        tile=known.vision_config.image_size,
        video=frame_rules(facts, token_id=video_id, placeholder=video_id, tokens=pooled(side)),
        side=side,
        max_tiles=int(known.vision_aspect_ratio.removeprefix("anyres_max_")),
        num_dropped=int(known.vision_feature_select_strategy == "default"),
    )
