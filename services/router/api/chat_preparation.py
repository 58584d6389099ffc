"""A chat on its way: rendered, tokenised, checked and sent to the instances. The answer's form is for the endpoints."""

import msgspec

from baton_serve.services.router.api.generation import TextGeneration
from baton_serve.services.router.api.model_service import ModelService
from baton_serve.services.router.protocol.asgi import RequestContext
from baton_serve.services.router.protocol.errors import BadRequestError
from baton_serve.services.router.protocol.openai_requests import ChatCompletionRequest
from baton_serve.services.router.text.message_reader import MessageFormat
from baton_serve.services.router.text.multimodal.image_tokens import (
    TokenizedPrompt,
    expand_image_tokens,
    expand_placeholders,
    image_urls,
)
from baton_serve.services.router.text.sampling_params import (
    ModelLimits,
    TextRules,
    chat_logprobs,
    check_prompt,
    text_rules,
    truncated,
)


class BegunChat(msgspec.Struct, frozen=True):
    """`model` is the name that the answer carries."""

    model: str
    message_format: MessageFormat
    rules: TextRules
    generation: TextGeneration


async def begin_chat(
    service: ModelService, request: ChatCompletionRequest, context: RequestContext, api_id: str, *, is_long: bool
) -> BegunChat:
    """`is_long`: the request had a long body. Raises `ApiError`."""
    model = service.model_name(request.model)
    limits = service.limits()
    logprobs = chat_logprobs(request)
    tokenizing_at = service.clock()
    urls = image_urls(request.messages)
    text = await service.model.render_chat(request, shows_images=True, is_long=is_long)
    message_format = service.message_formats.of(request, text)
    token_ids = await service.tokenize(
        text, limits, add_special_tokens=bool(request.add_special_tokens), truncate=request.truncate_prompt_tokens
    )
    prompt = TokenizedPrompt(truncated(token_ids, request.truncate_prompt_tokens, limits))
    if urls:
        prompt = await _expand_images(service, request, urls, token_ids, limits)
    timing = service.timing(context, tokenizing_at=tokenizing_at)
    check_prompt(prompt.token_ids, limits, param="messages")
    rules = text_rules(request, logprobs=logprobs, tokens_as_ids=service.settings.return_tokens_as_token_ids)
    if message_format.needs_special_tokens:
        rules = msgspec.structs.replace(rules, skip_special_tokens=False)
    rules = await service.with_grammar(rules, request, message_format.grammar_spec, context.exchange)
    generation = service.generate(request, api_id, [prompt], rules, limits, timing=timing)
    return BegunChat(model, message_format, rules, generation)


async def count_tokens(service: ModelService, request: ChatCompletionRequest, *, is_long: bool) -> int:
    """Of the prompt that the request would be. Raises `ApiError`."""
    service = service.of(request.model)
    service.model_name(request.model)
    text = await service.model.render_chat(request, shows_images=True, is_long=is_long)
    token_ids = await service.model.tokenize(text, add_special_tokens=False, max_tokens=service.max_tokenised())
    return len(
        await expand_placeholders(token_ids, image_urls(request.messages), service.model.vision, service.image_limits)
    )


async def _expand_images(
    service: ModelService, request: ChatCompletionRequest, urls: list[str], token_ids: list[int], limits: ModelLimits
) -> TokenizedPrompt:
    if request.truncate_prompt_tokens is not None:
        raise BadRequestError(
            "truncate_prompt_tokens could cut an image in two: leave it out where there are images",
            param="truncate_prompt_tokens",
        )
    profile = service.model.vision
    assert profile is not None, "rendering has refused images"
    return await expand_image_tokens(token_ids, urls, profile, service.image_limits, limits)
