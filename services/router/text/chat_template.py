"""Messages to prompt text, exactly as `transformers.apply_chat_template` renders them, without transformers.

Templates are foreign code: they run in Jinja's immutable sandbox and see plain JSON values only.
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

_REASONING = ("reasoning_content", "thinking", "reasoning")
_END_MARK = "BATON-END-OF-FINAL-MESSAGE "
_TOO_OLD = "no chat template: the model has none, so give one with --chat-template FILE"


class _Named(msgspec.Struct, frozen=True):
    name: str
    template: str


class _Config(msgspec.Struct, frozen=True):
    chat_template: str | list[_Named] | None = None


class ChatTemplates:
    """The templates of one model: a default, and perhaps one for requests with tools (`tool_use`)."""

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """Raises `ModelFolderError` for a template that Jinja cannot parse."""
        self._special_tokens = dict(special_tokens)
        try:
            self._templates = {name: ChatTemplate(source) for name, source in templates.items()}
        except jinja2.TemplateError as exc:
            raise ModelFolderError(f"the chat template is broken: {exc}") from exc

    @classmethod
    def from_folder(
        cls, folder: Path, special_tokens: Mapping[str, str], override: str | None = None
    ) -> "ChatTemplates":
        """`override` is a file or a template itself. Raises `ModelFolderError`."""
        if override is not None:
            return cls({"default": _file_or_text(override)}, special_tokens)
        templates: dict[str, str] = {}
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
        return cls(templates, special_tokens)

    @property
    def source(self) -> str | None:
        """Of the default template."""
        return self._templates["default"].source if "default" in self._templates else None

    def pick(self, *, has_tools: bool) -> "ChatTemplate":
        """Raises `BadRequestError` when the model has no template."""
        name = "tool_use" if has_tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise BadRequestError(_TOO_OLD, param="messages", code="no_chat_template")
        return self._templates[name]

    def variables(self, extra: Mapping[str, Json]) -> dict[str, Json]:
        return {**self._special_tokens, **extra}


class ChatTemplate:
    def __init__(self, source: str) -> None:
        """Raises `jinja2.TemplateError`."""
        environment = _environment()
        self.source = source
        self._template = environment.from_string(source)
        self._template.globals = dict(self._template.globals)  # a ChainMap is copied slowly at each rendering
        self.content_format: ContentFormat = _content_format(environment.parse(source))
        """Whether the template walks over parts of a message's content or expects a string."""

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
        """Raises `BadRequestError` when the template refuses the messages."""
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
        except (
            jinja2.TemplateError,
            ArithmeticError,
            AttributeError,
            LookupError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as exc:
            raise BadRequestError(f"the chat template refuses these messages: {exc}", param="messages") from exc
        return text if final is None else _cut_at_mark(text, final)


def _normalized(message: TemplateMessage) -> TemplateMessage:
    """Templates expect a missing key, not null; reasoning goes by the names that templates read."""
    chat: TemplateMessage = {key: value for key, value in message.items() if value is not None}
    named = [chat[key] for key in _REASONING if key in chat]
    if not named:
        return chat
    reasoning = named[0]
    return {"thinking": reasoning, **chat, "reasoning_content": reasoning}


def _mark_final_message(chat: list[TemplateMessage]) -> str:
    """Puts a mark behind the last message's text, in a copy; returns that text."""
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
    mark = _END_MARK.strip()
    if mark not in rendered or final.strip() not in rendered:
        raise BadRequestError(
            "the chat template drops the last message, so it cannot be continued", param="continue_final_message"
        )
    at = rendered.rindex(mark)
    # A template that strips messages has also stripped the mark's own trailing space.
    return rendered[:at] if rendered[at : at + len(_END_MARK)] == _END_MARK else rendered[:at].rstrip()


def _file_or_text(given: str) -> str:
    if "{" in given or "\n" in given:
        return given
    try:
        return Path(given).read_text()
    except OSError as exc:
        raise ModelFolderError(f"chat template {given!r} cannot be read: {exc.strerror}") from exc


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks what an assistant wrote, for training; here it renders its body."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's interface

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: jinja2.runtime.Macro) -> str:
        return str(caller())


def _environment() -> ImmutableSandboxedEnvironment:
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
    """Jinja's own would escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _content_format(tree: nodes.Template) -> ContentFormat:
    """`openai` when the template loops over a message's content."""
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
