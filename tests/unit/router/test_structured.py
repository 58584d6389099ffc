"""Forms of answers: what requests ask for becomes a grammar that allows just that, or a 400 that says why not."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken

from baton_serve.contracts.closed_objects import close_objects
from baton_serve.contracts.lark import Lark, UnconvertedGbnfError
from baton_serve.services.router.protocol.openai_requests import ChatCompletionRequest, CompletionRequest
from baton_serve.services.router.settings import ReasoningParser, RouterSettings, ToolCallParser
from baton_serve.services.router.text.grammar import Rule, Vocabulary, read_grammar_spec
from baton_serve.services.router.text.grammar.compiling.limited_compiler import lark_of_gbnf
from baton_serve.services.router.text.grammar.structural_tags import structural_tag
from baton_serve.services.router.text.message_reader import MessageFormat
from baton_serve.services.router.text.tokenization import TextTokenizer
from tests.unit.router.conftest import Router, Serve
from tests.unit.router.test_message_reader import HELLO, PATH, plain, streamed, whole, writes
from tests.unit.router.tokenizers_for_tests import byte_level, word_piece

PERSON = {
    "type": "object",
    "properties": {"name": {"$ref": "#/$defs/name"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
    "$defs": {"name": {"type": "string"}},
}
OPEN_PERSON = {key: value for key, value in PERSON.items() if key != "additionalProperties"}
ANNA = '{"name": "Anna", "age": 41}'
ANNA_IN_PARIS = '{"name": "Anna", "age": 41, "city": "Paris"}'
TOOLS = [
    {"type": "function", "function": {"name": "find", "parameters": PERSON}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED = {"type": "function", "function": {"name": "find"}}


MARKERS = ("<think>", "</think>", "<call>", "<tool_call>", "</tool_call>")
"""One token each, as in Qwen 3. Other markers are letters here."""


def made_tokenizer() -> TextTokenizer:
    backend = byte_level()
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in MARKERS])
    return TextTokenizer(backend, {"eos_token": "</s>"})


TOKENIZER = made_tokenizer()
VOCABULARY = Vocabulary(TOKENIZER)
MATCHING = LLTokenizer(TOKENIZER.backend.to_str(), eos_token=TOKENIZER.backend.token_to_id("</s>"))


def grammar_of(rule: Rule, param: str = "x") -> str:
    try:
        return VOCABULARY.write(rule, param=param)
    except UnconvertedGbnfError as exc:
        return VOCABULARY.write(rule, param=param, converted={exc.gbnf: lark_of_gbnf(exc.gbnf)})


def follows(grammar: str, text: str) -> bool:
    matcher = LLMatcher(MATCHING, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = TOKENIZER.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def asked_grammar(**body: Any) -> str:
    grammar_spec = read_grammar_spec(CompletionRequest(prompt="a", **body))
    assert grammar_spec is not None
    return grammar_of(grammar_spec.rule, grammar_spec.param)


STRUCTURES = {
    "type": "structural_tag",
    "triggers": ["<fn="],
    "structures": [
        {"begin": "<fn=find>", "schema": PERSON, "end": "</fn>"},
        {"begin": "<fn=now>", "schema": {"type": "null"}, "end": "</fn>"},
    ],
}
TAGS = {
    "type": "structural_tag",
    "format": {
        "type": "sequence",
        "elements": [
            {"type": "tag", "begin": "<call>", "content": {"type": "any_text"}, "end": "</call>"},
            {"type": "or", "elements": [{"type": "const_string", "value": "yes"}, {"type": "regex", "pattern": "n+o"}]},
            {
                "type": "tags_with_separator",
                "separator": ",",
                "at_least_one": True,
                "tags": [{"begin": "[", "content": {"type": "json_schema", "json_schema": True}, "end": "]"}],
            },
            {"type": "grammar", "grammar": 'root ::= "!" | "!" root'},
        ],
    },
}

FORMS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"response_format": {"type": "json_object"}}, ["{}", ANNA], ["[]", "x", '{"a"}']),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}}}, [ANNA], ["{}"]),
    ({"guided_json": PERSON}, [ANNA], ["{}", '{"name": 5, "age": 41}']),
    ({"guided_json": json.dumps(PERSON)}, [json.dumps(json.loads(ANNA), indent=4)], ["{}", ANNA.replace(" ", "\n\n")]),
    ({"guided_json": PERSON, "guided_whitespace_pattern": ""}, [ANNA.replace(" ", "")], [ANNA]),
    ({"guided_regex": r"^\d+/[a-f]+$"}, ["12/abc"], ["12/", "x12/a", "12/abcx"]),
    ({"guided_choice": ["red", "green <call> é"]}, ["red", "green <call> é"], ["re", "greenish", "blue"]),
    ({"guided_grammar": 'root ::= "a" tail\ntail ::= "b" | "c" tail'}, ["ab", "accb"], ["a", "b"]),
    ({"guided_grammar": 'start: "a" tail\ntail: /[bc]+/'}, ["ab", "accb"], ["a", "b"]),
    ({"structured_outputs": {"json_object": True}}, ["{}"], ["[]"]),
    ({"regex": "a+"}, ["aa"], ["b"]),
    ({"ebnf": 'root ::= "a" | "b"'}, ["a", "b"], ["c"]),
    ({"grammar": 'root ::= "a" | "b"'}, ["a", "b"], ["c"]),
    ({"json_schema": PERSON}, [ANNA], ["{}"]),
    ({"json_schema": json.dumps(PERSON)}, [ANNA], ["{}"]),
    ({"response_format": {"type": "json_object", "schema": PERSON}}, [ANNA], ["{}"]),
    ({"response_format": {"type": "json_schema", "schema": PERSON}}, [ANNA], ["{}"]),
    ({"guided_grammar": 'start: "a"', "structured_outputs": {"grammar": 'start: "a"'}}, ["a"], ["b"]),
    ({"guided_json": json.dumps(PERSON), "structured_outputs": {"json": PERSON}}, [ANNA], ["{}"]),
    (
        {"guided_regex": "a", "regex": "a", "structured_outputs": {"regex": "a", "disable_fallback": True}},
        ["a"],
        ["b"],
    ),
    ({"structured_outputs": {"json": PERSON, "disable_any_whitespace": True}}, [ANNA.replace(" ", "")], [ANNA]),
    (
        {"structured_outputs": {"json": {"type": "object", "properties": {}}, "disable_additional_properties": True}},
        ["{}"],
        [ANNA],
    ),
    (
        {"structured_outputs": {"json": OPEN_PERSON, "disable_additional_properties": False}},
        [ANNA, ANNA_IN_PARIS],
        ["{}"],
    ),
    ({"structured_outputs": {"choice": ["a"]}}, ["a"], ["b"]),
    (
        {"response_format": STRUCTURES},
        ["free text", f"a <fn=find>{ANNA}</fn> b <fn=now>null</fn>", "< fn"],
        ["<fn=find>{}</fn>", f"<fn=find>{ANNA}", "<fn=x>"],
    ),
    ({"structured_outputs": {"structural_tag": json.dumps(STRUCTURES)}}, ["text"], ["<fn=x>"]),
    ({"response_format": TAGS}, ["<call>any\nthing</call>yes[1]!", "<call></call>nno[{}],[2]!!"], ["yes[1]!"]),
]


@pytest.mark.parametrize(("body", "good", "bad"), FORMS, ids=[json.dumps(body)[:40] for body, _, _ in FORMS])
def test_a_form_allows_what_it_says_and_nothing_else(body: dict[str, Any], good: list[str], bad: list[str]) -> None:
    grammar = asked_grammar(**body)
    assert [text for text in good if not follows(grammar, text)] == []
    assert [text for text in bad if follows(grammar, text)] == []


def test_an_empty_grammar_of_other_engines_asks_for_nothing() -> None:
    assert read_grammar_spec(CompletionRequest(prompt="a", grammar="", ebnf="", regex="", json_schema="")) is None
    any_json = asked_grammar(json_schema={})
    assert [follows(any_json, text) for text in ("[1]", "{}", "x")] == [True, True, False]


FRIENDS = {"type": "object", "properties": {"all": {"type": "array", "items": {"$ref": "#/$defs/person"}}}}
PARTS = {
    "$defs": PERSON["$defs"],
    "allOf": [OPEN_PERSON, {"properties": {"city": {"type": "string"}}, "required": ["city"]}],
}
EITHER = {"type": "object", "properties": {"a": {}}, "anyOf": [{"required": ["a"]}, {"required": ["city"]}]}
DEEP = '{"properties": {"a": ' * 400 + "{}" + "}}" * 400


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (OPEN_PERSON, [ANNA], [ANNA_IN_PARIS]),
        (OPEN_PERSON | {"additionalProperties": True}, [ANNA, ANNA_IN_PARIS], []),
        (OPEN_PERSON | {"additionalProperties": {"const": "Paris"}}, [ANNA_IN_PARIS], []),
        (
            FRIENDS | {"$defs": {"person": {"properties": {"name": {}}}}},
            ['{"all": [{"name": 1}]}'],
            ['{"all": [{"x": 1}]}'],
        ),
        ({"type": "object"}, ["{}", ANNA], []),
        ({"const": {"properties": {"a": 1}}}, ['{"properties": {"a": 1}}'], []),
        ({"type": "object", "properties": {"properties": {"const": 1}}}, ['{"properties": 1}'], ['{"a": 1}']),
        (PARTS, [ANNA_IN_PARIS], [ANNA]),
    ],
)
def test_an_object_has_the_properties_that_its_schema_names(
    schema: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    grammar = asked_grammar(guided_json=schema)
    assert [text for text in good if not follows(grammar, text)] == []
    assert [text for text in bad if follows(grammar, text)] == []


def test_schemas_that_are_put_together_or_make_no_sense_are_left_to_the_compiler() -> None:
    for schema in (PARTS, EITHER, {"allOf": 3}, {"properties": 3}, {"items": [3]}, json.loads(DEEP)):
        assert close_objects(schema) == schema


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "yaml"}}, "response_format", "yaml"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "schema is missing"),
    ({"guided_json": {"type": "thing"}}, "guided_json", "thing"),
    ({"guided_json": "{"}, "guided_json", "not valid JSON"),
    ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json", "uniqueItems"),
    ({"guided_json": {"$ref": "#/nowhere"}}, "guided_json", "nowhere"),
    ({"guided_regex": "["}, "guided_regex", "unclosed"),
    ({"guided_regex": "(?=a)"}, "guided_regex", "look-around"),
    ({"guided_choice": []}, "guided_choice", "list"),
    ({"guided_grammar": "root ::= ((("}, "guided_grammar", "Expected"),
    ({"guided_grammar": "start: nothing"}, "guided_grammar", "nothing"),
    ({"guided_json": {}, "guided_regex": "a"}, "guided_regex", "exclude each other"),
    (
        {"guided_grammar": 'start: "a"', "structured_outputs": {"grammar": 'start: "b"'}},
        "structured_outputs",
        "exclude",
    ),
    (
        {"guided_json": {}, "structured_outputs": {"json": {}, "disable_any_whitespace": True}},
        "structured_outputs",
        "exclude",
    ),
    (
        {"guided_json": PERSON, "structured_outputs": {"json": PERSON, "disable_additional_properties": False}},
        "structured_outputs",
        "exclude",
    ),
    ({"guided_json": "{", "json_schema": {}}, "guided_json", "not valid JSON"),
    ({"regex": "["}, "regex", "unclosed"),
    ({"grammar": {"type": "json", "value": {}}}, "grammar", "string"),
    ({"grammar": "root ::= a", "grammar_lazy": True}, "grammar_lazy", "not supported"),
    ({"structural_tag": "{}"}, "structural_tag", "not supported"),
    ({"guided_json": {}, "guided_decoding_backend": "guesses"}, "guided_decoding_backend", "guesses"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "guided_json"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"yaml": {}}}, "structured_outputs", "yaml"),
    ({"response_format": {**STRUCTURES, "triggers": ["x"]}}, "response_format", "no trigger"),
    ({"response_format": {"type": "structural_tag", "format": {"type": "x"}}}, "response_format", "'x'"),
]


def test_an_invalid_grammar_is_refused_before_anything_is_sent_to_an_instance(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        for path, prompt in (("/v1/completions", {"prompt": "a"}), (PATH, {"messages": HELLO})):
            for body, param, reason in REFUSED:
                answer = await router.http.post(path, json={**prompt, **body})
                error = answer.json()["error"]
                assert (answer.status_code, error["param"]) == (400, param), body
                assert reason in error["message"], error
        assert router.fakes["prefill-0"].assignments() == []
        assert router.fakes["decode-0"].assignments() == []

    serve(scenario)


def test_reasons_quote_no_grammar_that_the_client_never_saw(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        for body, message in (
            ({"guided_json": {"type": "thing"}}, "guided_json: Invalid type: thing"),
            ({"guided_regex": "[a"}, "error: unclosed character class"),
        ):
            answer = await router.http.post("/v1/completions", json={"prompt": "a", **body})
            assert answer.json()["error"]["message"].endswith(message)

    serve(scenario)


LOOPS = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
BESIDE = {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, {"type": "object"}]}}, "$ref": "#/$defs/a"}
EXPLAINED: list[tuple[dict[str, Any], str]] = [
    (
        {"guided_json": {"$ref": "#"}},
        "'#' leads back to itself, so that it describes no text; let it name a definition",
    ),
    # Below a property the compiler accepts it, and the answer failed when it came there.
    ({"guided_json": {**LOOPS, "properties": {"x": {"$ref": "#/$defs/a"}}}}, "leads back to itself, so that it"),
    ({"guided_json": BESIDE}, "'#/$defs/a' leads back to itself and has other keys beside it, or stands in an allOf"),
    ({"guided_json": {"$ref": "#/$defs/x"}}, "the $ref '#/$defs/x' names nothing in the schema; add the definition"),
    ({"guided_json": {"$ref": "http://a/b"}}, "the $ref 'http://a/b' points outside of the schema, and nothing is"),
    ({"guided_json": {"not": {}}}, 'the schema has keys that are not supported: ["not"]; remove them'),
    ({"guided_json": {"oneOf": [{"type": "object"}, {}]}}, "alternatives overlap is not supported; use anyOf"),
    ({"guided_regex": r"[^\s\S]"}, "permits no text here, because a rule or $ref leads back to itself"),
    ({"guided_grammar": "start: a\na: b\nb: a\n"}, "add such an alternative, or remove a condition"),
    ({"guided_grammar": 'start: A\nA: "x" A | "y"\n'}, 'the terminal "A" refers to itself, which only rules may;'),
]


@pytest.mark.parametrize(("body", "reason"), EXPLAINED, ids=[reason[:40] for _, reason in EXPLAINED])
def test_a_grammar_that_cannot_be_used_is_explained_with_a_remedy(
    serve: Serve, body: dict[str, Any], reason: str
) -> None:
    async def scenario(router: Router) -> None:
        answer = await router.http.post("/v1/completions", json={"prompt": "a", **body})
        assert answer.status_code == 400
        message = answer.json()["error"]["message"]
        assert reason in message
        assert not any(mark in message for mark in ("NoExtension", "verbose", "json-schema:", "coerce"))

    serve(scenario)


def test_a_vocabulary_that_cannot_be_followed_is_refused() -> None:
    vocabulary = Vocabulary(TextTokenizer(word_piece(), {}))
    grammar_spec = read_grammar_spec(CompletionRequest(prompt="a", guided_regex="a"))
    assert grammar_spec is not None
    with pytest.raises(Exception, match="tokenizer"):
        vocabulary.write(grammar_spec.rule, param=grammar_spec.param)


def test_the_grammar_and_bad_words_reach_both_instances(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        words = ["hello", "w", "x"]
        await router.complete(prompt="hello", max_tokens=2, guided_choice=["a", "b"], bad_words=words)
        for instance in ("prefill-0", "decode-0"):
            (message,) = router.fakes[instance].assignments()
            assert message.work.sampling.grammar is not None
            assert '"a" | "b"' in message.work.sampling.grammar
            space_w = router.service.model.tokenizer.encode(" w", add_special_tokens=False)
            encode = router.service.model.tokenizer.encode
            once = [encode(word, add_special_tokens=False) for word in words]
            assert message.work.sampling.bad_words == [once[0], once[1], space_w, once[2]]

    serve(scenario)


def form_of(
    reasoning: ReasoningParser | None = None, prompt: str = "", parser: ToolCallParser | None = None, **body: Any
) -> MessageFormat:
    request = ChatCompletionRequest.model_validate({"messages": HELLO, **body})
    settings = RouterSettings(
        model="m", reasoning_parser=reasoning, tool_call_parser=parser, enable_auto_tool_choice=parser is not None
    )
    return MessageFormat(settings, request, prompt)


def chat_grammar(
    reasoning: ReasoningParser | None = None, prompt: str = "", parser: ToolCallParser | None = None, **body: Any
) -> str:
    grammar_spec = form_of(reasoning, prompt, parser, **body).grammar_spec
    assert grammar_spec is not None
    return grammar_of(grammar_spec.rule, grammar_spec.param)


def test_the_tags_and_triggers_of_a_structural_tag_are_counted_before_they_are_compared(serve: Serve) -> None:
    tag = {"begin": "zq", "end": "z"}
    bodies: list[tuple[dict[str, Any], str]] = [
        ({"structures": [tag] * 1001, "triggers": ["z"]}, "structures"),
        ({"structures": [tag], "triggers": [*map(str, range(100)), "z"]}, "triggers"),
        ({"format": {"type": "tags_with_separator", "separator": ",", "tags": [tag] * 1001}}, "tags"),
    ]

    async def scenario(router: Router) -> None:
        for body, name in bodies:
            form = {"type": "structural_tag", **body}
            answer = await router.http.post("/v1/completions", json={"prompt": "a", "response_format": form})
            assert answer.status_code == 400
            assert f"{name} has 1" in answer.json()["error"]["message"]

    serve(scenario)


def test_a_structural_tag_has_a_bounded_number_of_grammars_in_gbnf(serve: Serve) -> None:
    def form(count: int) -> dict[str, Any]:
        parts = [{"type": "grammar", "grammar": f'root ::= "{i}"'} for i in range(count)]
        return {"type": "structural_tag", "format": {"type": "sequence", "elements": parts}}

    async def scenario(router: Router) -> None:
        for count, status in ((16, 200), (17, 400)):
            body = {"prompt": "a", "max_tokens": 1, "response_format": form(count)}
            answer = await router.http.post("/v1/completions", json=body)
            assert answer.status_code == status, answer.text

    serve(scenario)


def test_nested_tags_with_separators_are_written_once() -> None:
    part: dict[str, Any] = {"type": "const_string", "value": "x" * 1000}
    for _ in range(15):
        tag = {"begin": "a", "end": "b", "content": part}
        part = {"type": "tags_with_separator", "separator": ",", "tags": [tag]}
    grammar = grammar_of(structural_tag({"format": part}, "p"))
    assert len(grammar) < 5_000


def test_reasoning_comes_before_the_form() -> None:
    form: dict[str, Any] = {"guided_choice": ["yes"]}
    qwen3, r1 = chat_grammar("qwen3", **form), chat_grammar("deepseek_r1", **form)
    begun, over = chat_grammar("qwen3", "…<think>\n", **form), chat_grammar("qwen3", "<think>\n</think>\n", **form)
    thought, open_thought = "<think>why < 3?</think>\n\nyes", "why?</think>yes"
    assert [follows(qwen3, text) for text in (thought, "yes", open_thought, "<think>yes")] == [True, True, False, False]
    assert [follows(r1, text) for text in (thought, "yes", open_thought)] == [True, False, True]
    assert [follows(begun, text) for text in (thought, "yes", open_thought)] == [True, False, True]
    assert [follows(over, text) for text in (thought, "yes")] == [False, True]
    letters = chat_grammar("mistral", **form)  # this vocabulary has no such token
    assert [follows(letters, text) for text in ("[THINK]a[/THINK] yes", "yes", "[THINK]yes")] == [True, True, False]


def test_reasoning_before_a_form_cannot_end_the_answer() -> None:
    class Marks:
        ends = frozenset({7})

        def pieces(self, text: str) -> list[str | int]:
            return [5]

    assert Lark(Marks()).text_up_to("</think>") == "<[^5,7]>* <[5]>"


def test_reasoning_of_harmony_comes_before_the_form() -> None:
    grammar = chat_grammar("gpt_oss", guided_choice=["yes"])
    analysis, final = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant", "<|channel|>final<|message|>yes"
    assert follows(grammar, final)
    assert follows(grammar, analysis + final)
    assert not follows(grammar, analysis)
    assert not follows(grammar, final.replace("yes", "no"))


def test_required_calls_follow_their_schemas() -> None:
    both = chat_grammar(tools=TOOLS, tool_choice="required")
    one = chat_grammar(tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    find, now = f'{{"name": "find", "parameters": {ANNA}}}', '{"name": "now", "parameters": {}}'
    assert follows(both, f"[{find}, {now}, {find}]")
    assert follows(one, f"[{now}]")
    assert not follows(one, f"[{find}, {now}]")
    for bad in ("[]", "text", '[{"name": "now", "parameters": {"a": 1}}]', '[{"name": "x", "parameters": {}}]'):
        assert not follows(both, bad)
    named = chat_grammar(tools=TOOLS, tool_choice=NAMED)
    assert follows(named, ANNA)
    assert not follows(named, "{}")


def allowed_tools(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_only_allowed_tools_are_called() -> None:
    find, now = f'{{"name": "find", "parameters": {ANNA}}}', '{"name": "now", "parameters": {}}'
    forced = chat_grammar(tools=TOOLS, tool_choice=allowed_tools("required", "now"))
    assert [follows(forced, text) for text in (f"[{now}]", f"[{find}]", "text")] == [True, False, False]
    free = chat_grammar(parser="hermes", tools=TOOLS, tool_choice=allowed_tools("auto", "now"))
    call = '<tool_call>\n{"name": "%s", "arguments": {}}\n</tool_call>'
    assert [follows(free, text) for text in (call % "now", call % "find", "text")] == [True, False, True]
    assert form_of(parser="hermes", tools=TOOLS, tool_choice=allowed_tools("auto", "now", "find")).grammar_spec is None


STRICT = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}, TOOLS[1]]  # type: ignore[dict-item]
DEEPSEEK_CALL = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"  # noqa: RUF001
DEEPSEEK_NAME = "find<｜tool▁sep｜>"  # noqa: RUF001
WRITTEN: dict[ToolCallParser, str] = {
    "hermes": '<tool_call>\n{"name": "find", "arguments": %s}\n</tool_call>',
    "llama3_json": '{"name": "find", "parameters": %s}',
    "mistral": '[TOOL_CALLS] [{"name": "find", "arguments": %s}]',
    "deepseek_v3": DEEPSEEK_CALL.format(DEEPSEEK_NAME + "%s"),
}
OTHERWISE: list[tuple[ToolCallParser, str]] = [
    ("mistral", "[TOOL_CALLS]find%s"),
    ("mistral", "[TOOL_CALLS]find[ARGS]%s"),
    ("deepseek_v3", DEEPSEEK_CALL.format("function<｜tool▁sep｜>find\n```json\n%s\n```")),  # noqa: RUF001
]


@pytest.mark.parametrize(("parser", "call"), [*WRITTEN.items(), *OTHERWISE])
def test_strict_tools_are_called_as_their_schemas_say_or_not_at_all(parser: ToolCallParser, call: str) -> None:
    grammar = chat_grammar(parser=parser, tools=STRICT)
    assert follows(grammar, call % ANNA)
    assert follows(
        grammar, "Nothing to <call>, <b>really</b>.".replace("<call>", "" if parser == "llama3_json" else "it")
    )
    for arguments in ("{}", '{"name": "Anna"}', ANNA.replace("41", '"x"')):
        assert not follows(grammar, call % arguments), arguments
    assert follows(grammar, (call % '{"a": 1}').replace("find", "now")), "not strict: any arguments"
    if parser != "llama3_json":
        assert follows(grammar, "Well: " + call % ANNA)


@pytest.mark.parametrize("parser", WRITTEN)
def test_an_answer_is_a_call_or_has_the_stated_form(parser: ToolCallParser) -> None:
    grammar = chat_grammar(parser=parser, tools=STRICT, guided_choice=["yes", "no"])
    assert follows(grammar, WRITTEN[parser] % ANNA)
    assert follows(grammar, "yes")
    assert not follows(grammar, "maybe")


def test_strict_tools_are_refused_where_calls_are_not_json(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        for extra, param in (({}, "tools"), ({"response_format": {"type": "json_object"}}, "response_format")):
            answer = await router.http.post(PATH, json={"messages": HELLO, "tools": STRICT, **extra})
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == param
            assert "pythonic" in answer.json()["error"]["message"]

    serve(scenario, enable_auto_tool_choice=True, tool_call_parser="pythonic")


def test_required_calls_are_read_streamed_as_they_come_whole(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        router.fakes.token_of = writes(
            f'[{{"name": "find", "parameters": {ANNA}}}, {{"name": "now", "parameters": {{}}}}]'
        )
        body: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required"}
        answer = await whole(router, **body)
        assert plain(answer) == plain(await streamed(router, **body))
        calls = [call["function"] for call in answer["message"]["tool_calls"]]
        assert calls == [{"name": "find", "arguments": ANNA}, {"name": "now", "arguments": "{}"}]
        assert (answer["message"]["content"], answer["finish_reason"]) == (None, "tool_calls")

    serve(scenario)


def test_a_named_call_is_the_arguments_alone(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        router.fakes.token_of = writes(ANNA)
        body: dict[str, Any] = {"tools": TOOLS, "tool_choice": NAMED}
        answer = await whole(router, **body)
        assert plain(answer) == plain(await streamed(router, **body))
        (call,) = answer["message"]["tool_calls"]
        assert call["function"] == {"name": "find", "arguments": ANNA}
        assert (answer["message"]["content"], answer["finish_reason"]) == (None, "stop")

    serve(scenario)


CUT_CALLS = ["", "[", '[{"name": "fi', '[{"name": "find", ', '[{"name": "find", "parameters": {"na']
"""Answers under a grammar of calls that `max_tokens` has cut off; the last one has begun its arguments."""


def test_forced_calls_that_were_cut_short_leave_no_json_in_the_content(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        for text in (*CUT_CALLS, f'[{{"name": "find", "parameters": {ANNA}'):
            router.fakes.token_of = writes(text)
            for choice in ("required", NAMED):
                body: dict[str, Any] = {"tools": TOOLS, "tool_choice": choice, "max_tokens": max(len(text), 1)}
                body |= {} if text else {"stop": "a"}
                answer = await whole(router, **body)
                assert plain(answer) == plain(await streamed(router, **body))
                assert not answer["message"]["content"], text
                has_call = choice == NAMED or "parameters" in text
                assert ("tool_calls" in answer["message"]) == has_call, text
                assert answer["finish_reason"] == ("length" if text else "stop"), text

    async def second(router: Router) -> None:
        router.fakes.token_of = writes(f'[{{"name": "find", "parameters": {ANNA}}}, {{"name": "fi')
        message = (await whole(router, tools=TOOLS, tool_choice="required"))["message"]
        assert message["content"] is None
        assert [call["function"]["arguments"] for call in message["tool_calls"]] == [ANNA]

    serve(scenario)
    serve(second)


@pytest.mark.parametrize(
    ("body", "param", "reason"),
    [
        ({"tool_choice": "required"}, "tool_choice", "needs at least one tool"),
        ({"tool_choice": NAMED}, "tool_choice", "'find'"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice", "must be"),
        ({"tools": TOOLS, "tool_choice": allowed_tools("auto", "other")}, "tool_choice", "'other'"),
        ({"tools": TOOLS, "tool_choice": allowed_tools("none", "find")}, "tool_choice", "mode"),
        ({"tools": TOOLS, "tool_choice": allowed_tools("auto")}, "tool_choice", "list of tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice", "mode"),
        ({"tools": TOOLS, "tool_choice": "required", "guided_regex": "a"}, "guided_regex", "exclude"),
        ({"tools": [{"type": "function", "function": {}}], "tool_choice": "required"}, "tools", "name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "x"}}}]}
            | {"tool_choice": "required"},
            "tools",
            "Invalid type: x",
        ),
    ],
)
def test_calls_that_cannot_be_forced_are_refused(serve: Serve, body: dict[str, Any], param: str, reason: str) -> None:
    async def scenario(router: Router) -> None:
        answer = await router.http.post(PATH, json={"messages": HELLO, **body})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param
        assert reason in answer.json()["error"]["message"]

    serve(scenario)
