"""Replaces what a chat template writes for each image by the texts and image tokens that the image becomes.

A prompt is tokenized with the texts of its images in it, as transformers does, because they may join with the text
around them.
"""

from collections.abc import Awaitable, Callable, Sequence

import msgspec

from baton_serve.contracts.media import MediaSpan
from baton_serve.contracts.vision import ImageFamily, Parts, UnfitImageError, expand_runs, write_parts
from baton_serve.services.router.protocol.errors import BadRequestError
from baton_serve.services.router.protocol.image_limits import ImageLimits, image_error
from baton_serve.services.router.protocol.openai_requests import ChatMessage, ContentPart
from baton_serve.services.router.text.multimodal.image_files import ImageFile, load
from baton_serve.services.router.text.multimodal.image_memory import ImageMemory, ImageReservation
from baton_serve.services.router.text.prompt_length import check_prompt
from baton_serve.services.router.text.sampling_params import ModelLimits

IMAGE_PART_TYPE = "image_url"
"""The `type` of a content part with an image in OpenAI's chat API."""


def image_urls(messages: Sequence[ChatMessage]) -> list[str]:
    """Return the URLs of all images in the messages, in the order of the prompt. Raises `BadRequestError` for an image
    part without a URL.
    """
    lists = [message.content for message in messages if isinstance(message.content, list)]
    return [_url_of(part) for parts in lists for part in parts if part.type == IMAGE_PART_TYPE]


def image_part(url: str) -> ContentPart:
    """Return an image as a content part of a chat message. The endpoints of other APIs convert their images with it."""
    return ContentPart(type=IMAGE_PART_TYPE, image_url={"url": url})


def _url_of(part: ContentPart) -> str:
    stated = part.image_url
    url = stated.get("url") if isinstance(stated, dict) else stated
    if not isinstance(url, str) or not url:
        raise image_error('an image must be {"type": "image_url", "image_url": {"url": "data:image/png;base64,…"}}')
    return url


class TokenizedPrompt(msgspec.Struct, frozen=True):
    """A prompt as tokens with its images. `media` are the spans of image tokens in `token_ids`; `images` are the
    distinct image files.
    """

    token_ids: list[int]
    media: Sequence[MediaSpan] = ()
    images: Sequence[bytes] = ()
    source_tokens: int = 0
    """Positions of the source that an encoder reads with the prompt, to which no token corresponds; 0 without one."""


class ImagePlaces:
    """Replaces the image placeholders in the text of one prompt by the texts of the images, and, after tokenization, by
    their image tokens.
    """

    def __init__(self, text: str, num_images: int, family: ImageFamily, image_token: str) -> None:
        """Start with the `text` of a rendered chat that has `num_images` placeholders. `family` has the model's rules
        for images; `image_token` is the text of the model's image token.
        """
        self._text = text
        self._num_images = num_images
        self._family = family
        self._token = image_token

    @property
    def is_fixed(self) -> bool:
        """True if every image becomes the same tokens, whatever its size."""
        return self._family.is_fixed

    @property
    def least(self) -> list[Parts]:
        """The text and the number of image tokens of each image, if all images had the size that takes the fewest
        tokens.
        """
        return [self._family.least] * self._num_images

    def parts_of(self, files: Sequence[ImageFile]) -> list[Parts]:
        """Return what each image becomes in the prompt, in order: its text and number of image tokens, which depend on
        its size.

        Raises `BadRequestError` for an image of a size that the model cannot read.
        """
        try:
            return [self._family.parts(width=file.width, height=file.height) for file in files]
        except UnfitImageError as exc:
            raise image_error(str(exc)) from exc

    def spans_of(self, where: Sequence[tuple[int, int]], files: Sequence[ImageFile]) -> list[MediaSpan]:
        """Return the span of each image in the prompt's tokens. `where` has the places of the images that `expanded`
        has returned.
        """
        grids = [self._family.token_grid(width=file.width, height=file.height) for file in files]
        return [MediaSpan(*place, file.digest, grid) for place, file, grid in zip(where, files, grids, strict=True)]

    def written(self, images: Sequence[Parts]) -> str:
        """Return the prompt's text in which the placeholders are replaced by the texts of the images. A run of image
        tokens is written as one token, which `expanded` repeats.

        Raises `BadRequestError` if the number of placeholders is not the number of images: the chat template has left
        one out, or the text of a message contains the placeholder.
        """
        try:
            return write_parts(self._text, images, self._family.placeholder or self._token, self._token)
        except ValueError as exc:
            raise _misplaced(exc) from exc

    def expanded(self, token_ids: Sequence[int], images: Sequence[Parts]) -> tuple[list[int], list[tuple[int, int]]]:
        """Repeat the image tokens in `token_ids`, the tokens of the text from `written`. Return the prompt's tokens,
        and for each image the position and the number of its tokens.

        Raises `BadRequestError` if the text of a message contains the image token.
        """
        try:
            return expand_runs(token_ids, images, self._family.image_token_id)
        except ValueError as exc:
            raise _misplaced(exc) from exc


def _misplaced(exc: ValueError) -> BadRequestError:
    return image_error(
        f"{exc}: the text of messages must not contain the model's image token, and the chat template must write one"
        " for each image"
    )


Tokenize = Callable[[str], Awaitable[list[int]]]
"""Returns the tokens of a prompt's text."""


async def count_image_tokens(
    tokenize: Tokenize, places: ImagePlaces, urls: Sequence[str], image_limits: ImageLimits, memory: ImageMemory
) -> list[int]:
    """Return the tokens of a prompt, with the image tokens of its images, for a request that only counts tokens.

    The images are loaded only if their number of tokens depends on their size. Raises `BadRequestError` if the images
    cannot be loaded or do not match the prompt, and `RateLimitError` if the limits of `ImageMemory` are reached.
    """
    _check_number(urls, image_limits)
    if places.is_fixed:
        images = places.least
    else:
        with ImageReservation(memory) as reservation:
            images = places.parts_of(await load(urls, image_limits, reservation))
    return places.expanded(await tokenize(places.written(images)), images)[0]


async def expand_image_tokens(
    tokenize: Tokenize,
    places: ImagePlaces,
    urls: Sequence[str],
    image_limits: ImageLimits,
    limits: ModelLimits,
    reservation: ImageReservation,
) -> TokenizedPrompt:
    """Load the images of a prompt. Return the prompt as tokens, with the image tokens of its images, and the image
    files.

    The files count in `reservation`, which the caller releases after the last use of the prompt. Raises
    `BadRequestError` if the images cannot be loaded, do not match the prompt, or leave no room for an answer, and
    `RateLimitError` if the limits of `ImageMemory` are reached.
    """
    _check_number(urls, image_limits)
    # A prompt that is too long already with the smallest images is rejected before anything is fetched.
    least = places.written(places.least)
    token_ids = await tokenize(least)
    check_prompt(places.expanded(token_ids, places.least)[0], limits, param="messages")
    files = await load(urls, image_limits, reservation)
    images = places.parts_of(files)
    written = places.written(images)
    if written != least:
        token_ids = await tokenize(written)
    found, where = places.expanded(token_ids, images)
    spans = places.spans_of(where, files)
    return TokenizedPrompt(found, spans, list({file.digest: file.data for file in files}.values()))


def _check_number(urls: Sequence[str], image_limits: ImageLimits) -> None:
    """Raise `BadRequestError` if a request has more images than `--limit-mm-per-prompt` allows."""
    if len(urls) > image_limits.per_prompt:
        raise image_error(
            f"the request has {len(urls)} images, the limit is {image_limits.per_prompt} (--limit-mm-per-prompt)"
        )
