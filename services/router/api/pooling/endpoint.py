"""The part that all endpoints of pooling models share: checks, inputs, and the way to the instances."""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from baton_serve.contracts.media import MAX_IMAGES, MAX_PROMPT_BYTES
from baton_serve.contracts.pooling import PoolingInput, PoolingProfile, PoolingSpec, PoolingTask
from baton_serve.services.router.api.model_service import ModelService
from baton_serve.services.router.api.pooling.image_inputs import lone_text, with_images
from baton_serve.services.router.api.pooling.inputs import InputRules, of_texts, of_token_ids
from baton_serve.services.router.api.pooling.schema import InputRequest, PoolingCommon
from baton_serve.services.router.protocol.asgi import (
    DisconnectWatch,
    Receive,
    RequestContext,
    Scope,
    Send,
    read_body,
    send_encoded,
)
from baton_serve.services.router.protocol.errors import BadRequestError, ClientGoneError
from baton_serve.services.router.protocol.image_limits import media_error
from baton_serve.services.router.protocol.openai_requests import TokenizeRequest
from baton_serve.services.router.protocol.openai_responses import Usage
from baton_serve.services.router.protocol.request_parsing import is_long, parsed
from baton_serve.services.router.quota.api_keys import allowed
from baton_serve.services.router.requests.pooling_dispatcher import PoolingPrompts, Vector
from baton_serve.services.router.text.multimodal.image_memory import ImageReservation
from baton_serve.services.router.text.multimodal.media_parts import MediaPart, media_of

R = TypeVar("R", bound=PoolingCommon)

# For errors: the endpoints that a model with this task serves.
_SERVED_BY = {
    "embed": "/v1/embeddings, /score and /rerank",
    "token_embed": "/pooling",
    "classify": "/classify, /pooling and, with a single class, /score and /rerank",
}


class PoolingEndpoint(Generic[R]):
    """Serves one path of pooling models, such as /score. It is a plain ASGI application that parses a request and
    answers with the result of the function `respond`.
    """

    def __init__(
        self,
        service: ModelService,
        schema: type[R],
        respond: "Callable[[PoolingCall, R], Awaitable[object]]",
        *,
        prefix: str,
    ) -> None:
        """Create the endpoint. `service` is that of the default model, `schema` the class of its requests; `respond`
        computes the answer to a request; `prefix` starts the ids of answers.
        """
        self._service = service
        self._schema = schema
        self._respond = respond
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = RequestContext.of(scope)
        body = await read_body(scope, receive)
        request = await parsed(body, self._schema)
        service = await self._service.serving(request.model)
        call = PoolingCall(service, request, context, prefix=self._prefix, is_long=is_long(body))
        try:
            encoded = await self._encoded_answer(call, request, context, receive)
        finally:
            call.close()
        await send_encoded(send, encoded)

    async def _encoded_answer(
        self, call: "PoolingCall", request: R, context: RequestContext, receive: Receive
    ) -> bytes:
        """Return the answer to a request as JSON. Raises `ApiError`, and `ClientGoneError` if the client disconnects.

        Nothing else that the answer was made of is kept then: a slow client may take minutes to receive 50 MB.
        """
        # A task of its own, so that it can be cancelled wherever it waits once the client has disconnected.
        response_task = asyncio.ensure_future(self._respond(call, request))
        is_gone = False

        def abandon() -> None:
            nonlocal is_gone
            is_gone = True
            response_task.cancel()

        try:
            with DisconnectWatch(receive, abandon, context.exchange):
                return msgspec.json.encode(await response_task)
        except asyncio.CancelledError:
            # Either the client has disconnected, or the server cancels this request. In the second case the
            # cancellation must go on.
            response_task.cancel()
            if is_gone:
                raise ClientGoneError("the client disconnected") from None
            raise


class PoolingCall:
    """One request to a pooling model: converts its inputs to tokens, computes their vectors on the instances, and
    counts its tokens.

    The endpoint creates it for each request and gives it to the function that computes the answer.
    """

    def __init__(
        self, service: ModelService, request: PoolingCommon, context: RequestContext, *, prefix: str, is_long: bool
    ) -> None:
        """Start with a parsed `request`. Raises `ApiError` if `service` does not serve a pooling model under the
        requested name.

        `prefix` starts the id of the answer. `is_long` says that the body was large, so that its chat is rendered in a
        thread.
        """
        self.service = service
        self.model = service.view.model_name(request.model)
        self.profile: PoolingProfile = service.view.pooling_profile()
        self.id = f"{prefix}-{request.request_id or context.request_id}"
        self.created = service.now()
        self._request = request
        self._arrived_at = context.arrived_at
        self._caller = context.caller
        self._slo = service.slo(context)
        self._trace_headers = context.trace_headers
        self._num_tokens = 0
        self._is_long = is_long
        self._reservations: list[ImageReservation] = []
        self._images: dict[bytes, bytes] = {}

    def close(self) -> None:
        """Give back the memory of the images. Call it when the answer is there; the inputs are not used again."""
        self._images.clear()
        for reservation in self._reservations:
            reservation.release()

    def require(self, *tasks: PoolingTask) -> None:
        """Raise `BadRequestError` if the model can perform none of `tasks`. The error names the endpoints that this
        model serves.
        """
        if not set(tasks) & set(self.profile.tasks):
            served = dict.fromkeys(_SERVED_BY[task] for task in self.profile.tasks)
            raise BadRequestError(
                f"this model does not serve {' or '.join(tasks)}; it answers at {'; '.join(served)}",
                code="unsupported_endpoint",
            )

    def rules(self, *, add_special_tokens: bool = True) -> InputRules:
        """Return how the inputs of this request are tokenized, truncated and limited in length."""
        max_tokens = self.service.view.max_model_len()
        assert max_tokens is not None, "the profile came from an instance, so one is known"
        return InputRules(
            max_tokens=max_tokens,
            vocab_size=self.service.model.vocab_size,
            truncate=self._request.kept_tokens(),
            keeps_end=self._request.keeps_end(),
            add_special_tokens=add_special_tokens,
            lowercase=self.service.model.lowercase,
        )

    async def texts(
        self, texts: Sequence[str] | Sequence[tuple[str, str]], *, param: str, rules: InputRules | None = None
    ) -> list[PoolingInput]:
        """Tokenize texts, or pairs of texts that are scored together. `param` is the request's field that errors name;
        without `rules`, those of `self.rules()` apply. Raises `BadRequestError` for an input that does not fit the
        model.
        """
        return await of_texts(self.service.model.tokenizer, texts, rules or self.rules(), param=param)

    async def inputs(self, request: InputRequest) -> list[PoolingInput]:
        """Return the tokenized inputs of a request: its texts, its token ids, or its chat as one text.

        Raises `BadRequestError` unless the request has exactly one of `input` and `messages`, and for inputs that do
        not fit the model.
        """
        if (request.input is None) == (request.messages is None):
            raise BadRequestError("give either input or messages", param="input")
        self.check_settings(request.mm_processor_kwargs)
        if request.input is None:
            chat = TokenizeRequest(
                messages=request.messages,
                add_generation_prompt=request.add_generation_prompt or False,
                continue_final_message=request.continue_final_message,
                chat_template=request.chat_template,
                chat_template_kwargs=request.chat_template_kwargs,
                add_special_tokens=request.add_special_tokens,
                mm_processor_kwargs=request.mm_processor_kwargs,
            )
            return [await self.chat(chat)]
        embedder = self.service.model.embedder
        writes_special = embedder is not None and embedder.writes_special_tokens
        rules = self.rules(add_special_tokens=request.add_special_tokens is not False and not writes_special)
        given = [request.input] if isinstance(request.input, str) else request.input
        texts = [item for item in given if isinstance(item, str)]
        if texts:
            texts = texts if embedder is None else [embedder.written(text) for text in texts]
            return await self.texts(texts, param="input", rules=rules)
        # A flat list of numbers is one prompt; the schema allows no mixture.
        single = [item for item in given if isinstance(item, int)]
        prompts = [single] if single else [item for item in given if isinstance(item, list)]
        return of_token_ids(prompts, rules, param="input")

    def check_settings(self, settings: Mapping[str, Any] | None) -> None:
        """Raise `BadRequestError` for `mm_processor_kwargs` to a model that reads no images."""
        if settings and self.service.model.embedder is None:
            raise BadRequestError(
                "mm_processor_kwargs is not supported by this model, which reads no images",
                param="mm_processor_kwargs",
                code="unsupported_parameter",
            )

    async def chat(self, chat: TokenizeRequest, *, param: str = "messages") -> PoolingInput:
        """Return a chat as one input, with its images if it has some. `param` is the request's field that errors name.
        Raises `BadRequestError` if it does not fit.
        """
        messages = chat.messages or []
        embedder, media = self.service.model.embedder, media_of(messages)
        # The template of a chat writes the special tokens itself, so none are added unless the client wants it.
        rules = self.rules(add_special_tokens=bool(chat.add_special_tokens))
        if media:
            return await self._with_images(chat, media, rules)
        if embedder is not None and embedder.is_alone:
            text = embedder.written(lone_text(messages))
            # Such a model has no template, so that its tokenizer adds the special tokens.
            rules = self.rules(add_special_tokens=not embedder.writes_special_tokens)
        else:
            text = await self.service.model.render_chat(chat, is_long=self._is_long)
        (found,) = await self.texts([text], param=param, rules=rules)
        return found

    async def _with_images(self, chat: TokenizeRequest, media: Sequence[MediaPart], rules: InputRules) -> PoolingInput:
        """Return a chat with images as one input, and keep the files for `compute`."""
        if rules.truncate is not None:
            raise BadRequestError(
                "truncate_prompt_tokens could cut an image in two: leave it out in requests with images",
                param="truncate_prompt_tokens",
            )
        reservation = ImageReservation(self.service.image_memory, self._caller.name)
        self._reservations.append(reservation)
        prompt = await with_images(
            self.service, chat, media, reservation, max_tokens=rules.max_tokens, is_long=self._is_long
        )
        # Files and digests are in the same order: that of their first places.
        self._images |= zip(dict.fromkeys(span.digest for span in prompt.media), prompt.images, strict=True)
        num_bytes = sum(map(len, self._images.values()))
        # All may go to one instance in one message.
        if len(self._images) > MAX_IMAGES or num_bytes > MAX_PROMPT_BYTES:
            raise media_error(
                f"a request may have {MAX_IMAGES} different images of {MAX_PROMPT_BYTES} bytes together: split it"
            )
        return PoolingInput(prompt.token_ids, media=list(prompt.media))

    async def compute(self, inputs: Sequence[PoolingInput], params: PoolingSpec) -> list[Vector]:
        """Compute one vector for each input on the instances, and return them in the same order. `params` has the task
        and what is done with its result. Raises `ApiError` if an input cannot be computed.
        """
        prompts = PoolingPrompts(
            # Instances need unique ids, but clients may choose ids (x-request-id) and use one twice.
            request_id=f"{self.id}-{secrets.token_hex(4)}",
            inputs=inputs,
            params=params,
            priority=allowed(self._request.priority, self._caller),
            caller=self._caller,
            slo=self._slo,
            trace_headers=self._trace_headers,
            model=self.service.view.only_names(),
            images=self._images,
        )
        self._num_tokens += prompts.num_tokens
        return await self.service.pooling.vectors(prompts, arrived_at=self._arrived_at)

    def usage(self) -> Usage:
        """Return the number of tokens of all inputs that were given to `compute` so far."""
        return Usage(prompt_tokens=self._num_tokens, total_tokens=self._num_tokens, completion_tokens=0)
