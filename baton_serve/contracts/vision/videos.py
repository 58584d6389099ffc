"""Decides how Qwen-VL and GLM-V read videos: size and groups of frames, and their tokens in a prompt.

Frames are scaled to one size and read by the tower in groups. Qwen2-VL and Qwen2.5-VL write all of a video as one grid.
Later models write the time of each group beside it.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from baton_serve.contracts.media import MAX_VIDEO_FRAMES, Clip, TokenGrid, float32
from baton_serve.contracts.vision.media_text import MediaText, UnfitImageError
from baton_serve.contracts.vision.model_files import ModelFacts
from baton_serve.contracts.vision.scaling import scaled_grid
from baton_serve.contracts.vision.video_sampling import SAMPLERS, Sampling

Stamps = Literal["", "qwen3", "glm4v", "glm46v"]
"""How the time of a group of frames is written; empty: not at all."""

_READS: Mapping[str, frozenset[str]] = {
    "even": frozenset({"fps", "min_frames", "max_frames"}),
    "spread": frozenset({"fps", "min_frames", "max_frames"}),
    "timed": frozenset({"fps", "max_duration"}),
    "stepped": frozenset(),
}
"""Settings of sampling that a request may replace, by rule."""


class VideoRules(msgspec.Struct, frozen=True, kw_only=True):
    """How one model reads videos."""

    token_id: int
    """The token whose embeddings are replaced by those of frames."""
    placeholder_id: int
    """The token that a chat template writes for a video."""
    side: int
    """Width and height in pixels that one token shows."""
    patch: int
    """Width and height in pixels of what the tower reads as one; a token joins several of them."""
    mean: Sequence[float]
    std: Sequence[float]
    rescale_factor: float
    is_bicubic: bool
    """How frames are scaled; else bilinear. Colours are multiplied by `rescale_factor` and normalized after that."""
    min_pixels: int
    max_pixels: int
    counts_all_frames: bool
    """True if the limits of pixels are those of all frames together, False if they are those of one frame."""
    frame_tokens: int | None = None
    """With `caps_frames`: tokens of one frame, or of all frames together (`counts_all_frames` is False)."""
    sampler: str
    sampling: Sampling
    samples: bool = True
    """False: all frames are seen."""
    stamps: Stamps = ""
    tokens_per_second: float | None = None
    """Positions of one second; None: each group of frames is one position behind the last."""

    @property
    def reads(self) -> frozenset[str]:
        """Return the settings of the video processor that a request may replace."""
        return _READS[self.sampler] | {"min_pixels", "max_pixels", "size", "num_frames", "do_sample_frames"}

    @property
    def least_frames(self) -> int:
        """Return the fewest frames of a video, which are as many as the tower reads together."""
        return self.sampling.temporal

    @property
    def least_text(self) -> MediaText:
        """Return the video that takes the fewest tokens."""
        group = self.sampling.temporal
        return self.text_of(Clip(width=1, height=1, num_frames=group, fps=1.0, indexes=list(range(group))))

    def sample(self, num_frames: int, fps: float) -> list[int]:
        """Return the frames that are seen of a video, by their number. Raises `UnfitImageError`."""
        wanted = self.sampling.num_frames or self.sampling.max_frames
        if wanted > MAX_VIDEO_FRAMES or (not self.samples and num_frames > MAX_VIDEO_FRAMES):
            raise UnfitImageError(f"at most {MAX_VIDEO_FRAMES} frames of a video can be seen")
        if not self.samples:
            return list(range(num_frames))
        found = SAMPLERS[self.sampler](num_frames, fps, self.sampling)
        if not found or len(found) > MAX_VIDEO_FRAMES:
            raise UnfitImageError(f"{len(found)} frames of a video are to be seen, at most {MAX_VIDEO_FRAMES} can be")
        return found

    def grid(self, clip: Clip) -> TokenGrid:
        """Return the grid of all frames together. Raises `UnfitImageError`."""
        count, group = len(clip.indexes), self.sampling.temporal
        high = self._most_pixels(count)
        if not self.counts_all_frames:
            rows, columns = scaled_grid(clip.width, clip.height, self.side, (self.min_pixels, high))
        elif count < group:
            raise UnfitImageError(f"a video needs at least {group} frames")
        else:
            # The number of frames is rounded as the sides are: a half to the even number.
            rounded = round(count / group) * group
            frames = (count, rounded)
            rows, columns = scaled_grid(
                clip.width, clip.height, self.side, (self.min_pixels, high), frames=frames, enlarges_first=True
            )
        return TokenGrid(-(-count // group), rows, columns, self._frame_step(clip))

    def _most_pixels(self, count: int) -> int:
        if self.frame_tokens is None:
            return self.max_pixels
        least = int(self.min_pixels * 1.05)
        tokens = self.frame_tokens * self.side**2
        if self.counts_all_frames:
            return max(min(tokens, self.max_pixels // count), least) * count
        return max(min(self.max_pixels, int(tokens * 0.9) * self.sampling.temporal // count), least)

    def _frame_step(self, clip: Clip) -> float:
        if self.tokens_per_second is None:
            return 1.0
        seen_fps = len(clip.indexes) / clip.num_frames * clip.fps
        # transformers multiplies numbers of 32 bits, and a product that is rounded otherwise moves positions by one.
        return float32(self.tokens_per_second * float32(self.sampling.temporal / seen_fps))

    def text_of(self, clip: Clip) -> MediaText:
        """Return what the frames of a video become in a prompt. Raises `UnfitImageError`."""
        grid = self.grid(clip)
        if not self.stamps:
            count = grid.frames * grid.rows * grid.columns
            return MediaText(parts=(count,), token_id=self.token_id, placeholder=self.placeholder_id, grids=(grid,))
        before, behind = _MARKS[self.stamps]
        parts: list[str | int] = []
        text = ""
        for second in self._seconds(clip, grid.frames):
            # The text behind a group and that before the next one are tokenized together.
            parts += [text + before.format(second), grid.rows * grid.columns]
            # A time is cut to whole seconds where the format has no digits behind the point.
            text = behind.format(int(second) if self.stamps == "glm4v" else second)
        one = TokenGrid(1, grid.rows, grid.columns)
        return MediaText(
            parts=[*parts, text],
            token_id=self.token_id,
            placeholder=self.placeholder_id,
            around=("<|vision_start|>", "<|vision_end|>") if self.stamps == "qwen3" else ("", ""),
            grids=[one] * grid.frames,
        )

    def _seconds(self, clip: Clip, count: int) -> Sequence[float]:
        """Return the time of each group of frames, in seconds."""
        group = self.sampling.temporal
        times = [index / clip.fps for index in clip.indexes]
        times += times[-1:] * (-len(times) % group)
        starts = range(0, count * group, group)
        if self.stamps == "qwen3":
            return [(times[start] + times[start + group - 1]) / 2 for start in starts]
        return [times[start] for start in starts]


_MARKS: Mapping[Stamps, tuple[str, str]] = {
    "qwen3": ("<{:.1f} seconds><|vision_start|>", "<|vision_end|>"),
    "glm4v": ("<|begin_of_image|>", "<|end_of_image|>{}"),
    "glm46v": ("<|begin_of_image|>", "<|end_of_image|>{:.1f} seconds"),
}
"""The texts before and behind each group of frames, with its time."""


class _Tower(msgspec.Struct, frozen=True):
    tokens_per_second: float = 4.0


class _Config(msgspec.Struct, frozen=True):
    model_type: str = ""
    image_token_id: int | None = None
    video_token_id: int | None = None
    vision_config: _Tower = _Tower()


class _Processor(msgspec.Struct, frozen=True):
    patch_size: int = 14
    merge_size: int = 2
    temporal_patch_size: int = 2
    do_resize: bool | None = None
    do_rescale: bool | None = None
    do_normalize: bool | None = None
    rescale_factor: float = 1 / 255
    image_mean: list[float] | None = None
    image_std: list[float] | None = None
    resample: int | None = None
    do_sample_frames: bool | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    size: Mapping[str, int | None] = {}
    fps: float | None = None
    num_frames: int | None = None
    min_frames: int | None = None
    max_frames: int | None = None
    max_duration: float | None = None
    cap_pixels_per_frame: bool | None = None
    max_video_tokens: int | None = None


class _Defaults(msgspec.Struct, frozen=True, kw_only=True):
    """The values of transformers' video processor of a family, for folders that do not state them."""

    limits: tuple[int, int]
    sampler: str
    stamps: Stamps = ""
    max_video_tokens: int = 768
    patch_size: int = 14
    mean: Sequence[float] = (0.48145466, 0.4578275, 0.40821073)
    std: Sequence[float] = (0.26862954, 0.26130258, 0.27577711)


_QWEN2 = _Defaults(limits=(128 * 28 * 28, 768 * 28 * 28), sampler="even", max_video_tokens=128_000)
_QWEN3 = _Defaults(
    limits=(128 * 32 * 32, 768 * 32 * 32),
    sampler="spread",
    stamps="qwen3",
    patch_size=16,
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
)
_GLM4 = _Defaults(limits=(112 * 112, 28 * 28 * 2 * 30_000), sampler="timed", stamps="glm4v")
_KINDS: Mapping[str, _Defaults] = {
    "qwen2_vl": _QWEN2,
    "qwen2_5_vl": _QWEN2,
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": _QWEN3,
    "qwen3_5": _QWEN3,
    "qwen3_5_moe": _QWEN3,
    "glm4v": _GLM4,
    "glm4v_moe": _GLM4,
    "glm46v": _Defaults(limits=_GLM4.limits, sampler="stepped", stamps="glm46v"),
}
_VIDEO_TOKENS = {"qwen3_5": 248057, "qwen3_5_moe": 248057, "glm4v": 151344, "glm46v": 151344, "glm4v_moe": 151364}
"""Video tokens of transformers' configs, for configs that do not state them."""
_FPS = 2.0
"""Frames per second that are seen of a video if the folder states nothing. Qwen2-VL and Qwen2.5-VL were trained with
it, although transformers' processor would show them every frame."""
_RESAMPLE = {None: True, 2: False, 3: True}
"""Whether scaling is bicubic, by Pillow's number of the method."""


def video_rules(facts: ModelFacts, image_token_id: int) -> VideoRules | None:
    """Return how a model with this image token reads videos, or None if it does not."""
    known = msgspec.convert(facts.config, _Config)
    kind = _KINDS.get(known.model_type)
    if kind is None:
        return None
    processor = msgspec.convert({"patch_size": kind.patch_size, **facts.videos}, _Processor)
    usual = (processor.do_resize, processor.do_rescale, processor.do_normalize)
    if False in usual or processor.resample not in _RESAMPLE:
        return None
    token_id = known.video_token_id or _VIDEO_TOKENS.get(known.model_type, 151656)
    low, high = (
        stated or processor.size.get(edge) or limit
        for stated, edge, limit in zip(
            (processor.min_pixels, processor.max_pixels), ("shortest_edge", "longest_edge"), kind.limits, strict=True
        )
    )
    cap = (processor.max_video_tokens or kind.max_video_tokens) if processor.cap_pixels_per_frame else None
    return VideoRules(
        token_id=image_token_id if kind.stamps.startswith("glm") else token_id,
        placeholder_id=token_id,
        side=processor.patch_size * processor.merge_size,
        patch=processor.patch_size,
        mean=processor.image_mean or kind.mean,
        std=processor.image_std or kind.std,
        rescale_factor=processor.rescale_factor,
        is_bicubic=_RESAMPLE[processor.resample],
        min_pixels=low,
        max_pixels=high,
        counts_all_frames=bool(kind.stamps),
        frame_tokens=None if kind.stamps.startswith("glm") else cap,
        sampler=kind.sampler,
        sampling=_sampling(processor),
        # transformers shows Qwen2-VL every frame, although it was trained with frames that are apart.
        samples=processor.do_sample_frames is not False or not kind.stamps,
        stamps=kind.stamps,
        tokens_per_second=known.vision_config.tokens_per_second if known.model_type == "qwen2_5_vl" else None,
    )


def _sampling(processor: _Processor) -> Sampling:
    usual = Sampling(fps=_FPS)
    return Sampling(
        fps=processor.fps or usual.fps,
        num_frames=processor.num_frames,
        min_frames=processor.min_frames or usual.min_frames,
        max_frames=processor.max_frames or usual.max_frames,
        max_duration=processor.max_duration or usual.max_duration,
        temporal=processor.temporal_patch_size,
    )
