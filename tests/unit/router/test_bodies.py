"""Bounds on the cost of a body: items are counted before any work, the first error ends validation, and long work runs
outside of the event loop.
"""

import asyncio
import copy
import json
import logging
import random
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from baton_serve.contracts.pooling import PoolingProfile
from baton_serve.services.router.api.messages.schema import CountTokensRequest, MessagesRequest
from baton_serve.services.router.api.pooling.schema import (
    ClassificationRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from baton_serve.services.router.api.responses import endpoint
from baton_serve.services.router.api.responses.request_to_chat import input_as_chat
from baton_serve.services.router.api.responses.schema import InputTokensRequest, ResponsesRequest
from baton_serve.services.router.protocol import body_scan
from baton_serve.services.router.protocol.body_scan import UNCOUNTED_BYTES, Counts, count
from baton_serve.services.router.protocol.errors import MAX_MESSAGE_CHARS, BadRequestError
from baton_serve.services.router.protocol.openai_requests import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from baton_serve.services.router.protocol.request_bounds import MAX_NUMBERS, MAX_OBJECTS, MAX_TEXTS, MAX_UNKNOWN
from baton_serve.services.router.protocol.request_parsing import parse, parsed
from baton_serve.services.router.text.prompt_length import Truncation
from baton_serve.services.router.text.served_model import ServedModel
from baton_serve.services.router.text.tokenization import PIECE_CHARS, TextTokenizer
from tests.unit.router.conftest import Router, Serve
from tools.fuzz_bodies import search

SCHEMAS: list[type[BaseModel]] = [
    ChatCompletionRequest,
    CompletionRequest,
    CountTokensRequest,
    DetokenizeRequest,
    InputTokensRequest,
    MessagesRequest,
    ResponsesRequest,
    TokenizeRequest,
    ClassificationRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
]
WRONG: list[Any] = [{}, [], 1.5, None, "", 1, [{}], [[]], {"role": 1}, {"type": 1}, {"text": 1}]
MANY = 300
CHAT = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: schema.__name__)
def test_the_first_wrong_element_of_a_list_or_an_object_ends_its_validation(schema: type[BaseModel]) -> None:
    for name in schema.model_fields:
        for wrong in WRONG:
            for value in ([wrong] * MANY, {str(i): wrong for i in range(MANY)}, [{"content": [wrong] * MANY}]):
                try:
                    schema.model_validate_json(json.dumps({name: value}))
                except ValidationError as exc:
                    assert sum(error["loc"][0] == name for error in exc.errors()) < 20, (name, wrong)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        pytest.param('{"prompt": [' + "{}," * (MAX_OBJECTS + 1) * 2 + "1]}", "objects", id="empty objects"),
        pytest.param('{"x": [' + "[]," * (MAX_OBJECTS + 1) * 2 + "1]}", "objects", id="empty lists"),
        pytest.param('{"x": [' + '"",' * (MAX_TEXTS + 1) + "1]}", "strings", id="empty texts"),
        pytest.param("{" + '"a":1,' * (MAX_TEXTS + 1) + '"b":1}', "strings", id="names"),
        pytest.param('{"prompt": [' + "1," * (MAX_NUMBERS + 1) + "1]}", "values", id="numbers"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/invocations", "/v1/embeddings"])
def test_what_a_long_body_has_is_counted_before_it_is_parsed(serve: Serve, path: str, body: str, named: str) -> None:
    async def test(router: Router) -> None:
        headers = {"content-type": "application/json"}
        answer = await router.http.post(path, content=body.encode(), headers=headers)
        assert answer.status_code == 400
        assert named in answer.json()["error"]["message"] and "limit" in answer.json()["error"]["message"]

    serve(test)


JSON = st.recursive(
    st.none() | st.integers() | st.text(alphabet='\\"a,[{}]:é'),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(alphabet='\\"a,[{'), inner, max_size=4),
    max_leaves=30,
)


def counts_of(value: Any) -> tuple[int, int, int]:
    """Objects and lists, texts and names, commas."""
    if isinstance(value, str):
        return 0, 1, 0
    if not isinstance(value, list | dict):
        return 0, 0, 0
    inner = [counts_of(item) for item in (value.values() if isinstance(value, dict) else value)]
    objects, texts, items = (sum(column) for column in zip(*inner, strict=True)) if inner else (0, 0, 0)
    return 1 + objects, texts + (len(value) if isinstance(value, dict) else 0), items + max(0, len(value) - 1)


@given(JSON, st.integers(1, 20))
@settings(deadline=None)
def test_counts_are_those_of_the_values_however_a_body_is_cut(value: Any, piece_bytes: int) -> None:
    body = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    counts = Counts()
    for _ in count(body, counts, piece_bytes=piece_bytes):
        pass
    assert (counts.objects, counts.texts, counts.items) == counts_of(value)


def test_text_counts_as_one_text_whatever_is_in_it() -> None:
    text = json.dumps('[{"a": "\\"b,\\\\"},' * 30_000)
    body_scan.check_counts(f'{{"prompt": {text}}}'.encode())


class Seen(BaseModel):
    """Knows which thread has validated it."""

    model_config = ConfigDict(extra="allow")
    thread: str = ""

    @model_validator(mode="after")
    def _note(self) -> "Seen":
        self.thread = threading.current_thread().name
        return self


def test_long_bodies_are_parsed_beside_the_event_loop() -> None:
    short = asyncio.run(parsed(b'{"a": 1}', Seen))
    long = asyncio.run(parsed(json.dumps({"a": "x" * UNCOUNTED_BYTES}).encode(), Seen))
    assert short.thread == threading.current_thread().name
    assert long.thread.startswith("bodies")


def test_short_bodies_of_many_items_are_prepared_beside_the_event_loop(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    prepared = endpoint._prepared

    def seen(*given: Any, **options: Any) -> Any:
        threads.append(threading.current_thread().name)
        return prepared(*given, **options)

    monkeypatch.setattr(endpoint, "_prepared", seen)

    async def scenario(router: Router) -> None:
        for num_items in (2, 7000):
            body = json.dumps({"input": [{"a": 1}] * num_items, "max_output_tokens": 1}, separators=(",", ":"))
            assert len(body) < UNCOUNTED_BYTES
            await router.http.post("/v1/responses", content=body, headers={"content-type": "application/json"})
        assert threads[0] == threading.current_thread().name
        assert threads[1].startswith("bodies")

    serve(scenario)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "a", "temperature": 1, "logit_bias": {"5": 1}, "stop": ["x"]},
        {"prompt": "a", "temperature": "hot"},
        {"prompt": 5},
        {"prompt": [1.0]},
        {"prompt": "a", "max_tokens": True},
        {"prompt": "a", "suffix": "b"},
        {},
        [],
    ],
)
def test_a_long_body_is_read_as_a_short_one(body: Any) -> None:
    short = json.dumps(body).encode()
    long = short[:-1] + b" " * UNCOUNTED_BYTES + short[-1:]
    found: list[Any] = []
    for given_body in (short, long):
        try:
            found.append(parse(given_body, CompletionRequest))
        except BadRequestError as exc:
            found.append((exc.message, exc.param, exc.code))
    assert found[0] == found[1]


def test_text_that_is_no_json_is_refused_in_any_length() -> None:
    for body in (b"{", b"{" + b" " * UNCOUNTED_BYTES, b'{"a": "\xff' + b"a" * UNCOUNTED_BYTES + b'"}'):
        with pytest.raises(BadRequestError, match="not valid JSON"):
            parse(body, CompletionRequest)


def test_unknown_parameters_are_one_short_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    names = {f"{i}-{'x' * 1000}": 1 for i in range(MAX_UNKNOWN)}
    parse(json.dumps({"prompt": "a", **names}).encode(), CompletionRequest)
    assert len(caplog.messages) == 1
    assert len(caplog.messages[0]) < 1000 and f"{MAX_UNKNOWN - 8} more" in caplog.messages[0]


@pytest.mark.parametrize("padding", ["", " " * UNCOUNTED_BYTES])
def test_too_many_unknown_parameters_are_refused(padding: str) -> None:
    names = {f"x{i}": 1 for i in range(MAX_UNKNOWN + 100)}
    with pytest.raises(BadRequestError, match="unknown parameters"):
        parse((json.dumps({"prompt": "a", **names}) + padding).encode(), CompletionRequest)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "a", "logit_bias": {"x" * 50_000: 1}}, "logit_bias"),
        ("/v1/completions", {"prompt": "a", "x" * 50_000: 1, "model": "m" * 50_000}, "model"),
        ("/v1/chat/completions", {"messages": [{"role": "r" * 50_000, "content": "a"}]}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "t" * 50_000}]}]}, "messages"),
        ("/v1/completions", {"prompt": "a", "response_format": {"type": "t" * 50_000}}, "response_format"),
    ],
)
def test_errors_quote_little_of_what_was_sent(serve: Serve, path: str, body: Any, param: str) -> None:
    async def test(router: Router) -> None:
        answer = await router.http.post(path, json=body)
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["param"] == param
        assert param in error["message"] and len(error["message"]) <= MAX_MESSAGE_CHARS + 10

    serve(test)


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("/v1/completions", "stop", ["x"] * 65),
        ("/v1/completions", "stop", "x" * 5_000),
        ("/v1/completions", "bad_words", ["x"] * 1_025),
        ("/v1/completions", "bad_words", ["x" * 257]),
        ("/v1/completions", "logit_bias", {str(i): 1 for i in range(10_001)}),
        ("/v1/completions", "stop_token_ids", [5] * 4_097),
        ("/v1/completions", "metadata", {str(i): 1 for i in range(1_025)}),
        ("/v1/completions", "user", "u" * 1_025),
        ("/v1/completions", "cache_salt", "u" * 1_025),
        ("/v1/chat/completions", "messages", CHAT * 10_001),
        ("/v1/chat/completions", "tools", [{"type": "function", "function": {"name": "f"}}] * 1_025),
        ("/v1/responses", "input", CHAT * 10_001),
        ("/v1/responses", "metadata", {str(i): "a" for i in range(1_025)}),
        ("/v1/messages", "messages", CHAT * 10_001),
        ("/v1/messages", "stop_sequences", ["x"] * 65),
        ("/tokenize", "messages", CHAT * 10_001),
        ("/detokenize", "tokens", [97] * 70_000),
        ("/v1/embeddings", "input", ["a"] * 10_001),
        ("/v1/embeddings", "input", [[97]] * 10_001),
        ("/score", "text_2", ["a"] * 10_001),
        ("/rerank", "documents", ["a"] * 10_001),
    ],
)
def test_every_list_has_a_greatest_length(serve: Serve, path: str, field: str, value: Any) -> None:
    asked: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "a", "max_tokens": 1},
        "/v1/chat/completions": {
            "messages": [{"role": "user", "content": "a"}],
            "max_tokens": 1,
            "tool_choice": "none",
        },
        "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
        "/v1/responses": {"input": "a", "max_output_tokens": 1},
        "/score": {"text_1": "a"},
        "/rerank": {"query": "a"},
    }

    async def test(router: Router) -> None:
        answer = await router.http.post(path, json={**asked.get(path, {}), field: value})
        assert answer.status_code == 400, answer.text[:1000]
        assert field in answer.json()["error"]["message"]

    is_pooling = path in ("/v1/embeddings", "/score", "/rerank")
    serve(test, pooling=PoolingProfile(tasks=["embed"], dimensions=3) if is_pooling else None)


class CountingTokenizer(TextTokenizer):
    """Knows what it has encoded, and in which threads."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        super().__init__(tokenizer.backend, tokenizer.special_tokens)
        self.sizes: list[int] = []
        self.threads: set[str] = set()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self._note([text])
        return super().encode(text, add_special_tokens=add_special_tokens)

    def encode_words(self, words: Sequence[str]) -> list[list[int]]:
        self._note(words)
        return super().encode_words(words)

    def _note(self, texts: Sequence[str]) -> None:
        self.sizes += map(len, texts)
        self.threads.add(threading.current_thread().name)


def counting(model: ServedModel) -> tuple[ServedModel, CountingTokenizer]:
    counted = copy.copy(model)
    counted.tokenizer = tokenizer = CountingTokenizer(model.tokenizer)
    return counted, tokenizer


def test_prompts_are_counted_before_one_is_tokenised(serve: Serve) -> None:
    async def test(router: Router) -> None:
        router.service.model, tokenizer = counting(router.service.model)
        answer = await router.http.post("/v1/completions", json={"prompt": ["a"] * 129, "max_tokens": 1})
        assert answer.status_code == 400 and "129 sequences" in answer.json()["error"]["message"]
        assert tokenizer.sizes == []

    serve(test)


def test_many_bad_words_are_tokenised_beside_the_event_loop(serve: Serve) -> None:
    async def test(router: Router) -> None:
        router.service.model, tokenizer = counting(router.service.model)
        await router.complete(prompt="a", max_tokens=1, bad_words=["hello"] * 500)
        assert len(tokenizer.sizes) == 1 + 2 * 500
        assert any(thread.startswith("texts") for thread in tokenizer.threads)
        tokenizer.threads.clear()
        await router.http.post("/v1/completions", json={"prompt": "a" * 5_000, "bad_words": ["a"] * 500})
        assert threading.current_thread().name not in tokenizer.threads

    serve(test)


def test_a_text_that_is_far_too_long_is_counted_by_pieces_and_refused(model: ServedModel) -> None:
    counted, tokenizer = counting(model)
    with pytest.raises(BadRequestError, match="more than 30000 tokens"):
        asyncio.run(counted.tokenize("x" * 300_000, add_special_tokens=True, max_tokens=30_000))
    assert max(tokenizer.sizes) == PIECE_CHARS
    assert sum(tokenizer.sizes) < 60_000


def test_only_the_part_of_a_text_that_truncation_keeps_is_encoded(model: ServedModel) -> None:
    text = "".join(random.Random(0).choices(["hello ", "w", "é", " "], k=100_000))
    counted, tokenizer = counting(model)
    whole = model.tokenizer.encode(text, add_special_tokens=True)
    for truncation in (Truncation(1_000), Truncation(1_000, keeps_beginning=True)):
        tokenizer.sizes.clear()
        found = asyncio.run(counted.tokenize_part(text, truncation, add_special_tokens=True))
        assert sum(tokenizer.sizes) < 20_000
        assert truncation.cut(found) == truncation.cut(whole)


def test_the_beginning_of_a_text_has_the_same_tokens_as_all_of_it(model: ServedModel) -> None:
    text = "".join(random.Random(0).choices(["hello ", "w", "é", " "], k=100_000))
    found = model.tokenizer.part(text, 1_000).ids
    assert len(found) < 20_000
    assert found[:1_000] == model.tokenizer.encode(text, add_special_tokens=False)[:1_000]


def test_lists_of_tokens_are_counted_once_for_each_prompt(serve: Serve) -> None:
    async def test(router: Router) -> None:
        asked = {"max_tokens": 1, "allowed_token_ids": [97] * 3_000}
        assert (await router.http.post("/v1/completions", json={"prompt": ["a"] * 2, **asked})).status_code == 200
        answer = await router.http.post("/v1/completions", json={"prompt": ["a"] * 100, **asked})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "allowed_token_ids"

    serve(test)


def test_arguments_of_a_call_are_counted_before_they_are_parsed(serve: Serve) -> None:
    async def test(router: Router) -> None:
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "[" + "[]," * 40_000 + "1]"}}
        messages = [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "user", "content": "a"}]
        answer = await router.http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1})
        assert answer.status_code == 400 and "argument string of a tool call" in answer.json()["error"]["message"]

    serve(test)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("guided_regex", "a" * 600_000),
        ("guided_grammar", "a" * 600_000),
        ("guided_choice", ["a" * 300_000, "b" * 300_000]),
        ("guided_json", "[" + "1," * 300_000 + "1]"),
        ("guided_json", "[" + "[]," * 40_000 + "1]"),
        ("structured_outputs", {"structural_tag": "[" + "[]," * 40_000 + "1]"}),
    ],
)
def test_forms_of_answers_are_measured_before_they_become_grammars(serve: Serve, field: str, value: Any) -> None:
    async def test(router: Router) -> None:
        answer = await router.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, field: value})
        assert answer.status_code == 400 and "limit" in answer.json()["error"]["message"]
        assert field in answer.json()["error"]["message"]

    serve(test)


def test_many_items_of_one_answer_become_one_message() -> None:
    items: list[dict[str, Any]] = [{"role": "user", "content": "a"}]
    items += [{"type": "reasoning", "content": f"{i};"} for i in range(3)]
    items += [{"role": "assistant", "content": "b"}, {"type": "function_call", "name": "f"}]
    items += [{"type": "function_call", "name": "g"}, {"role": "assistant", "content": "c"}]
    items += [{"role": "assistant", "content": ""}, {"role": "user", "content": "d"}]
    messages = input_as_chat(InputTokensRequest.model_validate({"input": items})).messages
    assert [(m.role, m.content) for m in messages] == [
        ("user", "a"),
        ("assistant", "b"),
        ("assistant", "c"),
        ("user", "d"),
    ]
    extra = messages[1].model_extra or {}
    assert extra["reasoning_content"] == "0;1;2;"
    assert [call["function"]["name"] for call in extra["tool_calls"]] == ["f", "g"]


def test_no_body_of_a_short_search_costs_far_too_much(model_folder: Any) -> None:
    """Bounds are ten times those of `make fuzz-bodies`: a busy machine breaks none of them, the old faults all."""

    async def searched() -> list[str]:
        left = iter(range(60))
        found = search(
            model_folder,
            random.Random(7),
            is_over=lambda: next(left, None) is None,
            max_bytes=1 << 20,
            leniency=10.0,
        )
        return [f"{case.path} {case.note}: {excesses}" async for case, _, excesses in found if excesses]

    assert asyncio.run(searched()) == []
