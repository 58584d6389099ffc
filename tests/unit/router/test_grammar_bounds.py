"""Bounds of grammars: what exceeds one is refused before anything compiles it, at every entrance of the API."""

import contextlib
import json
import sys
import time
from typing import Any

import pytest

from baton_serve.contracts.grammar_bounds import (
    MAX_CHARS,
    GrammarBoundsError,
    check_gbnf,
    check_grammar,
    check_lark,
    check_schema,
)
from tests import grammar_bombs as bombs
from tests.unit.router.conftest import Router, Serve

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
HELLO = [{"role": "user", "content": "hello"}]

EXCEEDING: list[tuple[bombs.Schema, str]] = [
    (bombs.references(3_000), "1001 distinct $ref targets or more; at most 1000 are allowed"),
    (bombs.deep(5_000), "nested 121 levels deep or more; at most 120 are allowed"),
    (bombs.deep_lists(200), "nested 121 levels deep or more; at most 120 are allowed"),
    (bombs.chain(60, lambda to: {"properties": {"a": bombs.deep(50), "b": to}}), "nested 4"),
    (bombs.properties(10_000), "10000 properties; at most 2000 are allowed"),
    ({"properties": {f"o{i}": bombs.needed(1_900) for i in range(3)}}, "properties or more; at most 5000"),
    (bombs.properties(481), "481 optional properties in a row"),
    (bombs.patterns(300), "300 patternProperties; at most 100 are allowed"),
    (bombs.values(20_000), "20000 enum values or more; at most 10000 are allowed"),
    ({"anyOf": [{"const": i} for i in range(60_000)]}, "values or more; at most 50000 are allowed"),
    ({"const": "a" * (MAX_CHARS + 1)}, f"of text or more; at most {MAX_CHARS} are allowed"),
]


@pytest.mark.parametrize(("schema", "reason"), EXCEEDING, ids=[reason[:40] for _, reason in EXCEEDING])
def test_a_schema_that_exceeds_a_bound_is_refused_with_the_bound(schema: bombs.Schema, reason: str) -> None:
    before = time.process_time()
    with pytest.raises(GrammarBoundsError) as caught:
        check_schema(schema)
    assert reason in str(caught.value)
    assert time.process_time() - before < 1.0


def test_a_schema_of_common_size_is_within_the_bounds() -> None:
    check_schema(bombs.chain(250, lambda to: {"type": "object", "properties": {f"p{i}": to for i in range(15)}}))
    check_schema(bombs.needed(2_000))
    check_schema({**bombs.properties(900), "required": ["p450"]})
    check_schema({"properties": {"next": {"$ref": "#"}, "other": {"$ref": "#/$defs/a~1b%20c"}}})


def test_references_to_each_other_or_to_nothing_end_the_check() -> None:
    for nothing in ({}, {"$ref": "#/$defs/nothing/0"}, {"properties": {"x": {"$ref": "#/$defs/a"}}}):
        with pytest.raises(GrammarBoundsError, match="leads back to itself"):
            check_schema({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, **nothing})
    check_schema({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"items": {"$ref": "#/$defs/a"}}}, "$ref": "#/$defs/a"})
    check_schema({"$ref": "#/$defs/nothing/0"})
    check_schema({"items": [{"$ref": "#/items/7"}, {"$ref": "http://a/b"}]})


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (bombs.rules(6_000), "1001 rules or more; at most 1000 are allowed"),
        ("start: " + "(" * 20_000 + '"a"' + ")" * 20_000, "4001 groups or more; at most 4000 are allowed"),
        ('start: "' + "a" * MAX_CHARS + '"', f"at most {MAX_CHARS} are allowed"),
        (bombs.lark_of(bombs.references(3_000)), "$ref"),
        ("start: %json " + "[" * 50_000, "nested more than 120 levels deep"),
        (json.dumps({"grammars": [{"lark_grammar": bombs.rules(600)}, {"lark_grammar": bombs.rules(600)}]}), "rules"),
        (json.dumps({"grammars": [{"json_schema": bombs.properties(10_000)}]}), "properties"),
        ('{"grammars": 3}', "neither Lark nor a list"),
        ('{"grammars": ' + "[" * 50_000, "neither Lark nor a list"),
    ],
    ids=lambda value: value[:30],
)
def test_a_grammar_that_exceeds_a_bound_is_refused_with_the_bound(grammar: str, reason: str) -> None:
    with pytest.raises(GrammarBoundsError) as caught:
        check_grammar(grammar)
    assert reason in str(caught.value)


def test_what_stands_in_strings_comments_and_schemas_is_no_rule() -> None:
    quiet = 'start: "' + ":(" * 2_000 + '" /' + "[:]" * 500 + "/ // " + ":" * 2_000 + "\n"
    check_lark(quiet + "%json " + json.dumps({"properties": {f"a:{i}": {} for i in range(400)}, "enum": [":"] * 1_500}))
    with pytest.raises(GrammarBoundsError, match="rules"):
        check_lark("start: a\n" * 1_001)


@pytest.mark.parametrize(
    "text", ['start: "' + '\\"' * 250_000, "start: " + "/\\/" * 170_000, 'a" ' * 170_000, "%json [" * 70_000]
)
def test_a_check_takes_time_in_proportion_to_the_text(text: str) -> None:
    before = time.process_time()
    with contextlib.suppress(GrammarBoundsError):
        check_lark(text)
    assert time.process_time() - before < 2.0


def test_rules_in_gbnf_are_counted_before_they_are_converted() -> None:
    check_gbnf(bombs.gbnf(900))
    with pytest.raises(GrammarBoundsError, match="6002 rules; at most 1000"):
        check_gbnf(bombs.gbnf(6_000))


def test_checks_need_no_stack() -> None:
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(200)
    try:
        with pytest.raises(GrammarBoundsError):
            check_schema(bombs.deep(100_000))
    finally:
        sys.setrecursionlimit(limit)


CHAIN, LARK = bombs.references(3_000), bombs.rules(6_000)
FUNCTION = {"name": "f", "parameters": CHAIN, "strict": True}
TAG = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": CHAIN}}
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": CHAIN}}
ENTRANCES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"response_format": FORM}),
    (CHAT, {"response_format": TAG}),
    (CHAT, {"response_format": {**TAG, "format": {"type": "grammar", "grammar": LARK}}}),
    (CHAT, {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"}),
    (CHAT, {"tools": [{"type": "function", "function": FUNCTION}]}),
    (CHAT, {"guided_json": CHAIN}),
    (COMPLETIONS, {"guided_json": json.dumps(CHAIN)}),
    (COMPLETIONS, {"guided_grammar": LARK}),
    (COMPLETIONS, {"guided_grammar": bombs.gbnf(6_000)}),
    (COMPLETIONS, {"guided_grammar": bombs.lark_of(CHAIN)}),
    (COMPLETIONS, {"guided_choice": ["a"] * 20_000}),
    (COMPLETIONS, {"guided_regex": "a" * (MAX_CHARS + 1)}),
    (COMPLETIONS, {"structured_outputs": {"json": CHAIN}}),
    (COMPLETIONS, {"structured_outputs": {"grammar": LARK}}),
    (COMPLETIONS, {"structured_outputs": {"structural_tag": json.dumps(TAG)}}),
    (MESSAGES, {"tools": [{"name": "f", "input_schema": CHAIN}], "tool_choice": {"type": "any"}, "max_tokens": 5}),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "a", "schema": CHAIN}}}),
    (RESPONSES, {"tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"}),
]


@pytest.mark.parametrize(("path", "body"), ENTRANCES, ids=[f"{path} {str(body)[:50]}" for path, body in ENTRANCES])
def test_every_entrance_refuses_what_exceeds_a_bound(serve: Serve, path: str, body: dict[str, Any]) -> None:
    async def scenario(router: Router) -> None:
        prompt = {COMPLETIONS: {"prompt": "a"}, RESPONSES: {"input": "a"}}.get(path, {"messages": HELLO})
        answer = await router.http.post(path, json={**prompt, **body})
        assert answer.status_code == 400, answer.text
        message = answer.json()["error"]["message"]
        assert "at most" in message or "the limit is" in message

    serve(scenario, enable_auto_tool_choice=True, tool_call_parser="hermes")
