"""Prepare a chat for all chat endpoints: render the template, tokenize, load and expand images, check the length,
submit.

All chat endpoints (OpenAI's chat, Responses, Messages) use it and then send the generation in their own format.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import msgspec

from baton_serve.services.router.api.generation import TextGeneration
from baton_serve.services.router.api.model_service import ModelService
from baton_serve.services.router.protocol.asgi import RequestContext
from baton_serve.services.router.protocol.errors import BadRequestError
from baton_serve.services.router.protocol.openai_requests import ChatCompletionRequest, TokenizeRequest
from baton_serve.services.router.text.message_reader import MessageFormat
from baton_serve.services.router.text.multimodal.image_memory import ImageReservation
from baton_serve.services.router.text.multimodal.image_tokens import (
    TokenizedPrompt,
    count_image_tokens,
    expand_image_tokens,
)
from baton_serve.services.router.text.multimodal.media_parts import MediaPart, media_of
from baton_serve.services.router.text.prompt_length import check_prompt, truncation_of
from baton_serve.services.router.text.sampling_params import TextRules, text_rules, wanted_logprobs


class BegunChat(msgspec.Struct, frozen=True):
    """A chat whose generation has started. The endpoint owns it and uses it in a `with` block, whose end cancels what
    still runs.
    """

    model: str
    """The model's name that the answer carries."""
    message_format: MessageFormat
    rules: TextRules
    generation: TextGeneration
    images: ImageReservation
    """The memory of the images, which are kept for replays."""

    def __enter__(self) -> "BegunChat":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Cancel the generation, so that no instance keeps working on it, and give back the memory that is reserved for
        its images.
        """
        try:
            self.generation.cancel("its answer has ended")
        finally:
            self.images.release()


async def begin_chat(
    service: ModelService, request: ChatCompletionRequest, context: RequestContext, api_id: str, *, is_long: bool
) -> BegunChat:
    """Render the chat's template, tokenize the prompt, load its images, and submit it to the instances.

    `api_id` is the id of the answer. With `is_long` (a large body) the template is rendered in a thread, so that it
    does not block the event loop. Raises `ApiError` if the request is not valid or not admitted.
    """
    model = service.view.model_name(request.model)
    limits = service.limits()
    images = ImageReservation(service.image_memory, context.caller.name)
    try:
        logprobs = wanted_logprobs(request, limits)
        tokenizing_at = service.clock()
        media = media_of(request.messages)
        text = await service.model.render_chat(request, shows_images=True, is_long=is_long)
        message_format = service.message_formats.of(request, text)
        truncation = truncation_of(request, limits)
        tokenize = partial(
            service.tokenize, limits=limits, add_special_tokens=bool(request.add_special_tokens), truncation=truncation
        )
        places = service.model.image_places(text, media, processor_settings_of(service, request))
        if places is None:
            token_ids = await tokenize(text)
            prompt = TokenizedPrompt(token_ids if truncation is None else truncation.cut(token_ids))
        elif request.truncate_prompt_tokens is not None:
            raise BadRequestError(
                "truncate_prompt_tokens could cut an image in two: leave it out in requests with images",
                param="truncate_prompt_tokens",
            )
        else:
            decoder, check = service.audio_cutter, partial(check_prompt, limits=limits, param="messages")
            prompt = await expand_image_tokens(tokenize, places, service.image_limits, check, images, decoder)
        # Taken here, because the prompt has just become tokens; what follows is not tokenization.
        timing = service.timing(context, tokenizing_at=tokenizing_at)
        check_prompt(prompt.token_ids, limits, param="messages")
        rules = text_rules(request, logprobs=logprobs, tokens_as_ids=service.tokens_as_ids)
        # Some formats of tool calls and reasoning are marked by special tokens, which the text must then contain.
        if message_format.needs_special_tokens:
            rules = msgspec.structs.replace(rules, skip_special_tokens=False)
        rules = await service.with_grammar(rules, request, message_format.grammar_spec, context)
        generation = service.generate(request, api_id, [prompt], rules, limits, timing=timing)
        # The returned chat owns the memory of its images.
        return BegunChat(model, message_format, rules, generation, images)
    except BaseException:
        images.release()
        raise


async def count_tokens(service: ModelService, request: ChatCompletionRequest, *, is_long: bool) -> int:
    """Return the number of prompt tokens that a chat request has, those of images included. Nothing is sent to an
    instance. With `is_long` (a large body) the template is rendered in a thread.

    Raises `ApiError` if the model does not exist or the request cannot be rendered.
    """
    service = service.of(request.model)
    service.view.model_name(request.model)
    text = await service.model.render_chat(request, shows_images=True, is_long=is_long)
    # Chat templates write the special tokens themselves, so none are added unless the client wants it.
    with_special = bool(request.add_special_tokens)
    settings = processor_settings_of(service, request)
    found = await counted_tokens(
        service, text, media_of(request.messages), settings=settings, add_special_tokens=with_special
    )
    return len(found)


def processor_settings_of(service: ModelService, request: ChatCompletionRequest | TokenizeRequest) -> Mapping[str, Any]:
    """Return the settings of the model's processor: the request's, and the server's where it has none. Raises
    `BadRequestError` for settings of a request to a model that reads no images.
    """
    if request.mm_processor_kwargs and service.model.vision is None:
        raise BadRequestError(
            "mm_processor_kwargs is not supported by this model, which reads no images",
            param="mm_processor_kwargs",
            code="unsupported_parameter",
        )
    return {**service.image_limits.processor_settings, **(request.mm_processor_kwargs or {})}


async def counted_tokens(
    service: ModelService,
    text: str,
    media: Sequence[MediaPart],
    *,
    settings: Mapping[str, Any],
    add_special_tokens: bool,
) -> list[int]:
    """Return the token ids of a prompt that is only counted or shown, not sent to an instance. They include the tokens
    of the images at `urls`.
    """
    tokenize = partial(
        service.model.tokenize, add_special_tokens=add_special_tokens, max_tokens=service.max_tokenised()
    )
    places = service.model.image_places(text, media, settings)
    if places is None:
        return await tokenize(text)
    return await count_image_tokens(tokenize, places, service.image_limits, service.image_memory, service.audio_cutter)
