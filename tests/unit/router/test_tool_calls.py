"""Calls of tools in what models write: known examples of each format, broken ones, and any text in any pieces."""

import json
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton_serve.services.router.text.scanning.message_parts import Call, Content, Part, merged
from baton_serve.services.router.text.tool_calls import TOOL_CALL_FORMATS, ToolCallFormat, Tools
from baton_serve.services.router.text.tool_calls.forced import named_call, required_calls

FORMATS = TOOL_CALL_FORMATS | {"required": ToolCallFormat(required_calls), "named": ToolCallFormat(named_call("f"))}
PARIS = {"city": "Paris"}
DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"  # noqa: RUF001
DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"  # noqa: RUF001
TOOLS = Tools(
    [
        {
            "name": "f",
            "parameters": {
                "properties": {
                    "city": {"type": "string"},
                    "n": {"type": "integer"},
                    "ok": {"type": "boolean"},
                    "at": {"type": "object"},
                }
            },
        },
        {"name": "broken", "parameters": {"properties": [1]}},
        {"name": 5, "parameters": "none"},
    ]
)


def read(name: str, pieces: Sequence[str]) -> list[Part]:
    reader = FORMATS[name].reader(TOOLS)
    parts = [part for piece in pieces for part in reader.push(piece)]
    return parts + reader.finish()


def calls(parts: Sequence[Part]) -> list[tuple[str | None, object]]:
    return [(part.name, json.loads(part.arguments)) for part in merged(parts) if isinstance(part, Call)]


def content(parts: Sequence[Part]) -> str:
    return "".join(part.text for part in merged(parts) if isinstance(part, Content))


EXAMPLES: list[tuple[str, str, str, list[tuple[str, object]]]] = [
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"city": "Paris"}}\n</tool_call>', "", [("f", PARIS)]),
    (
        "hermes",
        'Let me see.\n<tool_call>\n{"arguments": {"city": "Paris"}, "name": "f"}\n</tool_call>\n'
        '<tool_call>\n{"name": "g"}\n</tool_call>',
        "Let me see.",
        [("f", PARIS), ("g", {})],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>', "", [("f", PARIS)]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}', "", [("f", {})]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"s": "} \\" </tool_call>"}}</tool_call> done',
        " done",
        [("f", {"s": '} " </tool_call>'})],
    ),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"city": "Paris"}}]', "", [("f", PARIS)]),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"a": [1, {"b": 2}]}}]',
        "",
        [("f", {}), ("g", {"a": [1, {"b": 2}]})],
    ),
    ("mistral", 'So: [TOOL_CALLS]f{"city": "Paris"}[TOOL_CALLS]g{}', "So:", [("f", PARIS), ("g", {})]),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{"city": "Paris"}', "", [("f", PARIS)]),
    ("llama3_json", '{"name": "f", "parameters": {"city": "Paris"}}', "", [("f", PARIS)]),
    (
        "llama3_json",
        '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"a": 1}}',
        "",
        [("f", {}), ("g", {"a": 1})],
    ),
    ("llama3_json", ' {"type": "function", "name": "f", "parameters": {"city": "Paris"}}', "", [("f", PARIS)]),
    ("llama3_json", '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
    (
        "qwen3_coder",
        "I look.\n<tool_call>\n<function=f>\n<parameter=city>\nParis\n</parameter>\n<parameter=n>\n3\n</parameter>\n"
        "<parameter=ok>\nTrue\n</parameter>\n<parameter=at>\n{'x'}\n</parameter>\n<parameter=code>\na\n\n\"b\"\n"
        "</parameter>\n</function>\n</tool_call>",
        "I look.",
        [("f", {"city": "Paris", "n": 3, "ok": True, "at": "{'x'}", "code": 'a\n\n"b"'})],
    ),
    (
        "qwen3_coder",
        "<function=f>\n</function>\n<tool_call>\n<function=g>\n</function>\n</tool_call>",
        "",
        [("f", {}), ("g", {})],
    ),
    (
        "deepseek_v3",
        DEEPSEEK.format(f'function{DEEPSEEK_SEPARATOR}f\n```json\n{{"city": "Paris"}}\n```'),
        "",
        [("f", PARIS)],
    ),
    ("deepseek_v3", "Ok." + DEEPSEEK.format(f'f{DEEPSEEK_SEPARATOR}{{"city": "Paris"}}'), "Ok.", [("f", PARIS)]),
    ("pythonic", '[f(city="Paris")]', "", [("f", PARIS)]),
    (
        "pythonic",
        "<|python_start|>[f(city='Par)is', n=-3, ok=True), g(), h.i(a={'x': [1, None]}, b=true)]<|python_end|>",
        "",
        [("f", {"city": "Par)is", "n": -3, "ok": True}), ("g", {}), ("h.i", {"a": {"x": [1, None]}, "b": True})],
    ),
    ("pythonic", "[f(n=1, city=Paris, 3)]", "", [("f", {"n": 1, "city": "Paris"})]),
    ("pythonic", "[a link](http://x)", "[a link](http://x)", []),
    ("pythonic", "[f(x)] is positional", "[f(x)] is positional", []),
    (
        "openai",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
        '<|constrain|>json<|message|>{"city": "Paris"}<|call|>',
        "",
        [("f", PARIS)],
    ),
    ("openai", ' to=functions.f<|channel|>commentary json<|message|>{"city": "Paris"}', "", [("f", PARIS)]),
    ("openai", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi", "Hi", []),
]


@pytest.mark.parametrize(("name", "text", "rest", "expected"), EXAMPLES)
def test_known_examples_are_read(name: str, text: str, rest: str, expected: list[tuple[str, object]]) -> None:
    whole = read(name, [text])
    assert (content(whole), calls(whole)) == (rest, expected)
    assert merged(read(name, list(text))) == merged(whole)


BROKEN = [
    ("hermes", "<tool_call>\nnothing\n</tool_call>"),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "argum'),
    ("hermes", "a </tool_call> b"),
    ("mistral", "[TOOL_CALLS] so they say"),
    ("mistral", '[TOOL_CALLS][{"nam'),
    ("llama3_json", '{"name": "f", "parameters'),
    ("llama3_json", "<|python_tag|>print(1)"),
    ("qwen3_coder", "<tool_call>\n<function=f\n</tool_call>"),
    ("deepseek_v3", DEEPSEEK.format("nothing")),
    ("pythonic", "[f(a="),
    ("pythonic", "[f(a=1"),
    ("openai", "<|channel|>final without a message"),
]


@pytest.mark.parametrize(("name", "text"), BROKEN)
def test_what_is_no_call_is_content(name: str, text: str) -> None:
    assert merged(read(name, [text])) == [Content(text)]


def test_a_call_that_is_cut_short_goes_out_as_far_as_it_came() -> None:
    (call,) = merged(read("hermes", ['<tool_call>{"name": "f", "arguments": {"city": "Pa']))
    assert call == Call(0, "f", '{"city": "Pa')


def test_a_stream_gives_the_name_first_and_then_pieces_of_arguments() -> None:
    reader = TOOL_CALL_FORMATS["hermes"].reader(TOOLS)
    assert reader.push("Yes ") == [Content("Yes")]
    assert reader.push('<tool_call>{"name": "f", ') == []
    assert reader.push('"arguments": {"ci') == [Call(0, "f", '{"ci')]
    assert reader.push('ty": "Paris"') == [Call(0, None, 'ty": "Paris"')]
    assert reader.push('}}</tool_call><tool_call>{"name": "g", "arguments": {') == [
        Call(0, None, "}"),
        Call(1, "g", "{"),
    ]
    assert reader.push("}}") == [Call(1, None, "}")]
    assert reader.finish() == []


SNIPPETS = [
    *(text for _, text, _, _ in EXAMPLES),
    *(text for _, text in BROKEN),
    *'{}[]()<>"\\,;:=\n ',
    '{"name": "f", ',
    '"arguments": ',
    "<tool_call>",
    "<function=f>",
    "<parameter=city>",
    "</parameter>",
    "[TOOL_CALLS]",
    "<|message|>",
    "<|start|>",
    "\\ud800",
    "f(a='\\ud800')",
    "[f(a=" + "(" * 300,
    "[f(a=" + "-" * 3000 + "1)]",
    "[f(a=1e999)]",
    "[f(a='\\d', b=b'x', c={1})]",
]
anything = st.one_of(st.text(), st.lists(st.one_of(st.sampled_from(SNIPPETS), st.text(max_size=4))).map("".join))


def cut(text: str, places: Sequence[int]) -> list[str]:
    at = sorted({place % (len(text) + 1) for place in places} | {0, len(text)})
    return [text[a:b] for a, b in pairwise(at)]


@pytest.mark.parametrize("name", sorted(FORMATS))
@settings(max_examples=25, deadline=None)
@given(text=anything, places=st.lists(st.integers(0, 400)))
def test_any_text_in_any_pieces_is_read_alike(name: str, text: str, places: list[int]) -> None:
    whole = merged(read(name, [text]))
    assert merged(read(name, cut(text, places))) == whole
    found = [part for part in whole if isinstance(part, Call)]
    assert [call.index for call in found] == list(range(len(found)))
    assert all(call.name for call in found)
    for part in whole:
        (part.arguments if isinstance(part, Call) else part.text).encode()
    if not found and name != "openai":
        assert content(whole) == text
