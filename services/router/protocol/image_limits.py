"""What clients may have the router fetch, and how much of it. Pure."""

from dataclasses import dataclass
from pathlib import Path

import msgspec

from baton_serve.services.router.protocol.errors import BadRequestError

ANY_DOMAIN = "*"
DEFAULT_IMAGES_PER_PROMPT = 999
"""vLLM's."""
_MODALITIES = ("image", "video", "audio")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLimits:
    per_prompt: int = DEFAULT_IMAGES_PER_PROMPT
    domains: frozenset[str] = frozenset()
    """Names of hosts; `*` is every one with a public address."""
    local_path: Path | None = None
    fetch_timeout_s: float = 5.0
    max_bytes: int = 16 << 20
    max_pixels: int = 1 << 25


def images_per_prompt(stated: str) -> int:
    """Of `--limit-mm-per-prompt`, as vLLM writes it: `image=2,video=1` or `{"image": 2}`. Raises `ValueError`."""
    if not stated.strip():
        return DEFAULT_IMAGES_PER_PROMPT
    try:
        if stated.lstrip().startswith("{"):
            limits = msgspec.json.decode(stated, type=dict[str, int])
        else:
            pairs = (entry.partition("=") for entry in stated.split(","))
            limits = {name.strip(): int(count) for name, _, count in pairs}
    except (msgspec.MsgspecError, ValueError):
        limits = {"": -1}
    if any(count < 0 or name not in _MODALITIES for name, count in limits.items()):
        raise ValueError(f'--limit-mm-per-prompt is image=2 or {{"image": 2}}, not {stated!r}')
    return limits.get("image", DEFAULT_IMAGES_PER_PROMPT)


def image_error(reason: str) -> BadRequestError:
    return BadRequestError(f"messages: {reason}", param="messages", code="invalid_image")


def image_too_large_error(limits: ImageLimits) -> BadRequestError:
    return image_error(f"an image has more than {limits.max_bytes} bytes (--max-image-bytes): make it smaller")
