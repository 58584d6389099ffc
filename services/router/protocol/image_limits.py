"""Limits for images in requests: their number and size, and the places from which the router may load them.

This module is pure: no network, no files.
"""

from dataclasses import dataclass
from pathlib import Path

import msgspec

from baton_serve.services.router.protocol.errors import BadRequestError

ANY_DOMAIN = "*"
"""Entry of `ImageLimits.domains` that allows every host with a public address."""

DEFAULT_IMAGES_PER_PROMPT = 999
"""Number of images in one prompt without `--limit-mm-per-prompt`, as in vLLM."""

_MODALITIES = ("image", "video", "audio")
"""Names that vLLM allows in `--limit-mm-per-prompt`. Only the limit of images has an effect here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLimits:
    """Limits for the images of one request, from the router's settings: their number, their size and the hosts to fetch
    from.
    """

    per_prompt: int = DEFAULT_IMAGES_PER_PROMPT
    """Number of images in one prompt."""
    domains: frozenset[str] = frozenset()
    """Hosts from which images are fetched (`--allowed-media-domains`). `*` allows every host with a public address."""
    local_path: Path | None = None
    """Folder below which `file:` URLs are read (`--allowed-local-media-path`). None: they are rejected."""
    fetch_timeout_s: float = 5.0
    """Time in which one image must have been fetched from the web."""
    max_bytes: int = 16 << 20
    """Size of one image file (`--max-image-bytes`)."""
    max_pixels: int = 1 << 25
    """Width times height of one image (`--max-image-pixels`)."""


def images_per_prompt(stated: str) -> int:
    """Parse the value of `--limit-mm-per-prompt` and return the largest number of images per prompt.

    vLLM's two formats are accepted: `image=2,video=1` and `{"image": 2}`. Raises `ValueError` for anything else.
    """
    if not stated.strip():
        return DEFAULT_IMAGES_PER_PROMPT
    try:
        if stated.lstrip().startswith("{"):
            limits = msgspec.json.decode(stated, type=dict[str, int])
        else:
            pairs = (entry.partition("=") for entry in stated.split(","))
            limits = {name.strip(): int(count) for name, _, count in pairs}
    except (msgspec.MsgspecError, ValueError):
        limits = {"": -1}  # an invalid entry, so that the check below reports the error
    if any(count < 0 or name not in _MODALITIES for name, count in limits.items()):
        raise ValueError(f'--limit-mm-per-prompt must be like image=2 or {{"image": 2}}, not {stated!r}')
    return limits.get("image", DEFAULT_IMAGES_PER_PROMPT)


def image_error(reason: str) -> BadRequestError:
    """Return the error (status 400) for an image of a chat that cannot be used. `reason` is its message."""
    return BadRequestError(f"messages: {reason}", param="messages", code="invalid_image")


def image_too_large_error(limits: ImageLimits) -> BadRequestError:
    """Return the error for an image file that has more than `limits.max_bytes` bytes."""
    return image_error(f"an image has more than {limits.max_bytes} bytes (--max-image-bytes): send a smaller one")
