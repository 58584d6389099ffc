"""What the router knows of the served model without its weights: names, tokenizer, chat template, vocabulary."""

import contextlib
from collections.abc import Sequence
from functools import partial
from itertools import chain
from pathlib import Path

import jinja2
import msgspec

from baton_serve.contracts.model_path import model_folder
from baton_serve.contracts.vision import VisionProfile, vision_profile
from baton_serve.services.router.protocol.body_scan import check_counts
from baton_serve.services.router.protocol.errors import BadRequestError, ModelFolderError
from baton_serve.services.router.protocol.json_texts import TooDeepError, parsed
from baton_serve.services.router.protocol.openai_requests import (
    ChatCompletionRequest,
    ChatMessage,
    ContentPart,
    TokenizeRequest,
    Tool,
)
from baton_serve.services.router.settings import RouterSettings
from baton_serve.services.router.text.chat_template import ChatTemplate, ChatTemplates, Json, TemplateMessage
from baton_serve.services.router.text.detokenizer import Detokenizer
from baton_serve.services.router.text.grammar import GrammarSpec, Vocabulary
from baton_serve.services.router.text.grammar.compiling.checker import GrammarChecker
from baton_serve.services.router.text.multimodal.image_tokens import IMAGE_PART_TYPE
from baton_serve.services.router.text.sampling_params import SamplingDefaults
from baton_serve.services.router.text.thread_pools import GRAMMARS, TEMPLATES
from baton_serve.services.router.text.tokenization import TextTokenizer, beside_loop, read_json

SHORT_ID_CHARS = 9
"""Mistral's templates refuse ids of calls of any other length."""

_OURS = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""Variables of templates that no request sets by itself."""

_RENDERED_INLINE_PARTS = 200
"""More messages are rendered in a thread, so that other streams go on: each takes 1 us, however long its text is."""

_CHARS_PER_WORD = 100
"""A word takes as long to tokenise as so many characters of a text."""


class _Ends(msgspec.Struct, frozen=True):
    eos_token_id: int | list[int] | None = None


class _TextConfig(_Ends, frozen=True):
    vocab_size: int | None = None


class _Config(_TextConfig, frozen=True):
    text_config: _TextConfig | None = None


class _SentenceConfig(msgspec.Struct, frozen=True):
    do_lower_case: bool = False


class ServedModel:
    def __init__(self, tokenizer: TextTokenizer, templates: ChatTemplates, *, settings: RouterSettings) -> None:
        self.tokenizer = tokenizer
        self.detokenizer = Detokenizer(tokenizer)
        self.path = settings.model
        self.vocabulary = Vocabulary(tokenizer)
        self.compiling = GrammarChecker(self.vocabulary.source)
        """Its process starts with the first grammar, or with `start`."""
        self.vocab_size = tokenizer.vocab_size
        self.lowercase = False
        """Texts are embedded in lower case."""
        self.eos_token_ids: frozenset[int] = frozenset()
        self.sampling_defaults = SamplingDefaults()
        self.vision: VisionProfile | None = None
        """How images are read; None: they are not."""
        self._templates = templates
        self._content_format = settings.chat_template_content_format
        self._has_short_ids = settings.tool_call_parser == "mistral"
        self._trusts_requests = settings.trust_request_chat_template

    @property
    def image_token(self) -> str | None:
        """What a chat template writes for an image."""
        return self.tokenizer.token(self.vision.image_token_id) if self.vision is not None else None

    @classmethod
    def from_settings(cls, settings: RouterSettings) -> "ServedModel":
        """Raises `ModelFolderError`."""
        folder = model_folder(settings.tokenizer or settings.model)
        tokenizer = TextTokenizer.from_folder(folder)
        templates = ChatTemplates.from_folder(folder, tokenizer.special_tokens, settings.chat_template)
        model = cls(tokenizer, templates, settings=settings)
        config = read_json(model_folder(settings.model) / "config.json", _Config)
        if config is None:
            raise ModelFolderError(f"{settings.model} has no config.json: is it the folder of a Hugging Face model?")
        stated = config.vocab_size or (config.text_config.vocab_size if config.text_config is not None else None)
        generation = read_json(model_folder(settings.model) / "generation_config.json", _Ends)
        model.eos_token_ids = model.vocabulary.ends = _eos_token_ids(config, config.text_config, generation)
        if settings.generation_config == "auto":
            defaults = read_json(model_folder(settings.model) / "generation_config.json", SamplingDefaults)
            model.sampling_defaults = defaults or SamplingDefaults()
        # Embeddings may have more rows than the tokenizer has tokens, or fewer.
        model.vocab_size = stated or tokenizer.vocab_size
        sentences = read_json(model_folder(settings.model) / "sentence_bert_config.json", _SentenceConfig)
        model.vision = vision_profile(read_json(model_folder(settings.model) / "config.json", dict[str, object]))
        model.vocabulary.read()
        model.lowercase = sentences is not None and sentences.do_lower_case
        return model

    async def tokenize(self, text: str, *, add_special_tokens: bool, max_tokens: int) -> list[int]:
        """Raises `BadRequestError` for a text that has more than `max_tokens`, where it is so long that finding out
        by tokenising all of it would take long; the caller checks others."""
        longest = self.tokenizer.longest_token_chars
        if len(text) > max_tokens * longest:
            raise _too_long(max_tokens, len(text), f"at least {len(text) // longest}")
        encode = partial(self.tokenizer.encode_within, add_special_tokens=add_special_tokens, max_tokens=max_tokens)
        token_ids = await beside_loop(len(text), lambda: encode(text))
        if token_ids is None:
            raise _too_long(max_tokens, len(text), f"more than {max_tokens}")
        return token_ids

    async def tokenize_end(self, text: str, *, add_special_tokens: bool, num_tokens: int) -> list[int]:
        """The last `num_tokens` of a text's tokens, and perhaps some before them."""
        encode = partial(self.tokenizer.encode_end, add_special_tokens=add_special_tokens, num_tokens=num_tokens)
        return await beside_loop(len(text), lambda: encode(text))

    async def grammar(self, grammar_spec: GrammarSpec) -> str:
        """Return the grammar's text, which is valid. It is written in a thread and compiled in another process, unless
        it has been compiled before. Raises `BadRequestError`, `RateLimitError` or `UnavailableError`."""
        grammar = await GRAMMARS.run(self.vocabulary.write, grammar_spec.rule, param=grammar_spec.param)
        self.vocabulary.check(grammar, await self.compiling.verdict(grammar), param=grammar_spec.param)
        return grammar

    def start_compiler(self) -> None:
        """Start the process that compiles grammars, where the tokenizer can have any."""
        with contextlib.suppress(BadRequestError):
            self.vocabulary.read_or_raise()
            self.compiling.start()

    async def bad_words(self, words: Sequence[str]) -> list[list[int]]:
        """Tokens of each word at the beginning of a text and, where that is written otherwise, after a space."""
        if not words:
            return []
        # Words are short: what each costs is the call.
        return await beside_loop(_CHARS_PER_WORD * len(words), lambda: self._bad_words(words))

    def _bad_words(self, words: Sequence[str]) -> list[list[int]]:
        firsts = self.tokenizer.encode_words(words)
        laters = self.tokenizer.encode_words([" " + word.lstrip() for word in words])
        found: list[list[int]] = []
        for first, later in zip(firsts, laters, strict=True):
            found += [first] if first else []
            if first and later[0] != first[0] and len(later) == len(first):
                found.append(later)
        return found

    async def render_chat(
        self,
        request: ChatCompletionRequest | TokenizeRequest,
        *,
        shows_images: bool = False,
        is_long: bool = False,
    ) -> str:
        """The prompt's text, with the token that stands for an image where one is shown. `is_long`: the request had a
        long body. Raises `BadRequestError`."""
        if request.continue_final_message and request.add_generation_prompt:
            raise BadRequestError(
                "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
            )
        num_parts = sum([len(m.content) if isinstance(m.content, list) else 1 for m in request.messages or ()])
        if not is_long and num_parts + len(request.tools or ()) <= _RENDERED_INLINE_PARTS:
            return self._rendered(request, shows_images=shows_images)
        return await TEMPLATES.run(self._rendered, request, shows_images=shows_images)

    def _rendered(self, request: ChatCompletionRequest | TokenizeRequest, *, shows_images: bool) -> str:
        continues = bool(request.continue_final_message)
        template = self._template(request)
        image = self.image_token if shows_images else None
        chat = [self._message(message, template, image) for message in request.messages or ()]
        tools = [_json(tool) for tool in request.tools] if request.tools else None
        kwargs = request.chat_template_kwargs or {}
        extra: dict[str, Json] = {name: value for name, value in kwargs.items() if name not in _OURS}
        documents: list[Json] | None = None
        if isinstance(request, ChatCompletionRequest):
            documents = list(request.documents) if request.documents is not None else None
            if request.reasoning_effort is not None:
                extra.setdefault("reasoning_effort", request.reasoning_effort)
        return template.render(
            chat,
            tools=tools,
            documents=documents,
            add_generation_prompt=request.add_generation_prompt is not False and not continues,
            continue_final_message=continues,
            variables=self._templates.variables(extra),
        )

    def _template(self, request: ChatCompletionRequest | TokenizeRequest) -> ChatTemplate:
        if request.chat_template is None:
            return self._templates.pick(has_tools=bool(request.tools))
        if not self._trusts_requests:
            raise BadRequestError(
                "a chat template in a request is run only with --trust-request-chat-template", param="chat_template"
            )
        try:
            return ChatTemplate(request.chat_template)
        except jinja2.TemplateError as exc:
            raise BadRequestError(f"chat_template cannot be parsed: {exc}", param="chat_template") from exc

    def _message(self, message: ChatMessage, template: ChatTemplate, image: str | None) -> TemplateMessage:
        plain: TemplateMessage = {"role": message.role, **(message.model_extra or {})}
        if isinstance(message.content, str) or message.content is None:
            plain["content"] = message.content
        else:
            shown = [image for part in message.content if part.type == IMAGE_PART_TYPE] if image is not None else []
            texts = [part for part in message.content if not shown or part.type != IMAGE_PART_TYPE]
            wanted = template.content_format if self._content_format == "auto" else self._content_format
            if wanted == "openai":
                plain["content"] = [_part(part, shown) for part in message.content]
            else:  # images come first, as vLLM has it
                plain["content"] = "\n".join([*shown, *(_text_of(part.type, part.text) for part in texts)])
        return self._with_calls(plain)

    def _with_calls(self, message: TemplateMessage) -> TemplateMessage:
        """As templates expect them: no empty list, arguments as objects, and ids as long as the model knows them."""
        calls = message.pop("tool_calls", None)
        if isinstance(calls, list) and calls:
            message["tool_calls"] = [self._call(call) for call in calls]
        elif calls:
            raise BadRequestError("messages: tool_calls must be a list", param="messages")
        if isinstance(answered := message.get("tool_call_id"), str):
            message["tool_call_id"] = self._short_id(answered)
        return message

    def _call(self, call: Json) -> Json:
        call = _with_parsed_arguments(call)
        if isinstance(call, dict) and isinstance(given := call.get("id"), str):
            return {**call, "id": self._short_id(given)}
        return call

    def _short_id(self, given: str) -> str:
        return given[-SHORT_ID_CHARS:] if self._has_short_ids else given


class ModelNames:
    """Names that clients may ask for; the first is the one that answers carry."""

    def __init__(self, settings: RouterSettings) -> None:
        self._stated = list(settings.served_model_name)
        self._own = [settings.model, Path(settings.model).name]

    def own(self) -> frozenset[str]:
        """By which instances of this model are told from others'."""
        return frozenset([*self._stated, *self._own])

    def all(self, advertised: Sequence[str]) -> list[str]:
        """`advertised` come from instances."""
        return self._stated or list(dict.fromkeys([*advertised, *self._own]))


def _too_long(max_tokens: int, num_chars: int, num_tokens: str) -> BadRequestError:
    return BadRequestError(
        f"this model's context is {max_tokens} tokens; a prompt of {num_chars} characters has {num_tokens} tokens",
        code="context_length_exceeded",
    )


def _eos_token_ids(*configs: _Ends | None) -> frozenset[int]:
    """Every token that an engine takes for the end of sequence."""
    stated = [config.eos_token_id for config in configs if config is not None]
    return frozenset(chain.from_iterable([one] if isinstance(one, int) else one or [] for one in stated))


def _text_of(kind: str, text: str | None) -> str:
    if kind not in ("text", "input_text", "output_text", "refusal") or text is None:
        raise BadRequestError(f"messages: content of type {kind!r} is not supported by this model", param="messages")
    return text


def _part(part: ContentPart, shown: Sequence[str]) -> Json:
    if shown and part.type == IMAGE_PART_TYPE:
        return {"type": "image"}
    return {"type": "text", "text": _text_of(part.type, part.text)}


def _json(tool: Tool) -> Json:
    return {"type": tool.type, "function": tool.function, **(tool.model_extra or {})}


def _with_parsed_arguments(call: Json) -> Json:
    """OpenAI's clients send arguments as a JSON string, templates expect the object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    text = str(function["arguments"])
    check_counts(text.encode(), "messages: an argument of a call")
    try:
        arguments: Json = parsed(text)
    except TooDeepError as exc:
        raise BadRequestError(f"messages: the arguments of a call: {exc}", param="messages") from exc
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}
