"""Decides the frames and tokens of videos in which each frame is a picture: InternVL and LLaVA-OneVision."""

from collections.abc import Mapping, Sequence
from math import ceil

import msgspec

from baton_serve.contracts.media import MAX_VIDEO_FRAMES, Clip, float32
from baton_serve.contracts.vision.media_text import MediaText, UnfitImageError
from baton_serve.contracts.vision.model_files import ModelFacts

NUM_FRAMES = 32
"""Frames that are seen of a video if nobody states a number, as in vLLM. transformers would show all of them."""
_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""Colours of transformers' video processors, for folders that do not state them."""


class FrameRules(msgspec.Struct, frozen=True, kw_only=True):
    """How one model reads videos. With `label` each frame has a text and tokens of its own, else all are one run of
    tokens with one more at its end."""

    token_id: int
    """The token whose embeddings are replaced by those of frames."""
    placeholder: str | int
    """The text, or the token, that a chat template writes for a video."""
    tokens: int
    """Tokens of one frame."""
    height: int
    width: int
    """Size in pixels to which every frame is scaled."""
    mean: Sequence[float]
    std: Sequence[float]
    rescale_factor: float
    is_bicubic: bool
    num_frames: int | None
    fps: float | None
    label: tuple[str, str] | None = None
    """Texts before and behind the tokens of a frame; `{}` is its number."""

    @property
    def reads(self) -> frozenset[str]:
        """Return the settings of the video processor that a request may replace."""
        return frozenset({"fps", "num_frames"})

    @property
    def least_frames(self) -> int:
        """Return the fewest frames of a video."""
        return 1

    @property
    def least_text(self) -> MediaText:
        """Return the video that takes the fewest tokens."""
        return self.text_of(Clip(width=1, height=1, num_frames=1, fps=1.0, indexes=[0]))

    def sample(self, num_frames: int, fps: float) -> list[int]:
        """Return the frames that are seen of a video, by their number: from the middles of equal parts. Raises
        `UnfitImageError`."""
        count = min(NUM_FRAMES, num_frames)
        if self.num_frames is not None:
            count = self.num_frames
        elif self.fps is not None:
            count = int(num_frames / fps * self.fps)
        if not 0 < count <= min(num_frames, MAX_VIDEO_FRAMES):
            raise UnfitImageError(f"{count} frames of a video of {num_frames} are to be seen")
        # The distances are those of `torch.arange` with 32-bit floats.
        step = num_frames / count
        found = [int(float32(step / 2 + number * step)) for number in range(count)]
        return [min(index, num_frames - 1) for index in found]

    def text_of(self, clip: Clip) -> MediaText:
        """Return what the frames of a video become in a prompt."""
        count = len(clip.indexes)
        if self.label is None:
            return MediaText(parts=(count * self.tokens + 1,), token_id=self.token_id, placeholder=self.placeholder)
        before, behind = self.label
        parts: list[str | int] = []
        text = ""
        for number in range(1, count + 1):
            # The text behind a frame and that before the next one are tokenized together.
            parts += [text + before.format(number), self.tokens]
            text = f"{behind}\n"
        grids = [None] * count
        return MediaText(parts=[*parts, behind], token_id=self.token_id, placeholder=self.placeholder, grids=grids)


class _Processor(msgspec.Struct, frozen=True):
    size: Mapping[str, int | None] = {}
    do_resize: bool | None = None
    do_rescale: bool | None = None
    do_normalize: bool | None = None
    do_center_crop: bool | None = None
    rescale_factor: float = 1 / 255
    image_mean: list[float] | None = None
    image_std: list[float] | None = None
    resample: int | None = None
    fps: float | None = None
    num_frames: int | None = None


def frame_rules(
    facts: ModelFacts,
    *,
    token_id: int,
    placeholder: str | int,
    tokens: int,
    label: tuple[str, str] | None = None,
) -> FrameRules | None:
    """Return how the model with these files reads videos; None if its processor prepares frames otherwise."""
    known = msgspec.convert(facts.videos, _Processor)
    height, width = known.size.get("height", 384), known.size.get("width", 384)
    usual = (known.do_resize, known.do_rescale, known.do_normalize)
    if False in usual or known.do_center_crop or known.resample not in (None, 2, 3) or not height or not width:
        return None
    return FrameRules(
        token_id=token_id,
        placeholder=placeholder,
        tokens=tokens,
        height=height,
        width=width,
        mean=known.image_mean or _CLIP_MEAN,
        std=known.image_std or _CLIP_STD,
        rescale_factor=known.rescale_factor,
        is_bicubic=known.resample != 2,
        num_frames=known.num_frames,
        fps=known.fps,
        label=label,
    )


def pooled(side: int) -> int:
    """Return the tokens of a frame whose `side` x `side` patches are reduced to half of them in each direction."""
    return ceil(side / 2) ** 2
