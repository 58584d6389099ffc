"""Decides which frames of a video a model sees. The rules and their roundings are those of transformers' video
processors.

Each rule gets the number of frames of the whole video and its frames per second, and returns numbers of frames in
ascending order.
"""

from collections.abc import Callable, Mapping
from math import ceil, floor
from types import MappingProxyType

import msgspec

from baton_serve.contracts.media import float32
from baton_serve.contracts.vision.media_text import UnfitImageError


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How many frames are wanted. With `num_frames`, `fps` does not count."""

    fps: float
    num_frames: int | None = None
    min_frames: int = 4
    max_frames: int = 768
    max_duration: float = 300.0
    """Longest time in seconds that is sampled at `fps`; longer videos have no more frames than one of this time."""
    temporal: int = 2
    """Number of frames that the tower reads together."""


def _even(total: int, fps: float, rules: Sampling) -> list[int]:
    """Return frames at equal distances, in whole groups of `temporal` (Qwen2-VL)."""
    group = rules.temporal
    if rules.num_frames is not None:
        count = round(rules.num_frames / group) * group
    else:
        most = floor(min(rules.max_frames, total) / group) * group
        wanted = min(max(total / fps * rules.fps, rules.min_frames), most, total)
        count = floor(wanted / group) * group
    _check(count, total)
    # The distances are those of `torch.arange` with 32-bit floats.
    step = total / count
    found = [int(float32(number * step)) for number in range(ceil(total / step))]
    # By its rounding the last one may lie behind the end, where transformers raises an error.
    return [index for index in found if index < total]


def _spread(total: int, fps: float, rules: Sampling) -> list[int]:
    """Return frames from the first to the last one (Qwen3-VL)."""
    if rules.num_frames is not None:
        count = rules.num_frames
    else:
        count = min(max(int(total / fps * rules.fps), rules.min_frames), rules.max_frames, total)
    _check(count, total)
    return _linear(0, total - 1, count, round)


def _timed(total: int, fps: float, rules: Sampling) -> list[int]:
    """Return the frames at times that are a fixed distance apart (GLM-4.1V)."""
    last, duration = total - 1, total / fps
    if rules.num_frames is not None:
        return _unique(_linear(0, last, min(rules.num_frames, total), int))
    if duration <= rules.max_duration:
        count = max(floor(duration * rules.fps), 1)
        return _unique([min(last, ceil(number * fps / rules.fps)) for number in range(count)])
    count = int(rules.max_duration * rules.fps)
    if count >= total:
        return _unique(list(range(total)))
    return _unique([min(last, ceil(number * (duration / (count - 1)) * fps)) for number in range(count)])


_RATES = ((30, 3.0), (300, 1.0), (2400, 0.5))
"""Frames per second that GLM-4.6V sees of videos up to a duration in seconds."""
_MOST_TIMED = 640


def _stepped(total: int, fps: float, rules: Sampling) -> list[int]:
    """Return more frames for each second of short videos than of long ones (GLM-4.6V)."""
    duration = total / fps
    effective = min(duration, _RATES[-1][0])
    rate = next(rate for longest, rate in _RATES if effective <= longest)
    wanted = min(int(effective * rate * rules.temporal), _MOST_TIMED)
    if rules.num_frames is not None:
        return _unique(_linear(0, total - 1, min(rules.num_frames, total), int))
    found = _linear(0, total - 1, wanted, int) if total < wanted else _each_step(total, fps, rate * rules.temporal)
    if len(found) < wanted:
        found = _linear(found[0] if found else 0, found[-1] if found else total - 1, wanted, int)
    elif len(found) > wanted:
        found = _linear(0, total - 1, wanted, int)
    return _unique(found)


def _each_step(total: int, fps: float, rate: float) -> list[int]:
    """Return the first frame after each step of `1 / rate` seconds, before the last full second ends."""
    found: list[int] = []
    due = 0.0
    for number in range(total):
        if number * (1 / fps) >= due:
            due += 1 / rate
            found.append(number)
            if due >= int(total / fps):
                break
    return found


def _linear(first: int, last: int, count: int, rounded: Callable[[float], int]) -> list[int]:
    """Return `count` numbers from `first` to `last` at equal distances, as `numpy.linspace`."""
    if count == 1:
        return [first]
    step = (last - first) / (count - 1) if count > 1 else 0.0
    return [*(rounded(number * step + first) for number in range(count - 1)), last] if count else []


def _unique(indexes: list[int]) -> list[int]:
    """Return the frames without repetitions, and the last one twice if their number is odd."""
    found = list(dict.fromkeys(indexes))
    return found + found[-1:] if len(found) % 2 else found


def _check(count: int, total: int) -> None:
    if not 0 < count <= total:
        raise UnfitImageError(
            f"a video of {total} frames is too short for the {count} frames that are to be seen of it"
        )


SAMPLERS: Mapping[str, Callable[[int, float, Sampling], list[int]]] = MappingProxyType(
    {"even": _even, "spread": _spread, "timed": _timed, "stepped": _stepped}
)
"""The rules by name."""
