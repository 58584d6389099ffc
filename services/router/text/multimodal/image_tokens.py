"""Replaces the one image token that a chat template writes for each image by as many as the image has embeddings.

The functions are pure, apart from `expand_placeholders` and `expand_image_tokens`, which load the images.
"""

from collections.abc import Sequence

import msgspec

from baton_serve.contracts.media import MediaSpan, expand_images, image_spans
from baton_serve.contracts.vision import VisionProfile
from baton_serve.services.router.protocol.image_limits import ImageLimits, image_error
from baton_serve.services.router.protocol.openai_requests import ChatMessage, ContentPart
from baton_serve.services.router.text.multimodal.image_files import ImageFile, load
from baton_serve.services.router.text.multimodal.image_memory import ImageMemory, ImageReservation
from baton_serve.services.router.text.prompt_length import check_prompt
from baton_serve.services.router.text.sampling_params import ModelLimits

IMAGE_PART_TYPE = "image_url"
"""The `type` of a content part with an image in OpenAI's chat API."""


def image_urls(messages: Sequence[ChatMessage]) -> list[str]:
    """Return the URLs of all images in the order of the prompt. Raises `BadRequestError` for a part without a URL."""
    lists = [message.content for message in messages if isinstance(message.content, list)]
    return [_url_of(part) for parts in lists for part in parts if part.type == IMAGE_PART_TYPE]


def image_part(url: str) -> ContentPart:
    """Return a content part with an image. The endpoints of other APIs convert their images to it."""
    return ContentPart(type=IMAGE_PART_TYPE, image_url={"url": url})


def _url_of(part: ContentPart) -> str:
    stated = part.image_url
    url = stated.get("url") if isinstance(stated, dict) else stated
    if not isinstance(url, str) or not url:
        raise image_error('an image must be {"type": "image_url", "image_url": {"url": "data:image/png;base64,…"}}')
    return url


class TokenizedPrompt(msgspec.Struct, frozen=True):
    """A prompt with its images: `media` are the spans of image tokens, `images` the distinct image files."""

    token_ids: list[int]
    media: Sequence[MediaSpan] = ()
    images: Sequence[bytes] = ()


def repeat_image_tokens(token_ids: Sequence[int], counts: Sequence[int], profile: VisionProfile) -> list[int]:
    """Return the prompt with `counts[i]` image tokens in the place of the i-th image token.

    Raises `BadRequestError` if the number of image tokens is not the number of images: the chat template has left one
    out, or the text of a message contains the image token.
    """
    count = token_ids.count(profile.image_token_id)
    if count != len(counts):
        raise image_error(
            f"the request has {len(counts)} images, but its prompt has {count} image tokens: the text of messages must"
            " not contain the model's image token, and the chat template must write one for each image"
        )
    return expand_images(token_ids, counts, profile.image_token_id)


async def expand_placeholders(
    token_ids: Sequence[int],
    urls: Sequence[str],
    profile: VisionProfile | None,
    image_limits: ImageLimits,
    memory: ImageMemory,
) -> list[int]:
    """Return a prompt with the image tokens of its images, for counting tokens.

    The images are loaded only if their number of tokens depends on their size. Raises `BadRequestError` if the images
    cannot be loaded or do not match the prompt, and `RateLimitError` if the limits of `ImageMemory` are reached.
    """
    if profile is None or not urls:
        return list(token_ids)
    least = _expand_to_minimum(token_ids, urls, profile, image_limits)
    if not profile.grid:
        return least
    with ImageReservation(memory) as reservation:
        files = await load(urls, image_limits, reservation)
    return repeat_image_tokens(token_ids, _counts(files, profile), profile)


async def expand_image_tokens(
    token_ids: Sequence[int],
    urls: Sequence[str],
    profile: VisionProfile,
    image_limits: ImageLimits,
    limits: ModelLimits,
    reservation: ImageReservation,
) -> TokenizedPrompt:
    """Load the images of a prompt and return it with their image tokens.

    The caller releases `reservation` after the last use of the prompt. Raises `BadRequestError` if the images cannot
    be loaded, do not match the prompt, or leave no room for an answer, and `RateLimitError` if the limits of
    `ImageMemory` are reached.
    """
    # An image has at least `tokens_per_image` tokens. A prompt that is too long already with these is rejected before
    # anything is fetched.
    check_prompt(_expand_to_minimum(token_ids, urls, profile, image_limits), limits, param="messages")
    files = await load(urls, image_limits, reservation)
    counts = _counts(files, profile)
    found = repeat_image_tokens(token_ids, counts, profile)
    images = {file.digest: file.data for file in files}
    return TokenizedPrompt(
        found,
        image_spans(found, counts, [file.digest for file in files], profile.image_token_id),
        list(images.values()),
    )


def _expand_to_minimum(
    token_ids: Sequence[int], urls: Sequence[str], profile: VisionProfile, image_limits: ImageLimits
) -> list[int]:
    """Return the prompt with the smallest number of image tokens that its images can have."""
    if len(urls) > image_limits.per_prompt:
        raise image_error(
            f"the request has {len(urls)} images, the limit is {image_limits.per_prompt} (--limit-mm-per-prompt)"
        )
    return repeat_image_tokens(token_ids, [profile.tokens_per_image] * len(urls), profile)


def _counts(files: Sequence[ImageFile], profile: VisionProfile) -> list[int]:
    return [profile.tokens_of(width=file.width, height=file.height) for file in files]
