"""Read the inputs of a pooling request (texts, token ids or a chat); `input_tokens.py` tokenizes and truncates them."""

from collections.abc import Mapping, Sequence
from typing import Any

from baton_serve.contracts.media import MAX_IMAGES, MAX_PROMPT_BYTES
from baton_serve.contracts.pooling import PoolingInput
from baton_serve.services.router.api.model_service import ModelService
from baton_serve.services.router.api.pooling.image_inputs import lone_text, with_images
from baton_serve.services.router.api.pooling.input_tokens import InputRules, of_texts, of_token_ids
from baton_serve.services.router.api.pooling.schema import InputRequest, PoolingCommon
from baton_serve.services.router.protocol.errors import BadRequestError
from baton_serve.services.router.protocol.image_limits import media_error
from baton_serve.services.router.protocol.openai_requests import TokenizeRequest
from baton_serve.services.router.text.multimodal.image_memory import ImageReservation
from baton_serve.services.router.text.multimodal.media_parts import MediaPart, media_of


class RequestInputs:
    """Converts the inputs of one request to tokens, and keeps the files of their images until the answer is there."""

    def __init__(self, service: ModelService, request: PoolingCommon, owner: str, *, is_long: bool) -> None:
        """`owner` is the owner of the API key, whose share of the memory for images is used. `is_long` says that the
        body was large, so that its chat is rendered in a thread.
        """
        self._service = service
        self._request = request
        self._owner = owner
        self._is_long = is_long
        self._reservations: list[ImageReservation] = []
        self.images: dict[bytes, bytes] = {}
        """The files of all images by their digest."""

    def close(self) -> None:
        """Give back the memory of the images. Call it when the answer is there; the inputs are not used again."""
        self.images.clear()
        for reservation in self._reservations:
            reservation.release()

    def rules(self, *, add_special_tokens: bool = True) -> InputRules:
        """Return how the inputs of this request are tokenized, truncated and limited in length."""
        max_tokens = self._service.view.max_model_len()
        assert max_tokens is not None, "the profile came from an instance, so one is known"
        return InputRules(
            max_tokens=max_tokens,
            vocab_size=self._service.model.vocab_size,
            truncate=self._request.kept_tokens(),
            keeps_end=self._request.keeps_end(),
            add_special_tokens=add_special_tokens,
            lowercase=self._service.model.lowercase,
        )

    async def texts(
        self, texts: Sequence[str] | Sequence[tuple[str, str]], *, param: str, rules: InputRules | None = None
    ) -> list[PoolingInput]:
        """Tokenize texts, or pairs of texts that are scored together. `param` is the request's field that errors name;
        without `rules`, those of `self.rules()` apply. Raises `BadRequestError` for an input that does not fit the
        model.
        """
        return await of_texts(self._service.model.tokenizer, texts, rules or self.rules(), param=param)

    async def of(self, request: InputRequest) -> list[PoolingInput]:
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
        embedder = self._service.model.embedder
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
        if settings and self._service.model.embedder is None:
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
        embedder, media = self._service.model.embedder, media_of(messages)
        # The template of a chat writes the special tokens itself, so none are added unless the client wants it.
        rules = self.rules(add_special_tokens=bool(chat.add_special_tokens))
        if media:
            return await self._with_images(chat, media, rules)
        if embedder is not None and embedder.is_alone:
            text = embedder.written(lone_text(messages))
            # Such a model has no template, so that its tokenizer adds the special tokens.
            rules = self.rules(add_special_tokens=not embedder.writes_special_tokens)
        else:
            text = await self._service.model.render_chat(chat, is_long=self._is_long)
        (found,) = await self.texts([text], param=param, rules=rules)
        return found

    async def _with_images(self, chat: TokenizeRequest, media: Sequence[MediaPart], rules: InputRules) -> PoolingInput:
        """Return a chat with images as one input, and keep the files for `compute`."""
        if rules.truncate is not None:
            raise BadRequestError(
                "truncate_prompt_tokens could cut an image in two: leave it out in requests with images",
                param="truncate_prompt_tokens",
            )
        reservation = ImageReservation(self._service.image_memory, self._owner)
        self._reservations.append(reservation)
        prompt = await with_images(
            self._service, chat, media, reservation, max_tokens=rules.max_tokens, is_long=self._is_long
        )
        # Files and digests are in the same order: that of their first places.
        self.images |= zip(dict.fromkeys(span.digest for span in prompt.media), prompt.images, strict=True)
        num_bytes = sum(map(len, self.images.values()))
        # All may go to one instance in one message.
        if len(self.images) > MAX_IMAGES or num_bytes > MAX_PROMPT_BYTES:
            raise media_error(
                f"a request may have {MAX_IMAGES} different images of {MAX_PROMPT_BYTES} bytes together: split it"
            )
        return PoolingInput(prompt.token_ids, media=list(prompt.media))
