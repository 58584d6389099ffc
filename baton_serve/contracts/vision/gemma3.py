"""Decides the image tokens of Gemma 3, also of the crops of pan and scan. All images have one size; their tokens attend
to each other in both directions.

With pan and scan, which requests ask for, crops of a wide or tall image follow it, each with tokens of its own.
"""

from collections.abc import Mapping
from math import ceil, floor
from typing import Any, ClassVar

import msgspec

from baton_serve.contracts.media import Clip
from baton_serve.contracts.vision.family import ImageFamily
from baton_serve.contracts.vision.media_text import MediaText, Parts, UnfitImageError
from baton_serve.contracts.vision.model_files import ModelFacts


class _Crops(msgspec.Struct, frozen=True):
    """Settings of pan and scan. The defaults are those of transformers' processor."""

    do_pan_and_scan: bool = False
    pan_and_scan_min_crop_size: int = 256
    pan_and_scan_max_num_crops: int = 4
    pan_and_scan_min_ratio_to_activate: float = 1.2

    def count(self, *, width: int, height: int) -> int:
        """Return how many crops follow an image of this size in pixels. Raises `UnfitImageError` if one would be
        empty."""
        long, short = max(width, height), min(width, height)
        if not self.do_pan_and_scan or long / short < self.pan_and_scan_min_ratio_to_activate:
            return 0
        # The steps and their roundings are those of transformers' processor.
        wanted = min(long // self.pan_and_scan_min_crop_size, floor(long / short + 0.5))
        found = min(max(wanted, 2), self.pan_and_scan_max_num_crops)
        side = ceil(long / found)
        if min(side, short) < self.pan_and_scan_min_crop_size:
            return 0
        if (found - 1) * side >= long:
            raise UnfitImageError(f"an image of {width} x {height} pixels is too small for {found} crops")
        return found


class Gemma3Images(ImageFamily, frozen=True):
    """How Gemma 3 models read images: the same number of tokens, between two marks, stands for each image and crop."""

    READS: ClassVar = frozenset(_Crops.__struct_fields__)

    parts_of_all: Parts
    crops: _Crops = _Crops()

    @property
    def is_fixed(self) -> bool:
        """Return whether all images have the same number of tokens, which crops would add to."""
        return not self.crops.do_pan_and_scan

    @property
    def least(self) -> Parts:
        """Return what stands for an image without crops."""
        return self.parts_of_all

    def parts(self, *, width: int, height: int) -> Parts:
        """Return what stands for an image of this size in pixels: the number of its tokens, between the texts of two
        marks, and the same for each crop behind it. Raises `UnfitImageError` if a crop would be empty."""
        count = self.crops.count(width=width, height=height)
        if not count:
            return self.parts_of_all
        (begin, tokens, end) = self.parts_of_all
        found: list[str | int] = [f"Here is the original image {begin}", tokens]
        for number in range(count):
            between = " " if number else " and here are some crops to help you see better "
            found += [f"{end}{between}{begin}", tokens]
        return [*found, end]

    def text_of(self, *, width: int, height: int, clip: Clip | None = None) -> MediaText:
        """Return what an image of this size becomes in a prompt. The tokens of a crop see each other only, so that each
        crop has a span of its own."""
        text = super().text_of(width=width, height=height, clip=clip)
        return msgspec.structs.replace(text, grids=(None,) * sum(isinstance(part, int) for part in text.parts))

    def call_settings(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the settings of pan and scan as the processor takes them in calls: all of them."""
        return {**self.processor_settings, **(msgspec.structs.asdict(self.crops) if settings else {})}


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
        # transformers ignores the values in the folder of the model.
        crops=msgspec.convert(facts.settings, _Crops),
    )
