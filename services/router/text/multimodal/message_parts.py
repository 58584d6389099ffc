"""Parts of messages that are images, as OpenAI's chats have them: `{"type": "image_url", "image_url": {"url": …}}`."""

from collections.abc import Sequence

from baton_serve.services.router.protocol.image_limits import image_error
from baton_serve.services.router.protocol.openai_requests import ChatMessage, ContentPart

IMAGE_PART_TYPE = "image_url"


def image_urls(messages: Sequence[ChatMessage]) -> list[str]:
    """In the order of the prompt. Raises `BadRequestError` for a part that names none."""
    lists = [message.content for message in messages if isinstance(message.content, list)]
    return [_url_of(part) for parts in lists for part in parts if part.type == IMAGE_PART_TYPE]


def image_part(url: str) -> ContentPart:
    """What other APIs' images become."""
    return ContentPart(type=IMAGE_PART_TYPE, image_url={"url": url})


def _url_of(part: ContentPart) -> str:
    stated = part.image_url
    url = stated.get("url") if isinstance(stated, dict) else stated
    if not isinstance(url, str) or not url:
        raise image_error('an image is {"type": "image_url", "image_url": {"url": "data:image/png;base64,…"}}')
    return url
