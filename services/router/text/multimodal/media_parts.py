"""The images and videos in the messages of a chat, as their content parts name them."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple

from baton_serve.services.router.protocol.image_limits import media_error
from baton_serve.services.router.protocol.openai_requests import ChatMessage, ContentPart

Kind = Literal["image", "video"]

KINDS: Mapping[str, Kind] = MappingProxyType({"image_url": "image", "video_url": "video"})
"""The kind of file that a content part of a type holds. The names are those of OpenAI's and vLLM's chat API."""


class MediaPart(NamedTuple):
    """One image or video of a chat."""

    kind: Kind
    url: str
    """Empty for a file that was sent before with the same `uuid`."""
    uuid: str | None = None

    @property
    def noun(self) -> str:
        """Return the words for it in messages."""
        return "an image" if self.kind == "image" else "a video"


def media_of(messages: Sequence[ChatMessage]) -> list[MediaPart]:
    """Return all images and videos in the order of the prompt. Raises `BadRequestError` for a part without a URL."""
    lists = [message.content for message in messages if isinstance(message.content, list)]
    return [_of(part, KINDS[part.type]) for parts in lists for part in parts if part.type in KINDS]


def image_part(url: str) -> ContentPart:
    """Return a content part with an image. The endpoints of other APIs convert their images to it."""
    return ContentPart(type="image_url", image_url={"url": url})


def _of(part: ContentPart, kind: Kind) -> MediaPart:
    stated = part.image_url if kind == "image" else part.video_url
    url = stated.get("url") if isinstance(stated, dict) else stated
    if part.uuid is not None and not url:
        return MediaPart(kind, "", part.uuid)
    if not isinstance(url, str) or not url:
        file = "image/png" if kind == "image" else "video/mp4"
        raise media_error(f'it must be {{"type": "{kind}_url", "{kind}_url": {{"url": "data:{file};base64,…"}}}}', kind)
    return MediaPart(kind, url, part.uuid)
