"""Prepares videos of the offline API: frames of the caller, or files that another process decodes."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from baton_serve.contracts.media import Clip, MediaHeader, with_header
from baton_serve.contracts.vision.framewise_videos import FrameRules
from baton_serve.contracts.vision.videos import VideoRules
from baton_serve.engine.errors import ConfigError
from baton_serve.engine.model.vision.video_reader import described

_METADATA = frozenset(
    {
        "fps", "total_num_frames", "frames_indices", "do_sample_frames", "duration", "width", "height",
        "video_backend", "original_fps",
    }
)  # fmt: skip
"""Keys of what vLLM's callers say about frames."""
_UNKNOWN_FPS = 24.0
"""Frames per second of frames without metadata, as in transformers."""


class GivenVideo(msgspec.Struct, frozen=True):
    """A video as a caller gives it: a file, or frames uint8 [count, height, width, 3] with what is known of them."""

    file: bytes = b""
    frames: Any = None
    metadata: Mapping[str, Any] = {}


def given_video(video: object) -> GivenVideo:
    """Return a video of vLLM's forms: an array [count, height, width, 3], a list of frames, a pair of one of these and
    its metadata, or the bytes of a file. Raises `ConfigError` for anything else.
    """
    if isinstance(video, bytes):
        return GivenVideo(video)
    metadata: Mapping[str, Any] = {}
    if isinstance(video, tuple) and len(video) == 2 and isinstance(video[1], Mapping):
        video, metadata = video
        if unknown := sorted(metadata.keys() - _METADATA):
            raise ConfigError(f"metadata of a video: {unknown[0]!r} is not known")
    if isinstance(video, list | tuple):
        video = np.stack([np.asarray(frame) for frame in video]) if video else None
    frames = np.asarray(video) if video is not None else np.zeros(0)
    if frames.ndim != 4 or frames.shape[-1] != 3 or not frames.size or frames.dtype != np.uint8:
        raise ConfigError(
            f"a video must have frames uint8 [count, height, width, 3], not {frames.dtype} {list(frames.shape)}"
        )
    return GivenVideo(frames=frames, metadata=metadata)


def file_of(video: GivenVideo, rules: VideoRules | FrameRules, settings: Mapping[str, Any]) -> bytes:
    """Return a video with the header that says which frames the model sees.

    `settings` are the `mm_processor_kwargs`, which `rules` have already. Raises `RequestError` or `UnfitImageError`.
    """
    if video.frames is None:
        found = described(video.file)
        indexes = rules.sample(found.num_frames, found.fps)
        clip = Clip(width=found.width, height=found.height, num_frames=found.num_frames, fps=found.fps, indexes=indexes)
        return with_header(video.file, MediaHeader(dict(settings), clip))
    count, height, width, _ = video.frames.shape
    stated = video.metadata
    fps = float(stated.get("fps") or _UNKNOWN_FPS)
    indexes, total = _indexes(stated.get("frames_indices"), count), int(stated.get("total_num_frames") or count)
    frames = video.frames
    if stated.get("frames_indices") is None:
        total = count
        if _samples(stated, settings):
            sampling = msgspec.structs.replace(rules, samples=True) if isinstance(rules, VideoRules) else rules
            indexes = sampling.sample(count, fps)
            frames = frames[indexes]
    clip = Clip(width=width, height=height, num_frames=total, fps=fps, indexes=indexes, is_raw=True)
    return with_header(np.ascontiguousarray(frames).tobytes(), MediaHeader(dict(settings), clip))


def _indexes(stated: Sequence[int] | None, count: int) -> list[int]:
    if stated is None:
        return list(range(count))
    if len(stated) != count:
        raise ConfigError(f"metadata of a video: frames_indices has {len(stated)} entries for {count} frames")
    return [int(index) for index in stated]


def _samples(stated: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    """Return whether only some of the caller's frames are seen."""
    for known in (settings, stated):
        if known.get("do_sample_frames") is not None:
            return bool(known["do_sample_frames"])
    # Without their rate it is unknown which frames are half a second apart.
    return stated.get("fps") is not None or not settings.keys().isdisjoint({"fps", "num_frames"})
