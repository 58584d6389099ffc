"""A chat on its way: rendered, tokenised, checked and sent to the instances. The answer's form is for the endpoints."""

import msgspec

from baton_serve.services.router.api.generation import Answering
from baton_serve.services.router.api.model_service import Frontend
from baton_serve.services.router.protocol.asgi import RequestContext
from baton_serve.services.router.protocol.errors import BadRequestError
from baton_serve.services.router.protocol.openai_requests import ChatCompletionRequest
from baton_serve.services.router.text.message_reader import MessageFormat
from baton_serve.services.router.text.multimodal.expand_images import placed, shown
from baton_serve.services.router.text.multimodal.image_tokens import Prompt
from baton_serve.services.router.text.multimodal.message_parts import urls_of
from baton_serve.services.router.text.sampling_params import (
    Limits,
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
    generation: Answering


async def begin_chat(
    frontend: Frontend, request: ChatCompletionRequest, context: RequestContext, api_id: str, *, is_long: bool
) -> BegunChat:
    """`is_long`: the request had a long body. Raises `ApiError`."""
    model = frontend.model_name(request.model)
    limits = frontend.limits()
    logprobs = chat_logprobs(request)
    tokenizing_at = frontend.clock()
    urls = urls_of(request.messages)
    text = await frontend.model.render_chat(request, shows_images=True, is_long=is_long)
    message_format = frontend.message_formats.of(request, text)
    token_ids = await frontend.tokenize(
        text, limits, add_special_tokens=bool(request.add_special_tokens), truncate=request.truncate_prompt_tokens
    )
    prompt = Prompt(truncated(token_ids, request.truncate_prompt_tokens, limits))
    if urls:
        prompt = await _shown(frontend, request, urls, token_ids, limits)
    arrival = frontend.arrival(context, tokenizing_at=tokenizing_at)
    check_prompt(prompt.token_ids, limits, param="messages")
    rules = text_rules(request, logprobs=logprobs, tokens_as_ids=frontend.settings.return_tokens_as_token_ids)
    if message_format.needs_special_tokens:
        rules = msgspec.structs.replace(rules, skip_special_tokens=False)
    rules = await frontend.constrained(rules, request, message_format.asked, context.exchange)
    generation = frontend.generate(request, api_id, [prompt], rules, limits, arrival=arrival)
    return BegunChat(model, message_format, rules, generation)


async def count_tokens(frontend: Frontend, request: ChatCompletionRequest, *, is_long: bool) -> int:
    """Of the prompt that the request would be. Raises `ApiError`."""
    frontend = frontend.of(request.model)
    frontend.model_name(request.model)
    text = await frontend.model.render_chat(request, shows_images=True, is_long=is_long)
    token_ids = await frontend.model.tokenize(text, add_special_tokens=False, max_tokens=frontend.max_tokenised())
    return len(await placed(token_ids, urls_of(request.messages), frontend.model.vision, frontend.image_limits))


async def _shown(
    frontend: Frontend, request: ChatCompletionRequest, urls: list[str], token_ids: list[int], limits: Limits
) -> Prompt:
    if request.truncate_prompt_tokens is not None:
        raise BadRequestError(
            "truncate_prompt_tokens could cut an image in two: leave it out where there are images",
            param="truncate_prompt_tokens",
        )
    profile = frontend.model.vision
    assert profile is not None, "rendering has refused images"
    return await shown(token_ids, urls, profile, frontend.image_limits, limits)
