"""Defines the interface of a family of models that read images: what an image of some size becomes in a prompt."""

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from baton_serve.contracts.media import Clip, Embedded, TokenGrid
from baton_serve.contracts.vision.audio_rules import SoundRules
from baton_serve.contracts.vision.framewise_videos import FrameRules
from baton_serve.contracts.vision.media_text import MediaText, Parts, UnfitImageError
from baton_serve.contracts.vision.model_files import ModelFacts
from baton_serve.contracts.vision.videos import VideoRules


class ImageFamily(msgspec.Struct, frozen=True, kw_only=True):
    """How a model reads images: which texts and tokens stand for an image of some size in the prompt. Each subclass is
    for one family of models; objects are immutable and made from the files of a model folder."""

    READS: ClassVar[frozenset[str]] = frozenset()
    """Settings of the image processor that a request may replace (`mm_processor_kwargs`)."""

    image_token_id: int
    """The token whose embedding is replaced by one of an image."""
    placeholder: str = ""
    """The text that the chat template writes for an image, if that is not the image token."""
    processor_settings: Mapping[str, Any] = {}
    """Arguments of the model's image processor, as transformers' processor of the whole model gives them."""

    chat_template: str = ""
    """The chat template of models whose folders have none; empty for families whose folders have one."""
    attends_both_ways: bool = False
    """True if the tokens of an image attend to each other in both directions. Then one step computes all of them."""
    video: VideoRules | FrameRules | None = None
    """How the model reads videos; None if it does not, or not in a way that is supported."""
    audio: SoundRules | None = None
    """How the model reads audio; None if it does not, or not in a way that is supported."""
    facts: ModelFacts | None = None
    """The files that this value was made from, so that it can be made again with other settings."""

    @property
    def reads_images(self) -> bool:
        """Return whether the model reads images. Some read audio alone."""
        return True

    @property
    def is_fixed(self) -> bool:
        """Return whether all images have the same number of tokens, so that a prompt's tokens can be counted without
        its images."""
        return False

    @property
    def least(self) -> Parts:
        """Return what stands for the image with the fewest tokens. A prompt that is too long even with such images is
        refused before its images are read."""
        return self.parts(width=1, height=1)

    def parts(self, *, width: int, height: int) -> Parts:
        """Return what stands for an image of this size in pixels: texts, and numbers of image tokens. Raises
        `UnfitImageError` if the model cannot read such an image."""
        raise NotImplementedError

    def token_grid(self, *, width: int, height: int) -> TokenGrid | None:
        """Return the rows and columns that the tokens of an image of this size in pixels form, for models whose
        positions have three parts (M-RoPE). None: they have positions like text."""
        return None

    def text_of(self, *, width: int, height: int, clip: Clip | None = None) -> MediaText:
        """Return what an image of this size, or the frames of a video, become in a prompt. Raises `UnfitImageError`."""
        if clip is not None:
            if self.video is None:
                raise UnfitImageError("this model does not read videos here")
            return self.video.text_of(clip)
        grid = self.token_grid(width=width, height=height)
        return self._written(self.parts(width=width, height=height), grid)

    def text_of_rows(self, rows: Embedded) -> MediaText:
        """Return what embeddings that a client has computed become in a prompt. Raises `UnfitImageError`."""
        grid = self.grid_of_rows(rows)
        return self._written(self.parts_of_rows(rows), grid)

    def parts_of_rows(self, rows: Embedded) -> Parts:
        """Return what stands for these embeddings: texts, and numbers of image tokens. Raises `UnfitImageError`."""
        # Families whose images have several runs of tokens have rules of their own.
        (count,) = (part for part in self.least if isinstance(part, int))
        if self.is_fixed and count != rows.num_rows:
            raise UnfitImageError(f"an image of this model has {count} embeddings, not {rows.num_rows}")
        return [rows.num_rows if isinstance(part, int) else part for part in self.least]

    def grid_of_rows(self, rows: Embedded) -> TokenGrid | None:
        """Return the grid that these embeddings form, None for positions like text. Raises `UnfitImageError`."""
        if rows.grid is not None:
            raise UnfitImageError("image_grid_thw is for models whose tokens form a grid: leave it out")
        return None

    def least_text(self, *, is_video: bool = False) -> MediaText:
        """Return the same for the image or video that takes the fewest tokens."""
        return self.video.least_text if is_video and self.video is not None else self._written(self.least, None)

    def _written(self, parts: Parts, grid: TokenGrid | None) -> MediaText:
        placeholder = self.placeholder or self.image_token_id
        return MediaText(parts=parts, token_id=self.image_token_id, placeholder=placeholder, grids=(grid,))

    def framed(self, text: str) -> str:
        """Return the text of a prompt, with a placeholder for each image, with what the model's processor adds to it;
        for most families nothing."""
        return text

    def call_settings(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arguments of the image processor for images that are read with `settings` (see `READS`).

        This value has been made with them already (`configured`).
        """
        return {**self.processor_settings, **settings}
