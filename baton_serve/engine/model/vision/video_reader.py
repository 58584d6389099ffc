"""Decodes videos in a process of their own, and prepares their frames for the vision tower. Callable from any thread.

The steps are those of transformers' video processors, which need torchvision; here torch alone does the same.
"""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Timer
from typing import IO

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from baton_serve.child_command import module_command
from baton_serve.contracts.media import Clip, TokenGrid, VideoFile, VideoTask
from baton_serve.contracts.vision.framewise_videos import FrameRules
from baton_serve.contracts.vision.videos import VideoRules
from baton_serve.engine.errors import RequestError

MAX_PIXELS = 1 << 26
"""Largest frame in pixels, before it is resized. The router has a lower limit; this one is for callers without."""
MAX_VIDEO_S = 6 * 3600.0
"""Longest video in seconds, for such callers."""
_WALL_S = 120.0
"""Longest time for one file, in seconds. Processor time is bounded too."""
_MODULE = "baton_serve.video_decoder"
_SIZE_BYTES = 8


def frames_of(file: bytes | memoryview, clip: Clip) -> Iterator[Tensor]:
    """Yield the frames that are seen of a video, uint8 [3, height, width] each. Raises `RequestError`."""
    size = clip.width * clip.height * 3
    if clip.is_raw:
        if len(file) != size * len(clip.indexes):
            raise RequestError("invalid", "a video does not have the frames that its header states")
        for number in range(len(clip.indexes)):
            yield _tensor(file[number * size : (number + 1) * size], clip)
        return
    task = VideoTask(max_pixels=MAX_PIXELS, max_s=MAX_VIDEO_S, indexes=clip.indexes)
    with _decoder(task, file) as out:
        found = _described(out)
        if (found.width, found.height) != (clip.width, clip.height):
            raise _unread("its frames do not have the size that its header states")
        for _ in clip.indexes:
            data = _message(out, size)
            if len(data) != size:
                # Instead of a frame the process has said what was wrong.
                raise _unread(msgspec.msgpack.decode(data, type=VideoFile).error)
            yield _tensor(data, clip)


def described(file: bytes) -> VideoFile:
    """Return the size, length and rate of a video. Raises `RequestError` if it cannot be used."""
    with _decoder(VideoTask(max_pixels=MAX_PIXELS, max_s=MAX_VIDEO_S), file) as out:
        return _described(out)


def pixel_values(frames: Iterator[Tensor], clip: Clip, rules: VideoRules) -> tuple[Tensor, TokenGrid]:
    """Return the patches of all frames, float32 [patches, values], and the grid of their tokens.

    Patches of one group of frames lie together, and within it those of one token.
    """
    grid = rules.grid(clip)
    size = (grid.rows * rules.side, grid.columns * rules.side)
    # Each frame is scaled as it comes: in their own size, all of them could have gigabytes.
    scaled = [_scaled(frame, size, rules) for frame in frames]
    group = rules.sampling.temporal
    scaled += scaled[-1:] * (-len(scaled) % group)
    video = _normalized(scaled, rules)
    joined, patch = rules.side // rules.patch, rules.patch
    split = video.view(grid.frames, group, 3, grid.rows, joined, patch, grid.columns, joined, patch)
    # The tower reads patches of one token one after another, and of each the colours before the frames.
    patches = split.permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return patches.reshape(-1, 3 * group * patch * patch), grid


def pixels_of(frames: Iterator[Tensor], rules: FrameRules) -> Tensor:
    """Return the pixels of all frames in the size of the tower, float32 [frames, 3, height, width]."""
    return _normalized([_scaled(frame, (rules.height, rules.width), rules) for frame in frames], rules)


def _normalized(frames: Sequence[Tensor], rules: VideoRules | FrameRules) -> Tensor:
    factor = 1.0 / rules.rescale_factor
    mean, std = (torch.tensor(values)[:, None, None] * factor for values in (rules.mean, rules.std))
    return torch.stack(list(frames)).to(torch.float32).sub_(mean).div_(std)


def _scaled(frame: Tensor, size: tuple[int, int], rules: VideoRules | FrameRules) -> Tensor:
    """Return a frame [3, height, width] in another size."""
    if tuple(frame.shape[-2:]) == size:
        return frame
    mode = "bicubic" if rules.is_bicubic else "bilinear"
    # Scaling bytes rounds otherwise than scaling floats, and transformers scales bytes.
    return F.interpolate(frame[None], size=size, mode=mode, align_corners=False, antialias=True)[0]


def _tensor(data: bytes | memoryview, clip: Clip) -> Tensor:
    rows = np.frombuffer(data, dtype=np.uint8).reshape(clip.height, clip.width, 3)
    return torch.from_numpy(rows.transpose(2, 0, 1).copy())


@contextmanager
def _decoder(task: VideoTask, file: bytes | memoryview) -> Iterator[IO[bytes]]:
    """Start a process that decodes a file, and yield its output. The process has ended when the block ends."""
    command = module_command(_MODULE, msgspec.json.encode(task).decode())
    try:
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    except OSError as exc:
        raise RequestError("overloaded", f"no process that decodes videos can be started: {exc}") from exc
    assert child.stdin is not None and child.stdout is not None
    timer = Timer(_WALL_S, child.kill)
    timer.start()
    try:
        child.stdin.write(file)
        child.stdin.close()
        yield child.stdout
    # A process that ended before it had read the file.
    except OSError as exc:
        raise _unread("its decoder failed, or took too much time or memory") from exc
    finally:
        timer.cancel()
        child.kill()
        child.wait()
        child.stdout.close()


def _described(out: IO[bytes]) -> VideoFile:
    found = msgspec.msgpack.decode(_message(out, 1 << 16), type=VideoFile)
    if found.error:
        raise _unread(found.error)
    return found


def _message(out: IO[bytes], most: int) -> bytes:
    """Return the next message of the process, of at most so many bytes. Raises `OSError` if there is none."""
    size = int.from_bytes(out.read(_SIZE_BYTES), "little")
    data = out.read(size) if 0 < size <= most else b""
    if not data or len(data) < size:
        raise OSError("the process that decodes a video has ended")
    return data


def _unread(why: str) -> RequestError:
    return RequestError("invalid", f"a video cannot be read: {why}")
