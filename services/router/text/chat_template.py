"""Choose the chat template and whether content is a string or parts, and render messages as transformers does.

Templates are untrusted code: they run in Jinja's immutable sandbox, and all their variables are plain JSON values.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Literal, TypeAlias

import jinja2
import jinja2.ext
import msgspec
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from baton_serve.services.router.protocol.errors import BadRequestError, ModelFolderError
from baton_serve.services.router.text.tokenization import read_json

Json: TypeAlias = "str | int | float | bool | list[Json] | dict[str, Json] | None"
TemplateMessage = dict[str, Json]
ContentFormat = Literal["string", "openai"]

TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)
"""The exceptions of parsing and rendering. A template is code that the messages drive: a wrong type, a missing key or a
division can raise in it, and Jinja computes constant expressions while it parses."""

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names under which clients send back the reasoning of an earlier answer, the most usual first."""

_END_MARK = "BATON-END-OF-FINAL-MESSAGE "
"""Appended to the final message to find its end in the rendered text. The space shows whether a template strips."""

_NO_TEMPLATE = "the model has no chat template: start the router with --chat-template FILE, or use /v1/completions"


class _NamedTemplate(msgspec.Struct, frozen=True):
    """One entry of the list `chat_template` in tokenizer_config.json: a template and its name."""

    name: str
    template: str


class _Config(msgspec.Struct, frozen=True):
    """The one field that is read from tokenizer_config.json and chat_template.json: the chat template, or a list of
    them.
    """

    chat_template: str | list[_NamedTemplate] | None = None


class ChatTemplates:
    """The chat templates of one model: `default`, and optionally `tool_use` for requests with tools."""

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """Parse the templates, given as Jinja text by name. `special_tokens` are the texts of `bos_token` and others,
        which templates may use. Raises `ModelFolderError` if Jinja cannot parse a template.
        """
        self._special_tokens = dict(special_tokens)
        try:
            self._templates = {name: ChatTemplate(source) for name, source in templates.items()}
        except jinja2.TemplateError as exc:
            raise ModelFolderError(f"the chat template is broken: {exc}") from exc

    @classmethod
    def from_folder(
        cls,
        folder: Path,
        special_tokens: Mapping[str, str],
        override: str | None = None,
        default: str | None = None,
    ) -> "ChatTemplates":
        """Load the templates of a model folder; `default` is used if it has none. Raises `ModelFolderError` if one
        cannot be read or parsed.

        `override` (`--chat-template`) replaces them; it is the path of a file, the text of a template, or the name of
        one of the folder's templates, such as `tool_use`.
        """
        if override is not None and _is_text(override):
            return cls({"default": override}, special_tokens)
        templates = _templates_of(folder) or ({} if default is None else {"default": default})
        if override is not None:
            templates = {"default": templates[override] if override in templates else _read(override)}
        return cls(templates, special_tokens)

    @property
    def source(self) -> str | None:
        """The text of the default template, or None if the model has none."""
        return self._templates["default"].source if "default" in self._templates else None

    def pick(self, *, has_tools: bool) -> "ChatTemplate":
        """Return the template for a request: `tool_use`, if there is one and the request has tools, otherwise the
        default. Raises `BadRequestError` if the model has no template.
        """
        name = "tool_use" if has_tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise BadRequestError(_NO_TEMPLATE, param="messages", code="no_chat_template")
        return self._templates[name]

    def variables(self, extra: Mapping[str, Json]) -> dict[str, Json]:
        """Return the variables that a template can use: the special tokens and `extra`, which wins if a name is in
        both.
        """
        return {**self._special_tokens, **extra}


class ChatTemplate:
    """One parsed chat template. It may be rendered in several threads."""

    def __init__(self, source: str) -> None:
        """Parse the Jinja text of a template. Raises `jinja2.TemplateError` if that fails."""
        environment = _environment()
        self.source = source
        self._template = environment.from_string(source)
        # Jinja copies the globals at each rendering, and copying its ChainMap is slow.
        self._template.globals = dict(self._template.globals)
        self.content_format: ContentFormat = _content_format(environment.parse(source))
        """`openai` if the template iterates over the parts of a message's content, `string` if it expects a string."""

    def render(
        self,
        messages: Sequence[TemplateMessage],
        *,
        tools: list[Json] | None = None,
        documents: list[Json] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Json],
    ) -> str:
        """Return the text of the prompt for a chat. `variables` are those of `ChatTemplates.variables`. Raises
        `BadRequestError` if the template rejects the messages.

        With `continue_final_message` the prompt ends with the text of the last message, so that the model continues it.
        """
        chat = [_normalized(message) for message in messages]
        final = _mark_final_message(chat) if continue_final_message else None
        try:
            text = self._template.render(
                {
                    **variables,
                    "messages": chat,
                    "tools": tools,
                    "documents": documents,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except TEMPLATE_ERRORS as exc:
            raise BadRequestError(f"the chat template rejects these messages: {exc}", param="messages") from exc
        return text if final is None else _cut_at_mark(text, final)


def _normalized(message: TemplateMessage) -> TemplateMessage:
    """Return a copy of a message without null values. Its reasoning, if it has any, is in both fields that templates
    read: `thinking` and `reasoning_content`.
    """
    # Templates test for a key with `is defined`, which is true for null.
    chat: TemplateMessage = {key: value for key, value in message.items() if value is not None}
    named = [chat[key] for key in _REASONING if key in chat]
    if not named:
        return chat
    reasoning = named[0]
    return {"thinking": reasoning, **chat, "reasoning_content": reasoning}


def _mark_final_message(chat: list[TemplateMessage]) -> str:
    """Append a mark to the end of the last message's text, by which `render` finds this text in the prompt. Return the
    text without the mark.

    Content parts are copied, because they belong to the request. Raises `BadRequestError` if the message has no text.
    """
    content = chat[-1].get("content") if chat else None
    if isinstance(content, str):
        chat[-1]["content"] = content + _END_MARK
        return content
    parts = [dict(part) if isinstance(part, dict) else part for part in content] if isinstance(content, list) else []
    for part in reversed(parts):
        text = part.get("text") if isinstance(part, dict) else None
        if isinstance(part, dict) and isinstance(text, str):
            part["text"] = text + _END_MARK
            chat[-1]["content"] = parts
            return text
    raise BadRequestError("the last message has no text to continue", param="continue_final_message")


def _cut_at_mark(rendered: str, final: str) -> str:
    # The approach is that of transformers: cut the rendered text at the mark, so that the tokens which the template
    # writes after a complete message are dropped.
    mark = _END_MARK.strip()
    if mark not in rendered or final.strip() not in rendered:
        raise BadRequestError(
            "the chat template drops the last message, so it cannot be continued", param="continue_final_message"
        )
    at = rendered.rindex(mark)
    # A template that strips messages has also stripped the trailing space of the mark. Then strip the message as well.
    return rendered[:at] if rendered[at : at + len(_END_MARK)] == _END_MARK else rendered[:at].rstrip()


def _templates_of(folder: Path) -> dict[str, str]:
    """Return the Jinja texts of all chat templates in a model folder, by name. Raises `ModelFolderError` if a file
    cannot be read.
    """
    templates: dict[str, str] = {}
    # Later sources replace earlier ones: transformers also prefers chat_template.jinja, the newest format.
    for name in ("tokenizer_config.json", "chat_template.json"):
        config = read_json(folder / name, _Config)
        if config is None or config.chat_template is None:
            continue
        if isinstance(config.chat_template, str):
            templates["default"] = config.chat_template
        else:
            templates |= {named.name: named.template for named in config.chat_template}
    if (folder / "chat_template.jinja").is_file():
        templates["default"] = (folder / "chat_template.jinja").read_text()
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = file.read_text()
    return templates


def _is_text(given: str) -> bool:
    # A path hardly ever contains a brace.
    return "{" in given or "\n" in given


def _read(given: str) -> str:
    try:
        return Path(given).read_text()
    except OSError as exc:
        raise ModelFolderError(f"--chat-template {given!r} cannot be read: {exc.strerror}") from exc


class _GenerationTag(jinja2.ext.Extension):
    """Implements the Jinja tag `{% generation %}…{% endgeneration %}`, by which templates mark the assistant's text for
    training.

    Here it only renders the text inside, as in transformers.
    """

    tags = {"generation"}  # noqa: RUF012 - Jinja's interface

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: jinja2.runtime.Macro) -> str:
        return str(caller())


def _environment() -> ImmutableSandboxedEnvironment:
    # The options, filters and functions are those of transformers: templates are written for them.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes characters for HTML, which must not appear in a prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _content_format(tree: nodes.Template) -> ContentFormat:
    """Return `openai` if the template iterates over a message's content, so that it expects a list of parts; otherwise
    `string`.

    vLLM decides it in the same way.
    """
    names = {"content"}
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and _is_content(assign.node, frozenset()):
            names.add(assign.target.name)
    loops = [loop.iter for loop in tree.find_all(nodes.For)]
    return "openai" if any(_is_content(loop, frozenset(names)) for loop in loops) else "string"


def _is_content(node: nodes.Node, names: frozenset[str]) -> bool:
    if isinstance(node, nodes.Filter) and node.node is not None:
        return _is_content(node.node, names)
    if isinstance(node, nodes.Name):
        return node.name in names
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "content"
