"""Decide how many images, videos and audio a request may have (`--limit-mm-per-prompt`), and hold the limits of size
and domains.

This module is pure: no network, no files.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from baton_serve.services.router.protocol.errors import BadRequestError

ANY_DOMAIN = "*"
"""Entry of `ImageLimits.domains` that allows every host with a public address."""

DEFAULT_PER_PROMPT = 999
"""Number of images, or of videos, in one prompt without `--limit-mm-per-prompt`, as in vLLM."""

_MODALITIES = ("image", "video", "audio")
"""Names that vLLM allows in `--limit-mm-per-prompt`."""
_SIZES = frozenset({"count", "width", "height", "length", "num_frames"})
"""Keys of vLLM's longer form of a limit. All but `count` size the images with which vLLM measures its memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLimits:
    """Limits for the images of one request, from the router's settings: their number, their size and the hosts to fetch
    from.
    """

    per_prompt: Mapping[str, int] = field(default_factory=dict)
    """Number of images and videos in one prompt, by kind (`--limit-mm-per-prompt`). A kind that is not stated may have
    `DEFAULT_PER_PROMPT`.
    """
    processor_settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the model's processor (`--mm-processor-kwargs`), which a request may replace."""
    takes_embeddings: bool = False
    """True if clients may send embeddings of images (`--enable-mm-embeds`)."""
    domains: frozenset[str] = frozenset()
    """Hosts from which images are fetched (`--allowed-media-domains`). `*` allows every host with a public address."""
    local_path: Path | None = None
    """Folder below which `file:` URLs are read (`--allowed-local-media-path`). None: they are rejected."""
    fetch_timeout_s: float = 5.0
    """Time in which one image must have been fetched from the web."""
    max_bytes: int = 16 << 20
    """Size of one image file (`--max-image-bytes`)."""
    max_pixels: int = 1 << 25
    """Width times height of one image, or of one frame of a video (`--max-image-pixels`)."""
    max_video_bytes: int = 31 << 20
    """Size of one video file (`--max-video-bytes`)."""
    max_video_s: float = 600.0
    """Longest video in seconds (`--max-video-s`)."""
    video_fetch_timeout_s: float = 30.0
    """Time in which one video must have been fetched from the web."""

    max_audio_bytes: int = 25 << 20
    """Size of one audio file (`--max-audio-bytes`)."""
    audio_fetch_timeout_s: float = 10.0
    """Time in which one audio file must have been fetched from the web."""

    def bytes_of(self, kind: str) -> int:
        """Return the largest size of a file of this kind."""
        return {"video": self.max_video_bytes, "audio": self.max_audio_bytes}.get(kind, self.max_bytes)

    def fetch_timeout_s_of(self, kind: str) -> float:
        """Return the time in which a file of this kind must have been fetched."""
        others = {"video": self.video_fetch_timeout_s, "audio": self.audio_fetch_timeout_s}
        return others.get(kind, self.fetch_timeout_s)

    def check_number(self, kind: str, count: int) -> None:
        """Raise `BadRequestError` if a prompt may not have so many images or videos."""
        most = self.per_prompt.get(kind, DEFAULT_PER_PROMPT)
        if count > most:
            raise media_error(f"the request has {count} {kind}s, the limit is {most} (--limit-mm-per-prompt)", kind)


def limits_per_prompt(stated: str) -> dict[str, int]:
    """Parse `--limit-mm-per-prompt` and return the limits by kind, of the kinds that are stated.

    vLLM's formats are accepted: `image=2,video=1`, `{"image": 2}` and `{"video": {"count": 1, "num_frames": 32}}`.
    Raises `ValueError` for anything else.
    """
    if not stated.strip():
        return {}
    try:
        if stated.lstrip().startswith("{"):
            given = msgspec.json.decode(stated, type=dict[str, int | dict[str, int]])
            limits = {name: _count_of(value) for name, value in given.items()}
        else:
            pairs = (entry.partition("=") for entry in stated.split(","))
            limits = {name.strip(): int(count) for name, _, count in pairs}
    except (msgspec.MsgspecError, ValueError):
        limits = {"": -1}  # an invalid entry, so that the check below reports the error
    if any(count < 0 or name not in _MODALITIES for name, count in limits.items()):
        raise ValueError(f'--limit-mm-per-prompt must be like image=2 or {{"image": 2}}, not {stated!r}')
    return limits


def _count_of(value: int | dict[str, int]) -> int:
    if isinstance(value, int):
        return value
    if not value.keys() <= _SIZES:
        raise ValueError("a limit has an unknown key")
    return value.get("count", DEFAULT_PER_PROMPT)


def processor_settings(stated: str) -> dict[str, Any]:
    """Parse `--mm-processor-kwargs`, an object in JSON. Raises `ValueError` for anything else."""
    if not stated.strip():
        return {}
    try:
        return msgspec.json.decode(stated, type=dict[str, Any])
    except msgspec.MsgspecError as exc:
        raise ValueError(f'--mm-processor-kwargs must be like {{"max_pixels": 1003520}}: {exc}') from exc


def media_error(reason: str, kind: str = "image") -> BadRequestError:
    """Return the error (status 400) for an image or a video of a chat that cannot be used."""
    return BadRequestError(f"messages: {reason}", param="messages", code=f"invalid_{kind}")


def too_large_error(limits: ImageLimits, kind: str) -> BadRequestError:
    """Return the error for a file that is larger than its kind may be."""
    noun = f"a {kind}" if kind == "video" else f"an {kind}"
    return media_error(
        f"{noun} has more than {limits.bytes_of(kind)} bytes (--max-{kind}-bytes): send a smaller one", kind
    )
