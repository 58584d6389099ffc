"""Where images stand in a prompt: the one token that a chat template writes for each becomes as many as the image is to
the decoder. Pure."""

from collections.abc import Sequence
from itertools import repeat

import msgspec

from baton_serve.contracts.media import MediaSpan
from baton_serve.contracts.vision import VisionProfile
from baton_serve.services.router.protocol.image_limits import ImageLimits, image_error
from baton_serve.services.router.protocol.openai_requests import ChatMessage, ContentPart
from baton_serve.services.router.text.multimodal.image_files import ImageFile, load
from baton_serve.services.router.text.sampling_params import ModelLimits, check_prompt

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


class TokenizedPrompt(msgspec.Struct, frozen=True):
    """Tokens, and the files of what some of them stand for, each once."""

    token_ids: list[int]
    media: Sequence[MediaSpan] = ()
    images: Sequence[bytes] = ()


def repeat_image_tokens(token_ids: Sequence[int], counts: Sequence[int], profile: VisionProfile) -> list[int]:
    """With so many tokens for each image. Raises `BadRequestError` unless the template has written a token for each,
    and no text has."""
    image_id, count = profile.image_token_id, token_ids.count(profile.image_token_id)
    if count != len(counts):
        raise image_error(
            f"{len(counts)} images were given, and the chat template has written {count} places for images: text must"
            " not contain the token that stands for one, and the template must write it for each"
        )
    found: list[int] = []
    lengths = iter(counts)
    for token_id in token_ids:
        found += repeat(image_id, next(lengths)) if token_id == image_id else (token_id,)
    return found


def media_spans(
    token_ids: Sequence[int], counts: Sequence[int], digests: Sequence[bytes], profile: VisionProfile
) -> list[MediaSpan]:
    """Of an expanded prompt."""
    spans: list[MediaSpan] = []
    at = 0
    for count, digest in zip(counts, digests, strict=True):
        at = token_ids.index(profile.image_token_id, at)
        spans.append(MediaSpan(at, count, digest))
        at += count
    return spans


async def expand_placeholders(
    token_ids: Sequence[int], urls: Sequence[str], profile: VisionProfile | None, image_limits: ImageLimits
) -> list[int]:
    """`token_ids` as long as they are with the images. Raises `BadRequestError`."""
    if profile is None or not urls:
        return list(token_ids)
    least = _expand_to_minimum(token_ids, urls, profile, image_limits)
    if not profile.grid:
        return least
    return repeat_image_tokens(token_ids, _counts(await load(urls, image_limits), profile), profile)


async def expand_image_tokens(
    token_ids: Sequence[int],
    urls: Sequence[str],
    profile: VisionProfile,
    image_limits: ImageLimits,
    limits: ModelLimits,
) -> TokenizedPrompt:
    """What can be refused without a file is refused before one is fetched. Raises `BadRequestError`."""
    check_prompt(_expand_to_minimum(token_ids, urls, profile, image_limits), limits, param="messages")
    files = await load(urls, image_limits)
    counts = _counts(files, profile)
    found = repeat_image_tokens(token_ids, counts, profile)
    images = {file.digest: file.data for file in files}
    return TokenizedPrompt(
        found, media_spans(found, counts, [file.digest for file in files], profile), list(images.values())
    )


def _expand_to_minimum(
    token_ids: Sequence[int], urls: Sequence[str], profile: VisionProfile, image_limits: ImageLimits
) -> list[int]:
    """With as few tokens as images can be."""
    if len(urls) > image_limits.per_prompt:
        raise image_error(f"{len(urls)} images, and at most {image_limits.per_prompt} are read (--limit-mm-per-prompt)")
    return repeat_image_tokens(token_ids, [profile.tokens_per_image] * len(urls), profile)


def _counts(files: Sequence[ImageFile], profile: VisionProfile) -> list[int]:
    return [profile.tokens_of(width=file.width, height=file.height) for file in files]
