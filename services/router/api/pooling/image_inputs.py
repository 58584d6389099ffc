"""Turn chats with images into inputs of a pooling model: images among a text, or an image alone."""

from collections.abc import Sequence
from functools import partial

from baton_serve.contracts.vision import READERS, TEXT_ALONE, EmbedderImages
from baton_serve.services.router.api.model_service import ModelService
from baton_serve.services.router.protocol.errors import BadRequestError
from baton_serve.services.router.protocol.image_limits import media_error
from baton_serve.services.router.protocol.openai_requests import ChatMessage, TokenizeRequest
from baton_serve.services.router.text.multimodal.image_memory import ImageReservation
from baton_serve.services.router.text.multimodal.image_tokens import (
    ImagePlaces,
    TokenizedPrompt,
    expand_image_tokens,
    lone_image,
)
from baton_serve.services.router.text.multimodal.media_parts import MediaPart


async def with_images(
    service: ModelService,
    chat: TokenizeRequest,
    media: Sequence[MediaPart],
    reservation: ImageReservation,
    *,
    max_tokens: int,
    is_long: bool,
) -> TokenizedPrompt:
    """Return a chat with the images `media` as one input of a model, of at most `max_tokens` tokens unless an image is
    the whole input.

    The files count in `reservation`, which the caller releases after their last use. `is_long` says that the request
    had a long body. Raises `BadRequestError` if the model or its limits do not allow these images, and `RateLimitError`
    if other requests have taken the memory of images.
    """
    model, embedder = service.model, service.model.embedder
    _check_kinds(media, embedder)
    assert embedder is not None, "checked"
    settings = {**service.image_limits.processor_settings, **(chat.mm_processor_kwargs or {})}
    if not embedder.is_alone:
        text = await model.render_chat(chat, shows_images=True, is_long=is_long)
    elif len(media) > 1:
        raise media_error(f"an input of this model has one image, not {len(media)}: send a request for each")
    elif lone_text(chat.messages or ()).strip():
        raise media_error(TEXT_ALONE)
    else:
        text = embedder.image_text or ""
    places = ImagePlaces(text, media, embedder.family, model.tokenizer.token, settings)
    if embedder.is_alone and embedder.image_text is None:
        return await lone_image(places, service.image_limits, reservation)
    is_special = bool(chat.add_special_tokens) and not embedder.is_alone
    tokenize = partial(model.tokenize, add_special_tokens=is_special, max_tokens=max_tokens)
    return await expand_image_tokens(
        tokenize, places, service.image_limits, partial(_check_length, max_tokens=max_tokens), reservation
    )


def lone_text(messages: Sequence[ChatMessage]) -> str:
    """Return the text of a chat to a model that has no chat template."""
    found: list[str] = []
    for message in messages:
        if isinstance(message.content, str):
            found.append(message.content)
        else:
            found += [part.text for part in message.content or () if part.text is not None]
    return "\n".join(found)


def _check_kinds(media: Sequence[MediaPart], embedder: EmbedderImages | None) -> None:
    """Raise `BadRequestError` unless all media are images, and the model reads images."""
    if embedder is None:
        raise media_error(f"this model does not accept images in inputs: {READERS}")
    for part in media:
        if part.kind != "image":
            raise media_error(f"{part.noun} is not accepted in inputs of models that compute vectors", part.kind)
        if part.is_embedded:
            raise media_error("embeddings of images are not accepted in inputs: send the image")


def _check_length(token_ids: Sequence[int], max_tokens: int) -> None:
    """Raise `BadRequestError` if an input has more tokens than the model takes."""
    if len(token_ids) > max_tokens:
        raise BadRequestError(
            f"messages: the input has {len(token_ids)} tokens with its images, but the model takes {max_tokens}: send"
            " fewer or smaller images",
            param="messages",
            code="context_length_exceeded",
        )
