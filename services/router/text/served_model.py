"""Loads what the router needs of a model (tokenizer, chat template, EOS tokens, vocabulary, limits, names), and renders
its prompts.
"""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from baton_serve.contracts.lark import UnconvertedGbnfError
from baton_serve.contracts.model_path import model_folder
from baton_serve.contracts.vision import (
    HEARD,
    EmbedderImages,
    ImageFamily,
    configured,
    default_template,
    embedder_images,
    image_family,
)
from baton_serve.contracts.vision.model_files import ModelFacts
from baton_serve.generation_config import GENERATION_CONFIG_FILE, GenerationDefaults, generation_config
from baton_serve.services.router.protocol.body_scan import TooDeepError, check_counts, parsed
from baton_serve.services.router.protocol.errors import BadRequestError, ModelFolderError
from baton_serve.services.router.protocol.image_limits import processor_settings
from baton_serve.services.router.protocol.openai_requests import (
    ChatCompletionRequest,
    ChatMessage,
    ContentPart,
    TokenizeRequest,
    Tool,
)
from baton_serve.services.router.settings import RouterSettings
from baton_serve.services.router.text.chat_template import (
    TEMPLATE_ERRORS,
    ChatTemplate,
    ChatTemplates,
    Json,
    TemplateMessage,
)
from baton_serve.services.router.text.detokenizer import Detokenizer
from baton_serve.services.router.text.grammar import GrammarSpec, Vocabulary
from baton_serve.services.router.text.grammar.compiling.checker import GrammarChecker
from baton_serve.services.router.text.multimodal.image_tokens import ImagePlaces
from baton_serve.services.router.text.multimodal.media_parts import KINDS, MediaPart
from baton_serve.services.router.text.prompt_length import Truncation
from baton_serve.services.router.text.speech.speech_profile import SpeechProfile, speech_profile
from baton_serve.services.router.text.thread_pools import GRAMMARS, REQUEST_TEMPLATES, TEMPLATES
from baton_serve.services.router.text.tokenization import (
    ENCODED_INLINE_CHARS,
    MissingTokenizer,
    TextTokenizer,
    beside_loop,
    read_json,
)

SHORT_ID_CHARS = 9
"""Length of tool call ids for Mistral's models. Their chat templates reject any other length."""

_RESERVED_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""Template variables that the router sets. `chat_template_kwargs` of a request cannot replace them."""

_RENDERED_INLINE_PARTS = 200
"""Largest number of messages and content parts that is rendered on the event loop. Each takes about 1 us, however long
its text is; longer chats are rendered in a thread, so that streams go on."""

_REQUEST_TEMPLATE_S = 5.0
"""Longest time in seconds to wait for the chat template of a request."""

_MAX_GBNF_PARTS = 16
"""Largest number of different grammars in GBNF in one request. Each is converted by another process."""

_CHARS_PER_WORD = 100
"""Cost of tokenizing one word of `bad_words`, as a number of characters of a text that takes as long."""


class _EosConfig(msgspec.Struct, frozen=True):
    """The ids of the end-of-sequence tokens, as config.json and generation_config.json state them."""

    eos_token_id: int | list[int] | None = None


class _TextConfig(_EosConfig, frozen=True):
    """The fields that are read from the config of a model's text decoder."""

    vocab_size: int | None = None


class _Config(_TextConfig, frozen=True):
    """The fields that are read from config.json. Models with images have those of the text decoder in `text_config`."""

    text_config: _TextConfig | None = None
    thinker_config: "_Config | None" = None
    """The part of an Omni model that writes text."""


class _SentenceConfig(msgspec.Struct, frozen=True):
    """The one field that is read from sentence_bert_config.json: whether texts are converted to lower case."""

    do_lower_case: bool = False


class ServedModel:
    """Holds all that the router needs of one model: tokenizer, chat templates, grammars and names, but no weights.

    It is created when the router starts, and endpoints use it on the event loop.
    """

    def __init__(self, tokenizer: TextTokenizer, templates: ChatTemplates, *, settings: RouterSettings) -> None:
        self.tokenizer = tokenizer
        self.detokenizer = Detokenizer(tokenizer)
        self.path = settings.model
        self.vocabulary = Vocabulary(tokenizer)
        self.compiling = GrammarChecker(self.vocabulary.source)
        """Compiles grammars in another process, which starts with the first grammar or with `start_compiler`."""
        self.vocab_size = tokenizer.vocab_size
        self.lowercase = False
        """True if texts for embeddings are converted to lower case."""
        self.eos_token_ids: frozenset[int] = frozenset()
        self.generation = GenerationDefaults()
        """The default sampling parameters of requests."""
        self.vision: ImageFamily | None = None
        """The rules for images in prompts; None if the model does not accept images."""
        self.embedder: EmbedderImages | None = None
        """The rules for images in inputs of a model that computes vectors; None if it does not accept images."""
        self.speech: SpeechProfile | None = None
        """Windows and tokens of transcripts; None if the model does not transcribe audio."""
        self._templates = templates
        self._content_format = settings.chat_template_content_format
        self._has_short_ids = settings.tool_call_parser == "mistral"
        self._trusts_requests = settings.trust_request_chat_template

    @property
    def inputs(self) -> list[str]:
        """Return what the model reads beside text: `image` and `audio` in chats, `speech` in files that it
        transcribes.
        """
        parts = self.media_placeholders
        reads_images = "image_url" in parts or self.embedder is not None
        found = {"image": reads_images, "audio": "input_audio" in parts, "speech": self.speech is not None}
        return [name for name, is_read in found.items() if is_read]

    @property
    def media_placeholders(self) -> dict[str, str]:
        """Return the texts that chat templates write for images and videos, by the type of a content part. A type that
        the model does not accept is missing.
        """
        if self.vision is None:
            return {}
        found: dict[str, str] = {}
        if self.vision.reads_images:
            mark = self.vision.placeholder or self.tokenizer.token(self.vision.image_token_id) or ""
            found |= {"image_url": mark, "image_embeds": mark}
        if self.vision.audio is not None:
            before, behind = self.vision.audio.marks
            mark = f"{before}{self.tokenizer.token(self.vision.audio.token_id)}{behind}"
            found |= {"audio_url": mark, "input_audio": mark}
        if self.vision.video is not None:
            least = self.vision.video.least_text
            place = least.placeholder
            mark = (self.tokenizer.token(place) or "") if isinstance(place, int) else place
            found["video_url"] = f"{least.around[0]}{mark}{least.around[1]}"
        return found

    def image_places(self, text: str, media: Sequence[MediaPart], settings: Mapping[str, Any]) -> ImagePlaces | None:
        """Return the places of a chat's images and videos in its text, or None if it has none.

        `settings` are those of the model's processor. `render_chat` rejects images and videos if the model does not
        accept them. Raises `BadRequestError` for settings that the model does not know.
        """
        if not media or self.vision is None:
            return None
        return ImagePlaces(text, media, self.vision, self.tokenizer.token, settings)

    @classmethod
    def from_settings(cls, settings: RouterSettings) -> "ServedModel":
        """Load the model that `settings.model` names, from its folder. Raises `ModelFolderError` if a file is missing
        or broken.
        """
        folder = model_folder(settings.tokenizer or settings.model)
        tokenizer = MissingTokenizer() if settings.skip_tokenizer_init else TextTokenizer.from_folder(folder)
        default = default_template(ModelFacts.of(model_folder(settings.model)))
        templates = ChatTemplates.from_folder(folder, tokenizer.special_tokens, settings.chat_template, default)
        model = cls(tokenizer, templates, settings=settings)
        config = read_json(model_folder(settings.model) / "config.json", _Config)
        if config is None:
            raise ModelFolderError(f"{settings.model} has no config.json: is it the folder of a Hugging Face model?")
        config = config.thinker_config or config
        stated = config.vocab_size or (config.text_config.vocab_size if config.text_config is not None else None)
        generation = read_json(model_folder(settings.model) / GENERATION_CONFIG_FILE, _EosConfig)
        model.generation = _generation(settings)
        ends = _eos_token_ids(config, config.text_config, generation) | model.generation.end_token_ids
        model.eos_token_ids = model.vocabulary.ends = ends
        # The embedding matrix may have more rows than the tokenizer has tokens, or fewer. Only ids below its number of
        # rows may reach an engine.
        model.vocab_size = stated or tokenizer.vocab_size
        sentences = read_json(model_folder(settings.model) / "sentence_bert_config.json", _SentenceConfig)
        model.vision = _vision(settings)
        model.embedder = embedder_images(ModelFacts.of(model_folder(settings.model)))
        model.speech = speech_profile(model_folder(settings.model), tokenizer)
        if not settings.skip_tokenizer_init:
            model.vocabulary.read()
        model.lowercase = sentences is not None and sentences.do_lower_case
        return model

    async def tokenize(self, text: str, *, add_special_tokens: bool, max_tokens: int) -> list[int]:
        """Return the token ids of a text.

        Raises `BadRequestError` if the text certainly has more than `max_tokens`, without tokenizing all of it. The
        caller must still check the number of the returned tokens.
        """
        # The number of characters alone shows nothing: a tokenizer may drop blanks or make one token of a long word.
        if len(text) <= ENCODED_INLINE_CHARS:  # so few characters are never too many tokens to encode
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        encode = partial(self.tokenizer.encode_within, add_special_tokens=add_special_tokens, max_tokens=max_tokens)
        token_ids = await beside_loop(len(text), lambda: encode(text))
        if token_ids is None:
            raise _too_long(max_tokens, len(text))
        return token_ids

    async def tokenize_part(self, text: str, truncation: Truncation, *, add_special_tokens: bool) -> list[int]:
        """Tokenize as much of a text as its truncation keeps, and a few tokens more; the caller still cuts the result
        with `Truncation.cut`.
        """
        encode = partial(
            self.tokenizer.encode_part,
            add_special_tokens=add_special_tokens,
            num_tokens=truncation.num_tokens,
            from_end=not truncation.keeps_beginning,
        )
        return await beside_loop(len(text), lambda: encode(text))

    async def grammar(self, grammar_spec: GrammarSpec, caller: str = "") -> str:
        """Return the text of the grammar, which is valid for the model's engine. A thread writes the text, and another
        process compiles it to check it.

        `caller` is the name of the API key's owner (see `GrammarChecker.verdict`). Raises `BadRequestError` if the
        grammar is invalid, `RateLimitError` if too many grammars wait for the compiler, and `UnavailableError` if the
        compiler cannot be used.
        """
        param = grammar_spec.param
        grammar = await self._written(grammar_spec, caller)
        self.vocabulary.check(grammar, await self.compiling.verdict(grammar, caller), param=param)
        return grammar

    async def _written(self, grammar_spec: GrammarSpec, caller: str) -> str:
        """Return the text of a grammar, not checked yet. Its parts in GBNF (llama.cpp's format) are converted first.
        Raises the errors of `grammar`.
        """
        param = grammar_spec.param
        converted: dict[str, str] = {}
        for _ in range(_MAX_GBNF_PARTS + 1):
            try:
                return await GRAMMARS.run(self.vocabulary.write, grammar_spec.rule, param=param, converted=converted)
            except UnconvertedGbnfError as exc:
                gbnf = exc.gbnf
            try:
                converted[gbnf] = await self.compiling.converted(gbnf, caller)
            except ValueError as exc:
                raise BadRequestError(f"{param}: {exc}", param=param, code="invalid_grammar") from exc
        raise BadRequestError(f"{param}: there are more than {_MAX_GBNF_PARTS} grammars in GBNF", param=param)

    def start_compiler(self) -> None:
        """Start the process that compiles grammars, unless the tokenizer does not support structured output."""
        # Starting it now saves the first request with a grammar the time in which the process reads the tokenizer.
        with contextlib.suppress(BadRequestError):
            self.vocabulary.read_or_raise()
            self.compiling.start()

    async def bad_words(self, words: Sequence[str]) -> list[list[int]]:
        """Return the token sequences that spell the `words`, as vLLM does: each at the beginning of a text, and after a
        space.

        There is only one sequence for a word if both are equal.
        """
        if not words:
            return []
        return await beside_loop(_CHARS_PER_WORD * len(words), lambda: self._bad_words(words))

    def _bad_words(self, words: Sequence[str]) -> list[list[int]]:
        firsts = self.tokenizer.encode_words(words)
        laters = self.tokenizer.encode_words([" " + word.lstrip() for word in words])
        found: list[list[int]] = []
        for first, later in zip(firsts, laters, strict=True):
            found += [first] if first else []
            # This is vLLM's rule. If the space changes the number of tokens, it is probably a token of its own, and the
            # sequence without it also matches after a space.
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
        """Render the messages of a request with the chat template and return the prompt's text.

        With `shows_images` the text has one placeholder for each image; without it images are rejected. `is_long` says
        that the request had a long body, so that it is rendered in a thread. Raises `BadRequestError` if the template
        rejects the messages.
        """
        if request.continue_final_message and request.add_generation_prompt:
            raise BadRequestError(
                "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
            )
        self._check_request_template(request)
        if request.chat_template is not None:
            return await self._rendered_apart(request, shows_images=shows_images)
        num_parts = sum([len(m.content) if isinstance(m.content, list) else 1 for m in request.messages or ()])
        if not is_long and num_parts + len(request.tools or ()) <= _RENDERED_INLINE_PARTS:
            return self._rendered(request, shows_images=shows_images)
        return await TEMPLATES.run(self._rendered, request, shows_images=shows_images)

    async def _rendered_apart(self, request: ChatCompletionRequest | TokenizeRequest, *, shows_images: bool) -> str:
        """Render a chat template that the request itself contains, in threads that nothing else uses, because it may be
        slow. Raises `BadRequestError` if the template is invalid or rejects the messages.
        """
        # Such a template may take any time. Its thread cannot be stopped, but the event loop and other chats go on.
        try:
            async with asyncio.timeout(_REQUEST_TEMPLATE_S):
                return await REQUEST_TEMPLATES.run(self._rendered, request, shows_images=shows_images)
        except TimeoutError:
            raise BadRequestError(
                f"chat_template was not rendered within {_REQUEST_TEMPLATE_S:g} s", param="chat_template"
            ) from None

    def _rendered(self, request: ChatCompletionRequest | TokenizeRequest, *, shows_images: bool) -> str:
        continues = bool(request.continue_final_message)
        template = self._template(request)
        marks = self.media_placeholders if shows_images else {}
        chat = [self._message(message, template, marks) for message in request.messages or ()]
        tools = [_json(tool) for tool in request.tools] if request.tools else None
        kwargs = request.chat_template_kwargs or {}
        extra: dict[str, Json] = {name: value for name, value in kwargs.items() if name not in _RESERVED_VARIABLES}
        documents: list[Json] | None = None
        if isinstance(request, ChatCompletionRequest):
            documents = list(request.documents) if request.documents is not None else None
            if request.reasoning_effort is not None:
                extra.setdefault("reasoning_effort", request.reasoning_effort)
                # As in vLLM: templates whose reasoning is switched by this variable follow the effort too.
                extra.setdefault("enable_thinking", request.reasoning_effort != "none")
            if request.verbosity is not None:
                extra.setdefault("verbosity", request.verbosity)
        return template.render(
            chat,
            tools=tools,
            documents=documents,
            add_generation_prompt=request.add_generation_prompt is not False and not continues,
            continue_final_message=continues,
            variables=self._templates.variables(extra),
        )

    def _check_request_template(self, request: ChatCompletionRequest | TokenizeRequest) -> None:
        """Raise `BadRequestError` if a request contains a chat template of its own, unless
        `--trust-request-chat-template` allows it.
        """
        if "chat_template" in (request.chat_template_kwargs or {}):
            raise BadRequestError(
                "chat_template_kwargs cannot contain chat_template: send it as chat_template, which needs a server that"
                " was started with --trust-request-chat-template",
                param="chat_template_kwargs",
            )
        if request.chat_template is not None and not self._trusts_requests:
            raise BadRequestError(
                "a chat template in a request is accepted only if the server was started with "
                "--trust-request-chat-template",
                param="chat_template",
            )

    def _template(self, request: ChatCompletionRequest | TokenizeRequest) -> ChatTemplate:
        if request.chat_template is None:
            return self._templates.pick(has_tools=bool(request.tools))
        try:
            return ChatTemplate(request.chat_template)
        except TEMPLATE_ERRORS as exc:
            raise BadRequestError(f"chat_template cannot be parsed: {exc}", param="chat_template") from exc

    def _message(self, message: ChatMessage, template: ChatTemplate, marks: Mapping[str, str]) -> TemplateMessage:
        # Templates would write "None". Only an assistant's message may lack content, if it has tool calls.
        if message.role == "user" and message.content is None:
            raise BadRequestError("messages: a user message needs content", param="messages")
        plain: TemplateMessage = {"role": message.role, **(message.model_extra or {})}
        if isinstance(message.content, str) or message.content is None:
            plain["content"] = message.content
        else:
            shown = [marks[part.type] for part in message.content if part.type in marks]
            texts = [part for part in message.content if part.type not in marks]
            # Some templates iterate over the parts of a content, and others expect a string.
            wanted = template.content_format if self._content_format == "auto" else self._content_format
            if wanted == "openai":
                plain["content"] = [_part(part, marks) for part in message.content]
            else:
                # Images come before the text, as in vLLM, wherever they are among the parts.
                plain["content"] = "\n".join([*shown, *(_text_of(part.type, part.text) for part in texts)])
        return self._with_calls(plain)

    def _with_calls(self, message: TemplateMessage) -> TemplateMessage:
        """Return a message whose tool calls have the form that chat templates expect: no empty list, arguments as
        objects, and short ids for models that need them.
        """
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
    """The names under which clients may request a model. Answers carry the first of them."""

    def __init__(self, settings: RouterSettings) -> None:
        self._stated = list(settings.served_model_name)
        self._own = [settings.model, Path(settings.model).name]

    def own(self) -> frozenset[str]:
        """Return all names by which the router recognizes an instance as one of this model."""
        return frozenset([*self._stated, *self._own])

    def all(self, advertised: Sequence[str]) -> list[str]:
        """Return the names that clients may use: those of `--served-model-name`, or without it the names that instances
        report (`advertised`) and the model's path.
        """
        return self._stated or list(dict.fromkeys([*advertised, *self._own]))


def _too_long(max_tokens: int, num_chars: int) -> BadRequestError:
    return BadRequestError(
        f"this model's context is {max_tokens} tokens, but a prompt of {num_chars} characters has more than "
        f"{max_tokens} tokens: shorten it",
        code="context_length_exceeded",
    )


def _vision(settings: RouterSettings) -> ImageFamily | None:
    """Return how the model reads images. Raises `ModelFolderError` for settings that it does not know."""
    facts = ModelFacts.of(model_folder(settings.model))
    family, embedder = image_family(facts), embedder_images(facts)
    stated = processor_settings(settings.mm_processor_kwargs)
    try:
        # Requests apply the settings. A wrong one must stop the process at its start, not fail the first request.
        if stated:
            reader = family or (None if embedder is None else embedder.family)
            if reader is None:
                raise ValueError("this model reads no images")
            configured(reader, stated)
    except ValueError as exc:
        raise ModelFolderError(f"--mm-processor-kwargs: {exc}") from exc
    return family


def _generation(settings: RouterSettings) -> GenerationDefaults:
    """Return the default sampling parameters of a model (generation_config.json, changed by settings). Raises
    `ModelFolderError` if the file cannot be used.
    """
    try:
        folder = model_folder(settings.model)
        return generation_config(folder, settings.generation_config, settings.override_generation_config)
    except ValueError as exc:
        raise ModelFolderError(str(exc)) from exc


def _eos_token_ids(*configs: _EosConfig | None) -> frozenset[int]:
    """Return the ids of all tokens that end a sequence, from all config files that state some. None stands for a
    missing file.
    """
    stated = [config.eos_token_id for config in configs if config is not None]
    return frozenset(chain.from_iterable([one] if isinstance(one, int) else one or [] for one in stated))


def _text_of(kind: str, text: str | None) -> str:
    if KINDS.get(kind) == "audio":
        raise BadRequestError(f"messages: this model does not hear {kind}: {HEARD}", param="messages")
    if kind not in ("text", "input_text", "output_text", "refusal") or text is None:
        raise BadRequestError(f"messages: content of type {kind!r} is not supported by this model", param="messages")
    return text


def _part(part: ContentPart, marks: Mapping[str, str]) -> Json:
    if part.type in marks:
        return {"type": KINDS[part.type]}
    return {"type": "text", "text": _text_of(part.type, part.text)}


def _json(tool: Tool) -> Json:
    return {"type": tool.type, "function": tool.function, **(tool.model_extra or {})}


def _with_parsed_arguments(call: Json) -> Json:
    """Return a tool call whose arguments, a JSON string in OpenAI's API, are replaced by the object that chat templates
    expect.
    """
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    text = str(function["arguments"])
    check_counts(text.encode(), "messages: the argument string of a tool call")
    try:
        arguments: Json = parsed(text)
    except TooDeepError as exc:
        raise BadRequestError(f"messages: the arguments of a tool call: {exc}", param="messages") from exc
    except ValueError:
        # The model may have written invalid JSON in an earlier answer. The template gets the string.
        return call
    return {**call, "function": {**function, "arguments": arguments}}
