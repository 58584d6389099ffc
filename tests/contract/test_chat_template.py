"""Prompts of chats are those of transformers, for templates with everything that real ones use."""

from pathlib import Path
from typing import Any

import pytest

from baton_serve.services.router.protocol.errors import BadRequestError, ModelFolderError
from baton_serve.services.router.text.chat_template import ChatTemplate, ChatTemplates, Json
from baton_serve.services.router.text.tokenization import TextTokenizer
from tests.unit.router.tokenizers_for_tests import TEMPLATE, byte_fallback, write_folder

LLAMA_3 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|im_start|>system\\n" + system_message + " " + date_string }}
{%- if tools is not none %}
    {{- "Tools: " }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n" }}{%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role not in ['user', 'assistant', 'tool'] %}
        {{- raise_exception("no such role: " + message.role) }}
    {%- endif %}
    {%- if message.tool_calls is defined %}
        {{- message.tool_calls[0].function.arguments | tojson }}
    {%- else %}
        {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
PARTS = """{% for message in messages %}[{{ message.role }}]
{% if message.content is string %}{{ message.content }}{% else %}
{% for part in message.content %}{% if part.type == 'text' %}<{{ part.text }}>{% endif %}{% endfor %}{% endif %}
{% endfor %}{% for d in documents or [] %}{{ d.title }}={{ d.text }};{% endfor %}"""
LOOPS = """{%- set ns = namespace(found=false) -%}
{% for message in messages %}{% if loop.index0 > 2 %}{% break %}{% endif %}{% generation %}
{{ loop.index }}{{ message.content }}
{% endgeneration %}{% set ns.found = true %}{% endfor %}
{{ ns.found }} {{ strftime_now('%Y') | length }} {{ {'a': '<é>'} | tojson }}"""
TRIMS = "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}\n{% endfor %}"

CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": "Hello <b>&amp;</b> wörld"},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"x": [1, "é"]}}}]},
    {"role": "user", "content": "and now? "},
]
TOOLS: list[Json] = [{"type": "function", "function": {"name": "f", "description": "d's <x>", "parameters": {}}}]
DOCUMENTS: list[Json] = [{"title": "T", "text": "x"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("templates") / "model")


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast.from_pretrained(folder)


def ours(source: str, messages: list[Any], folder: Path, **options: Any) -> str:
    special = TextTokenizer.from_folder(folder).special_tokens
    variables = special | options.pop("variables", {})
    return ChatTemplate(source).render(messages, variables=variables, **options)


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("source", [TEMPLATE, LLAMA_3, LOOPS, TRIMS], ids=["chatml", "llama3", "loops", "trims"])
def test_templates_render_as_in_transformers(
    source: str, add_generation_prompt: bool, folder: Path, theirs: Any
) -> None:
    chat = CHAT if source == LLAMA_3 else [CHAT[0], CHAT[1], CHAT[3]]
    expected = theirs.apply_chat_template(
        chat, chat_template=source, tools=TOOLS, tokenize=False, add_generation_prompt=add_generation_prompt
    )
    assert ours(source, chat, folder, tools=TOOLS, add_generation_prompt=add_generation_prompt) == expected


def test_parts_documents_and_variables_render_as_in_transformers(folder: Path, theirs: Any) -> None:
    chat = [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]
    expected = theirs.apply_chat_template(chat, chat_template=PARTS, documents=DOCUMENTS, tokenize=False)
    assert ours(PARTS, chat, folder, documents=DOCUMENTS, add_generation_prompt=False) == expected
    expected = theirs.apply_chat_template(CHAT[:2], chat_template=LLAMA_3, tokenize=False, date_string="today")
    rendered = ours(LLAMA_3, CHAT[:2], folder, add_generation_prompt=False, variables={"date_string": "today"})
    assert rendered == expected


AND_SO = [{"type": "text", "text": "and so"}]


@pytest.mark.parametrize(
    ("source", "content"),
    [(s, c) for s in (TEMPLATE, TRIMS, PARTS) for c in ("and so ", "and so")] + [(PARTS, AND_SO)],
)
def test_the_last_message_is_continued_as_in_transformers(source: str, content: Any, folder: Path, theirs: Any) -> None:
    chat = [CHAT[1], {"role": "assistant", "content": content}]
    expected = theirs.apply_chat_template(chat, chat_template=source, tokenize=False, continue_final_message=True)
    assert ours(source, chat, folder, continue_final_message=True, add_generation_prompt=False) == expected
    assert chat[-1]["content"] == content


def test_a_template_that_refuses_is_a_bad_request(folder: Path) -> None:
    with pytest.raises(BadRequestError, match="no such role: alien"):
        ours(LLAMA_3, [{"role": "alien", "content": "x"}], folder)
    with pytest.raises(BadRequestError):
        ours("{{ messages[5].content.x }}", CHAT, folder)


@pytest.mark.parametrize(
    "attack",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10000000) %}{% endfor %}",
    ],
)
def test_templates_cannot_leave_their_sandbox(attack: str, folder: Path) -> None:
    with pytest.raises(BadRequestError):
        ours(attack, CHAT, folder)


@pytest.mark.parametrize(
    ("source", "wanted"), [(TEMPLATE, "string"), (LLAMA_3, "string"), (PARTS, "openai"), (TRIMS, "string")]
)
def test_a_template_shows_whether_it_takes_parts(source: str, wanted: str) -> None:
    assert ChatTemplate(source).content_format == wanted


def test_templates_come_from_every_place_models_keep_them(tmp_path: Path) -> None:
    def default(folder: Path, override: str | None = None, *, has_tools: bool = False) -> str:
        template = ChatTemplates.from_folder(folder, {}, override).pick(has_tools=has_tools)
        return template.render([], variables={})

    folder = write_folder(tmp_path / "a", chat_template="from config")
    assert default(folder) == "from config"
    (folder / "chat_template.jinja").write_text("from file")
    assert default(folder) == "from file"
    (tmp_path / "mine.jinja").write_text("mine")
    assert default(folder, str(tmp_path / "mine.jinja")) == "mine"
    assert default(folder, "{{ 'inline' }}") == "inline"
    several = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    folder = write_folder(tmp_path / "b", chat_template=several)
    assert default(folder) == "plain"
    assert default(folder, has_tools=True) == "tools"
    assert default(folder, "tool_use") == "tools"
    with pytest.raises(ModelFolderError, match=r"missing\.jinja"):
        default(folder, "missing.jinja")
    with pytest.raises(BadRequestError, match="--chat-template"):
        default(write_folder(tmp_path / "c", byte_fallback(), chat_template=None))
    with pytest.raises(ModelFolderError, match="broken"):
        default(folder, "{% if %}")
